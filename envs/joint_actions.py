"""A wrapper that turns several simultaneous choices into one choice among all of their combinations."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ..data.spaces import ActionMap


class JointActions(gym.wrappers.TransformAction[Any, Any, Any]):
    """Presents a MultiDiscrete or MultiBinary action as one Discrete choice among its combinations.

    A policy over independent factors cannot express "this place or that one, but not the row of the one with
    the column of the other". Critics also judge every combination. The factors of combination i are the
    digits of i; the last one changes fastest.

    Args:
        env: an environment with a MultiDiscrete or MultiBinary action space.
    Raises: TypeError for another action space.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        action_map = ActionMap(env.action_space)
        nvec = _nvec(action_map)
        if not nvec:
            raise TypeError(
                f"The action space is {env.action_space}, but JointActions supports only MultiDiscrete and "
                "MultiBinary. Fix: remove the wrapper."
            )

        def factors(action: Any) -> Any:
            return action_map.to_env(np.array([np.unravel_index(int(action), nvec)]))[0]

        super().__init__(env, factors, spaces.Discrete(math.prod(nvec)))


def num_combinations(space: spaces.Space[Any]) -> int:
    """Number of actions of a MultiDiscrete or MultiBinary space; 0 for others that ActionMap accepts."""
    nvec = _nvec(ActionMap(space))
    return math.prod(nvec) if nvec else 0


def _nvec(action_map: ActionMap) -> list[int]:
    space = action_map.policy_space
    return space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else []
