"""Implicit Q-learning, for fixed data sets."""

from __future__ import annotations

from typing import Any

import gin
import torch
from torch import Tensor

from ..nets import CriticEnsemble
from .base import CODE_SUPPLIED, LossTerms
from .off_policy import Estimates, OffPolicyAgent, Transitions
from .parts import RandomSubset, UncorrectedReturns


@gin.configurable(denylist=CODE_SUPPLIED)
class IQLAgent(OffPolicyAgent):
    """Critics that never evaluate an action outside the data, and an actor that imitates its best actions.

    Per discount g (the last one acts), with s the shared encoder's output:
        q = min_{c in subset} Q'_c(s, a)
        y = returns(m r, d, V)                  (published: m r + g (1 - d) V(s'))
        critic loss = ((Q_c(s, a) - y) / sigma)^2
        value loss  = |expectile - 1[u < 0]| u^2,  u = (q - V(s)) / sigma
        actor loss  = -min(exp(beta A), max_weight) log pi(a | s),  A = (q - V(s)) / sigma
    The value loss counts as the loss of one more critic. sigma comes from `values`. Q' are Polyak averages.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, eq. 5 to 7.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        expectile: in (0, 1); 0.5 gives the mean of the data's returns, values near 1 the best of them.
        beta: how strongly better actions are preferred; 0 clones behaviour.
        max_weight: largest weight of an action.
        num_critics: ensemble size.
        critic_subset: draws the critics for each target; two different ones by default, which are all unless
            num_critics is raised.
        **shared: other settings of OffPolicyAgent.
    Raises: ValueError for settings that do not fit together.
    """

    returns: UncorrectedReturns

    def __init__(
        self,
        *given: Any,
        expectile: float = 0.7,
        beta: float = 3.0,
        max_weight: float = 100.0,
        num_critics: int = 2,
        critic_subset: RandomSubset = RandomSubset(replace=False),
        **shared: Any,
    ) -> None:
        settings = {**shared, "num_critics": num_critics, "critic_subset": critic_subset}
        super().__init__(*given, **settings)
        if not (0.0 < expectile < 1.0 and beta >= 0.0 and max_weight > 0.0):
            raise ValueError(
                f"IQLAgent has expectile={expectile}, beta={beta} and max_weight={max_weight}, but "
                "expectile must lie in (0, 1), beta must be at least 0 and max_weight must be above 0. "
                "Fix: remove these bindings to use the defaults 0.7, 3 and 100."
            )
        if not isinstance(self.returns, UncorrectedReturns):
            raise ValueError(
                f"IQLAgent.returns is {self.returns}, but IQL learns no values of actions that are not in "
                "the data. Fix: bind IQLAgent.returns = @NStep() or @LambdaReturns()."
            )
        self.expectile, self.beta, self.max_weight = expectile, beta, max_weight
        # V is a critic with a single action.
        self.value_function = CriticEnsemble(self.state_dim, 1, len(self.discounts), True, num_critics=1)

    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        with torch.no_grad():
            next_values = self.all_values(self.value_function, transitions.following.state)[:, :, 0]
            targets = self.returns.from_values(self.steps(transitions), next_values)
            critics, reduced = self.drawn_critics(transitions.current.state)
            recorded = self.recorded_values(critics, transitions.current.state, transitions.recorded)
            q_target = reduced(recorded)
        self.gather_targets(targets, transitions)
        q = self.recorded_values(self.critics, transitions.current.state, transitions.recorded)
        v = self.all_values(self.value_function, transitions.current.state)
        # All critics share V, so its errors count as part of what they agree on.
        self.gather_advantages((q - v).detach(), transitions)
        errors = (q_target[:, :, None] - v) / self.values.sigma
        value_loss = torch.where(errors < 0, 1.0 - self.expectile, self.expectile) * errors.square()
        policy = self.policies(self.actor, transitions.current)
        advantages = q_target - v.detach()[:, :, 0]
        weights = self._weights(advantages)
        actor_loss = -weights * self.imitation_log_prob(policy, transitions.recorded)
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = self.metrics(
                transitions,
                q=q,
                targets=targets,
                policy=policy,
                advantages=advantages / self.reward_multiplier,
                filter_weights=weights,
            )
        critic_loss = torch.cat([self.critic_errors(q, targets), value_loss], dim=2)
        return LossTerms(actor_loss, critic_loss, metrics)

    def _weights(self, advantages: Tensor) -> Tensor:
        """Imitation weights of advantages (B, L, G, 1), in environment units times the reward multiplier."""
        return (self.beta * advantages / self.values.sigma).exp().clamp(max=self.max_weight)

    def estimate(self, transitions: Transitions) -> Estimates:
        """V comes from the value function, advantages from the smallest of all target critics."""
        state = transitions.current.state
        q = self.recorded_values(self.critics, state, transitions.recorded)
        v = self.all_values(self.value_function, state)[:, :, 0]
        advantages = self.recorded_values(self.target_critics, state, transitions.recorded).amin(2) - v
        m = self.reward_multiplier
        return Estimates(q / m, v / m, advantages / m, self._weights(advantages))
