"""Trajectories, and windows of them, as time-major numpy arrays; and the layout of their timesteps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MATRIX = 2  # axes: rows and columns


@dataclass(frozen=True)
class Layout:
    """Observation keys, shapes and dtypes, and the number of action columns.

    Attributes:
        obs: shape of one timestep and dtype, by observation key.
        action_width: A, the number of discrete actions or of elements of a continuous action; with several
            factors, the sum of their numbers of actions.
        nvec: number of actions of each of K factors (MultiDiscrete); None for other actions.
        num_values: n for observations with whole numbers in 0, …, n - 1, by key: an integer, or one per
            element. It does not affect how trajectories are stored, so comparisons of layouts ignore it.
    """

    obs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    action_width: int
    nvec: tuple[int, ...] | None = None
    num_values: dict[str, Any] = field(default_factory=dict, compare=False)

    def describe_mismatch(self, other: Layout) -> str | None:
        """Describe why data of layout `other` cannot be trained on when this one is expected; None if it can.

        Keys, shapes, A and nvec must be equal; dtypes may differ if numpy casts them "same_kind" to the
        expected one, such as float64 to float32, or uint8 to float32, but not float32 to uint8.
        """
        if other == self:
            return None
        problems: list[str] = []
        for key in sorted(self.obs.keys() | other.obs.keys()):
            expected, found = self.obs.get(key), other.obs.get(key)
            if found is None:
                problems.append(f"observation {key!r} is missing")
            elif expected is None:
                problems.append(f"observation {key!r} is not expected")
            elif found[0] != expected[0] or not np.can_cast(found[1], expected[1], "same_kind"):
                problems.append(
                    f"observation {key!r} is {found[1]}{list(found[0])}, expected "
                    f"{expected[1]}{list(expected[0])}"
                )
        if other.action_width != self.action_width:
            problems.append(f"actions have {other.action_width} columns, expected {self.action_width}")
        elif other.nvec != self.nvec:
            problems.append(f"actions have {_factors(other.nvec)}, expected {_factors(self.nvec)}")
        return "; ".join(problems) or None

    def __str__(self) -> str:
        """Return for example `position float32[2], image uint8[64, 64, 3]; 4 action columns`."""
        obs = ", ".join(f"{key} {dtype}{list(shape)}" for key, (shape, dtype) in self.obs.items())
        factors = "" if self.nvec is None else f" ({_factors(self.nvec)})"
        return f"{obs}; {self.action_width} action columns{factors}"


def _factors(nvec: tuple[int, ...] | None) -> str:
    return "one factor" if nvec is None else f"factors of {', '.join(map(str, nvec))}"


@dataclass(frozen=True)
class Trajectory:
    """A sequence of T transitions between T+1 timesteps.

    Timestep t holds o_t and everything observed with it. `actions[i]`, `rews[i]` and `dones[i]` describe the
    step from timestep i to timestep i+1, so `rl2s[i + 1]` repeats `rews[i]` and the action of row i.

    Attributes:
        obs: each (T+1, ...), in the environment's own dtype.
        rl2s: (T+1, 1+A) float32, the previous reward and then the previous action (one-hot if discrete, else
            scaled to [-1, 1]); zeros at the first timestep of an episode.
        time_idxs: (T+1, 1) int64, index within the episode, also in a window that starts in mid-episode.
        actions: (T, A): uint8 one-hot rows of discrete actions (with `nvec`, the one-hots of all factors side
            by side), or float32 continuous actions in [-1, 1]. The constructor converts indices to rows, see
            action_rows.
        rews: (T, 1) float32, environment units.
        dones: (T, 1) bool, True where the environment terminated on arriving at timestep i+1 (not where a
            time limit cut the episode).
        env_name: name of the environment that produced it.
        policy_version: number of the policy that acted last in it, None if unknown.
        priority_slot: number that identifies the window's trajectory in PrioritySampler; -1 without
            priorities.
        nvec: number of actions of each of the K factors of an action (MultiDiscrete); A is their sum. None
            for other actions.
        extras: further data from the agent for each step, each (T, ...) in its own dtype; mostly empty.
            Batches only hold `log_probs` (T, 1), the log-probabilities with which the actions were taken.

    Raises:
        ValueError: If the trajectory has no transition, the lengths of the arrays contradict each other, or
            an action is out of range.
    """

    obs: dict[str, Array]
    rl2s: Array
    time_idxs: Array
    actions: Array
    rews: Array
    dones: Array
    env_name: str = "env"
    policy_version: int | None = None
    priority_slot: int = -1
    nvec: tuple[int, ...] | None = None
    extras: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compare the lengths of all arrays with that of the rewards, and convert the actions to rows."""
        num_transitions = len(self.rews)
        num_timesteps = num_transitions + 1
        fits = (
            num_transitions >= 1
            and len(self.actions) == len(self.dones) == num_transitions
            and len(self.rl2s) == len(self.time_idxs) == num_timesteps
            and all(len(array) == num_timesteps for array in self.obs.values())
            and all(array.shape[:1] == (num_transitions,) for array in self.extras.values())
        )
        if not fits:
            raise ValueError(self._describe_mismatch())
        object.__setattr__(self, "actions", action_rows(self.actions, self.rl2s.shape[1] - 1, self.nvec))

    def _describe_mismatch(self) -> str:
        found = {f"obs[{key!r}]": value.shape for key, value in self.obs.items()}
        for name in ("rl2s", "time_idxs", "actions", "rews", "dones"):
            found[name] = getattr(self, name).shape
        found |= {f"extras[{key!r}]": value.shape for key, value in self.extras.items()}
        shapes = ", ".join(f"{name} {shape}" for name, shape in found.items())
        return (
            f"These arrays do not form a trajectory: {shapes}. With T >= 1 transitions, actions, rews, "
            "dones and extras have T rows; every observation, rl2s and time_idxs have T+1. Fix: append the "
            "observation that follows the last action, and drop trajectories without a transition."
        )

    def __len__(self) -> int:
        """Return the number of transitions, T."""
        return len(self.rews)

    @property
    def layout(self) -> Layout:
        """The layout of its timesteps."""
        obs = {key: (value.shape[1:], value.dtype) for key, value in self.obs.items()}
        return Layout(obs, self.rl2s.shape[1] - 1, self.nvec)

    def slice(self, start: int, stop: int) -> Trajectory:
        """Return transitions start (inclusive) to stop (exclusive) as views; nothing is copied.

        Raises:
            ValueError: Unless 0 <= start < stop <= T.
        """
        if not 0 <= start < stop <= len(self.rews):
            raise ValueError(
                f"A slice from {start} to {stop} of a trajectory of {len(self.rews)} transitions is not "
                "possible. 0 <= start < stop <= T must hold, so that the slice has at least one "
                "transition. Fix: take start and stop from Sampler.window."
            )
        after = stop + 1
        # This runs once per window. It skips the checks of the constructor, which hold for all parts.
        window = object.__new__(Trajectory)
        window.__dict__.update(
            obs={key: value[start:after] for key, value in self.obs.items()},
            rl2s=self.rl2s[start:after],
            time_idxs=self.time_idxs[start:after],
            actions=self.actions[start:stop],
            rews=self.rews[start:stop],
            dones=self.dones[start:stop],
            env_name=self.env_name,
            policy_version=self.policy_version,
            priority_slot=self.priority_slot,
            nvec=self.nvec,
            extras={key: value[start:stop] for key, value in self.extras.items()},
        )
        return window

    def with_priority_slot(self, slot: int) -> Trajectory:
        """Return the same arrays with another `priority_slot`."""
        same = object.__new__(Trajectory)
        same.__dict__.update(self.__dict__, priority_slot=slot)
        return same


