"""The off-policy actor-critic on a shared sequence model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import gin
import torch
from einops import rearrange, reduce
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch
from ..nets import Actor, Categorical, CriticEnsemble, PolicyDistribution, PopArt, TrajEncoder, TstepEncoder
from .base import BaseAgent, LossTerms
from .filters import binary_filter
from .objectives import masked_mean, n_step_targets

TRAINING_DISCOUNTS = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)


@gin.configurable(
    denylist=["obs_space", "action_space", "tstep_encoder_type", "traj_encoder_type", "max_seq_len"]
)
class Agent(BaseAgent):
    """Actor and critics over every timestep of a sequence, for several discount factors at once.

    Per discount g (the last one acts), with s the shared encoder's output:
        y = m r + g (1 - d) min_{c in subset} Q'_c(s', a'),  a' ~ pi'(s')   (Discrete: expectation over pi')
        critic loss = (norm(Q_c(s, a)) - norm(y))^2
        actor loss  = -online_coeff norm(min_c Q_c(sg(s), a ~ pi)) - offline_coeff f(A) log pi(a | s)
        A = mean_c Q_c(s, a) - mean_c V_c(s), in environment units; primes are Polyak averages
    The critics' parameters get no gradient from the actor loss. MultiDiscrete actions enter the critics like
    continuous ones, as one-hots; gradients pass through samples of them (see MultiCategorical).

    Source: Grigsby et al. 2023, arXiv:2310.09971; critic subsets of Chen et al. 2021 (REDQ),
    arXiv:2101.05982.

    Args:
        obs_space: see BaseAgent.
        action_space: see BaseAgent.
        tstep_encoder_type: see BaseAgent.
        traj_encoder_type: see BaseAgent.
        max_seq_len: see BaseAgent.
        num_critics: ensemble size.
        num_critics_td: members in each target's minimum, drawn without repetition.
        online_coeff: weight of the first actor term.
        offline_coeff: weight of the second actor term.
        gamma: discount of the acting policy.
        training_discounts: trained beside it (empty: none).
        reward_multiplier: m above; metrics are reported without it.
        tau: Polyak rate per update of the target networks.
        n_step: steps in the TD target.
        fbc_filter_func: f above.
        fake_filter: f = 1 (behaviour cloning).
        entropy_coeff: weight of an entropy bonus in the actor loss, in nats.
        popart: normalise values per discount.
        popart_beta: rate of the moving averages behind that.
        popart_floor: least standard deviation of the targets that it reckons with, as a share of their root
            mean square; 0 for whatever they have.
        use_target_actor: take a' from the Polyak average of the actor, else from the actor itself.
        num_actions_for_value: policy samples per expectation over MultiDiscrete or continuous actions.
        actor_type: builds the policy head.
        critic_type: builds the critics.
    Raises: ValueError for impossible sizes or discounts.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box,
        tstep_encoder_type: Callable[..., TstepEncoder],
        traj_encoder_type: Callable[..., TrajEncoder],
        max_seq_len: int,
        *,
        num_critics: int = 4,
        num_critics_td: int = 2,
        online_coeff: float = 1.0,
        offline_coeff: float = 0.1,
        gamma: float = 0.999,
        training_discounts: Sequence[float] = TRAINING_DISCOUNTS,
        reward_multiplier: float = 10.0,
        tau: float = 0.003,
        n_step: int = 1,
        fbc_filter_func: Callable[..., Tensor] = binary_filter,
        fake_filter: bool = False,
        entropy_coeff: float = 0.0,
        popart: bool = True,
        popart_beta: float = 5e-4,
        popart_floor: float = 0.1,
        use_target_actor: bool = True,
        num_actions_for_value: int = 1,
        actor_type: Callable[..., nn.Module] = Actor,
        critic_type: Callable[..., nn.Module] = CriticEnsemble,
    ) -> None:
        super().__init__(obs_space, action_space, tstep_encoder_type, traj_encoder_type, max_seq_len)
        discounts = [*training_discounts, gamma]
        _check_settings(num_critics, num_critics_td, n_step, num_actions_for_value, discounts)
        self.num_critics_td, self.n_step, self.tau = num_critics_td, n_step, tau
        self.online_coeff, self.offline_coeff, self.entropy_coeff = online_coeff, offline_coeff, entropy_coeff
        self.reward_multiplier, self.use_target_actor = reward_multiplier, use_target_actor
        self.fbc_filter_func, self.fake_filter = fbc_filter_func, fake_filter
        self.num_actions_for_value = num_actions_for_value
        self.discounts: Tensor
        column = torch.tensor(discounts, dtype=torch.float32)[:, None]
        self.register_buffer("discounts", column, persistent=False)
        width, num_discounts = self.traj_encoder.emb_dim, len(discounts)
        self.actor = actor_type(width, self.action_dim, num_discounts, self.distribution)
        has_all_values = isinstance(action_space, spaces.Discrete)  # one output per action
        self.critics = critic_type(
            width, self.action_dim, num_discounts, has_all_values, num_critics=num_critics
        )
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.popart = PopArt(num_discounts, beta=popart_beta, floor=popart_floor, enabled=popart)

    def policy(self, state: Tensor) -> PolicyDistribution:
        return self.distribution(self.actor(state).params[..., -1, :])

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        state = self.encode(batch)
        here, following = state[:, :-1], state[:, 1:].detach()
        targets = self._td_targets(batch, following)
        if self.training:
            self.popart.gather(targets, batch.mask)
        policy = self.actor(here)
        q_data, q_policy = self._action_values(batch.actions, here, policy)
        critic_loss = (self.popart.normalized(q_data) - self.popart.normalize(targets)[:, :, None]).square()
        advantages = self._advantages(q_data, q_policy)
        actor_loss, filter_weights = self._actor_loss(batch, policy, q_policy, advantages)
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = self._metrics(batch, policy, q_data, targets, advantages, filter_weights)
        return LossTerms(actor_loss, critic_loss, metrics)

    @torch.no_grad()
    def _td_targets(self, batch: Batch, following: Tensor) -> Tensor:
        """(B, L, G, 1) TD targets in environment units times the reward multiplier."""
        policy = (self.target_actor if self.use_target_actor else self.actor)(following)
        q = self.popart.value(self._policy_values(self.target_critics, following, policy))
        subset = torch.randperm(q.shape[2], device=q.device)[: self.num_critics_td]
        return n_step_targets(
            self.reward_multiplier * batch.rews[..., None],
            batch.dones[..., None],
            batch.mask[..., None],
            q[:, :, subset].amin(2),
            self.discounts,
            n_step=self.n_step,
        )

    def _policy_values(self, critics: nn.Module, state: Tensor, policy: PolicyDistribution) -> Tensor:
        """Critic outputs (B, L, C, G, 1) of the policy's actions: exact mean if Discrete, else sampled."""
        if isinstance(policy, Categorical):
            exact: Tensor = (critics(state) * policy.probs[:, :, None]).sum(-1, keepdim=True)
            return exact
        actions = torch.stack([policy.sample() for _ in range(self.num_actions_for_value)])
        values = critics(state, rearrange(actions, "k b l g a -> b l (k g) a"))
        # g2 counts the actions' discounts, g those of the outputs: the critic of g judges the action of g
        values = rearrange(values, "b l (k g2) c g 1 -> b l k c g2 g", g2=len(self.discounts))
        sampled: Tensor = reduce(values.diagonal(dim1=-2, dim2=-1), "b l k c g -> b l c g 1", "mean")
        return sampled

    def _action_values(
        self, actions: Tensor, state: Tensor, policy: PolicyDistribution
    ) -> tuple[Tensor, Tensor]:
        """Raw critic outputs (B, L, C, G, 1) of recorded actions, and of the policy's for the actor loss.

        The second carries gradient into the policy alone, not into critics or their state input.
        """
        if isinstance(policy, Categorical):
            outputs = self.critics(state)
            q_data = (outputs * actions[:, :, None, None]).sum(-1, keepdim=True)
            return q_data, (outputs.detach() * policy.probs[:, :, None]).sum(-1, keepdim=True)
        q_data = self.critics(state, actions[:, :, None]).squeeze(2)
        frozen = {name: p.detach() for name, p in self.critics.named_parameters()}

        def frozen_critics(*args: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.critics, frozen, args)
            return out

        return q_data, self._policy_values(frozen_critics, state.detach(), policy)  # type: ignore[arg-type]

    @torch.no_grad()
    def _advantages(self, q_data: Tensor, q_policy: Tensor) -> Tensor:
        """(B, L, G, 1) how much better the recorded action is than the policy, environment units."""
        gain = self.popart.value(q_data) - self.popart.value(q_policy)
        return gain.mean(2) / self.reward_multiplier

    def _actor_loss(
        self, batch: Batch, policy: PolicyDistribution, q_policy: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, L, G, 1) loss and (B, L, G, 1) filter weights."""
        weights = torch.ones_like(advantages) if self.fake_filter else self.fbc_filter_func(advantages)
        loss = torch.zeros_like(advantages)
        if self.online_coeff:
            loss = loss - self.online_coeff * self.popart.normalized(q_policy).amin(2)
        if self.offline_coeff:
            loss = loss - self.offline_coeff * weights * policy.log_prob(batch.actions[:, :, None])
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * policy.entropy()
        return loss, weights

    @torch.no_grad()
    def _metrics(
        self,
        batch: Batch,
        policy: PolicyDistribution,
        q_data: Tensor,
        targets: Tensor,
        advantages: Tensor,
        filter_weights: Tensor,
    ) -> dict[str, Tensor]:
        mask, mask_g = batch.mask, batch.mask[..., None]
        q = self.popart.value(q_data)[..., -1, :] / self.reward_multiplier
        y = targets[:, :, -1] / self.reward_multiplier
        return {
            "q": masked_mean(q.mean(2), mask),
            "q_ensemble_std": masked_mean(q.std(2), mask) if q.shape[2] > 1 else q.new_zeros(()),
            "td_target": masked_mean(y, mask),
            "td_target_min": y.where(mask, torch.inf).min(),
            "td_target_max": y.where(mask, -torch.inf).max(),
            "advantage": masked_mean(advantages[:, :, -1], mask),
            "filter_approved": masked_mean((advantages > 0).float(), mask_g),
            "filter_weight": masked_mean(filter_weights, mask_g),
            "policy_entropy": masked_mean(policy.entropy()[:, :, -1], mask),
            "action_log_prob": masked_mean(policy.log_prob(batch.actions[:, :, None])[:, :, -1], mask),
            "reward": masked_mean(batch.rews, mask),
            "popart_mu": self.popart.mu[-1, 0].clone(),
            "popart_sigma": self.popart.sigma[-1, 0].clone(),
        }

    @torch.no_grad()
    def after_update(self) -> None:
        """Move running statistics, then the target networks by tau."""
        super().after_update()
        for online, target in ((self.actor, self.target_actor), (self.critics, self.target_critics)):
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), self.tau)


def _check_settings(
    num_critics: int, num_critics_td: int, n_step: int, num_actions: int, discounts: Sequence[float]
) -> None:
    if not 1 <= num_critics_td <= num_critics:
        raise ValueError(
            f"num_critics_td is {num_critics_td}, but must lie between 1 and num_critics = {num_critics}. "
            "Fix: bind Agent.num_critics_td or Agent.num_critics."
        )
    if n_step < 1 or num_actions < 1:
        raise ValueError(
            f"n_step is {n_step} and num_actions_for_value is {num_actions}, both must be at least 1. "
            "Fix: bind Agent.n_step and Agent.num_actions_for_value to positive integers."
        )
    if not all(0.0 <= g <= 1.0 for g in discounts):
        raise ValueError(f"Discounts are {list(discounts)}, but must lie in [0, 1]. Fix: bind Agent.gamma.")
