"""One process as a member of its run: the learner's lock, the heartbeat, and the pace it has to keep."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...data.manager import FolderLock, Office
from .heartbeat import PERIOD_S, Heartbeat
from .ratio import Ledger, Ratio, Throttle

LEARNER = Office(
    "learner",
    "trains",
    "a run has one learner (mode 'learn' or 'both'), and a second one would spoil its policy and checkpoints",
    "end that process, or choose another name with --run-name (Experiment.run_name); --mode collect "
    "processes may be as many as you like.",
)
CONTROL_PERIOD_S = 0.4  # of heartbeats that others steer by
LOOK_EVERY_S = 0.5  # between an actor's looks at the learner
LOOK_GAP_S = 0.05  # at least, between two of them
POLL_S = 0.2  # while it waits
_logger = logging.getLogger("loxodon")


class Membership:
    """What the rest of the experiment calls; before `join` and after `leave` the calls do nothing.

    Args:
        run_dir, run_name: the run.
        mode: "both", "learn" or "collect".
        rank: of this process; only rank 0 holds the lock and keeps the books.
        ratio: None for no update-to-data control.

    Attributes:
        ledger: of the main process of a learner; None elsewhere.
        ending: state to leave with, and a note.
        env_steps: collected by this process (in mode "both": by the run).
        steps_count_for: env steps of the run per env step of this process.
        collected: env steps of this epoch. updates_left: that may be made without another look at the actors.
        waited_s: time this process waited for others since it was last set to 0.
    """

    def __init__(self, run_dir: Path, run_name: str, mode: str, rank: int, ratio: Ratio | None) -> None:
        self.run_dir, self.run_name, self.mode, self.rank, self.ratio = run_dir, run_name, mode, rank, ratio
        self.role = {"both": "both", "learn": "learner"}.get(mode, "actor")
        self.ledger: Ledger | None = None
        self.ending: tuple[str, str | None] = ("stopped", None)
        self.env_steps, self.steps_count_for, self.waited_s = 0, 1, 0.0
        self.collected = self.updates_left = 0
        self.should_stop: Callable[[], bool] = lambda: False
        self.is_over: Callable[[], bool] = lambda: False
        self.say: Callable[[str], None] = _logger.info
        self._lock: FolderLock | None = None
        self._heartbeat: Heartbeat | None = None
        self._throttle: Throttle | None = None
        self._look_at_s, self._steps_left = 0.0, 0.0
        self._has_said = False
        self.warm_up: int | None = None  # env steps before training; see Throttle

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Join for what is inside and after; if that fails, say so and leave again.

        Raises:
            ValueError: If this process would be the second learner of the run.
            OSError: If nothing can be written to the run folder.
        """
        try:
            if self.role != "actor" and self.rank == 0 and self._lock is None:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self.run_dir, self.run_name, LEARNER)
            if self._heartbeat is None:
                self._heartbeat = self._begin_heartbeat()
        except OSError as error:
            raise OSError(
                f"The run folder {self.run_dir} cannot be written to: {error}. Fix: restore its permissions, "
                "or choose another Experiment.ckpt_base_dir."
            ) from error
        try:
            with self.reporting():
                yield
        except BaseException:
            self.leave()
            raise

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell of an error that comes out of what is inside."""
        try:
            yield
        except KeyboardInterrupt:
            self.end("stopped", "interrupted")
            raise
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.end("failed", f"{type(error).__name__}: {lines[-1] if lines else ''}")
            raise

    def state(self, state: str, note: str | None = None) -> None:
        """Tell what this process does from now on."""
        if self._heartbeat is not None:
            self._heartbeat.state(state, note)

    def end(self, state: str, note: str | None = None) -> None:
        """Tell that this process has ended its work, and how."""
        self.ending = state, note
        self.state(state, note)

    def put(self, **figures: Any) -> None:
        """Tell new figures; see Heartbeat.put."""
        if self._heartbeat is not None:
            self._heartbeat.put(**figures)

    def leave(self) -> None:
        """Write the last state and let another learner in."""
        if self._heartbeat is not None:
            self._heartbeat.close(*self.ending)
            self._heartbeat = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def on_env_steps(self, num_steps: int) -> None:
        """Count env steps just taken; waits if the learner is too far behind."""
        num_steps *= self.steps_count_for
        self.env_steps += num_steps
        self.collected += num_steps
        if self._heartbeat is None:
            return
        self._heartbeat.put(env_steps=self.env_steps)
        if self._throttle is not None:
            self._steps_left -= num_steps
            if self._steps_left < 1 or time.monotonic() >= self._look_at_s:
                self._look(self._throttle)

    def _look(self, throttle: Throttle) -> None:
        """See how many steps may be taken until the next look; wait while it is none."""
        start_s = time.monotonic()
        if (early_s := self._look_at_s - LOOK_EVERY_S + LOOK_GAP_S - start_s) > 0:
            time.sleep(early_s)  # close to the limit, few steps are allowed at a time
        while (allowed := throttle.env_steps_allowed(self.env_steps)) == 0:
            if self.should_stop() or self.is_over():
                break
            self._tell_of_waiting(throttle)
            time.sleep(POLL_S)
        if allowed == 0 or throttle.is_waiting:
            self.waited_s += time.monotonic() - start_s
            throttle.is_waiting = False
            self.state("collecting")
        self._steps_left = math.inf if allowed is None else allowed
        self._look_at_s = time.monotonic() + LOOK_EVERY_S

    def _tell_of_waiting(self, throttle: Throttle) -> None:
        learner, throttle.is_waiting = throttle.learner, True
        is_gone = learner is not None and not learner.is_alive
        note = "for the learner, which is not running" if is_gone else "for the learner's updates"
        self.state("waiting", note)
        if is_gone and not self._has_said:
            self._has_said = True
            self.say(
                f"Waiting {note}, as Experiment.replay_ratio = {self.ratio and self.ratio.value} asks. "
                "Start it again with --resume."
            )

    def _begin_heartbeat(self) -> Heartbeat:
        period_s = PERIOD_S if self.ratio is None else CONTROL_PERIOD_S
        heartbeat = Heartbeat(self.run_dir, self.role, rank=self.rank, period_s=period_s)
        if self.role == "actor":
            if self.ratio is not None:
                self._throttle = Throttle(self.run_dir, self.ratio, heartbeat.process_id, self.warm_up)
        elif self.rank == 0:
            self.ledger = Ledger(self.run_dir, self.ratio, heartbeat.process_id)
        return heartbeat