def action_rows(actions: Array, width: int, nvec: tuple[int, ...] | None = None) -> Array:
    """Convert actions to the one form in which trajectories hold them.

    Args:
        actions: (T, A) rows, or indices of discrete actions from 0: integers (T,) or (T, 1), with factors (T,
            K). If K equals A, bytes are rows and other integers are indices.
        width: A.
        nvec: number of actions of each of K factors; None for one factor, or continuous actions.

    Returns: (T, A), uint8 for integers and bool, else float32; the same array if it already has this form.

    Raises:
        ValueError: For another shape, an index out of range, or a row of integers that is not one-hot.
    """
    kind, factors = actions.dtype.kind, nvec or (width,)
    fits = sum(factors) == width
    if kind == "f" and actions.shape[1:] == (width,) and fits:
        return actions.astype(np.float32, copy=False)
    found = actions[:, None] if actions.ndim == 1 else actions
    if kind in "iub" and found.ndim == _MATRIX and fits:
        is_byte = found.dtype.itemsize == 1 and kind != "i"
        if found.shape[1] == width and (is_byte or width > len(factors)):
            rows = found.view(np.uint8) if is_byte else found.astype(np.uint8)
            if found.dtype == np.uint8 or (np.array_equal(rows, found) and is_one_hot(rows, nvec)):
                return rows
        elif found.shape[1] == len(factors):
            indices = found.astype(np.int64)
            if ((indices >= 0) & (indices < np.array(factors))).all():
                rows = np.zeros((len(found), width), np.uint8)
                rows[np.arange(len(found))[:, None], indices + np.cumsum((0, *factors[:-1]))] = 1
                return rows
    lowest, highest = (actions.min(), actions.max()) if actions.size and kind in "iubf" else (0, 0)
    raise ValueError(
        f"Actions {actions.dtype}{list(actions.shape)} that range from {lowest} to {highest} do not fit "
        f"rl2s of width {1 + width}, which has {' + '.join(map(str, factors))} columns for actions. Fix: "
        f"store (T, {width}) rows, or indices (T, {len(factors)}) from 0, and one-hot rl2s of width 1 + "
        "number of actions."
    )


def is_one_hot(actions: Array, nvec: tuple[int, ...] | None = None) -> bool:
    """Return True if each row (T, A), or each factor's part of it, holds a single one among zeros."""
    # All ones are found at once, and the i-th of them must be in row i.
    if nvec is None and actions.flags.c_contiguous:
        ones = np.flatnonzero(actions)
        rows = np.arange(len(actions))
        return bool(np.array_equal(ones // actions.shape[1], rows) and (actions.reshape(-1)[ones] == 1).all())
    starts = np.cumsum((0, *nvec[:-1])) if nvec else [0]
    is_one = actions == 1
    is_single = np.add.reduceat(is_one, starts, axis=1, dtype=np.int64) == 1
    return bool(is_single.all() and (is_one | (actions == 0)).all())


def action_indices(traj: Trajectory) -> npt.NDArray[np.int64] | None:
    """Indices of discrete actions, (T, 1) or, with factors, (T, K); None if the actions are continuous.

    Rows of two or more floats count as discrete if all are one-hot, because AMAGO 3.x may store them so.
    """
    actions, nvec = traj.actions, traj.nvec
    is_discrete = actions.dtype == np.uint8 or nvec is not None
    if not is_discrete and (actions.shape[1] == 1 or not is_one_hot(actions)):
        return None
    parts = np.split(actions, np.cumsum(nvec)[:-1], axis=1) if nvec else [actions]
    return np.stack([part.argmax(axis=1) for part in parts], axis=1)
