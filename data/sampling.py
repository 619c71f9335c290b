"""Which files and which windows are drawn: uniformly, by length, by age and by priority."""

from __future__ import annotations

import difflib
import math
import multiprocessing
import time
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt

from .buffer import TrajectoryFile

SAMPLE_BY = ("trajectory", "timestep")
NUM_PRIORITY_SLOTS = 2**20
Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


def window_at(traj_len: int, max_seq_len: int, mode: str, fraction: float) -> tuple[int, int]:
    """Return the window that lies at a fraction of the way from the first possible one to the last.

    Args:
        traj_len: transitions in the trajectory.
        max_seq_len: transitions in the longest window.
        mode: which ends the window may hang over, and so be shorter: "none", "left", "right" or "both".
        fraction: in [0, 1); uniform ones give uniform window starts.

    Returns: start (inclusive) and stop (exclusive), 0 <= start < stop <= traj_len.
    """
    if traj_len <= max_seq_len:
        return 0, traj_len
    lowest = 1 - max_seq_len if mode in ("left", "both") else 0
    highest = traj_len - 2 if mode in ("right", "both") else traj_len - max_seq_len
    start = lowest + int(fraction * (highest + 1 - lowest))
    return max(start, 0), min(start + max_seq_len, traj_len)


def priority_slot(traj_id: str) -> int:
    """Return the place of a trajectory in the priority table, the same in every process."""
    try:
        return int(traj_id, 16) % NUM_PRIORITY_SLOTS
    except ValueError:  # a foreign id
        return zlib.crc32(traj_id.encode()) % NUM_PRIORITY_SLOTS


def check_sampling(sample_by: str, recent_fraction: float | None, priority_exponent: float | None) -> None:
    """Raise ValueError unless these arguments of DiskTrajDataset are allowed."""
    if sample_by not in SAMPLE_BY:
        near = difflib.get_close_matches(str(sample_by), SAMPLE_BY, n=1)
        raise ValueError(
            f"sample_by is {sample_by!r}; allowed are {', '.join(map(repr, SAMPLE_BY))}. "
            f"Fix: set DiskTrajDataset.sample_by = {near[0] if near else SAMPLE_BY[0]!r}."
        )
    if recent_fraction is not None and not 0 < recent_fraction <= 1:
        raise ValueError(
            f"recent_fraction is {recent_fraction}, but must be above 0 and at most 1, or None for all. "
            "Fix: set DiskTrajDataset.recent_fraction, e.g. 0.5."
        )
    if priority_exponent is not None and not priority_exponent > 0:
        raise ValueError(
            f"priority_exponent is {priority_exponent}, but must be above 0, or None for no priorities. "
            "Fix: set DiskTrajDataset.priority_exponent, e.g. 0.6."
        )


