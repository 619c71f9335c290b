"""The base of the built-in tasks: their state for checkpoints, and checks of their settings."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from ...data.errors import check_count
from ..env_state import generator_state, set_generator_state

GRID_MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
"""Column and row step of the actions 0 stay, 1 right, 2 left, 3 down, 4 up."""
StepResult = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class Task(gym.Env[Any, Any]):
    """A task whose state is a few attributes and the random generator.

    Attributes:
        settings: names of the arguments that must agree with a stored state.
        variables: names of the attributes that form the state; their values are replaced or modified in
            place.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()

    def get_state(self) -> dict[str, Any]:
        """Return everything that later steps and resets depend on."""
        return {
            "settings": self._values(self.settings),
            "variables": copy.deepcopy(self._values(self.variables)),
            "generator": generator_state(self),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises: ValueError if the state is from a task with other settings.
        """
        own, name = self._values(self.settings), type(self).__name__
        if (found := state.get("settings")) != own:
            raise ValueError(
                f"The saved state is that of {name} with {found}, but this environment has {own}. "
                "Fix: resume with the settings of the earlier run, or set Collector.save_env_state = False."
            )
        for key, value in copy.deepcopy(state["variables"]).items():
            setattr(self, key, value)
        set_generator_state(self, state["generator"])

    def _values(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def check_counts(task: gym.Env[Any, Any], least: int = 1, **counts: Any) -> None:
    """Raise ValueError unless all settings are whole numbers of at least `least`."""
    for name, count in counts.items():
        check_count(f"{type(task).__name__}.{name}", count, least)
