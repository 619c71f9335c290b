"""Double-buffered sampling: while half the envs step in their workers, the policy acts for the other half."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..envs import Histories
from .collector import Collector, RolloutState, episode_shares


class EnvHalves:
    """Vector envs of worker processes that are one vector env of all their envs to whoever builds on it."""

    def __init__(self, halves: Sequence[Any]) -> None:
        self.halves = list(halves)
        self.num_envs: int = sum(envs.num_envs for envs in self.halves)
        self.single_observation_space = self.halves[0].single_observation_space
        self.single_action_space = self.halves[0].single_action_space
        self.env_observation_space = self.halves[0].env_observation_space
        self.env_action_space = self.halves[0].env_action_space

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """See `SequenceVectorEnv.call`."""
        return tuple(answer for envs in self.halves for answer in envs.call(name, *args, **kwargs))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """See `SequenceVectorEnv.call_each`."""
        parts = zip(self.halves, self._parts(arguments), strict=True)
        return tuple(answer for envs, part in parts for answer in envs.call_each(name, part))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """See `SequenceVectorEnv.get_attr`."""
        return self.call(name)

    def has_attr(self, name: str) -> tuple[bool, ...]:
        """See `SequenceVectorEnv.has_attr`."""
        return tuple(answer for envs in self.halves for answer in envs.has_attr(name))

    def tell(self, name: str, *args: Any) -> None:
        """See `SequenceVectorEnv.tell`."""
        for envs in self.halves:
            envs.tell(name, *args)

    def set_attr(self, name: str, values: Any) -> None:
        """See `SequenceVectorEnv.set_attr`."""
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        for envs, part in zip(self.halves, self._parts(values), strict=True):
            envs.set_attr(name, part)

    def _parts(self, rows: Sequence[Any]) -> list[list[Any]]:
        """One list per half; what is too many falls to the last one, which complains."""
        borders = [0, *np.cumsum([envs.num_envs for envs in self.halves])[:-1].tolist(), len(rows)]
        return [list(rows[start:stop]) for start, stop in itertools.pairwise(borders)]

    def close(self) -> None:
        """End all workers."""
        for envs in reversed(self.halves):  # newer workers hold ends of the older ones' pipes
            envs.close()


class OverlappedCollector:
    """Takes turns between collectors over asynchronous vector envs; from outside it is like one `Collector`.

    The order of all calls is fixed, so a seed gives the same rollout every time. It is another rollout than
    that of one collector: the policy draws its actions for one part of the envs after the other.

    Args:
        halves: collectors of the same agent, usually two. Their histories share `histories`.
        histories: statistics of all of them.
    """

    def __init__(self, halves: Sequence[Collector], histories: Histories) -> None:
        self.halves, self.histories = list(halves), histories
        self.num_envs = sum(half.num_envs for half in self.halves)

    @property
    def state(self) -> list[RolloutState] | None:
        """Where each half stands; None before the first step."""
        states = [half.state for half in self.halves if half.state is not None]
        return states or None

    def restart(self, seed: int | None) -> None:
        """Store running pieces, reset all envs (env i gets seed + i) and forget the hidden states."""
        offset = 0
        for half in self.halves:
            half.restart(None if seed is None else seed + offset)
            offset += half.num_envs

    def set_policy_version(self, version: int | None) -> None:
        """Tell the sinks which policy acts from now on."""
        for half in self.halves:
            half.set_policy_version(version)

    def flush(self) -> None:
        """Store what is running: every running piece is closed, and all pieces are on disk afterwards."""
        for half in self.halves:
            half.flush()

    def wait(self) -> None:
        """Return when every finished piece is on disk."""
        for half in self.halves:
            half.wait()

    def close(self) -> None:
        """Store what is running and end the sinks; the envs are left alone."""
        for half in self.halves:
            half.close()

    def state_dict(self) -> dict[str, Any]:
        """What exact resumption needs of exploration and sinks, one entry per half; see `Collector`."""
        states = [half.state_dict() for half in self.halves]
        return {name: [state[name] for state in states] for name in states[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not isinstance(state["writer"], list):
            raise ValueError(
                "The checkpoint was written without overlapping sampling, which this run uses. Fix: resume "
                "with the Experiment.overlap_sampling and env_mode of the earlier run."
            )
        for i, half in enumerate(self.halves):
            half.load_state_dict({name: values[i] for name, values in state.items()})

    def collect(self, timesteps: int, *, episodes: int | None = None, render: bool = False) -> int:
        """Take up to `timesteps` steps in every env and leave none under way; see `Collector.collect`."""
        if self.state is None:
            self.restart(seed=None)
        quotas, taken, first = self._quotas(episodes), 0, self.halves[0]
        if timesteps < 1:
            return taken
        with torch.inference_mode(), first.cast():
            for half in self.halves:
                half.begin_step()
            for left in reversed(range(timesteps)):
                is_stopped = first.should_stop is not None and first.should_stop()
                goes_on = left > 0 and _is_short(quotas) and not is_stopped
                for half, quota in zip(self.halves, quotas, strict=True):
                    taken += half.finish_step(quota)
                    if render:
                        half.envs.render()
                    if goes_on:
                        half.begin_step()
                if not goes_on:
                    break
        return taken

    def _quotas(self, episodes: int | None) -> list[np.ndarray | None]:
        """The episodes that each env of each half has to play; None for no limit."""
        if episodes is None:
            return [None] * len(self.halves)
        borders = np.cumsum([half.num_envs for half in self.halves])[:-1]
        return list(np.split(episode_shares(episodes, self.num_envs), borders))


def _is_short(quotas: Sequence[np.ndarray | None]) -> bool:
    """True while some env has episodes left to play, or where there is no limit."""
    return any(quota is None or bool(quota.any()) for quota in quotas)
