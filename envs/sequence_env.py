"""Any gymnasium environment in the one form the rest of the library knows."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np

from ..data.spaces import ActionMap, ObsLayout

NUM_STEP_PARTS = 5
METRIC_PREFIX = "metric/"
"""Keys of `info` that begin so are special metrics: numbers reported under the rest of the key."""


class SequenceEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A single environment with dict observations and a normalised action space.

    observation_space: Dict of arrays (see `ObsLayout`); action_space: see `ActionMap`, such as Box(-1, 1,
    (A,)). Rewards, flags and infos pass through unchanged.

    Args:
        env: the environment to wrap.
        env_name: name for metrics and file names. None takes the inner environment's own `env_name` attribute
            (asked again for every episode), else its registered name, else its class name.
    """

    def __init__(self, env: gym.Env[Any, Any], env_name: str | None = None) -> None:
        if not isinstance(env, gym.Env):
            raise TypeError(
                f"SequenceEnv got {type(env).__name__}, but wraps a gymnasium.Env. "
                "Fix: derive the environment from gymnasium.Env (for old gym environments, install shimmy)."
            )
        _check_reset(env.unwrapped)
        super().__init__(env)
        self.obs_layout = ObsLayout(env.observation_space)
        self.action_map = ActionMap(env.action_space)
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
        raw, info = check_reset_result(self.env.reset(seed=seed, options=options), self.env)
        return self.obs_layout.flatten(raw), info

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], Any, bool, bool, dict[str, Any]]:
        """One env step with an action of this wrapper's `action_space`."""
        env_action = self.action_map.to_env(np.asarray(action)[None])[0]
        raw, reward, terminated, truncated, info = self.env.step(env_action)
        return self.obs_layout.flatten(raw), reward, terminated, truncated, info


def _check_reset(env: Any) -> None:
    """Raise TypeError for an environment of old gym, whose reset takes no seed."""
    parameters = inspect.signature(env.reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all and not {"seed", "options"} <= parameters.keys():
        raise TypeError(
            f"{type(env).__name__}.reset takes ({', '.join(parameters)}), but gymnasium gives it seed and "
            "options. Fix: def reset(self, *, seed=None, options=None), returning (observation, info); for "
            "old gym environments install shimmy."
        )


def check_reset_result(found: Any, env: gym.Env[Any, Any]) -> Any:
    """`(observation, info)` as it came from `reset`; TypeError if it is something else."""
    if isinstance(found, tuple) and len(found) == 2:  # noqa: PLR2004 - a pair
        return found
    raise TypeError(
        f"{type(env.unwrapped).__name__}.reset returned {_kind_of(found)}, but gymnasium expects the pair "
        "(observation, info). Fix: return observation, {} from it."
    )


def wrong_step_result(found: Any, env: gym.Env[Any, Any]) -> TypeError:
    """The error for a `step` that returned another number of values than NUM_STEP_PARTS."""
    return TypeError(
        f"{type(env.unwrapped).__name__}.step returned {_kind_of(found)}, but gymnasium expects observation, "
        "reward, terminated, truncated, info. Fix: return these five; `done` of old gym was terminated or "
        "truncated."
    )


def _kind_of(found: Any) -> str:
    return f"{len(found)} values" if isinstance(found, tuple) else f"one {type(found).__name__}"
