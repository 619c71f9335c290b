"""Two vector environments that a user sees as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import SequenceVectorEnv
from .workers import AsyncVectorEnv


class EnvHalves(SequenceVectorEnv):
    """All environments of several vector environments that are stepped in turns, so not through this.

    It answers for all of them (`call`, `get_attr`, `set_attr`, `tell` ...) and closes them.
    """

    def __init__(self, halves: Sequence[AsyncVectorEnv]) -> None:
        self.halves, first = list(halves), halves[0]
        self.num_envs = sum(envs.num_envs for envs in halves)
        self.single_observation_space = first.single_observation_space
        self.single_action_space = first.single_action_space
        self.env_observation_space = first.env_observation_space
        self.env_action_space = first.env_action_space

    def _ask(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        answers: tuple[Any, ...] = ()
        for envs in self.halves:
            start = len(answers)
            answers += envs._ask(what, arguments[start : start + envs.num_envs])
        return answers

    def close_extras(self, **_: Any) -> None:
        """End all workers."""
        for envs in reversed(self.halves):  # newer workers hold ends of the older ones' pipes
            envs.close()
