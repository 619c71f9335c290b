"""Which files are drawn: uniformly, by length, by age and by priority."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .buffer import TrajectoryFile

SAMPLE_BY = ("trajectory", "timestep")
NUM_PRIORITY_SLOTS = 2**20
Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


def priority_slot(traj_id: str) -> int:
    """Return the place of a trajectory in the priority table, the same in every process."""
    return int(traj_id, 36) % NUM_PRIORITY_SLOTS  # ids are digits and letters; ours only up to f


class PriorityTable:
    """Priorities in memory that the process shares with those it starts.

    Files are drawn with probability p_i ** exponent / sum_k p_k ** exponent. One without a priority counts as
    if it had the highest that was ever given. Two files share a place with a chance of one in a million.

    Args:
        exponent: alpha; 1 draws in proportion to the priorities, values near 0 almost uniformly.

    Source: Schaul et al. 2016, "Prioritized Experience Replay", arXiv:1511.05952, eq. 1.
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent
        # p ** exponent by slot, 0 where there is none; behind them the highest of all times, 0 at first.
        self._shared = multiprocessing.RawArray("f", NUM_PRIORITY_SLOTS + 1)
        self._weights = np.frombuffer(self._shared, np.float32)

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

    def weights(self, slots: Indices) -> Weights:
        """Return p ** exponent of (k,) slots."""
        found = self._weights[slots].astype(np.float64)
        found[found == 0] = self._weights[-1] or 1.0
        return found

    def reset(self, slots: Indices) -> None:
        """Take priorities back, because their files are gone."""
        self._weights[slots] = 0

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

    def __getstate__(self) -> dict[str, Any]:
        return {"exponent": self.exponent, "_shared": self._shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _weights=np.frombuffer(state["_shared"], np.float32))


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
        self._weights: Weights | None = None
        self._slots: Indices | None = None

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return `count` positions in the list of files, which is not empty."""
        if self._lengths is None and self._priorities is None:
            positions = rng.integers(self._first, len(self._files), size=count)
        else:
            cumulative = self._cumulative_weights()
            drawn = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
            positions = np.minimum(drawn, len(cumulative) - 1) + self._first
        return list(positions.tolist())

    def _cumulative_weights(self) -> Weights:
        """Sums of the weights of the files up to each one; those of priorities are others each time."""
        if self._weights is None:
            candidates, lengths = self._files[self._first :], self._lengths
            self._weights = np.array([1.0 if lengths is None else lengths[file.path] for file in candidates])
            if self._priorities is None:
                self._weights = np.cumsum(self._weights)
            else:
                self._slots = np.array([priority_slot(file.traj_id) for file in candidates], np.int64)
        if self._priorities is None or self._slots is None:
            return self._weights
        return np.cumsum(self._weights * self._priorities.weights(self._slots))
