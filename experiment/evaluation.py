"""Playing without exploration: evaluations in training, `loxodon evaluate`, and `Experiment.interact`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..agents import BaseAgent
from ..data import Sink
from ..envs import Histories
from .collect import Collector, RolloutGroup


class Evaluator:
    """Plays in environments without exploration, and leaves the agent as it was.

    Every random number, the episodes included, comes from the global generators. Inside
    `isolated_rng(seed)` the same seed gives the same episodes, and training continues as if none had been
    played.

    Args:
        device: where the agents are.
        sample: True draws actions, False takes the most likely ones.
        should_stop: see Collector.
        cast: see Collector.
    """

    def __init__(
        self,
        device: torch.device,
        sample: bool,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        cast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.device, self.sample, self.should_stop, self.cast = device, sample, should_stop, cast
        self._newest: Collector | None = None

    @property
    def share_done(self) -> float:
        """Share of the running call's timesteps that have been taken, in [0, 1]."""
        return 0.0 if self._newest is None else self._newest.share_done

    def play(
        self,
        agent: BaseAgent,
        envs: Any,
        timesteps: int,
        *,
        episodes: int | None = None,
        limit: int | None = None,
        sinks: Sequence[Sink] = (),
        render: bool = False,
    ) -> Histories:
        """Begin new episodes in `envs` and act; returns the statistics of these episodes.

        Args:
            agent: acts, in evaluation mode.
            envs: vector env.
            timesteps: steps to take in each env.
            episodes: see `Collector.collect`.
            limit: see `Collector.collect`.
            sinks: each takes every step.
            render: see `Collector.collect`.
        """
        collector: Collector = Collector(
            [RolloutGroup(envs, sinks=sinks)],
            agent,
            self.device,
            self.sample,
            should_stop=self.should_stop,
            cast=self.cast,
            save_env_state=False,
        )
        self._newest, was_training = collector, agent.training
        agent.eval()
        try:
            collector.restart(int(torch.randint(2**31 - 1, ())))
            collector.collect(timesteps, episodes=episodes, limit=limit, render=render)
        finally:
            agent.train(was_training)
        return collector.histories
