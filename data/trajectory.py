"""One trajectory, or a window of one, as time-major numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


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
        actions: (T, 1) int64 if discrete, else (T, A) float32 in [-1, 1].
        rews: (T, 1) float32, environment units.
        dones: (T, 1) bool, True where the environment terminated on arriving at timestep i+1 (not where it
            was cut off by a time limit).
        env_name: name of the environment that produced it.

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

    def __post_init__(self) -> None:
        """Compare the lengths of all arrays with that of the rewards."""
        num_transitions = len(self.rews)
        num_timesteps = num_transitions + 1
        fits = (
            num_transitions >= 1
            and len(self.actions) == len(self.dones) == num_transitions
            and len(self.rl2s) == len(self.time_idxs) == num_timesteps
            and all(len(array) == num_timesteps for array in self.obs.values())
        )
        if not fits:
            raise ValueError(self._describe_mismatch())

    def _describe_mismatch(self) -> str:
        arrays = {f"obs[{key!r}]": value for key, value in self.obs.items()}
        for name in ("rl2s", "time_idxs", "actions", "rews", "dones"):
            arrays[name] = getattr(self, name)
        shapes = ", ".join(f"{name} {value.shape}" for name, value in arrays.items())
        return (
            f"These arrays do not form a trajectory: {shapes}. With T >= 1 transitions, actions, rews and "
            "dones have T rows; every observation, rl2s and time_idxs have T+1. Fix: append the observation "
            "that follows the last action, and drop trajectories without a transition."
        )

    def __len__(self) -> int:
        """Return the number of transitions, T."""
        return len(self.rews)

    def slice(self, start: int, stop: int) -> Trajectory:
        """Return transitions start (inclusive) to stop (exclusive) as views; nothing is copied or changed."""
        after = stop + 1
        return Trajectory(
            obs={key: value[start:after] for key, value in self.obs.items()},
            rl2s=self.rl2s[start:after],
            time_idxs=self.time_idxs[start:after],
            actions=self.actions[start:stop],
            rews=self.rews[start:stop],
            dones=self.dones[start:stop],
            env_name=self.env_name,
        )
