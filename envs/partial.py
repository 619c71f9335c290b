"""Partial observability: environments with some entries of the observation removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from ..data.errors import WrongValueError
from .spec import EnvSpec


@gin.configurable
def partial_env(
    env_id: str = gin.REQUIRED,
    keep: Sequence[int] = gin.REQUIRED,
    kwargs: dict[str, Any] | None = None,
    env_name: str | None = None,
) -> EnvSpec:
    """Recipe for a registered environment that shows only some entries of its observation.

    CartPole without velocities is `partial_env.env_id = "CartPole-v1"` with `partial_env.keep = (0, 2)`.

    Args:
        env_id: see `gym_env`; its observations must be a Box of shape (O,).
        keep: indices of the entries to show, in this order.
        kwargs: arguments for `gymnasium.make`.
        env_name: name for metrics and files; None takes the registered name without version.
    Raises: ValueError when the environment is built, if its observations or `keep` do not meet this.
    """
    recipe = {"base": EnvSpec(env_id, dict(kwargs or {})), "keep": tuple(keep)}
    return EnvSpec(_make_partial, recipe, env_name)


class PartialObs(gym.ObservationWrapper[Any, Any, Any]):
    """Selects entries of a flat observation, (K,) of the inner environment's (O,); keeps dtype and bounds.

    Args:
        env: the inner environment.
        keep: K different indices, each from 0 to O - 1.
    Raises: ValueError if the observation is not a Box of shape (O,), or `keep` does not fit it.
    """

    def __init__(self, env: gym.Env[Any, Any], keep: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(
                "partial_env keeps entries of a flat observation, but the observation space of this "
                f"environment is {space}. Fix: name an environment whose observation_space is a Box of "
                "shape (O,)."
            )
        size = space.shape[0]
        whole = all(isinstance(index, (int, np.integer)) and 0 <= index < size for index in keep)
        if not keep or not whole or len(set(keep)) != len(keep):
            raise ValueError(
                f"partial_env.keep is {tuple(keep)!r}, but must hold one or more different whole numbers "
                f"from 0 to {size - 1}, because the observation has {size} entries. Fix: set "
                "partial_env.keep = (0, 2), for example."
            )
        self._keep = list(keep)
        dtype: Any = space.dtype
        self.observation_space = gym.spaces.Box(space.low[self._keep], space.high[self._keep], dtype=dtype)

    def observation(self, observation: Any) -> np.ndarray:
        """The kept entries, (K,)."""
        values = np.asarray(observation)
        if values.shape != self.env.observation_space.shape:
            raise WrongValueError(
                f"an observation with shape {values.shape}",
                f"Its space {self.env.observation_space} requires the shape "
                f"{self.env.observation_space.shape}. Fix: make the environment's observation_space and its "
                "observations agree.",
            )
        kept: np.ndarray = values[self._keep]
        return kept


def _make_partial(base: EnvSpec, keep: Sequence[int]) -> gym.Env[Any, Any]:
    return PartialObs(base.build_raw(), keep)
