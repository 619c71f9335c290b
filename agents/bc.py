"""Behaviour cloning: imitation of the policy that made the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
from torch import Tensor, nn

from ..data import Batch
from ..data.errors import check_number
from ..nets import Actor, PolicyDistribution
from .base import CODE_SUPPLIED, BaseAgent, LossTerms
from .masks import masked_mean


@gin.configurable(denylist=CODE_SUPPLIED)
class BCAgent(BaseAgent):
    """A policy that imitates all actions in the data, good or bad, from observations and their history.

        loss = -log pi(a | s) - entropy_coeff H(pi(s))

    Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation".

    Args:
        *given: arguments that code supplies, see BaseAgent.
        entropy_coeff: weight of an entropy bonus, in nats.
        actor_type: builds the policy head.
        **shared: settings of BaseAgent.
    """

    def __init__(
        self,
        *given: Any,
        entropy_coeff: float = 0.0,
        actor_type: Callable[..., nn.Module] = Actor,
        **shared: Any,
    ) -> None:
        super().__init__(*given, **shared)
        check_number(f"{type(self).__name__}.entropy_coeff", entropy_coeff)
        self.actor = actor_type(self.actor_dim, self.action_dim, 1, self.distribution)
        self.entropy_coeff = entropy_coeff

    def policy(self, state: Tensor) -> PolicyDistribution:
        return self.distribution(self.actor(state).params[..., -1, :])

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        """The losses of a batch, see BaseAgent.forward; the critic loss is 0."""
        state, obs = self.encode(batch)[:, :-1], {key: x[:, :-1] for key, x in batch.obs.items()}
        policy = self.restrict(self.policy(self.actor_input(state, obs)), obs)
        log_probs = self.imitation_log_prob(policy, batch.actions)
        loss = -log_probs
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * policy.entropy()
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = {
                "action_log_prob": masked_mean(log_probs.detach(), batch.mask),
                "policy_entropy": masked_mean(policy.entropy().detach(), batch.mask),
                "reward": masked_mean(batch.rews, batch.mask),
            }
        return LossTerms(loss[:, :, None], loss.new_zeros(*loss.shape[:2], 1, 1, 1), metrics)
