"""Sampling of stored trajectories and of windows of them."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import numpy.typing as npt

from .errors import check_choice, check_number
from .trajectory import Trajectory

SAMPLE_BY = ("trajectory", "timestep")
PADDED_SAMPLING_MODES = ("none", "left", "right", "both", "shifted")
NUM_PRIORITY_SLOTS = 2**20
Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


@gin.configurable
class Sampler:
    """Draws windows of stored trajectories: first a trajectory, then a window of it.

    Trajectory i is drawn with probability w_i / sum_k w_k; `weights` returns w. The start of the window is
    uniform over those that Experiment.padded_sampling allows; `window` returns it. For another rule, override
    these two methods, decorate the class with `@gin.configurable` and bind it in gin:
    `RLDataset.sampler = @MySampler()`.

    Args:
        sample_by: "trajectory" draws every trajectory equally often (w_i = 1), "timestep" in proportion to
            its transitions, so that every transition is drawn about equally often.
        recent_fraction: draw only from this newest share of the trajectories, above 0 and at most 1; None for
            all.

    Raises:
        ValueError: If a setting is not allowed.

    Attributes:
        max_seq_len, padded_sampling: settings of the run; see configure.
    """

    max_seq_len: int
    padded_sampling: str
    _traj_ids: Sequence[str] = ()
    _cumulative: Weights | None = None  # cumulative sums of the weights; None if all are equal
    _is_stale = True

    def __init__(self, sample_by: str = "trajectory", recent_fraction: float | None = None) -> None:
        check_choice("Sampler.sample_by", sample_by, SAMPLE_BY)
        check_number("Sampler.recent_fraction", recent_fraction, above=0, highest=1, optional=True)
        self.sample_by, self.recent_fraction = sample_by, recent_fraction

    def configure(self, *, max_seq_len: int, padded_sampling: str) -> None:
        """Receive the settings of the run; the dataset calls this once, before anything is drawn.

        Args:
            max_seq_len: transitions in the longest window.
            padded_sampling: "none", "left", "right", "both" or "shifted"; see window.

        Raises:
            ValueError: If the mode is unknown.
        """
        check_choice("Experiment.padded_sampling", padded_sampling, PADDED_SAMPLING_MODES)
        self.max_seq_len, self.padded_sampling = max_seq_len, padded_sampling

    # ---- choice of a trajectory ----

    @property
    def needs_values(self) -> bool:
        """True if `weights` needs the value of every trajectory. Files are then opened when first listed."""
        return self.sample_by == "timestep"

    def value(self, traj: Trajectory) -> float:
        """Return the number that `weights` receives for a trajectory: by default its length."""
        return len(traj)

    def weights(self, num_trajs: int, values: Weights | None) -> Weights | None:
        """Return the weights w (K,), each at least 0, or None if all trajectories are equally likely.

        The dataset calls this when trajectories have been added or removed.

        Args:
            num_trajs: K, the number of trajectories, which are sorted by age, the oldest first.
            values: (K,), what `value` returned for each; None unless needs_values.
        """
        if self.recent_fraction is None:
            return values
        num_recent = max(1, math.ceil(self.recent_fraction * num_trajs))
        is_recent = np.arange(num_trajs) >= num_trajs - num_recent
        return np.where(is_recent, 1.0 if values is None else values, 0.0)

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        """Draw `count` times; returns the position of each trajectory, and the fraction for its `window`."""
        if self._is_stale:
            self._cumulative, self._is_stale = self._sum_weights(), False
        if self._cumulative is None:
            positions = rng.integers(len(self._traj_ids), size=count)
        else:
            drawn = np.searchsorted(self._cumulative, rng.random(count) * self._cumulative[-1], side="right")
            positions = np.minimum(drawn, len(self._traj_ids) - 1)
        return list(zip(positions.tolist(), rng.random(count).tolist(), strict=True))

    def set_trajs(self, traj_ids: Sequence[str], values: Sequence[float] | None) -> None:
        """Receive the trajectories to draw from; the dataset calls this after every change.

        Args:
            traj_ids: (K,) names of the trajectories, the oldest first.
            values: (K,), what `value` returned for each; None unless needs_values.
        """
        self._traj_ids, self._is_stale = traj_ids, True
        self._values = None if values is None else np.array(values, np.float64)

    def _sum_weights(self) -> Weights | None:
        num_trajs = len(self._traj_ids)
        if (weights := self.weights(num_trajs, self._values)) is None:
            return None
        weights = np.asarray(weights, np.float64)
        total, name = np.cumsum(weights), type(self).__name__
        if weights.shape != (num_trajs,) or weights.min() < 0 or not 0 < total[-1] < np.inf:
            raise ValueError(
                f"{name}.weights returned an array {weights.shape} from {weights.min(initial=np.inf):g} to "
                f"{weights.max(initial=-np.inf):g}, but must return ({num_trajs},): one number per "
                "trajectory, all finite, at least 0 and not all 0. "
                f"Fix: correct {name}.weights or {name}.value."
            )
        return total

    # ---- choice of a window ----

    def window(self, length: int, fraction: float) -> tuple[int, int]:
        """Return start (inclusive) and stop (exclusive) of a window; 0 <= start < stop <= length.

        A trajectory of T <= max_seq_len = M transitions is taken whole. Otherwise, s is uniform over
        0, ..., T - M ("none"), starts at 1 - M ("left", "both", "shifted"), and ends at max(T - 2, T - M)
        ("right", "both", "shifted"). The window is [s, s + M) without the parts beyond the ends; "shifted"
        moves it inside instead.

        Args:
            length: T, transitions in the trajectory.
            fraction: uniform in [0, 1); the only randomness.
        """
        longest, mode = self.max_seq_len, self.padded_sampling
        if length <= longest:
            return 0, length
        last_full = length - longest
        lowest = 1 - longest if mode in ("left", "both", "shifted") else 0
        highest = max(length - 2, last_full) if mode in ("right", "both", "shifted") else last_full
        start = lowest + int(fraction * (highest + 1 - lowest))
        if mode == "shifted":
            start = min(max(start, 0), last_full)
        return max(start, 0), min(start + longest, length)

    # ---- priorities and checkpoints ----

    def priority_slot(self, traj_id: str) -> int:
        """Return the number that identifies a trajectory in PrioritySampler; -1 without priorities."""
        return -1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict returned; the state of another kind of sampler is ignored."""


