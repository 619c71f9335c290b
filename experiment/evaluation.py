"""Evaluation: a rollout from fresh episodes that leaves no trace in the training run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..envs import Histories, ReturnHistory, SpecialMetricHistory
from .process.rng import isolated_rng


class Evaluator:
    """Runs `interact` without exploration from a blank hidden state and reduces the statistics to figures.

    Args:
        interact: rolls out, as `Experiment.interact`; returns (hidden state, (returns, specials)).
        policy_metrics: (returns, specials) -> figures without prefix.
    """

    def __init__(
        self,
        interact: Callable[..., tuple[Any, Histories]],
        policy_metrics: Callable[[ReturnHistory, SpecialMetricHistory], dict[str, float]],
    ) -> None:
        self.interact, self.policy_metrics = interact, policy_metrics

    def evaluate(
        self,
        envs: Any,
        timesteps: int,
        *,
        seed: int,
        render: bool = False,
        save_trajs_to: Any = None,
        episodes: int | None = None,
    ) -> dict[str, float]:
        """Figures of every episode that begins within the first `timesteps` steps of its env.

        Each is played to its end, so that short ones are not preferred. episodes: at most so many of them,
        shared equally by the envs. Empty when no episode ended; see `Collector.collect`, which warns then.

        All global random generators are as before afterwards.
        """
        with isolated_rng(seed):
            _, (returns, specials) = self.interact(
                envs,
                timesteps,
                render=render,
                save_on_done=save_trajs_to or False,
                episodes=sys.maxsize if episodes is None else episodes,
            )
        return self.policy_metrics(returns, specials)
