"""An actor-critic with losses that do not depend on the scale of rewards, for many tasks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import gin
import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn import functional as F

from ..nets import BinnedCriticEnsemble, Categorical, PolicyDistribution, ValueBins
from .base import CODE_SUPPLIED, LossTerms
from .filtered import FilteredActorAgent
from .off_policy import Estimates, Transitions
from .parts import PlainValues, RandomSubset


@gin.configurable(denylist=[*CODE_SUPPLIED, "values", "loss_weights"])
class MultiTaskAgent(FilteredActorAgent):
    """Critics that classify values into bins, and an actor that imitates better actions than its own.

    Per discount g (the last one acts), with s the shared encoder's output and v(Q) the value of a
    distribution Q over bins (see ValueBins):
        V'(s') = critic_subset of v(Q'_c(s', a')), a' ~ pi'(s')            (published: a mean)
        y = returns(m r, d, V')                                            (published: m r + g (1 - d) V'(s'))
        critic loss = cross-entropy(bins(y), Q_c(s, a))
        actor loss  = -f(A) log pi(a | s)
        A = mean_c v(Q_c(s, a)) - mean_c mean_k v(Q_c(s, a_k)),  a_k ~ pi(s)
    A is in environment units; primes are Polyak averages. Both losses are log-likelihoods of classifiers (for
    Box: of a density), so tasks of any reward scale have equal weight. Discrete actions enter the critics as
    one-hots; expectations over them are exact if that takes no more passes than samples would.

    Source: Grigsby et al. 2024 (AMAGO-2), arXiv:2411.11188; filters of Wang et al. 2020, arXiv:2006.15134.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        num_actions_for_value_in_actor_loss: k, the policy samples per value of an advantage.
        bins_type: builds the bins; their range has to include all returns times reward_multiplier, m above.
        critic_type: builds the critics.
        critic_subset: draws the critics for each target; a mean by default, since the actor does not
            maximise over the critics' errors.
        **shared: settings of FilteredActorAgent, where fbc_filter_func is f, and others of OffPolicyAgent,
            except `values` and `loss_weights`, since classifiers have no scale.
    Raises: ValueError for settings that do not fit together.
    """

    def __init__(
        self,
        *given: Any,
        num_actions_for_value_in_actor_loss: int = 3,
        bins_type: Callable[..., ValueBins] = ValueBins,
        critic_type: Callable[..., BinnedCriticEnsemble] = BinnedCriticEnsemble,
        critic_subset: RandomSubset = RandomSubset(reduce="mean"),
        **shared: Any,
    ) -> None:
        bins = bins_type()

        def make_critics(
            width: int, action_dim: int, num_discounts: int, _: bool, *, num_critics: int
        ) -> BinnedCriticEnsemble:
            return critic_type(width, action_dim, num_discounts, bins.num_bins, num_critics=num_critics)

        super().__init__(
            *given,
            critic_type=make_critics,
            critic_subset=critic_subset,
            values=PlainValues(),
            num_actions_for_value_in_actor_loss=num_actions_for_value_in_actor_loss,
            **shared,
        )
        self.bins = bins

    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        with torch.no_grad():
            targets = self.policy_targets(transitions, self.next_policies(transitions))
            labels = self.bins.encode(targets.squeeze(-1))
        logits = self.critics(transitions.current.state, transitions.recorded).squeeze(2)
        critic_loss = self.bins.cross_entropy(logits, labels[:, :, None])[..., None]
        policy = self.policies(self.actor, transitions.current)
        q, advantages = self._advantages(transitions, policy, logits)
        weights = self.filter_weights(advantages)
        imitation = -weights * self.imitation_log_prob(policy, transitions.recorded)
        actor_loss = self.with_entropy_bonus(imitation, policy)
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = self.metrics(
                transitions,
                q=q,
                targets=targets,
                policy=policy,
                advantages=advantages,
                filter_weights=weights,
            )
            ends = labels[..., [0, -1]].sum(-1, keepdim=True).where(transitions.mask[..., None], 0.0)
            metrics["targets_at_ends"] = ends.sum() / (transitions.mask.sum() * len(self.discounts)).clamp(
                min=1
            )
        return LossTerms(actor_loss, critic_loss, metrics)

    @torch.no_grad()
    def _advantages(
        self, transitions: Transitions, policy: PolicyDistribution, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values (B, L, C, G, 1) of recorded actions, and their advantages (B, L, G, 1)."""
        q = self.bins.decode(logits)[..., None]
        num_samples = self.num_actions_for_value_in_actor_loss
        if not self._has_few_actions(policy, num_samples):
            v = self._expected(self.critics, transitions.current.state, policy, num_samples)
            return q, (q - v).mean(2) / self.reward_multiplier
        # The recorded action contributes 0 to the advantage, so only the others are evaluated.
        ahead = torch.arange(1, self.action_dim, device=q.device)
        others = F.one_hot(
            (transitions.recorded.argmax(-1) + ahead) % self.action_dim, self.action_dim
        ).float()
        values = self.critics(
            transitions.current.state, others, read=self.bins.decode
        )  # (B, L, A - 1, C, G, 1)
        probs = einsum(policy.probs, others, "b l g a, b l other a -> b l other g")
        gains = rearrange(probs, "b l other g -> b l other 1 g 1") * (q[:, :, None] - values)
        return q, gains.sum(2).mean(2) / self.reward_multiplier

    # --- values of critics, decoded from bins --------------------------------------------------------------

    def policy_values(
        self, critics: Any, state: Tensor, policy: PolicyDistribution, num_samples: int | None = None
    ) -> Tensor:
        num_samples = num_samples or self.num_actions_for_value_in_critic_loss
        return self._expected(critics, state, policy, num_samples)

    def recorded_values(self, critics: Any, state: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = critics(state, actions, read=self.bins.decode).squeeze(2)
        return values

    def estimate(self, transitions: Transitions) -> Estimates:
        logits = self.critics(transitions.current.state, transitions.recorded).squeeze(2)
        q, advantages = self._advantages(transitions, self.policies(self.actor, transitions.current), logits)
        q = q / self.reward_multiplier
        return Estimates(q, q.mean(2) - advantages, advantages, self.filter_weights(advantages))

    def _expected(self, critics: Any, state: Tensor, policy: PolicyDistribution, num_samples: int) -> Tensor:
        """(B, L, C, G, 1) expected values of the policy: exact for a few discrete actions, else sampled."""
        if self._has_few_actions(policy, num_samples):
            every = torch.eye(self.action_dim, device=state.device).expand(*state.shape[:2], -1, -1)
            values = critics(state, every, read=self.bins.decode)  # (B, L, A, C, G, 1)
            exact: Tensor = (values * rearrange(policy.probs, "b l g a -> b l a 1 g 1")).sum(2)
            return exact
        actions = rearrange(self.draw(policy, num_samples), "k b l g a -> b l k g a").contiguous()
        sampled: Tensor = critics(state, actions, own_discount=True, read=self.bins.decode).mean(2)
        return sampled

    def _has_few_actions(self, policy: PolicyDistribution, num_samples: int) -> TypeGuard[Categorical]:
        """True if evaluating all actions takes no more passes than `num_samples` for every discount."""
        return isinstance(policy, Categorical) and self.action_dim <= num_samples * len(self.discounts)
