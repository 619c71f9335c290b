"""Batches of EnvPool's environments as `envpool/NAME`; importing this module registers them if possible."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


class EnvPoolVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A batch of the EnvPool environment `name`; keyword arguments are passed to EnvPool.

    EnvPool only takes seeds on construction, so a reset with a seed constructs it anew.
    """

    def __init__(self, name: str, num_envs: int, **kwargs: Any) -> None:
        self._settings = {"task_id": name, "num_envs": num_envs, **kwargs}
        self.pool = self._make()
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.env_name, self.num_envs = name, num_envs
        self.single_observation_space, self.single_action_space = (
            self.pool.observation_space,
            self.pool.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _make(self, **seed: int) -> Any:
        return import_module("envpool").make_gymnasium(**{**self._settings, **seed})

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all rows; a single seed serves all of them."""
        seed = seed[0] if isinstance(seed, list) else seed
        if seed is not None:
            self.pool.close()
            self.pool = self._make(seed=seed % 2**31)
        obs, _ = self.pool.reset()
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one env step in all rows; in a row whose episode has ended, only begin the next one."""
        return *self.pool.step(actions)[:4], {}

    def close_extras(self, **kwargs: Any) -> None:
        """Stop EnvPool's threads."""
        self.pool.close()


if find_spec("envpool") is not None:
    for _name in import_module("envpool").list_all_envs():
        gym.register(
            f"envpool/{_name.replace('/', '-')}",  # ids of gymnasium have a single level
            vector_entry_point=f"{__name__}:EnvPoolVectorEnv",
            kwargs={"name": _name},
        )
