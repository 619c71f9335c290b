"""Vector environments: N sequence environments behind one batched interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import guarded
from ..generators import generators_state, set_generators_state
from ..spec import EnvSpec, build_all
from .adapter import AlreadyVectorizedEnv
from .base import SequenceVectorEnv, StepResult
from .group import EnvGroup, StepBuffers, check_same_spaces
from .workers import AsyncVectorEnv

MODES = ("async", "sync", "already_vectorized", "auto")
AUTO_TRIAL_S = 0.25
FEWEST_STEPS = 2  # smallest number of steps in a timing trial
logger = logging.getLogger("loxodon")


class SyncVectorEnv(SequenceVectorEnv):
    """All environments in this process, one after the other. See `SequenceVectorEnv` for the interface."""

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        envs = build_all(specs)
        obs_space, action_space = envs[0].obs_layout.space, envs[0].action_map.policy_space
        check_same_spaces(envs, obs_space, action_space, first=0)
        memory = bytearray(StepBuffers.num_bytes(obs_space, action_space, len(envs)))
        super().__init__(
            obs_space, action_space, StepBuffers.carve(memory, obs_space, action_space, len(envs))
        )
        self.env_observation_space, self.env_action_space = envs[0].raw_spaces
        self._group = EnvGroup(envs, self.buffers)
        self.env_names = self._group.env_names

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin new episodes everywhere; env i is seeded with seed + i."""
        metrics = guarded(self._failed, "reset", self._group.reset, self.seeds_of(seed), options)
        self.env_names = self._group.env_names
        return self.buffers.obs, self.infos(False, metrics)

    def step(self, actions: Any) -> StepResult:
        """One env step everywhere."""
        self.buffers.actions[:] = actions
        has_ended, metrics = guarded(self._failed, "step", self._group.step)
        self.env_names = self._group.env_names
        return self.step_result(has_ended, metrics)

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(guarded(self._failed, what, self._group.query, what, arguments))

    def render(self) -> tuple[Any, ...]:
        """One frame per environment."""
        return tuple(guarded(self._failed, "render", self._group.render))

    def close_extras(self, **_: Any) -> None:
        """Close every environment."""
        self._group.close()

    def _failed(self) -> str:
        row = self._group.failed_row
        return f"Environment {row} ({self.env_names[row]})"


def make_vector_env(
    specs: Sequence[EnvSpec],
    mode: str,
    *,
    context: str | None = None,
    num_workers: int | None = None,
    seed: int | None = None,
) -> SequenceVectorEnv:
    """Build the parallel environments.

    Args:
        specs: one recipe per environment; for "already_vectorized" recipes of one vector environment.
        mode: "sync" (in this process), "async" (worker processes), "already_vectorized" (the recipe makes a
            gymnasium VectorEnv), or "auto" (tries sync and async for a moment and keeps the faster).
        context: start method of the workers, "fork", "forkserver", "spawn" or None (the platform's default).
        num_workers: number of worker processes; None: AsyncVectorEnv.num_workers.
        seed: of the global random generators in the workers; see AsyncVectorEnv.
    """
    if mode not in MODES:
        raise ValueError(f"env_mode is {mode!r}, but must be one of {MODES}. Fix: set Experiment.env_mode.")
    if not specs:
        raise ValueError(
            "There are no environments to build. Fix: set Experiment.parallel_actors to 1 or more."
        )
    if mode == "already_vectorized":
        return AlreadyVectorizedEnv(specs)
    if mode == "sync":
        return SyncVectorEnv(specs)
    if mode == "async":
        return _async(specs, context, num_workers, seed)
    return _faster_of_both(specs, context, num_workers, seed)


def _async(
    specs: Sequence[EnvSpec], context: str | None, num_workers: int | None, seed: int | None
) -> AsyncVectorEnv:
    if num_workers is None:  # gin may know better
        return AsyncVectorEnv(specs, context=context, seed=seed)
    return AsyncVectorEnv(specs, context=context, num_workers=num_workers, seed=seed)


def _faster_of_both(
    specs: Sequence[EnvSpec], context: str | None, num_workers: int | None, seed: int | None
) -> SequenceVectorEnv:
    in_process: SequenceVectorEnv = SyncVectorEnv(specs)
    before = generators_state()
    try:
        sync_speed = _steps_per_s(in_process)
        set_generators_state(before)  # how much was drawn depends on the speed
        workers: SequenceVectorEnv = _async(specs, context, num_workers, seed)
        async_speed = _steps_per_s(workers)
    except BaseException:
        in_process.close()
        raise
    is_async = async_speed > sync_speed
    chosen, other = (workers, in_process) if is_async else (in_process, workers)
    other.close()
    logger.info(
        "env_mode=auto chose %s: %.0f env steps/s in process, %.0f through worker processes.",
        "async" if is_async else "sync",
        sync_speed,
        async_speed,
    )
    return chosen


def _steps_per_s(env: SequenceVectorEnv) -> float:
    """Env steps per second under random actions, all environments together."""
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(16)]
    env.step(actions[0])
    num_steps, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < AUTO_TRIAL_S or num_steps < FEWEST_STEPS:
        env.step(actions[num_steps % 16])
        num_steps += 1
    return num_steps * env.num_envs / elapsed
