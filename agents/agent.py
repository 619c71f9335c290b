"""The off-policy actor-critic on a shared sequence model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import Tensor

from ..data.errors import check_number
from ..nets import (
    CriticEnsemble,
    DiscountInputCriticEnsemble,
    PolicyDistribution,
)
from .base import CODE_SUPPLIED, LossTerms
from .filtered import FilteredActorAgent
from .off_policy import Estimates, Transitions


@gin.configurable(denylist=CODE_SUPPLIED)
class Agent(FilteredActorAgent):
    """Actor and critics over every timestep of a sequence, for several discount factors at once.

    Per discount g (the last one acts), with s the shared encoder's output and Q = values(outputs):
        V'(s')      = critic_subset of E Q'_c(s', a'), a' ~ pi'(s')        (Discrete: exact mean over pi')
        y           = returns(m r, d, V')                                  (published: m r + g (1 - d) V'(s'))
        critic loss = ((Q_c(s, a) - y) / sigma)^2
        actor loss  = -online_coeff (min_c Q_c(sg(s), a ~ pi) - mu) / sigma - offline_coeff f(A) log pi(a | s)
        A           = mean_c Q_c(s, a) - mean_c E Q_c(s, a ~ pi), in environment units
        loss        = loss_weights (actor loss + Experiment.critic_loss_weight * critic loss)
    critic_subset, returns, values and loss_weights are parts (see `agents/parts/`). mu and sigma come from
    `values`, m is reward_multiplier, and primes are Polyak averages. With the default parts this is the
    published agent; `gin_configs/base_offpolicy.gin` has the recommended settings, and docs/algorithm.md
    compares the two.
    The critics' parameters get no gradient from the actor loss. MultiDiscrete actions enter the critics like
    continuous ones, as one-hots; gradients pass through samples of them (see MultiCategorical).

    Source: Grigsby et al. 2023, arXiv:2310.09971; critic subsets of Chen et al. 2021 (REDQ),
    arXiv:2101.05982.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        online_coeff: weight of the policy gradient in the actor loss.
        offline_coeff: weight of filtered behaviour cloning in the actor loss.
        critic_type: builds the critics.
        **shared: settings of FilteredActorAgent, where fbc_filter_func is f, and of OffPolicyAgent, such as
            gamma and the parts; reward_multiplier is m.
    Raises: ValueError for settings that do not fit together.
    """

    def __init__(
        self,
        *given: Any,
        online_coeff: float = 1.0,
        offline_coeff: float = 0.1,
        critic_type: Callable[..., CriticEnsemble] = DiscountInputCriticEnsemble,
        **shared: Any,
    ) -> None:
        super().__init__(*given, critic_type=critic_type, **shared)
        name = type(self).__name__
        check_number(f"{name}.online_coeff", online_coeff, lowest=0)
        check_number(f"{name}.offline_coeff", offline_coeff, lowest=0)
        self.online_coeff, self.offline_coeff = online_coeff, offline_coeff
        if online_coeff:
            self.need_gradient_of_samples("online_coeff = 0")

    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        with torch.no_grad():
            targets = self.policy_targets(transitions, self.next_policies(transitions))
        self.gather_targets(targets, transitions)
        policy = self.policies(self.actor, transitions.current)
        q_data, q_policy = self.action_values(transitions, policy)
        critic_loss = self.critic_errors(q_data, targets)
        critic_advantages = (q_data - q_policy).detach()
        self.gather_advantages(critic_advantages, transitions)
        advantages = critic_advantages.mean(2) / self.reward_multiplier  # in environment units
        actor_loss, weights = self._actor_loss(transitions, policy, q_policy, advantages)
        found = {"q": q_data, "targets": targets, "advantages": advantages, "filter_weights": weights}
        metrics = self.metrics(transitions, policy=policy, **found) if with_metrics else {}
        return LossTerms(actor_loss, critic_loss, metrics)

    def estimate(self, transitions: Transitions) -> Estimates:
        found = super().estimate(transitions)
        return found._replace(filter_weights=self.filter_weights(found.advantages))

    def _actor_loss(
        self, transitions: Transitions, policy: PolicyDistribution, q_policy: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, L, G, 1) loss and (B, L, G, 1) filter weights."""
        weights, loss = self.filter_weights(advantages), torch.zeros_like(advantages)
        if self.online_coeff:
            loss = loss - self.online_coeff * self.values.normalize(q_policy.amin(2))
        if self.offline_coeff:
            loss = loss - self.offline_coeff * weights * self.imitation_log_prob(policy, transitions.recorded)
        return self.with_entropy_bonus(loss, policy), weights
