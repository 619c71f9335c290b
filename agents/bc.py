"""Behaviour cloning: the policy of whoever made the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch
from ..nets import Actor, DistributionType, PolicyDistribution, TrajEncoder, TstepEncoder
from .base import BaseAgent, LossTerms
from .masks import masked_mean
from .off_policy import CODE_SUPPLIED


@gin.configurable(denylist=CODE_SUPPLIED)
class BCAgent(BaseAgent):
    """A policy that imitates all actions of the data, good or bad, from observations and their history.

        loss = -log pi(a | s) - entropy_coeff H(pi(s))

    Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation".

    Args:
        obs_space: see BaseAgent.
        action_space: see BaseAgent.
        tstep_encoder_type: see BaseAgent.
        traj_encoder_type: see BaseAgent.
        max_seq_len: see BaseAgent.
        entropy_coeff: weight of an entropy bonus, in nats.
        distribution_type: see BaseAgent.
        action_mask_key: see BaseAgent.
        pass_obs_keys_to_actor: see BaseAgent.
        pass_timestep_to_heads: see BaseAgent.
        actor_type: builds the policy head.
    """

    def __init__(
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box,
        tstep_encoder_type: Callable[..., TstepEncoder],
        traj_encoder_type: Callable[..., TrajEncoder],
        max_seq_len: int,
        *,
        entropy_coeff: float = 0.0,
        distribution_type: DistributionType | str | None = None,
        action_mask_key: str | None = None,
        pass_obs_keys_to_actor: Sequence[str] | None = None,
        pass_timestep_to_heads: bool = False,
        actor_type: Callable[..., nn.Module] = Actor,
    ) -> None:
        super().__init__(
            obs_space,
            action_space,
            tstep_encoder_type,
            traj_encoder_type,
            max_seq_len,
            distribution_type=distribution_type,
            action_mask_key=action_mask_key,
            pass_obs_keys_to_actor=pass_obs_keys_to_actor,
            pass_timestep_to_heads=pass_timestep_to_heads,
        )
        self.actor = actor_type(self.actor_dim, self.action_dim, 1, self.distribution)
        self.entropy_coeff = entropy_coeff

    def policy(self, state: Tensor) -> PolicyDistribution:
        return self.distribution(self.actor(state).params[..., -1, :])

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        """As BaseAgent says; there is no critic, its loss is 0."""
        state, obs = self.encode(batch)[:, :-1], {key: x[:, :-1] for key, x in batch.obs.items()}
        policy = self.restrict(self.policy(self.actor_input(state, obs)), obs)
        log_probs = policy.log_prob(batch.actions)
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
