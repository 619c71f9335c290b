"""Learning from demonstrations with an on-policy agent: their actions and their returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor, nn

from ..data import Batch
from ..nets import PolicyDistribution, ValueNorm
from .base import LossTerms
from .masks import masked_mean
from .ppo_loss import PPOLoss
from .sequence_model import SequenceModel

EstimateReturns = Callable[..., tuple[Tensor, Tensor]]


class Imitator(Protocol):
    """The agent's side of imitation; the first sequence model is the policy's, the last the critic's."""

    training: bool
    sequence_models: dict[str, SequenceModel]
    value_head: nn.Module
    value_norm: ValueNorm
    loss: PPOLoss

    def policy(self, state: Tensor) -> PolicyDistribution:
        """The distribution over actions at states (B, L, D)."""

    def restrict(self, policy: PolicyDistribution, obs: dict[str, Tensor]) -> PolicyDistribution:
        """The policy without the actions that observations (B, L, *) forbid."""

    def imitation_log_prob(self, policy: PolicyDistribution, actions: Tensor) -> Tensor:
        """Log-probabilities (B, L, 1) of recorded actions; 0 for those that a mask forbids."""


@dataclass(frozen=True)
class Demonstrations:
    """Windows of trajectories to imitate.

    Attributes:
        batch: windows of trajectories.
        estimate: advantages and returns of (L, B) rewards; see `GAE`.
    """

    batch: Batch
    estimate: EstimateReturns

    @property
    def mask(self) -> Tensor:
        """(B, L, 1) bool, True on real transitions."""
        return self.batch.mask

    def to(self, device: torch.device) -> Demonstrations:
        """A copy on another device."""
        return replace(self, batch=self.batch.to(device))


def imitation_loss(agent: Imitator, demos: Demonstrations, with_metrics: bool = False) -> LossTerms:
    """Losses of behaviour cloning, and of a value function of the demonstrated behaviour.

        actor = -log pi(a | s),  critic = the agent's value loss of V(s) against R
    `demos.estimate` computes the returns R from the rewards and the agent's own values, which count where a
    window ends without termination. In training mode, statistics of inputs and returns are gathered.

    Returns: actor (B, L, 1, 1), critic (B, L, 1, 1, 1).
    """
    batch = demos.batch
    models = agent.sequence_models.values()
    states = [model.encode(batch, mask=batch.timestep_mask, resets=batch.resets) for model in models]
    policy = agent.policy(states[0][:, :-1])
    policy = agent.restrict(policy, {key: x[:, :-1] for key, x in batch.obs.items()})
    log_probs = agent.imitation_log_prob(policy, batch.actions).float()
    outputs: Tensor = agent.value_head(states[-1]).float()
    values = agent.value_norm.value(outputs.detach())
    returns = _returns(batch, values, demos.estimate)
    if agent.training and agent.value_norm.enabled:
        agent.value_norm.gather(returns, batch.mask)
    critic = agent.loss.value_loss(outputs[:, :-1], agent.value_norm(returns), reduction="none")
    metrics: dict[str, Tensor] = {}
    if with_metrics:
        metrics = {
            "log_prob": masked_mean(log_probs.detach(), batch.mask),
            "entropy": masked_mean(policy.entropy().detach().float(), batch.mask),
            "value": masked_mean(values[:, :-1], batch.mask),
            "return": masked_mean(returns, batch.mask),
        }
    return LossTerms(-log_probs[:, :, None], critic[:, :, None, None], metrics)


@torch.no_grad()
def _returns(batch: Batch, values: Tensor, estimate: EstimateReturns) -> Tensor:
    """(B, L, 1) float32 from values (B, L+1, 1)."""
    steps = (batch.rews, values[:, :-1], values[:, 1:], batch.dones, batch.dones, batch.mask)
    _, returns = estimate(*(rearrange(step, "b l 1 -> l b") for step in steps))
    return rearrange(returns, "l b -> b l 1")
