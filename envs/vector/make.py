"""make_vector_env builds the parallel environments of a mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data.errors import check_choice
from ..spec import EnvSpec
from .adapter import AlreadyVectorizedEnv
from .base import SequenceVectorEnv
from .sync import SyncVectorEnv
from .workers import AsyncVectorEnv

MODES = ("async", "sync", "already_vectorized")


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
        specs: one recipe per environment; for "already_vectorized", recipes of one vector environment.
        mode: "sync" (in this process), "async" (worker processes), or "already_vectorized" (the recipe makes
            a gymnasium VectorEnv).
        context: start method of the workers, "fork", "forkserver", "spawn" or None (the platform's default).
        num_workers: number of worker processes; None for AsyncVectorEnv.num_workers.
        seed: seed of the global random generators in the workers; see AsyncVectorEnv.
    """
    check_choice("Experiment.env_mode", mode, MODES)
    if not specs:
        raise ValueError(
            "There are no environments to build. Fix: set Experiment.parallel_actors to 1 or more."
        )
    if mode == "already_vectorized":
        return AlreadyVectorizedEnv(specs)
    if mode == "sync":
        return SyncVectorEnv(specs)
    # If no number is passed, gin's binding applies.
    workers: dict[str, Any] = {} if num_workers is None else {"num_workers": num_workers}
    return AsyncVectorEnv(specs, context=context, seed=seed, **workers)
