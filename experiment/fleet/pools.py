"""What runs the actors of a learner: processes of this machine, or those of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import gin

from . import pacing
from .commands import actor_environment, actor_words
from .supervisor import ActorSupervisor

if TYPE_CHECKING:
    from ..experiment import Experiment

# (experiment, words of its command line, number of actors) -> context in which the actors run
MakePool = Callable[["Experiment", Sequence[str], int], AbstractContextManager[Any]]


def keep_pace_of_preset(exp: Experiment) -> None:
    """Unless the config sets replay_ratio: as many updates per env step as an epoch of mode "both" has.

    So a preset learns the same with actors, however fast they are. Without a phase of both in one epoch
    (start_collecting_at_epoch) there is nothing to compare.

    Raises: ValueError if an epoch collects nothing.
    """
    env_steps = exp.parallel_actors * exp.train_timesteps_per_epoch * exp.accelerator.num_processes
    if not env_steps:
        raise ValueError(
            "Experiment.train_timesteps_per_epoch is 0, so actors would collect nothing. "
            "Fix: set it to a positive number, or leave out --actors."
        )
    updates = exp.train_batches_per_epoch // exp.batches_per_update
    if _is_bound("Experiment.replay_ratio") or not updates or exp.start_collecting_at_epoch:
        return
    exp.replay_ratio = updates / env_steps
    exp.fleet.ratio = pacing.ratio_of(exp)


def _is_bound(name: str) -> bool:
    """Whether the config sets this parameter, be it to None."""
    try:
        gin.query_parameter(name)
    except ValueError:
        return False
    return True


def local_pool(
    exp: Experiment, words: Sequence[str], num_actors: int, *, program: Sequence[str]
) -> ActorSupervisor:
    """Actors that are processes of this machine."""
    command = [*program, *actor_words(words, exp, num_actors=num_actors, num_per_machine=num_actors)]
    return supervise(exp, command, num_actors)


def supervise(
    exp: Experiment, command: Sequence[str], num_processes: int, name: str = "actor"
) -> ActorSupervisor:
    """Processes that live and end with `exp.learn()`, and end it when none of them can go on."""

    def end_run() -> None:
        exp.ctx.stop.ask("the supervisor of its actors")

    return ActorSupervisor(
        command,
        num_processes,
        exp.run_dir / "logs" / "actors",
        actor_environment(os.environ),
        say=exp.ctx.console.say,
        should_stop=exp.ctx.stop.requested,
        on_failure=end_run,
        may_start=lambda: exp.epoch >= exp.start_collecting_at_epoch,
        name=name,
    )


def elsewhere(exp: Experiment, words: Sequence[str], num_actors: int) -> AbstractContextManager[Any]:
    """Actors that something else starts and ends."""
    return contextlib.nullcontext()


def ray_pool(
    exp: Experiment, words: Sequence[str], num_actors: int, *, options: Sequence[str]
) -> ActorSupervisor:
    """Actors on a Ray cluster, kept there by a process of its own.

    So the learner imports nothing of Ray, whose threads and a learner that forks would not go together.
    options: for ray_pool.py.
    """
    own = ["--log-folder", str((exp.run_dir / "logs" / "actors").absolute()), "--actors", str(num_actors)]
    module = [sys.executable, "-m", f"{__package__}.ray_pool"]
    command = [*module, *options, *own, "--", *actor_words(words, exp, num_actors=num_actors)]
    return supervise(exp, command, 1, "ray_pool")
