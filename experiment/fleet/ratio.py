"""Gradient updates per collected env step, kept between processes that only share a folder.

Everybody counts for himself: an actor its env steps, the learner its updates; both are published in
heartbeats and only grow. With U updates and S env steps since training began, ratio R, tolerance e and E
updates per epoch,

    the learner waits while  U > R S + e max(R S, E),      actors wait while  U < R S - e max(R S, E).

(Relative to one epoch at first: a share of next to nothing would make them wait for each other after every
step.) Both at once would need U > U, so with equal knowledge one of them always goes on. Their knowledge may
be old, but while both wait, nothing changes, and after one heartbeat it is equal. So there is no deadlock, in
whatever order they start; what may happen is that one waits for processes that are gone, and it says so.

The env steps of an actor are a number that belongs to a random process name, and tallies are merged by taking
the larger number for each name. So nothing is counted twice, however often a file is read, folded into the
learner's `totals.json`, or restored from a checkpoint, and an actor that starts again begins a new number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .heartbeat import STATUS_FOLDER
from .reading import TOTALS_NAME, Beat, StatusReader

NOT_ENOUGH_DATA = "for trajectories to train on"  # note of a learner that cannot begin
FORGET_AFTER_S = 24 * 3600.0  # files of processes that ended longer ago are folded into the totals
_logger = logging.getLogger("loxodon")


@dataclass(frozen=True)
class Ratio:
    """The update-to-data ratio and how far off it may be.

    tolerance: share of the updates made so far, but at least of epoch_updates.
    """

    value: float
    tolerance: float
    epoch_updates: int

    def updates_allowed(self, env_steps: int, updates: int) -> int:
        """How many more updates may begin; 0 if the learner has to wait."""
        due = self.value * env_steps
        most = due + self.tolerance * max(due, self.epoch_updates)
        return 0 if updates > most else int(most) - updates + 1

    def env_steps_allowed(self, env_steps: int, updates: int) -> int:
        """How many more env steps all actors together may take; 0 if they have to wait."""
        slack = self.tolerance * self.epoch_updates
        most = max(updates / (1 - self.tolerance), updates + slack) / self.value
        return 0 if env_steps > most else int(most) - env_steps + 1

    def updates_due(self, env_steps: int, updates: int) -> int:
        """Updates that are missing to the ratio itself."""
        return max(0, int(self.value * env_steps + 1e-6) - updates)


@dataclass
class Tally:
    """What `totals.json` holds.

    Attributes:
        learner: name of the process (its heartbeat's id) that trains; None if none ever did.
        counts: env steps by actor's name, of all actors that ever collected for the run.
        began_at: env steps of all and updates at the moment training could begin; None before.
    """

    learner: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    began_at: tuple[int, int] | None = None

    def take(self, counts: Iterable[tuple[str, int]]) -> None:
        """Merge; a name that is known keeps its larger number."""
        for name, env_steps in counts:
            self.counts[name] = max(self.counts.get(name, 0), int(env_steps))

    def take_beats(self, beats: Iterable[Beat]) -> None:
        """Merge what actors say of themselves."""
        self.take((beat.id, beat.env_steps) for beat in beats if beat.role == "actor")

    @property
    def env_steps(self) -> int:
        """Of all actors together."""
        return sum(self.counts.values())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"learner": self.learner, "counts": self.counts, "began_at": self.began_at}

    @classmethod
    def from_json(cls, raw: Any) -> Tally:
        """The opposite. Raises ValueError, KeyError or TypeError for anything else."""
        began_at = None if raw["began_at"] is None else (int(raw["began_at"][0]), int(raw["began_at"][1]))
        learner = None if raw["learner"] is None else str(raw["learner"])
        return cls(learner, {str(name): int(steps) for name, steps in raw["counts"].items()}, began_at)


def read_tally(run_dir: Path) -> Tally | None:
    """What the learner wrote last, or None if there is nothing readable."""
    path = run_dir / STATUS_FOLDER / TOTALS_NAME
    try:
        return Tally.from_json(json.loads(path.read_bytes())) if path.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class Ledger:
    """The learner's side: sums up the env steps, says how many updates may be made, folds old files.

    Args:
        run_dir: folder of the run.
        ratio: None to count only.
        process_id: name of this process.
    """

    def __init__(self, run_dir: Path, ratio: Ratio | None, process_id: str) -> None:
        self.ratio, self.run_dir = ratio, run_dir
        self.reader, self.tally = StatusReader(run_dir), Tally(process_id)
        self.beats: list[Beat] = []
        self._is_written = True

    def begin(self, *, anew: bool = False) -> None:
        """Take over what earlier learners counted and become the learner that actors look at.

        anew: this learner begins a run of a name that was used before; env steps of processes that are gone
            are not counted.
        """
        earlier = read_tally(self.run_dir)
        if earlier is not None and not anew:
            self.tally.take(earlier.counts.items())
        elif earlier is not None:
            for beat in self.reader.read():
                if not beat.is_alive:
                    with contextlib.suppress(
                        OSError
                    ):  # a folder that cannot be written to is told of elsewhere
                        beat.path.unlink(missing_ok=True)
        self.count()
        self.write()

    def count(self) -> int:
        """Read all heartbeats; returns the env steps of all actors that ever collected."""
        self.beats = self.reader.read()
        self.tally.take_beats(self.beats)
        return self.tally.env_steps

    def begin_training(self, env_steps: int, updates: int) -> None:
        """Count from here on, unless counting has begun already: what was collected before is no debt."""
        if self.tally.began_at is None:
            self.tally.began_at = (env_steps, updates)
            self.write()

    def since_began(self, env_steps: int, updates: int) -> tuple[int, int]:
        """Env steps and updates since training began."""
        first = self.tally.began_at or (env_steps, updates)
        return env_steps - first[0], updates - first[1]

    def fold(self) -> None:
        """Drop the files of processes that ended long ago; their env steps stay in the totals."""
        newest = max((beat.modified for beat in self.beats), default=0.0)
        now = min(newest, time.time())  # a clock that jumps ahead drops nothing
        old = [b for b in self.beats if not b.is_alive and now - b.modified > FORGET_AFTER_S]
        if (old or not self._is_written) and self.write():
            for beat in old:
                try:
                    beat.path.unlink(missing_ok=True)
                except OSError:
                    return

    def write(self) -> bool:
        """Replace `totals.json`; False if that was not possible."""
        path = self.run_dir / STATUS_FOLDER / TOTALS_NAME
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.tally.as_json()) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            if self._is_written:
                _logger.warning("%s cannot be written (%s); it is tried again each epoch.", path, error)
            self._is_written = False
        else:
            self._is_written = True
        return self._is_written

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to remember, JSON-able."""
        return self.tally.as_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: the beginning of training is restored, env steps counted since stay."""
        earlier = Tally.from_json(state)
        self.tally.take(earlier.counts.items())
        self.tally.began_at = earlier.began_at


class Throttle:
    """The actor's side: says whether this actor has to wait for the learner.

    Args:
        run_dir: folder of the run.
        ratio: as the learner's.
        process_id: name of this process.
        warm_up: env steps that all actors of this time take before training begins; None for any number.
    """

    def __init__(self, run_dir: Path, ratio: Ratio, process_id: str, warm_up: int | None = None) -> None:
        self.run_dir, self.ratio, self.process_id, self.warm_up = run_dir, ratio, process_id, warm_up
        self.reader = StatusReader(run_dir)
        self.learner: Beat | None = None
        self.is_waiting = False

    def env_steps_allowed(self, own_env_steps: int) -> int | None:
        """How many env steps this process may take before the next look; None for any number.

        0 means that env steps are far ahead of updates. What is left is shared by the actors at work, so it
        does not matter how fast one is between two looks. own_env_steps: of this process.

        Before training, actors wait once they have taken `warm_up` steps, unless the learner lacks data all
        the same. Before there is a learner, and after it has finished, nobody waits. One that is dead is
        waited for: it will be started again, and has fallen behind enough.
        """
        tally = read_tally(self.run_dir)
        if tally is None:
            return None
        beats = self.reader.read()
        self.learner = next((beat for beat in beats if beat.id == tally.learner), None)
        if self.learner is None or self.learner.state == "finished":
            return None
        others = [b for b in beats if b.role == "actor" and b.is_alive and b.id != self.process_id]
        if tally.began_at is None:
            if self.warm_up is None or self.learner.note == NOT_ENOUGH_DATA:
                return None
            left = max(0, self.warm_up - own_env_steps - sum(beat.env_steps for beat in others))
            return min(left, max(1, left // (1 + len(others))))
        tally.take_beats(beats)
        tally.take([(self.process_id, own_env_steps)])
        collected_by_learner = self.learner.env_steps if self.learner.role == "both" else 0
        env_steps = tally.env_steps + collected_by_learner - tally.began_at[0]
        left = self.ratio.env_steps_allowed(env_steps, self.learner.gradient_steps - tally.began_at[1])
        return min(left, max(1, left // (1 + len(others))))
