"""What runs the actors of a learner: processes of this machine, or those of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .commands import actor_environment, actor_words
from .supervisor import ActorSupervisor

if TYPE_CHECKING:
    from ..experiment import Experiment

# (experiment, words of its command line, number of actors) -> context in which the actors run
MakePool = Callable[["Experiment", Sequence[str], int], AbstractContextManager[Any]]


def local_pool(
    exp: Experiment, words: Sequence[str], num_actors: int, *, program: Sequence[str]
) -> ActorSupervisor:
    """Actors that are processes of this machine."""
    command = [*program, *actor_words(words, exp, num_per_machine=num_actors)]
    return supervise(exp, command, num_actors)


def supervise(exp: Experiment, command: Sequence[str], num_processes: int, name: str = "actor") -> ActorSupervisor:
    """Processes that live and end with `exp.learn()`, and end it when none of them can go on."""

    def end_run() -> None:
        exp.stop.ask("the supervisor of its actors")

    return ActorSupervisor(
        command,
        num_processes,
        exp.run_dir / "logs" / "actors",
        actor_environment(os.environ),
        say=lambda line: exp.view.say(line),  # noqa: PLW0108 - learn() puts another view there
        should_stop=lambda: exp.stop.requested(),  # noqa: PLW0108 - and another request
        on_failure=end_run,
        may_start=lambda: exp.epoch >= exp.start_collecting_at_epoch,
        name=name,
    )
