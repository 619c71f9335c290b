"""Evaluation: a rollout from fresh episodes that leaves no trace in the training run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..envs import Histories, ReturnHistory, SpecialMetricHistory
from .rng import isolated_rng

logger = logging.getLogger("loxodon")


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
        """Figures of at most `timesteps` steps per env (or `episodes` episodes); empty when no episode ended.

        All global random generators are as before afterwards.
        """
        with isolated_rng(seed):
            _, (returns, specials) = self.interact(
                envs, timesteps, render=render, save_on_done=save_trajs_to or False, episodes=episodes
            )
        metrics = self.policy_metrics(returns, specials)
        if not metrics:
            logger.warning(
                "Evaluation took %d steps in each of %d envs and no episode ended, so there is nothing to "
                "report. Fix: raise the number of evaluation timesteps (Experiment.val_timesteps_per_epoch) "
                "above the length of an episode.",
                timesteps,
                envs.num_envs,
            )
        return metrics
