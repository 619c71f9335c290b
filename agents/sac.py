"""Soft actor-critic on sequences."""

from __future__ import annotations

import math
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ..data.errors import check_number
from .base import CODE_SUPPLIED, LossTerms
from .off_policy import OffPolicyAgent, Transitions

DISCRETE_ENTROPY_SHARE = 0.3
"""Default target entropy of discrete policies, as a share of the entropy of uniform actions."""


@gin.configurable(denylist=CODE_SUPPLIED)
class SACAgent(OffPolicyAgent):
    """An actor that maximises value and entropy, with a balance that is learned.

    Per discount g (the last one acts), with s the shared encoder's output, H the entropy of a policy:
        y = m r + g (1 - d) (min_{c in subset} Q'_c(s', a') + alpha H(pi(s'))),  a' ~ pi(s')
        critic loss = ((Q_c(s, a) - y) / sigma)^2
        actor loss  = -(min_c Q_c(sg(s), a ~ pi) + alpha H(pi(s))) / sigma
                      + log alpha (H(pi(s)) - target_entropy)
    For discrete actions, samples are replaced by expectations over pi. sigma comes from `values`. There is
    one alpha per discount; it is in units of values, and learns from the last term alone. Q' are Polyak
    averages. H is exact where it has a closed form; for TanhGaussian the mean slope of tanh is sampled.

    Source: Haarnoja et al. 2018, arXiv:1812.05905; discrete: Christodoulou 2019, arXiv:1910.07207.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        alpha: initial value of alpha.
        target_entropy: entropy that alpha aims for, in nats; None: minus the number of dimensions for Box,
            else three tenths of the entropy of uniform actions, those that a mask forbids included.
        learn_alpha: learn alpha; otherwise it is constant.
        reward_multiplier: multiplies rewards in the losses.
        num_critics: ensemble size.
        **shared: other settings of OffPolicyAgent.
    Raises: ValueError for settings that do not fit together.
    """

    def __init__(
        self,
        *given: Any,
        alpha: float = 1.0,
        target_entropy: float | None = None,
        learn_alpha: bool = True,
        reward_multiplier: float = 1.0,
        num_critics: int = 2,
        **shared: Any,
    ) -> None:
        settings = {**shared, "reward_multiplier": reward_multiplier, "num_critics": num_critics}
        super().__init__(*given, **settings)
        self.need_gradient_of_samples("distribution_type = 'TanhGaussian'")
        check_number("SACAgent.alpha", alpha, above=0)
        log_alpha = torch.full((len(self.discounts), 1), math.log(alpha))
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=learn_alpha)
        self.target_entropy = _usual_entropy(self.action_space) if target_entropy is None else target_entropy

    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_policy = self.policies(self.actor, transitions.following)
            targets = self.policy_targets(transitions, next_policy, bonus=alpha * next_policy.entropy())
        self.gather_targets(targets, transitions)
        policy = self.policies(self.actor, transitions.current)
        q_data, q_policy = self.action_values(transitions, policy)
        advantages = (q_data - q_policy).detach()
        self.gather_advantages(advantages, transitions)
        value, entropy = q_policy.amin(2), policy.entropy()
        actor_loss = -(value + alpha * entropy) / self.values.sigma
        actor_loss = actor_loss + self.log_alpha * (entropy.detach() - self.target_entropy)
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = self.metrics(
                transitions,
                q=q_data,
                targets=targets,
                policy=policy,
                advantages=advantages.mean(2) / self.reward_multiplier,
            )
            metrics["alpha"] = alpha[-1, 0].clone()
        return LossTerms(actor_loss, self.critic_errors(q_data, targets), metrics)


def _usual_entropy(action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box) -> float:
    """The default target entropy, in nats."""
    if isinstance(action_space, spaces.Box):
        return -float(action_space.shape[0])
    nvec = [action_space.n] if isinstance(action_space, spaces.Discrete) else action_space.nvec.tolist()
    return DISCRETE_ENTROPY_SHARE * sum(math.log(n) for n in nvec)
