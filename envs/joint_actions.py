"""Several choices at once as one choice among all of their combinations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class JointActions(gym.ActionWrapper[Any, Any, Any]):
    """A MultiDiscrete or MultiBinary action as one Discrete choice among its combinations.

    A policy over factors cannot say "this place or that one, but not the row of the one with the column of
    the other", and critics and memories of actions (`Agent.action_memory_type`) know every combination.
    Combination i has the digits of i as its factors, the last one counting fastest.

    Args:
        env: its action space is MultiDiscrete or MultiBinary.
    Raises: TypeError for another action space.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        if not num_combinations(env.action_space):
            raise TypeError(
                f"The action space is {env.action_space}, but JointActions takes MultiDiscrete and "
                "MultiBinary ones. Fix: leave the wrapper out."
            )
        self._factors = _factors(env.action_space)
        self.action_space = spaces.Discrete(num_combinations(env.action_space))

    def action(self, action: int) -> np.ndarray:
        """The factors (*shape) of combination `action`, in the dtype and numbering of the environment."""
        space: Any = self.env.action_space
        digits = np.array(np.unravel_index(int(action), self._factors)).reshape(space.shape)
        return (digits + getattr(space, "start", 0)).astype(space.dtype)


def num_combinations(space: spaces.Space[Any] | None) -> int:
    """How many actions a MultiDiscrete or MultiBinary space has, 0 for any other kind."""
    return int(np.prod(factors, dtype=object)) if (factors := _factors(space)) else 0


def _factors(space: spaces.Space[Any] | None) -> tuple[int, ...]:
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    if isinstance(space, spaces.MultiBinary):
        return (2,) * int(np.prod(space.shape))
    return ()
