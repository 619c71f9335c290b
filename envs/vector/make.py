"""make_vector_env: the parallel environments of a mode, or of the faster of two."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..generators import generators_state, set_generators_state
from ..spec import EnvSpec
from .adapter import AlreadyVectorizedEnv
from .base import SequenceVectorEnv
from .sync import SyncVectorEnv
from .workers import AsyncVectorEnv

MODES = ("async", "sync", "already_vectorized", "auto")
AUTO_TRIAL_S = 0.25
FEWEST_STEPS = 2  # smallest number of steps in a timing trial
logger = logging.getLogger("loxodon")


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
