"""EnvPool's environments, many at once, as `envpool/NAME`: importing this module registers them."""

from __future__ import annotations

from typing import Any

import envpool
import gymnasium as gym


def make_envpool(name: str, num_envs: int, **kwargs: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A batch of the environment that EnvPool calls `name`; the arguments are those of EnvPool."""
    env: gym.vector.VectorEnv[Any, Any, Any] = envpool.make_gymnasium(name, num_envs=num_envs, **kwargs)
    return env


for _name in (name for name in envpool.list_all_envs() if "/" not in name):  # gymnasium has one level
    gym.register(f"envpool/{_name}", vector_entry_point=make_envpool, kwargs={"name": _name})
