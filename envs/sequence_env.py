"""A wrapper that brings any gymnasium environment into the library's form."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..data.errors import WrongValueError
from ..data.spaces import ActionMap, ObsLayout
from .returned import as_flag, as_reward, check_env, copied, reset_result, step_result


class SequenceEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A single environment with dict observations and a normalised action space.

    observation_space: Dict of arrays (see `ObsLayout`); action_space: see `ActionMap`, such as Box(-1, 1,
    (A,)). The caller owns all returned values: later calls of the environment do not change them.

    Args:
        env: the environment to wrap.
        env_name: name for metrics and file names. None takes the inner environment's own `env_name` attribute
            (read again for every episode), or its registered name, or its class name.
    """

    def __init__(self, env: gym.Env[Any, Any], env_name: str | None = None) -> None:
        if not isinstance(env, gym.Env):
            raise TypeError(
                f"SequenceEnv got {type(env).__name__}, but needs a gymnasium.Env. Fix: derive the "
                "environment from gymnasium.Env (for old gym environments, install shimmy)."
            )
        check_env(env)
        super().__init__(env)
        try:
            self.obs_layout = ObsLayout(env.observation_space)
            self.action_map = ActionMap(env.action_space)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"The environment {type(env.unwrapped).__name__} is not supported: {error}"
            ) from None
        self.observation_space = self.obs_layout.space
        self.action_space = self.action_map.policy_space
        self._fixed_name = env_name
        if env_name is None and not env.has_wrapper_attr("env_name"):
            self._fixed_name = env.spec.name if env.spec is not None else type(env.unwrapped).__name__

    @property
    def raw_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation and action space of the inner environment."""
        return self.env.observation_space, self.env.action_space

    @property
    def env_name(self) -> str:
        """The current name; may change at every reset if the inner environment has an `env_name`."""
        return (
            self._fixed_name if self._fixed_name is not None else str(self.env.get_wrapper_attr("env_name"))
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode; the observation is a new flat dict."""
        try:
            raw, info = reset_result(self.env.reset(seed=seed, options=options), self.env)
            return self.obs_layout.flatten(raw), copied(info)
        except WrongValueError as error:
            raise error.completed(f"The environment {self.env_name} returned") from None

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Take one env step with an action from this wrapper's `action_space`."""
        env_action = self.action_map.to_env(np.asarray(action)[None])[0]
        try:
            raw, reward, terminated, truncated, info = step_result(self.env.step(env_action), self.env)
            flags = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
            return self.obs_layout.flatten(raw), as_reward(reward), *flags, copied(info)
        except WrongValueError as error:
            raise error.completed(f"The environment {self.env_name} returned") from None
