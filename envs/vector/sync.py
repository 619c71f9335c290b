"""Environments in this process, stepped one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spec import EnvSpec, build_all
from .base import SequenceVectorEnv, StepResult
from .group import EnvGroup, check_same_spaces


class SyncVectorEnv(SequenceVectorEnv):
    """All environments in this process, one after the other. See `SequenceVectorEnv` for the interface."""

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        envs = build_all(specs)
        obs_space, action_space = envs[0].obs_layout.space, envs[0].action_map.policy_space
        check_same_spaces(envs, obs_space, action_space, first=0)
        super().__init__(obs_space, action_space, len(envs))
        self.env_observation_space, self.env_action_space = envs[0].raw_spaces
        self._group = EnvGroup(envs, self.buffers)
        self.env_names = self._group.env_names

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin new episodes in all environments; env i is seeded with seed + i."""
        metrics = self._group.reset(self.seeds_of(seed), options)
        self.env_names = self._group.env_names
        return self.buffers.obs, self.infos(False, metrics)

    def step(self, actions: Any) -> StepResult:
        """Take one env step in all environments."""
        self.buffers.actions[:] = actions
        has_ended, metrics = self._group.step()
        self.env_names = self._group.env_names
        return self.step_result(has_ended, metrics)

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(self._group.query(what, arguments))

    def close_extras(self, **_: Any) -> None:
        """Close every environment."""
        self._group.close()