@gin.configurable
class PrioritySampler(Sampler):
    """Draws trajectories in proportion to p_i ** exponent times the weight of Sampler.

    The priority p_i is the TD error of the last window of trajectory i that was trained on. A trajectory that
    has none yet gets the highest priority ever given. Priorities are in memory that the process shares with
    its children, such as loader workers. Two trajectories share a slot there with a probability of one in a
    million. Those of two runs with the same seed in one folder always do.

    Args:
        exponent: alpha; 1 draws in proportion to the priorities, values near 0 almost uniformly.

    Raises:
        ValueError: If the exponent is not above 0.

    Source: Schaul et al. 2016, "Prioritized Experience Replay", arXiv:1511.05952, eq. 1.
    """

    def __init__(self, exponent: float = 0.6) -> None:
        check_number("PrioritySampler.exponent", exponent, above=0)
        super().__init__()
        self.exponent = exponent
        self._shared = multiprocessing.RawArray("f", NUM_PRIORITY_SLOTS + 1)

    @property
    def _powers(self) -> npt.NDArray[np.float32]:
        """Powers p ** exponent by slot, 0 for slots without one; the last is the highest ever given."""
        return np.frombuffer(self._shared, np.float32)

    def set_trajs(self, traj_ids: Sequence[str], values: Sequence[float] | None) -> None:
        gone = set(self._traj_ids).difference(traj_ids)
        self._powers[[self.priority_slot(traj_id) for traj_id in gone]] = 0
        self._slots = np.array([self.priority_slot(traj_id) for traj_id in traj_ids], np.int64)
        super().set_trajs(traj_ids, values)

    def weights(self, num_trajs: int, values: Weights | None) -> Weights | None:
        powers = self._powers[self._slots].astype(np.float64)
        powers[powers == 0] = self._powers[-1] or 1.0
        weights = super().weights(num_trajs, values)
        return powers if weights is None else weights * powers

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        self._is_stale = True  # priorities have changed
        return super().draw(count, rng)

    def priority_slot(self, traj_id: str) -> int:
        return int(traj_id, 36) % NUM_PRIORITY_SLOTS  # ids are digits and letters; our own use only 0 to f

    def update_priorities(self, slots: Indices, priorities: npt.NDArray[Any]) -> None:
        """Set priorities, for this process and its children; slots below 0 are ignored.

        Args:
            slots: (B,) int64, Trajectory.priority_slot of the windows.
            priorities: (B,) float, at least 0.

        Raises:
            ValueError: If the shapes differ, a slot does not exist, or a priority is negative or not
                finite.
        """
        slots, priorities = np.asarray(slots), np.asarray(priorities, np.float64)
        last, lowest, highest = slots.max(initial=-1), priorities.min(initial=0), priorities.max(initial=0)
        fits = slots.ndim == 1 and slots.shape == priorities.shape and slots.dtype.kind in "iu"
        if not fits or last >= NUM_PRIORITY_SLOTS or lowest < 0 or not highest < np.inf:
            raise ValueError(
                f"slots are {slots.dtype}{list(slots.shape)} up to {last} and priorities "
                f"{list(priorities.shape)} from {lowest} to {highest}, but slots must be integers (B,) "
                f"below {NUM_PRIORITY_SLOTS} and priorities finite numbers (B,) of at least 0. Fix: pass "
                "Trajectory.priority_slot and the absolute TD error of each window."
            )
        is_ours = slots >= 0
        limits = np.finfo(np.float32)
        powers = np.clip(priorities[is_ours] ** self.exponent, limits.tiny, limits.max).astype(np.float32)
        self._powers[slots[is_ours]] = powers
        self._powers[-1] = max(self._powers[-1], powers.max(initial=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return the priorities by slot, and the highest ever given."""
        given, inverse = np.flatnonzero(self._powers[:-1]), 1 / self.exponent
        return {
            "sources": given.tolist(),  # a name from older checkpoints
            "priorities": (self._powers[given].astype(np.float64) ** inverse).tolist(),
            "highest": float(self._powers[-1]) ** inverse,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._powers[:] = 0
            self.update_priorities(np.array(state["sources"], np.int64), np.array(state["priorities"]))
            self._powers[-1] = state["highest"] ** self.exponent
