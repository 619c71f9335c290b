"""Gradient updates per collected env step, kept between processes that only share a folder.

Each process publishes only its own counters in its heartbeat: an actor its env steps, the learner its
updates. They only grow. The learner adds up the actors' counters and publishes the sum in pace.json.
With U updates and S env steps since training began, D(S) updates due at that number of env steps, tolerance e
and E updates per epoch,

    the learner waits while  U > D(S) + e max(D(S), E),      actors wait while  U < D(S) - e max(D(S), E).

D(S) is R S with ratio R, and less while the ratio still rises. (At first the tolerance is relative to one
epoch: a share of a small number would make them wait for each other after every step.) Both conditions at
once would need U > U, so with equal knowledge one of them can always proceed. Their knowledge may be old, but
while both wait nothing changes, and two heartbeats later it is equal. So a deadlock is impossible in any
order of starts. A process may wait for others that are gone, and then reports it. Waiting never depends on
which processes seem alive, because processes with different clocks may disagree on that.

The env steps of the run are the sum over the heartbeats of all actors so far. Only the learner deletes such a
file, a day after its process ended, and adds its env steps to a number in its own heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gin

from ...data.errors import check_number
from ..contracts import RunContext
from ..process.distributed import from_main
from .heartbeat import Heartbeat, LearnerReport, newest_learner, read_heartbeats, read_learner_report
from .shared_folder import SHARED, location_of

DELETE_AFTER_S = 24 * 3600.0  # files of processes that ended longer ago are deleted
WAIT_S = 0.2  # interval between two checks by a process that waits
POLL_S = 0.5  # longest time between two reads of the learner's report by an actor
MIN_POLL_GAP_S = 0.05  # shortest time between two of them
REMIND_S = 30.0
FINISHED_VARIABLE = "LOXODON_FINISHED_BEFORE"
"""Environment variable: learners that had finished when the jobs of this one were submitted, by their ids."""
CONTINUE_S = 60.0  # time for which an actor of a finished run waits for its continuation
SILENT_S = 8.0  # time without a learner after which an actor reports it
_logger = logging.getLogger("loxodon")


@dataclass(frozen=True)
class Ratio:
    """The update-to-data ratio, which rises linearly from 0 at first, and its tolerance.

    With ratio R and warm-up W, after S env steps R S^2 / (2 W) updates are due if S < W, else R (S - W / 2).

    tolerance: share of the updates that are due, but at least of epoch_updates.
    warmup_env_steps: W, the number of env steps until the ratio has its full value.
    """

    value: float
    tolerance: float
    epoch_updates: int
    warmup_env_steps: int = 0

    def _due(self, env_steps: int) -> float:
        warmup = self.warmup_env_steps
        if env_steps < warmup:
            return self.value * env_steps**2 / (2 * warmup)
        return self.value * (env_steps - warmup / 2)

    def _env_steps_for(self, updates: float) -> float:
        """The number of env steps at which these updates are due."""
        full, warmup = updates / self.value, self.warmup_env_steps
        return math.sqrt(2 * warmup * full) if full < warmup / 2 else full + warmup / 2

    def updates_allowed(self, env_steps: int, updates: int) -> int:
        """Number of updates that may still begin; 0 if the learner has to wait."""
        due = self._due(env_steps)
        most = due + self.tolerance * max(due, self.epoch_updates)
        return 0 if updates > most else int(most) - updates + 1

    def env_steps_allowed(self, env_steps: int, updates: int) -> int:
        """Number of env steps that all actors together may still take; 0 if they have to wait."""
        slack = self.tolerance * self.epoch_updates
        most = self._env_steps_for(max(updates / (1 - self.tolerance), updates + slack))
        return 0 if env_steps > most else int(most) - env_steps + 1

    def updates_due(self, env_steps: int, updates: int) -> int:
        """Number of updates missing to the ratio itself."""
        return max(0, int(self._due(env_steps) + 1e-6) - updates)


@gin.configurable(allowlist=["tolerance", "warmup_env_steps", "actor_processes"])
class ReplayRatio:
    """Counts the env steps of all actors, and makes learner and actors wait for each other.

    The main process of a learner aggregates the counters: it adds up the actors' env steps, decides how many
    updates may be made, and publishes the start of training in its heartbeat. An actor compares the steps of
    all actors with that. In mode "both" there is no waiting: the ratio sets the number of updates of each
    epoch.

    Args:
        ctx: context of the run.
        process_id: name of this process in its heartbeats.
        ratio: gradient updates per env step of all actors together; None counts without any waiting.
        epoch_updates: number of updates in an epoch.
        batches_per_update: number of batches in an update.
        start_after: env steps of all actors before a learner begins to train.
        is_over: returns True if the learner has published its last policy and this process has yet to load
            it.
        tolerance: deviation from the ratio at which learner or actors wait, as a share of the updates that
            are due (at least of an epoch's). In [0, 1).
        warmup_env_steps: env steps, of all actors together, over which the ratio rises linearly from 0.
            Without it, the first episodes are replayed so often that networks memorise them.
        actor_processes: collecting processes of the run, which share schedules of exploration; set by
            --actors.

    Attributes:
        env_steps: number collected by this process; in mode "both" by the run.

    Raises: ValueError or TypeError for an invalid number.
    """

    def __init__(
        self,
        ctx: RunContext,
        process_id: str,
        ratio: float | None = None,
        *,
        epoch_updates: int = 0,
        batches_per_update: int = 1,
        start_after: int = 0,
        is_over: Callable[[], bool] = lambda: False,
        tolerance: float = 0.1,
        warmup_env_steps: int = 0,
        actor_processes: int = 1,
    ) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError(
                f"ReplayRatio.tolerance is {tolerance!r}, but must be a number of at least 0 and below 1: it "
                "is a share of Experiment.replay_ratio. Fix: set ReplayRatio.tolerance, e.g. 0.1."
            )
        check_number("ReplayRatio.actor_processes", actor_processes, lowest=1, whole=True)
        self.ctx, self.process_id, self.start_after, self.is_over = ctx, process_id, start_after, is_over
        check_number("ReplayRatio.warmup_env_steps", warmup_env_steps, lowest=0, whole=True)
        self.ratio = None if ratio is None else Ratio(ratio, tolerance, epoch_updates, warmup_env_steps)
        self.batches_per_update, self.actor_processes = batches_per_update, actor_processes
        self.env_steps = 0
        self._aggregates = ctx.role.learns and ctx.is_main
        self._beats: list[Heartbeat] = []
        self._began_at: tuple[int, int] | None = None  # env steps of all and updates, when training began
        self._forgotten = 0  # env steps of the run that no heartbeat of an actor counts
        # In mode "both": env steps of actors that progress.env_steps includes, as it is the run's total.
        self._included = 0
        self._restored: dict[str, Any] = {}
        # In mode "both", all ranks collect as much as this process.
        self._num_collecting = ctx.accelerator.num_processes if ctx.role.does_both else 1
        self._epoch_env_steps = 0  # env steps in the running epoch
        self._updates_left = 0  # updates before the next check
        # Env steps before the next check; time of a check in any case.
        self._env_steps_left, self._poll_at_s = 0.0, 0.0
        # Time when the learner was last seen; time of the last warning about its absence.
        self._seen_s, self._warned_s = time.monotonic(), -math.inf
        self._waited_s = 0.0  # seconds since the last call of `metrics`
        self._has_reported_waiting = False

    # ---- called by every process ----

    def begin(self, *, is_new: bool) -> None:
        """`learn` begins: everything is built, and loaded if the run is resumed.

        is_new: True if this run has no checkpoint yet; an earlier run may have had the same name.
        """
        progress, self._seen_s = self.ctx.progress, time.monotonic()
        if self.ctx.role.does_both:
            self.env_steps = progress.env_steps
        self.ctx.status.put(
            epoch=progress.epoch,
            env_steps=self.env_steps,
            gradient_steps=progress.gradient_steps,
            policy_version=progress.policy_version,
        )
        self.ctx.status.state("waiting", "to begin")
        if not self._aggregates:
            return
        others = [beat for beat in read_heartbeats(self.ctx.run_dir) if beat.id != self.process_id]
        if is_new:
            for beat in others:
                if not beat.is_alive:
                    _delete(beat)
        elif (earlier := newest_learner(others)) is not None:  # take over its count
            self._forgotten = max(self._forgotten, earlier.forgotten_env_steps)
        self._continue_counts()
        self._count()
        self._publish()

    def begin_epoch(self) -> None:
        """An epoch begins: report its number, and count the env steps that all actors collected so far."""
        self.ctx.status.put(epoch=self.ctx.progress.epoch)
        self._epoch_env_steps = 0
        if self._aggregates:
            self._count()
            self._delete_old_heartbeats()

    def metrics(self) -> dict[str, float]:
        """The ratio so far, and how long this process has waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        if self.ratio is None:
            return {}
        if self.ctx.role.is_actor:
            return {"time/wait_for_learner_s": waited_s}
        if not self._aggregates:
            return {}
        env_steps, updates = self._since_began()
        ratio = {"train/replay_ratio": updates / env_steps} if env_steps else {}
        return {**ratio, "time/wait_for_actors_s": waited_s}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; empty in a process that does not aggregate the counters."""
        if not self._aggregates:
            return {}
        counted, total = self._counted(read_heartbeats(self.ctx.run_dir)), self.ctx.progress.env_steps
        uncounted = total - self._included if self.ctx.role.does_both else max(0, total - counted)
        return {"env_steps": counted, "uncounted_env_steps": uncounted, "began_at": self._began_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, also of another mode; env steps that actors have taken since count."""
        if state and self._aggregates:
            began_at = state["began_at"]
            self._began_at = None if began_at is None else (int(began_at[0]), int(began_at[1]))
            self._restored = state

    def _continue_counts(self) -> None:
        """Continue the counts of the checkpoint that was loaded, if any."""
        state, self._restored = self._restored, {}
        if not state:
            return
        known = self._counted(read_heartbeats(self.ctx.run_dir))
        self._forgotten += max(0, state["env_steps"] - known)  # for a copy of the folder without status/
        uncounted = state.get("uncounted_env_steps")  # missing in old checkpoints
        if self.ctx.role.only_learns:
            self._forgotten += uncounted or 0
        elif uncounted is not None:
            self._included = self.ctx.progress.env_steps - uncounted

    # ---- calls where env steps are taken ----

    def after_env_steps(self, num_steps: int) -> None:
        """Count env steps that this process has taken; an actor waits if the learner is too far behind."""
        num_steps *= self._num_collecting
        self.env_steps += num_steps
        self._epoch_env_steps += num_steps
        self.ctx.status.put(env_steps=self.env_steps)
        if self.ctx.role.is_actor:
            self._env_steps_left -= num_steps
            if self._env_steps_left < 1 or time.monotonic() >= self._poll_at_s:
                self._check_learner_progress()

    def _check_learner_progress(self) -> None:
        """Read the learner's report, and wait for the learner if there is a ratio to keep."""
        if self.ratio is not None:
            self._await_learner(self.ratio)
        else:
            self._warn_without_learner(read_learner_report(self.ctx.run_dir))
            self._env_steps_left, self._poll_at_s = math.inf, time.monotonic() + POLL_S

    def _warn_without_learner(self, report: LearnerReport | None) -> None:
        """Warn repeatedly while an actor finds no learner in this folder."""
        if report is not None and (report.learner.is_alive or report.learner.state == "finished"):
            self._seen_s = time.monotonic()
        elif self._should_warn():
            there_is = "There is no learner" if report is None else "The learner is not running"
            _logger.warning(
                "%s in %s, the run folder that this actor sees, so its policy never changes. Fix: start "
                "a learner with the same Experiment.run_name and Experiment.ckpt_base_dir. If one is "
                "running, it sees another folder: %s.",
                there_is,
                location_of(self.ctx.run_dir),
                SHARED,
            )

    def _should_warn(self) -> bool:
        """True every REMIND_S once the learner has been missing for SILENT_S."""
        now_s = time.monotonic()
        if now_s - self._seen_s < SILENT_S or now_s - self._warned_s < REMIND_S:
            return False
        self._warned_s = now_s
        return True

    def _await_learner(self, ratio: Ratio) -> None:
        """Update the number of steps until the next check; wait while it is 0."""
        start_s, waits = time.monotonic(), False
        if (early_s := self._poll_at_s - POLL_S + MIN_POLL_GAP_S - start_s) > 0:
            time.sleep(early_s)  # close to the limit, few steps are allowed at a time
        while (allowed := self._env_steps_allowed(ratio)) == 0:
            waits = True
            if self.ctx.stop.requested() or self.is_over():
                break
            time.sleep(WAIT_S)
        if waits:
            self._waited_s += time.monotonic() - start_s
            self.ctx.status.state("collecting")
        self._env_steps_left = allowed
        self._poll_at_s = time.monotonic() + POLL_S

    def _env_steps_allowed(self, ratio: Ratio) -> float:
        """Number of env steps that this process may take before the next check.

        0 means that env steps are far ahead of updates. The remaining steps are shared by the actors at work,
        so their speed between two checks does not matter.

        Before training, actors wait once they have taken `start_after` steps. They never wait for a learner
        that lacks data; after a resumption, too, the trajectories may be gone. There is no waiting before a
        learner starts, nor after it has finished. Actors do wait for a dead learner: it is expected to
        restart, and is already behind.
        """
        report = read_learner_report(self.ctx.run_dir)
        self._warn_without_learner(report)
        if report is None or report.learner.state == "finished":
            return math.inf
        learner, is_counted = report.learner, self.process_id in report.counted
        env_steps = report.env_steps - report.counted.get(self.process_id, 0) + self.env_steps
        if learner.lacks_data:
            return math.inf
        if learner.began_env_steps is None or learner.began_updates is None:
            left = max(0, self.start_after - env_steps)
        else:
            updates = learner.gradient_steps - learner.began_updates
            left = ratio.env_steps_allowed(env_steps - learner.began_env_steps, updates)
        if not left:
            self._report_waiting(ratio, learner)
        return min(left, max(1, left // max(1, report.num_actors + (not is_counted))))

    def wait_for_continuation(self) -> bool:
        """Wait a minute for a learner that continues a finished run; False if none does.

        Actors may be started before the learner that continues a run with more epochs. Without one, nobody
        would use or delete what they collect. Actors of Slurm wait for as long as necessary: their learner is
        in the queue, unless one has finished since the jobs were submitted.
        """
        end_s = time.monotonic() + CONTINUE_S
        queued_after = os.environ.get(FINISHED_VARIABLE, "").split()
        while (found := read_learner_report(self.ctx.run_dir)) and found.learner.state == "finished":
            is_queued = found.learner.id in queued_after
            if self.ctx.stop.requested() or (time.monotonic() >= end_s and not is_queued):
                return False
            if not self._has_reported_waiting:
                self._has_reported_waiting = True
                self.ctx.status.state("waiting", "for a learner that continues the finished run")
                limit = "" if is_queued else f" for {CONTINUE_S:g} s"
                self.ctx.console.say(
                    f"The learner of this run has finished. This actor waits{limit} for one that continues "
                    "the run (--resume with more epochs)."
                )
            time.sleep(WAIT_S)
        return True

    def _report_waiting(self, ratio: Ratio, learner: Heartbeat) -> None:
        note = "for the learner's updates" if learner.is_alive else "for the learner, which is not running"
        self.ctx.status.state("waiting", note)
        if not learner.is_alive and not self._has_reported_waiting:
            self._has_reported_waiting = True
            self.ctx.console.say(
                f"Waiting {note}, as Experiment.replay_ratio = {ratio.value} requires. Start it again with "
                "--resume."
            )

    # ---- calls where updates are made, by all processes of a learner together ----

    def is_warm(self) -> bool:
        """True if actors have collected as much as mode "both" has when it begins to train."""
        return self.ratio is None or from_main(
            lambda: self._count() >= self.start_after or self._began_at is not None, self.ctx.accelerator
        )

    def batches(self, planned: int) -> int:
        """Number of batches this epoch trains on. From here on, env steps and updates count for the ratio.

        With a ratio in mode "both", the number is that missing to `ratio` times the env steps since training
        began, including those of its first epoch. Otherwise, and in epochs that collect nothing, it is
        `planned`.
        """
        ratio = self.ratio
        if ratio is None or (self.ctx.role.does_both and not self._epoch_env_steps):
            return planned
        due = from_main(lambda: self._begin_training(ratio), self.ctx.accelerator)
        return due * self.batches_per_update if self.ctx.role.does_both else planned

    def before_update(self) -> bool:
        """Return when the env steps allow for an update; False if the run was asked to stop."""
        if self.ratio is None or not self.ctx.role.only_learns:
            return True
        if self._updates_left < 1 and not self._await_actors(self.ratio):
            return False
        self._updates_left -= 1
        return True

    def _await_actors(self, ratio: Ratio) -> bool:
        """Wait until there is an update to make, often not at all; False if asked to stop."""
        start_s = reminded_s = time.monotonic()  # actors that this command starts need some seconds
        has_waited = False

        def allowed() -> int:
            return ratio.updates_allowed(*self._since_began())

        while (left := from_main(allowed, self.ctx.accelerator)) < 1:
            if self.ctx.stop_agreed():
                return False
            has_waited = True
            self.ctx.status.state("waiting", "for env steps of actors")
            if time.monotonic() - reminded_s > REMIND_S:
                reminded_s = time.monotonic()
                if self._aggregates and not any(b.is_alive and b.role == "actor" for b in self._beats):
                    self.ctx.console.say(  # otherwise, waiting is normal with a ratio
                        f"Waiting for env steps, as Experiment.replay_ratio = {ratio.value} requires, but "
                        f"no running actor sees {location_of(self.ctx.run_dir)} (start one with --mode "
                        "collect)."
                    )
            time.sleep(WAIT_S)
        self._updates_left = left
        if has_waited:
            self._waited_s += time.monotonic() - start_s
            self.ctx.status.state("learning")
        return True

    # ---- the aggregated counters ----

    def _publish(self) -> None:
        began_env_steps, began_updates = self._began_at or (None, None)
        self.ctx.status.put(
            began_env_steps=began_env_steps,
            began_updates=began_updates,
            forgotten_env_steps=self._forgotten,
        )

    def _counted(self, beats: list[Heartbeat]) -> int:
        """Env steps of all actors."""
        return self._forgotten + sum(beat.env_steps for beat in beats if beat.role == "actor")

    def _count(self) -> int:
        """Read all heartbeats; returns the env steps of the run, which a learner cannot know otherwise."""
        self._beats = read_heartbeats(self.ctx.run_dir)
        progress, counted = self.ctx.progress, self._counted(self._beats)
        if self.ctx.role.does_both:
            return progress.env_steps - self._included + counted
        progress.env_steps = max(progress.env_steps, counted)
        return counted

    def count_env_steps(self) -> int:
        """Env steps so far of all collecting processes; called in the learner's main process."""
        return max(self._count(), self.ctx.progress.env_steps)

    def _since_began(self) -> tuple[int, int]:
        """Env steps and updates since training began."""
        env_steps, updates = self._count(), self.ctx.progress.gradient_steps
        first = self._began_at or (env_steps, updates)
        return env_steps - first[0], updates - first[1]

    def _begin_training(self, ratio: Ratio) -> int:
        """Return how many updates are missing to reach the ratio; the first call starts the count."""
        if self._began_at is None:  # steps collected before training started do not count
            self._began_at = self._count() - self._epoch_env_steps, self.ctx.progress.gradient_steps
            self._publish()
        return ratio.updates_due(*self._since_began())

    def _delete_old_heartbeats(self) -> None:
        """Delete the files of processes that ended long ago; their env steps stay."""
        for beat in self._beats:
            is_old = not beat.is_alive and time.time() - beat.modified > DELETE_AFTER_S
            if is_old and _delete(beat) and beat.role == "actor":
                self._forgotten += beat.env_steps
        self._publish()


def _delete(beat: Heartbeat) -> bool:
    """Delete a process's file; False in a read-only folder, which is reported elsewhere."""
    with contextlib.suppress(OSError):
        beat.path.unlink(missing_ok=True)
        return True
    return False
