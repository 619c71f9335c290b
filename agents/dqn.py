"""Q-learning on sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import gin
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from ..nets import (
    Categorical,
    CriticEnsemble,
    DuelingCriticEnsemble,
    PolicyDistribution,
)
from .base import CODE_SUPPLIED, LossTerms
from .off_policy import Estimates, OffPolicyAgent, Timesteps, Transitions, expectation
from .parts import RandomSubset


class GreedyPolicy(Categorical):
    """The action with the largest of the values (..., A), with log-probability 0; samples equal the mode."""

    def _logarithms(self) -> Tensor:
        is_best = F.one_hot(self.params.argmax(-1), self.params.shape[-1]) > 0
        return torch.where(is_best, 0.0, -1e9)

    def act(self, sample: bool) -> Tensor:
        return self.params.argmax(-1)


@gin.configurable(denylist=CODE_SUPPLIED)
class DQNAgent(OffPolicyAgent):
    """Critics of all discrete actions, and the greedy policy; exploration is left to the environment side.

    Per discount g (the last one acts), with s the shared encoder's output:
        y = m r + g (1 - d) min_{c in subset} Q'_c(s', argmax_a mean_c Q_c(s', a))
        loss = ((Q_c(s, a) - y) / sigma)^2
    Without double_q, the argmax is over Q'. Q' are Polyak averages, sigma comes from `values`. Critics are
    dueling networks by default. R2D2 is this agent with NStep.n = 5, burn_in and prioritised sampling (see
    PrioritySampler).

    Source: Mnih et al. 2015; van Hasselt et al. 2016, arXiv:1509.06461 (double); Wang et al. 2016,
    arXiv:1511.06581 (dueling); Kapturowski et al. 2019 (R2D2).

    Args:
        obs_space: see BaseAgent.
        action_space: Discrete.
        *given: other arguments that code supplies, see BaseAgent.
        double_q: choose the next action by Q and evaluate it by Q'; otherwise use Q' for both.
        num_critics: ensemble size.
        critic_subset: draws the critics for each target, see RandomSubset.
        critic_type: builds the critics.
        **shared: other settings of OffPolicyAgent.
    Raises: ValueError for another action space, or settings that do not fit together.
    """

    has_actor = False

    def __init__(
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete,
        *given: Any,
        double_q: bool = True,
        num_critics: int = 1,
        critic_subset: RandomSubset = RandomSubset(size=1),
        critic_type: Callable[..., CriticEnsemble] = DuelingCriticEnsemble,
        **shared: Any,
    ) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(
                f"DQNAgent got actions in {action_space}, but it compares the values of all actions, so it "
                "needs a Discrete space. Fix: set Experiment.agent_type = @SACAgent or @Agent."
            )
        settings = {**shared, "num_critics": num_critics, "critic_subset": critic_subset}
        super().__init__(obs_space, action_space, *given, critic_type=critic_type, **settings)
        self.double_q = double_q

    def policy(self, state: Tensor) -> PolicyDistribution:
        return GreedyPolicy(self.of_acting(self.all_values(self.critics, state).mean(-3)))

    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        with torch.no_grad():
            chooser = self.critics if self.double_q else self.target_critics
            after = transitions.following
            best = self._greedy(self.all_values(chooser, after.state), after)
            targets = self.policy_targets(transitions, best)
        self.gather_targets(targets, transitions)
        q, v = self._q_and_v(transitions)
        self.gather_advantages((q - v).detach(), transitions)
        loss = self.critic_errors(q, targets)
        metrics = self.metrics(transitions, q=q, targets=targets) if with_metrics else {}
        return LossTerms(loss.new_zeros(*loss.shape[:2], len(self.discounts), 1), loss, metrics)

    def _greedy(self, values: Tensor, at: Timesteps) -> Categorical:
        """For each discount, the allowed action with the largest mean of values (B, L, C, G, A)."""
        return cast("Categorical", self.restrict(GreedyPolicy(values.mean(2)), at.obs))

    def estimate(self, transitions: Transitions) -> Estimates:
        return self._estimates_of(*self._q_and_v(transitions))

    def _q_and_v(self, transitions: Transitions) -> tuple[Tensor, Tensor]:
        """Values (B, L, C, G, 1) of the recorded and, without gradient, of the greedy actions."""
        values = self.all_values(self.critics, transitions.current.state)
        greedy = self._greedy(values.detach(), transitions.current)
        return expectation(values, transitions.recorded), expectation(values.detach(), greedy.probs)
