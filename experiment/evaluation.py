"""Playing without exploration: evaluations in training, `loxodon evaluate`, and `Experiment.interact`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..agents import BaseAgent
from ..data import Sink
from ..envs import Histories
from .collect import Collector, RolloutGroup


class Evaluator:
    """Plays in environments without exploration, and leaves the agent as it was.

    All random numbers, including those of the episodes, come from the global generators. Inside
    `isolated_rng(seed)` the same seed gives the same episodes, and training continues as if none had been
    played.

    Args:
        device: device of the agents.
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
        hidden_state: Any = None,
        episodes: int | None = None,
        limit: int | None = None,
        sinks: Sequence[Sink] = (),
        render: bool = False,
    ) -> tuple[Any, Histories]:
        """Act in `envs`; returns the last hidden state and the statistics of the episodes of this call.

        Args:
            agent: acts in evaluation mode.
            envs: vector env.
            timesteps: steps to take in each env.
            hidden_state: the result of the previous call of this method, to continue in the same `envs` where
                it stopped; None resets all envs.
            episodes: see `Collector.collect`.
            limit: see `Collector.collect`.
            sinks: receivers of every step.
            render: see `Collector.collect`.
        """
        last, state, histories = self._newest, None, None
        if hidden_state is not None:
            if last is None or last.groups[0].envs is not envs:
                raise ValueError(
                    "A hidden state was given, but the last evaluation did not act in these environments, so "
                    "they begin new episodes. Fix: pass hidden_state=None, or continue before other "
                    "evaluations."
                )
            state, histories = last.groups[0].state, copy.deepcopy(last.histories)
            histories.clear()
        group = RolloutGroup(envs, sinks=sinks)
        collector: Collector = Collector(
            [group],
            agent,
            self.device,
            self.sample,
            histories=histories,
            should_stop=self.should_stop,
            cast=self.cast,
            is_training=False,
            save_env_state=False,
        )
        self._newest, was_training = collector, agent.training
        agent.eval()
        try:
            if state is None:
                collector.restart(int(torch.randint(2**31 - 1, ())))
            else:
                collector.continue_from([state])
            assert group.state is not None
            if hidden_state is not None:
                group.state.hidden_state = hidden_state
            collector.collect(timesteps, episodes=episodes, limit=limit, render=render)
        finally:
            agent.train(was_training)
        return group.state.hidden_state, collector.histories
