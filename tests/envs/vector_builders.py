"""Every kind of vector environment, built in the same way."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode
from scripted_envs import ScriptedEnv

from loxodon.envs import EnvSpec, make_vector_env
from loxodon.envs.vector.base import SequenceVectorEnv

KINDS = ["sync", "fork", "forkserver", "spawn", "already_vectorized", "autoreset disabled"]
VECTORIZED_MODES = {
    "already_vectorized": "SameStep",
    "autoreset disabled": "Disabled",
    "next step": "NextStep",
}


def gymnasium_vector_env(num_envs: int, mode: str = "SameStep", **kwargs: Any) -> gym.vector.VectorEnv:
    makers = [lambda: ScriptedEnv(**kwargs)] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))


def vector_env_of(maker: Any) -> gym.vector.VectorEnv:
    """Two rows of the environment that `maker` makes."""
    return gym.vector.SyncVectorEnv([maker] * 2, autoreset_mode=AutoresetMode("SameStep"))


def build(kind: str, specs: list[EnvSpec], num_workers: int | None = 2) -> SequenceVectorEnv:
    if kind in VECTORIZED_MODES:
        kwargs = {"num_envs": len(specs), "mode": VECTORIZED_MODES[kind], **specs[0].kwargs}
        return make_vector_env([EnvSpec(gymnasium_vector_env, kwargs)], "already_vectorized")
    mode, context = ("sync", None) if kind == "sync" else ("async", kind)
    return make_vector_env(specs, mode, context=context, num_workers=num_workers)
