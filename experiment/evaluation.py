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
        make_sinks: Callable[[int], Sequence[Sink]] = lambda num_envs: (),
        render: bool = False,
    ) -> tuple[Any, Histories]:
        """Act in `envs`; returns the last hidden state and the statistics of the episodes of this call.

        The state is that of the agent, or a list with one for each of two halves.

        Args:
            agent: acts in evaluation mode.
            envs: vector env, or the halves that asynchronous training environments consist of.
            timesteps: steps to take in each env.
            hidden_state: the result of the previous call of this method, to continue in the same `envs` where
                it stopped; None resets all envs.
            episodes: see `Collector.collect`.
            limit: see `Collector.collect`.
            make_sinks: (number of envs) -> receivers of every step; called once for each vector env.
            render: see `Collector.collect`.
        """
        last, parts = self._newest, getattr(envs, "halves", [envs])
        continues = hidden_state is not None
        if continues and (last is None or [group.envs for group in last.groups] != parts):
            raise ValueError(
                "A hidden state was given, but the last evaluation did not act in these environments, so "
                "they begin new episodes. Fix: pass hidden_state=None, or continue before other evaluations."
            )
        groups = [RolloutGroup(part, sinks=make_sinks(part.num_envs)) for part in parts]
        collector: Collector = Collector(
            groups,
            agent,
            self.device,
            self.sample,
            should_stop=self.should_stop,
            cast=self.cast,
            is_training=False,
            save_env_state=False,
        )
        self._newest, was_training = collector, agent.training
        agent.eval()
        try:
            if continues:
                assert last is not None
                self._continue(collector, last, hidden_state if len(parts) > 1 else [hidden_state])
            else:
                collector.restart(int(torch.randint(2**31 - 1, ())))
            collector.collect(timesteps, episodes=episodes, limit=limit, render=render)
        finally:
            agent.train(was_training)
        found = [group.state.hidden_state for group in groups if group.state is not None]
        return (found if len(parts) > 1 else found[0]), collector.histories

    def _continue(self, collector: Collector, last: Collector, hidden_states: Sequence[Any]) -> None:
        """Begin where the last collector stopped, with a hidden state for each of its groups."""
        states = []
        for group, before, hidden_state in zip(collector.groups, last.groups, hidden_states, strict=True):
            assert before.state is not None
            before.state.hidden_state = hidden_state
            states.append(before.state)
            group.histories.returns.set_running(before.histories.returns.running())
        collector.continue_from(states)
