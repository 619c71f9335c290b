"""One trajectory, or a window of one, as time-major numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from .extras import shapes_of, window_of
from .layout import Layout

Array = npt.NDArray[Any]
ARRAY_NAMES = ("rl2s", "time_idxs", "rews", "dones", "actions")


class StoredTrajectory(Protocol):
    """What can be done with a trajectory without having all of it in memory. A Trajectory is one itself."""

    @property
    def env_name(self) -> str:
        """Name of the environment that produced it."""

    @property
    def policy_version(self) -> int | None:
        """Number of the policy that acted last in it, None if unknown."""

    @property
    def layout(self) -> Layout:
        """What its timesteps look like."""

    def __len__(self) -> int:
        """Return the number of transitions, T."""

    def slice(self, start: int, stop: int) -> Trajectory:
        """Return transitions start (inclusive) to stop (exclusive); the result must not be written to."""


@dataclass(frozen=True)
class Trajectory:
    """T transitions between T+1 timesteps.

    Timestep t holds o_t and everything that became known with it. `actions[i]`, `rews[i]` and `dones[i]`
    describe the step from timestep i to timestep i+1, so `rl2s[i + 1]` repeats `rews[i]` and the action of
    row i.

    Attributes:
        obs: each (T+1, ...), in the environment's own dtype.
        rl2s: (T+1, 1+A) float32, the previous reward and then the previous action (one-hot if discrete, else
            scaled to [-1, 1]); zeros at the first timestep of an episode.
        time_idxs: (T+1, 1) int64, index within the episode, also in a window that starts in mid-episode.
        actions: one of three forms: (T, 1) int64 indices of discrete actions; (T, A) uint8 one-hot rows of
            discrete actions; (T, A) float32, continuous in [-1, 1] or one-hot rows. With `nvec`, (T, K) int64
            indices of all factors, or (T, A) rows of their one-hots side by side.
        rews: (T, 1) float32, environment units.
        dones: (T, 1) bool, True where the environment terminated on arriving at timestep i+1 (not where it
            was cut off by a time limit).
        env_name: name of the environment that produced it.
        policy_version: number of the policy that acted last in it, None if unknown.
        source: what DiskTrajDataset.update_priorities calls the file that a window was drawn from, -1 if no
            priorities are kept for it.
        nvec: number of actions of each of the K factors that an action has (MultiDiscrete); A is their sum.
            None for other actions.
        extras: what the agent said about its steps, such as `log_probs` (T, 1), each (T, ...) in its own
            dtype; mostly empty. Windows read one when it is asked for, so batches, which ask for none, cost
            the same with and without.

    Raises:
        ValueError: If there is no transition, or the lengths of the arrays contradict each other.
    """

    obs: dict[str, Array]
    rl2s: Array
    time_idxs: Array
    actions: Array
    rews: Array
    dones: Array
    env_name: str = "env"
    policy_version: int | None = None
    source: int = -1
    nvec: tuple[int, ...] | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compare the lengths of all arrays with that of the rewards."""
        num_transitions = len(self.rews)
        num_timesteps = num_transitions + 1
        fits = (
            num_transitions >= 1
            and len(self.actions) == len(self.dones) == num_transitions
            and len(self.rl2s) == len(self.time_idxs) == num_timesteps
            and all(len(array) == num_timesteps for array in self.obs.values())
            and all(shape[:1] == (num_transitions,) for shape in shapes_of(self.extras).values())
        )
        if not fits:
            raise ValueError(self._describe_mismatch())

    def _describe_mismatch(self) -> str:
        found = {f"obs[{key!r}]": value.shape for key, value in self.obs.items()}
        for name in ("rl2s", "time_idxs", "actions", "rews", "dones"):
            found[name] = getattr(self, name).shape
        found |= {f"extras[{key!r}]": shape for key, shape in shapes_of(self.extras).items()}
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
        """What its timesteps look like."""
        obs = {key: (value.shape[1:], value.dtype) for key, value in self.obs.items()}
        return Layout(obs, self.rl2s.shape[1] - 1, self.nvec)

    def slice(self, start: int, stop: int) -> Trajectory:
        """Return transitions start (inclusive) to stop (exclusive) as views; nothing is copied or changed.

        Raises:
            ValueError: Unless 0 <= start < stop <= T.
        """
        if not 0 <= start < stop <= len(self.rews):
            raise ValueError(
                f"A slice from {start} to {stop} of a trajectory of {len(self.rews)} transitions is not "
                "possible; 0 <= start < stop <= T must hold, so that it has T >= 1 transitions itself. "
                "Fix: draw windows with loxodon.data.random_window."
            )
        after = stop + 1
        # What was checked when the whole was made holds for its parts, and this runs once per window.
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
            source=self.source,
            nvec=self.nvec,
            extras=window_of(self.extras, start, stop) if self.extras else self.extras,
        )
        return window

    def with_source(self, source: int) -> Trajectory:
        """Return the same arrays under another `source`."""
        same = object.__new__(Trajectory)
        same.__dict__.update(self.__dict__, source=source)
        return same
