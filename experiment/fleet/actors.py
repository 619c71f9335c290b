"""The actors of a learner: their command line, their environment, and the supervisor that runs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import gin

from ...envs import num_usable_cores
from ..contracts import RunContext
from .shared_folder import TOKEN_VARIABLE, write_token
from .supervisor import ActorSupervisor

_ENTRY = "import sys; from loxodon.tools.run import main; sys.exit(main())"
_FLAGS = ("--resume",)  # options without a value
# Variables that `accelerate launch` sets: an actor must not take itself for one of its processes.
_RANK_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_RANK_NAMES |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
_RANK_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_USE_", "FSDP_")
_KEPT = {"ACCELERATE_USE_CPU"}  # a choice of device that also holds for actors
# Environment of a process that must not open a GPU context, which would take memory from the learner.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


class SeparateActors(nullcontext[None]):
    """Actors that are jobs of their own: they may begin before their learner, and it does not end them."""


def is_bound(name: str) -> bool:
    """True if the config sets this parameter, even if to None."""
    try:
        gin.query_parameter(name)
    except ValueError:
        return False
    return True


def _needs_gpu() -> bool:
    """True if the config sets a precision that CPUs do not have."""
    name = "Experiment.mixed_precision"
    return is_bound(name) and gin.query_parameter(name) == "fp16"


def _has_env_workers() -> bool:
    """True if environments run in worker processes, as they do by default."""
    name = "Experiment.env_mode"
    return not is_bound(name) or gin.query_parameter(name) == "async"


@dataclass(frozen=True)
class ActorSpec:
    """The actors that a learner starts.

    Attributes:
        learner_words: arguments of the learner's command line.
        num_actors: number of actors of the run.
        replay_ratio: ratio of the run, which all its processes keep.
        first_epoch: epoch of the learner in which they begin.
        device: device on which they act. With "cpu" they see no GPU.
    """

    learner_words: Sequence[str]
    num_actors: int
    replay_ratio: float | None = None
    first_epoch: int = 0
    device: str = "cpu"

    def words(self, num_per_machine: int = 1) -> list[str]:
        """The arguments of an actor; num_per_machine: number of actors that share a machine.

        The config, overrides, run name and seed are those of the learner, but the actor only collects and
        does not evaluate. It has one torch thread and a share of the cores for environment workers, unless
        the command line sets them.
        """
        own: dict[str, Any] = {
            "Experiment.val_interval": None,
            "Experiment.evaluate_at_end": False,
            "Experiment.start_collecting_at_epoch": 0,
            "WallClockLimit.seconds": None,  # actors end with the learner
            "Experiment.replay_ratio": self.replay_ratio,
            "ReplayRatio.actor_processes": self.num_actors,
        }
        if self.device == "cpu" and _needs_gpu():
            own["Experiment.mixed_precision"] = "no"
        options = ("--actors", "--mode", "--resume", "--device", "--actor-device")
        kept = without(self.learner_words, *options, "Experiment.mode", *own)
        kept += [] if self.device == "cpu" else ["--device", self.device]
        said = {word.partition("=")[0].strip() for word in kept}
        if "Experiment.torch_threads" not in said:
            own["Experiment.torch_threads"] = 1
        workers = "AsyncVectorEnv.num_workers"
        if num_per_machine > 1 and _has_env_workers() and workers not in said and not is_bound(workers):
            own[workers] = max(1, num_usable_cores() // num_per_machine)
        return [*kept, "--mode", "collect", *(f"{name}={value!r}" for name, value in own.items())]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that hide GPUs from actors that must not use one."""
        return dict(NO_GPU) if self.device == "cpu" else {}


# Makes the context in which the actors of a run are at work.
MakePool = Callable[[RunContext, ActorSpec], AbstractContextManager[Any]]


def local_pool(ctx: RunContext, spec: ActorSpec, *, program: Sequence[str]) -> ActorSupervisor:
    """Actors that are processes of this machine. program: words that start the command line."""
    return supervise(ctx, spec, [*program, *spec.words(spec.num_actors)], spec.num_actors)


def supervise(
    ctx: RunContext, spec: ActorSpec, command: Sequence[str], num_processes: int, name: str = "actor"
) -> ActorSupervisor:
    """Processes that run during `learn`, and end it when none of them is left."""
    return ActorSupervisor(
        command,
        num_processes,
        ctx.run_dir / "logs" / "actors",
        {**actor_environment(os.environ), **spec.environment, TOKEN_VARIABLE: write_token(ctx.run_dir)},
        say=ctx.console.say,
        should_stop=ctx.stop.requested,
        on_failure=lambda: ctx.stop.ask("the supervisor of its actors"),
        may_start=lambda: ctx.progress.epoch >= spec.first_epoch,
        name=name,
    )


def this_program() -> list[str]:
    """Words that start the running script or module once more."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    path = getattr(main, "__file__", None)
    return [sys.executable, str(path)] if path is not None else library_program()


def library_program() -> list[str]:
    """Words that start the command line of the library, for callers with a different script."""
    return [sys.executable, "-c", _ENTRY]


def without(words: Sequence[str], *names: str) -> list[str]:
    """The words without these options (and the word after, if they take one) and overrides."""
    kept, is_value = [], False
    for word in words:
        if is_value:
            is_value = False
        elif word in names:
            is_value = word not in _FLAGS
        elif word.partition("=")[0].strip() not in names:
            kept.append(word)
    return kept


def actor_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an actor: unbuffered, one BLAS thread, and without the ranks of its learner."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _RANK_NAMES or name.startswith(_RANK_PREFIXES))
    }
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1"}
