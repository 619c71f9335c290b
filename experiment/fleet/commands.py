"""The command line and the environment of an actor, made from those of its learner."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...envs import num_usable_cores
from .leash import ENV_NAME

if TYPE_CHECKING:
    from ..settings import Settings

_ENTRY = "import sys; from loxodon.experiment.cli import main; sys.exit(main())"
_FLAGS = ("--resume",)  # options without a value
# What `accelerate launch` tells its processes: an actor must not take itself for one of them.
_RANK_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_RANK_NAMES |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
_RANK_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_USE_", "FSDP_")
_KEPT = {"ACCELERATE_USE_CPU"}  # a choice of device, which holds for actors too


def this_program() -> list[str]:
    """Words that start the running script or module once more."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    path = getattr(main, "__file__", None)
    return [sys.executable, str(path)] if path is not None else library_program()


def library_program() -> list[str]:
    """Words that start the command line of the library, for callers whose script is not it."""
    return [sys.executable, "-c", _ENTRY]


def without(words: Sequence[str], *names: str) -> list[str]:
    """The words without these options (and the word after, if they take one) and overrides."""
    kept, is_value = [], False
    for word in words:
        if is_value:
            is_value = False
        elif word in names:
            is_value = word not in _FLAGS
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def actor_words(
    words: Sequence[str], run: Settings, *, num_actors: int, num_per_machine: int = 1
) -> list[str]:
    """The arguments of an actor of a learner started with `words`.

    The same config, overrides, run name and seed; but it only collects, and leaves evaluation to the learner.
    One thread for torch and a share of the cores for environment workers, unless the command line says more.

    Args:
        words: arguments of the learner.
        run: its settings.
        num_actors: how many actors the run has.
        num_per_machine: how many actors share a machine.
    """
    own: dict[str, Any] = {"val_interval": None, "evaluate_at_end": False, "start_collecting_at_epoch": 0}
    own["max_wall_clock_s"] = None  # the learner's end is theirs
    own["replay_ratio"], own["actor_processes"] = run.replay_ratio, num_actors
    kept = without(words, "--actors", "--mode", "--resume", "Experiment.mode", *_named(own))
    defaults: dict[str, Any] = {"torch_threads": 1}
    if run.async_env_workers is None and num_per_machine > 1:
        defaults["async_env_workers"] = max(1, num_usable_cores() // num_per_machine)
    said = {word.partition("=")[0] for word in kept}
    own |= {name: value for name, value in defaults.items() if f"Experiment.{name}" not in said}
    return [*kept, "--mode", "collect", *(f"Experiment.{name}={value!r}" for name, value in own.items())]


def _named(settings: Iterable[str]) -> list[str]:
    return [f"Experiment.{name}" for name in settings]


def actor_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an actor: leashed, unbuffered, one BLAS thread, and no rank of its learner's."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _RANK_NAMES or name.startswith(_RANK_PREFIXES))
    }
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1", ENV_NAME: "stdin"}