class PriorityTable:
    """Priorities in memory that the process shares with those it starts.

    Files are drawn with probability p_i ** exponent / sum_k p_k ** exponent. One without a priority counts as
    if it had the highest that was ever given. Two files share a place with a chance of one in a million.

    Copies made by pickle, other than for a process that is being started, have a table of their own.

    Args:
        exponent: alpha; 1 draws in proportion to the priorities, values near 0 almost uniformly.

    Source: Schaul et al. 2016, "Prioritized Experience Replay", arXiv:1511.05952, eq. 1.
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        # p ** exponent by slot, 0 where there is none; behind them the highest of all times, 0 at first.
        self._shared = multiprocessing.RawArray("f", NUM_PRIORITY_SLOTS + 1)
        # When the table was last changed: CLOCK_MONOTONIC is common to all processes of a machine, and
        # unlike a count it needs no lock.
        self._changed_ns = multiprocessing.RawArray("q", 1)
        self._view()

    @property
    def version(self) -> int:
        """A number that is another one after every update, in whichever process."""
        return int(self._changed_ns[0])

    def update(self, slots: Indices, priorities: npt.NDArray[Any]) -> None:
        """Set priorities; slots below 0 (windows from elsewhere) are passed over.

        Args:
            slots: (B,) int64, Trajectory.source of the windows.
            priorities: (B,) float, at least 0.

        Raises:
            ValueError: If the shapes differ, a slot does not exist or a priority is negative or not finite.
        """
        slots, priorities = np.asarray(slots), np.asarray(priorities, np.float64)
        if slots.ndim != 1 or slots.shape != priorities.shape or slots.dtype.kind not in "iu":
            raise ValueError(
                f"slots are {slots.dtype}{list(slots.shape)} and priorities {list(priorities.shape)}, but "
                "must be integers (B,) and numbers (B,). Fix: pass a Trajectory.source and a priority for "
                "each window."
            )
        if not len(slots):
            return
        if slots.max() >= NUM_PRIORITY_SLOTS or not np.isfinite(priorities).all() or priorities.min() < 0:
            raise ValueError(
                f"Priorities range from {priorities.min()} to {priorities.max()} and slots up to "
                f"{slots.max()}, but priorities must be finite and at least 0, slots below "
                f"{NUM_PRIORITY_SLOTS}. Fix: pass absolute TD errors, and slots from Trajectory.source."
            )
        is_ours = slots >= 0
        limits = np.finfo(np.float32)
        weights = np.clip(priorities[is_ours] ** self.exponent, limits.tiny, limits.max).astype(np.float32)
        self._weights[slots[is_ours]] = weights
        self._weights[-1] = max(self._weights[-1], weights.max(initial=0.0))
        self._touch()

    def weights(self, slots: Indices) -> Weights:
        """Return p ** exponent of (k,) slots."""
        found = self._weights[slots].astype(np.float64)
        found[found == 0] = self._weights[-1] or 1.0
        return found

    def reset(self, slots: Indices) -> None:
        """Take priorities back, because their files are gone."""
        if self._weights[slots].any():
            self._weights[slots] = 0
            self._touch()

    def state_dict(self, traj_ids: Sequence[str]) -> dict[str, Any]:
        """Return the priorities that were given to these trajectories, JSON-able."""
        weights = self._weights[[priority_slot(traj_id) for traj_id in traj_ids]].tolist() if traj_ids else []
        given = zip(traj_ids, weights, strict=True)
        inverse = 1 / self.exponent
        return {
            "highest": float(self._weights[-1]) ** inverse,
            "of": {traj_id: weight**inverse for traj_id, weight in given if weight},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict returned; all other trajectories lose their priority."""
        self._weights[:] = 0
        values = state["of"]
        self.update(
            np.array([priority_slot(traj_id) for traj_id in values], np.int64),
            np.array(list(values.values())),
        )
        self._weights[-1] = state["highest"] ** self.exponent
        self._touch()

    def _touch(self) -> None:
        self._changed_ns[0] = time.monotonic_ns()

    def _view(self) -> None:
        self._weights = np.frombuffer(self._shared, np.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Return the shared memory itself for a process that is being started, else what is in it."""
        if get_spawning_popen() is not None:
            return {name: value for name, value in self.__dict__.items() if name != "_weights"}
        given = np.flatnonzero(self._weights)
        return {"exponent": self.exponent, "given": given, "values": self._weights[given]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what __getstate__ returned."""
        if "given" in state:
            self.__init__(state["exponent"])  # type: ignore[misc]
            self._weights[state["given"]] = state["values"]
        else:
            self.__dict__.update(state)
            self._view()


class FileSampler:
    """Draws positions in a list of files.

    Args:
        recent_fraction: only this newest share of the files is drawn, at least one file; None for all.
        priorities: weigh files by these; None to treat them alike.
    """

    def __init__(self, *, recent_fraction: float | None, priorities: PriorityTable | None) -> None:
        self._recent_fraction, self._priorities = recent_fraction, priorities
        self.set_files([], None)

    def set_files(self, files: Sequence[TrajectoryFile], lengths: Mapping[str, int] | None) -> None:
        """Choose what to draw from. This costs nothing before the next draw.

        Args:
            files: the oldest first.
            lengths: by path; files are drawn in proportion to them. None to draw whatever the length.
        """
        self._files, self._lengths = files, lengths
        self._first = 0
        if self._recent_fraction is not None:
            self._first = max(0, len(files) - max(1, math.ceil(self._recent_fraction * len(files))))
        self._base: Weights | None = None
        self._slots: Indices | None = None
        self._cumulative: Weights | None = None
        self._version = -1

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return `count` positions in the list of files, which is not empty."""
        if self._lengths is None and self._priorities is None:
            positions: list[int] = rng.integers(self._first, len(self._files), size=count).tolist()
            return positions
        cumulative = self._cumulative_weights()
        drawn = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
        positions = (np.minimum(drawn, len(cumulative) - 1) + self._first).tolist()
        return positions

    def _cumulative_weights(self) -> Weights:
        """Sums of the weights of the files up to each one; made anew only if something has changed."""
        version = self._priorities.version if self._priorities is not None else 0
        if self._cumulative is None or version != self._version:
            weights = self._base_weights()
            if self._priorities is not None:
                if self._slots is None:
                    candidates = self._files[self._first :]
                    self._slots = np.fromiter((priority_slot(file.traj_id) for file in candidates), np.int64)
                weights = weights * self._priorities.weights(self._slots)
            self._cumulative, self._version = np.cumsum(weights), version
        return self._cumulative

    def _base_weights(self) -> Weights:
        if self._base is None:
            candidates, lengths = self._files[self._first :], self._lengths
            if lengths is None:
                self._base = np.ones(len(candidates))
            else:
                self._base = np.fromiter((lengths[file.path] for file in candidates), np.float64)
        return self._base
