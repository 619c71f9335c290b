"""Batches of environments in JAX: gymnax as `gymnax/NAME`, XLand-MiniGrid as `xminigrid/NAME`.

Importing this module registers the names of those of the two packages that are installed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class JaxVectorEnv(VectorEnv[Any, Any, Any], ABC):
    """A batch of one JAX environment, stepped as one compiled function.

    Subclasses define one environment. The state of all rows can be stored, so runs resume exactly.

    Args:
        name: id inside the package.
        num_envs: number of rows.
        **params: override fields of the environment's parameters.
    """

    package: ClassVar[str]

    def __init__(self, name: str, num_envs: int, **params: Any) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.env, default = import_module(self.package).make(name)
        known = [part.name for part in dataclasses.fields(default)]
        if unknown := sorted(params.keys() - set(known)):
            raise ValueError(
                f"{self.package}/{name} has no parameter {', '.join(unknown)}, only {', '.join(known)}. Fix: "
                "correct gym_env.kwargs (in Python EnvSpec.kwargs)."
            )
        self.params = default.replace(**params)
        self.env_name, self.num_envs = name, num_envs
        self._jax = import_module("jax")
        self.single_observation_space, self.single_action_space = self._spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._reset_all = self._jax.jit(self._jax.vmap(self._reset_one))
        self._step_all = self._jax.jit(self._jax.vmap(self._step_and_begin_anew))
        self._random, self._state = self._jax.random.PRNGKey(0), None

    @abstractmethod
    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of one environment."""

    @abstractmethod
    def _reset_one(self, key: Any) -> tuple[Any, Any]:
        """Return observation and state of a new episode."""

    @abstractmethod
    def _step_one(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        """Return observation, state, reward, terminated and truncated."""

    def _step_and_begin_anew(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        """Also return the first observation of the next episode if one ended, else the step's observation."""
        key_of_step, key_of_reset = self._jax.random.split(key)
        obs, state, reward, terminated, truncated = self._step_one(key_of_step, state, action)
        first, anew = self._reset_one(key_of_reset)
        ended = terminated | truncated
        here = self._jax.tree.map(
            lambda new, old: self._jax.numpy.where(ended, new, old), (first, anew), (obs, state)
        )
        return *here, obs, reward, terminated, truncated

    def _keys(self) -> Any:
        keys = self._jax.random.split(self._random, self.num_envs + 1)
        self._random = keys[0]
        return keys[1:]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all rows; a single seed serves all of them."""
        seed = seed[0] if isinstance(seed, list) else seed
        if seed is not None:
            self._random = self._jax.random.PRNGKey(seed)
        obs, self._state = self._reset_all(self._keys())
        return self._as_numpy(obs), {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one env step in all rows; if an episode ends, a new one begins at once."""
        obs, self._state, *rest = self._step_all(self._keys(), self._state, actions)
        final, rewards, terminated, truncated = (self._as_numpy(x) for x in rest)
        ended = terminated | truncated
        infos = {"final_obs": final, "_final_obs": ended} if ended.any() else {}
        return self._as_numpy(obs), rewards.astype(np.float32), terminated, truncated, infos

    def _as_numpy(self, tree: Any) -> Any:
        return self._jax.tree.map(np.asarray, tree)

    def get_state(self) -> dict[str, Any]:
        """Return arrays for `set_state`."""
        leaves = self._jax.tree.leaves((self._random, self._state))
        return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the state that `get_state` returned."""
        like = (self._random, self._jax.eval_shape(self._reset_all, self._keys())[1])
        leaves = [self._jax.numpy.asarray(state[str(i)]) for i in range(len(state))]
        self._random, self._state = self._jax.tree.unflatten(self._jax.tree.structure(like), leaves)


class GymnaxVectorEnv(JaxVectorEnv):
    """An environment of gymnax (1.0 or newer)."""

    package = "gymnax"

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        to_gymnasium = import_module("gymnax.environments.spaces").gymnax_space_to_gym_space
        return to_gymnasium(self.env.observation_space(self.params)), to_gymnasium(
            self.env.action_space(self.params)
        )

    def _reset_one(self, key: Any) -> tuple[Any, Any]:
        obs, state = self.env.reset_env(key, self.params)
        return obs, state

    def _step_one(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return obs, state, reward, terminated, self.env.is_truncated(state, self.params)


class XMiniGridVectorEnv(JaxVectorEnv):
    """An environment of XLand-MiniGrid; observations (V, V, 2) uint8 are ids of tiles and colours.

    Raises: ValueError for one of the `XLand` ids without a ruleset, as it has no goal.
    """

    package = "xminigrid"

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        ruleset = getattr(self.params, "ruleset", None)
        if ruleset is not None and not np.any(ruleset.goal):  # its rewards would always be 0
            raise ValueError(
                f"xminigrid/{self.env_name} has no goal. Fix: pass one of the package's rulesets in Python, "
                "EnvSpec(id, {'ruleset': ...}), or choose one of its MiniGrid ids."
            )
        constants = import_module("xminigrid.core.constants")
        high = max(constants.NUM_TILES, constants.NUM_COLORS) - 1
        obs_space = spaces.Box(0, high, self.env.observation_shape(self.params), np.uint8)
        return obs_space, spaces.Discrete(int(self.env.num_actions(self.params)))

    def _reset_one(self, key: Any) -> tuple[Any, Any]:
        timestep = self.env.reset(self.params, key)
        return timestep.observation, timestep

    def _step_one(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        timestep = self.env.step(self.params, state, action)
        is_last, terminated = timestep.last(), timestep.discount == 0.0
        return timestep.observation, timestep, timestep.reward, is_last & terminated, is_last & ~terminated


if find_spec("gymnax") is not None:
    for _name in import_module("gymnax").registered_envs:
        gym.register(
            f"gymnax/{_name}", vector_entry_point=f"{__name__}:GymnaxVectorEnv", kwargs={"name": _name}
        )
if find_spec("xminigrid") is not None:
    for _name in import_module("xminigrid").registered_environments():
        gym.register(
            f"xminigrid/{_name}", vector_entry_point=f"{__name__}:XMiniGridVectorEnv", kwargs={"name": _name}
        )
