"""Base class of agents that learn from stored trajectories: values and their targets, without losses."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch
from ..data.errors import check_count, check_number
from ..nets import (
    Actor,
    Categorical,
    CriticEnsemble,
    PolicyDistribution,
    dead_units,
)
from ..nets.mlp import require_positive
from .base import BaseAgent, LossTerms
from .masks import masked_mean
from .parts import ActByReturn, NStep, PopArt, RandomSubset, Returns, Steps, ValueScale, WeighByAdvantage

TRAINING_DISCOUNTS = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)  # Grigsby et al. 2023


@dataclass(frozen=True)
class Timesteps:
    """L timesteps of B sequences: states (B, L, D), and observations (B, L, ...)."""

    state: Tensor
    obs: dict[str, Tensor]


@dataclass(frozen=True)
class Transitions:
    """The transitions of a batch: states, actions and next states.

    Attributes:
        batch: the batch itself.
        current: the timestep at which each transition begins.
        following: the timestep after it, without gradient.
        mask: (B, L, 1) bool, True on the transitions that contribute to the losses.
    """

    batch: Batch
    current: Timesteps
    following: Timesteps
    mask: Tensor

    @property
    def recorded(self) -> Tensor:
        """(B, L, 1, A) actions that were taken; they broadcast over discounts."""
        return self.batch.actions[:, :, None]


@dataclass(frozen=True)
class Values:
    """Estimates of an agent for stored transitions, for each of G discounts; the last one acts.

    All but `mask` and `discounts` are (B, L, G, 1) float, in environment units, and meaningful only where
    the mask is True.

    Attributes:
        q: values of the recorded actions, means of the critics.
        v: values of the policy's actions.
        advantages: advantages of the recorded actions, as defined by the actor's loss.
        filter_weights: weights of the recorded actions in imitation; None for agents that do not imitate.
        q_std: standard deviation of the critics around q; 0 for a single critic.
        mask: (B, L, 1) bool, True on real transitions.
        discounts: (G, 1) float.
    """

    q: Tensor
    v: Tensor
    advantages: Tensor
    filter_weights: Tensor | None
    q_std: Tensor
    mask: Tensor
    discounts: Tensor


class Estimates(NamedTuple):
    """The estimates that make up `Values`, in environment units, with q of each critic."""

    q: Tensor  # (B, L, C, G, 1)
    v: Tensor  # (B, L, G, 1)
    advantages: Tensor  # (B, L, G, 1)
    filter_weights: Tensor | None = None  # (B, L, G, 1)


class OffPolicyAgent(BaseAgent, ABC):
    """Critics, and in most agents an actor, over every timestep of a sequence, for several discounts at once.

    Subclasses define the losses in `losses`. The parts of targets and losses are in `agents/parts/`, and are
    called in this order: `critic_subset` draws critics, `returns` computes targets from their values,
    `values` gathers the targets, the subclass computes its losses with `values`, `loss_weights` gathers the
    advantages of the recorded actions, and then weights the losses. Defaults are the published settings; the
    recommended ones are in `gin_configs/base_offpolicy.gin`.

    Args:
        *given: arguments that code supplies, see BaseAgent.
        gamma: discount of the acting policy.
        training_discounts: discounts that are trained in addition to gamma (empty: none); gamma is left out.
        reward_multiplier: factor of all rewards; metrics are reported without it.
        tau: Polyak rate per update of the target networks.
        num_critics: ensemble size C.
        critic_subset: draws the critics for each target, see RandomSubset.
        returns: computes the targets of critics (NStep, LambdaReturns or Retrace).
        burn_in: number of transitions at the beginning of a window that only refresh memory and have no
            losses, unless the episode begins there.
        num_actions_for_value_in_critic_loss: policy samples per expectation over MultiDiscrete or continuous
            actions, in targets.
        num_actions_for_value_in_actor_loss: the same in the actor's loss.
        values: turns outputs of critics into values (PopArt, PlainValues, FixedUnits or SummedValues).
        loss_weights: weights of the losses of each discount, see WeighByAdvantage; None for equal weights.
        acting: chooses the discount whose policy acts, see ActByReturn; None for gamma.
        actor_type: builds the policy head.
        critic_type: builds the critics.
        **shared: settings of BaseAgent.
    Raises: ValueError for impossible sizes or discounts, or parts that do not fit the actions; TypeError for
        a setting that is not a part of its kind.
    """

    has_actor: ClassVar[bool] = True
    has_target_actor: ClassVar[bool] = False
    acting_discount: int | Tensor | None = None
    """Index of the discount whose policy acts, or one index for each environment, (N,) int64. If it is None,
    `acting` decides, or gamma is used; see `act_for`."""

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        *given: Any,
        gamma: float = 0.999,
        training_discounts: Sequence[float] = TRAINING_DISCOUNTS,
        reward_multiplier: float = 10.0,
        tau: float = 0.003,
        num_critics: int = 4,
        critic_subset: RandomSubset = RandomSubset(),
        returns: Returns = NStep(),
        burn_in: int = 0,
        num_actions_for_value_in_critic_loss: int = 1,
        num_actions_for_value_in_actor_loss: int = 1,
        values: ValueScale = PopArt(),
        loss_weights: WeighByAdvantage | None = None,
        acting: ActByReturn | None = None,
        actor_type: Callable[..., nn.Module] = Actor,
        critic_type: Callable[..., CriticEnsemble] = CriticEnsemble,
        **shared: Any,
    ) -> None:
        super().__init__(*given, **shared)
        _require_parts(
            type(self).__name__,
            critic_subset=critic_subset,
            returns=returns,
            values=values,
            loss_weights=loss_weights,
            acting=acting,
        )
        discounts = [*(g for g in training_discounts if g != gamma), gamma]
        self.tau, self.critic_subset = tau, critic_subset
        self.returns = returns if self.is_discrete else returns.of_continuous_actions()
        # Agents that are made with the same part do not share its statistics.
        self.values, self.loss_weights = copy.deepcopy(values), copy.deepcopy(loss_weights)
        self.acting = copy.deepcopy(acting)
        self.reward_multiplier = reward_multiplier
        self.num_actions_for_value_in_critic_loss = num_actions_for_value_in_critic_loss
        self.num_actions_for_value_in_actor_loss = num_actions_for_value_in_actor_loss
        self.burn_in = burn_in
        self._check_settings(num_critics, discounts)
        self.values.build(discounts)
        if self.loss_weights is not None:
            self.loss_weights.build(discounts)
        if self.acting is not None:
            self.acting.build(discounts)
        self.discounts: Tensor
        column = torch.tensor(discounts, dtype=torch.float32)[:, None]
        self.register_buffer("discounts", column, persistent=False)
        width, num_discounts = self.state_dim, len(discounts)
        if self.actor_obs_keys and not self.has_actor:
            name = type(self).__name__
            raise ValueError(
                f"{name}.pass_obs_keys_to_actor is {list(self.actor_obs_keys)}, but {name} has no actor. "
                f"Fix: remove {name}.pass_obs_keys_to_actor."
            )
        has_all_values = isinstance(self.action_space, spaces.Discrete)  # one output per action
        if self.has_actor:
            self.actor = actor_type(self.actor_dim, self.action_dim, num_discounts, self.distribution)
        self.critics = critic_type(
            width, self.action_dim, num_discounts, has_all_values, num_critics=num_critics
        )
        self.critics.build(discounts)
        if self.has_target_actor:
            self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    @abstractmethod
    def losses(self, transitions: Transitions, with_metrics: bool) -> LossTerms:
        """The losses of all transitions; gathers the statistics of targets in training mode."""

    @property
    def leaves_out_transitions(self) -> bool:
        return self.burn_in > 0

    def policy(self, state: Tensor) -> PolicyDistribution:
        return self.distribution(self.of_acting(self.actor(state).params))

    def of_acting(self, x: Tensor) -> Tensor:
        """The entries (..., P) of x (..., G, P) that belong to the discount that acts."""
        index = self.acting_discount
        if index is None:
            index = -1 if self.acting is None else self.acting.best
        if isinstance(index, int):
            return x[..., index, :]
        if index.ndim == 0:
            return x.index_select(-2, index.view(1)).squeeze(-2)
        return x[torch.arange(len(x), device=x.device), index]

    def act_for(self, discount: float) -> None:
        """Let the policy of another discount act, to find out which horizons have been learned.

        Raises: ValueError if the agent does not train this discount.
        """
        trained = [round(value, 6) for value in self.discounts[:, 0].tolist()]
        if discount not in trained:
            raise ValueError(
                f"The discount {discount} is not trained: this {type(self).__name__} has {trained}. Fix: "
                "choose one of these."
            )
        self.acting_discount = trained.index(discount)

    def _act_extras(self, policy: PolicyDistribution, sample: bool) -> dict[str, Tensor]:
        if not self.returns.needs_probabilities:
            return {}
        probs: Tensor = cast(Any, policy).probs  # all discrete distributions have them
        return {"action_probs": probs if sample else F.one_hot(policy.act(False), probs.shape[-1]).float()}

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        transitions = self.transitions(batch)
        terms = self.losses(transitions, with_metrics)
        if self.loss_weights is not None:
            weights = self.loss_weights.weights(self.values.sigma)
            metrics = terms.metrics | (self._by_discount("loss_weight", weights) if with_metrics else {})
            terms = replace(
                terms, actor=terms.actor * weights, critic=terms.critic * weights, metrics=metrics
            )
        return replace(terms, mask=transitions.mask)

    def transitions(self, batch: Batch) -> Transitions:
        """Encode a batch into its transitions."""
        state = self.encode(batch)
        current, following = state[:, :-1], state[:, 1:].detach()
        before = {key: x[:, :-1] for key, x in batch.obs.items()}
        after = {key: x[:, 1:] for key, x in batch.obs.items()}
        mask = batch.mask
        if self.burn_in:
            places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape[:2])
            begins = torch.zeros_like(places)
            if batch.resets is not None:
                begins = places.where(batch.resets[:, :-1], 0).cummax(1).values
            is_warm = (places - begins >= self.burn_in) | (batch.time_idxs[..., 0].gather(1, begins) == 0)
            mask = mask & is_warm[..., None]
        return Transitions(batch, Timesteps(current, before), Timesteps(following, after), mask)

    def policies(self, actor: nn.Module, at: Timesteps) -> PolicyDistribution:
        """One policy per discount, over (B, L, G, A)."""
        return self.restrict(actor(self.actor_input(at.state, at.obs)), at.obs)

    # --- values, in environment units times the reward multiplier -------------------------------------------

    def all_values(self, critics: Any, state: Tensor) -> Tensor:
        """Values (..., C, G, A) of all discrete actions in states (..., D)."""
        return self.values.value(critics(state))

    def policy_values(
        self, critics: Any, state: Tensor, policy: PolicyDistribution, num_samples: int | None = None
    ) -> Tensor:
        """Values (B, L, C, G, 1) of the policy's actions: exact means if Discrete, else means over samples.

        num_samples: number of samples; None for num_actions_for_value_in_critic_loss.
        """
        if isinstance(policy, Categorical):
            return expectation(self.all_values(critics, state), policy.probs)
        num_samples = num_samples or self.num_actions_for_value_in_critic_loss
        return self.values_of_own_discount(critics, state, self.draw(policy, num_samples))

    @staticmethod
    def draw(policy: PolicyDistribution, num_samples: int) -> Tensor:
        """(K, B, L, G, A) samples of policies, clipped to the action space."""
        actions = torch.stack([policy.sample() for _ in range(num_samples)])
        return actions if policy.is_bounded else actions.clamp(-1.0, 1.0)

    def values_of_own_discount(self, critics: Any, state: Tensor, actions: Tensor) -> Tensor:
        """Values (B, L, C, G, 1) of actions (K, B, L, G, A): means over K, each for its discount."""
        if self.critics.reads_discount and not self.values.mixes_discounts:
            by_timestep = rearrange(actions, "k b l g a -> b l k g a")
            return self.values.value(critics(state, by_timestep, own_discount=True)).mean(2)
        values = self.values.value(critics(state, rearrange(actions, "k b l g a -> b l (k g) a")))
        # g2 counts the discounts of actions, g those of values. The diagonal pairs each action with the value
        # of its own discount.
        values = rearrange(values, "b l (k g2) c g 1 -> b l k c g2 g", g2=len(self.discounts))
        return values.diagonal(dim1=-2, dim2=-1).mean(2)[..., None]

    def recorded_values(self, critics: Any, state: Tensor, actions: Tensor) -> Tensor:
        """Values (B, L, C, G, 1) of actions (B, L, 1, A)."""
        if isinstance(self.action_space, spaces.Discrete):
            return expectation(self.all_values(critics, state), actions)
        return self.values.value(critics(state, actions).squeeze(2))

    def values_of_both(
        self,
        critics: Any,
        state: Tensor,
        policy: PolicyDistribution,
        actions: Tensor,
        num_samples: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Values of recorded and of the policy's actions, in one pass if critics output all actions."""
        if self.critics.from_action is None:
            values, probs = self.all_values(critics, state), cast("Categorical", policy).probs
            return expectation(values, actions), expectation(values, probs)
        of_policy = self.policy_values(critics, state, policy, num_samples)
        return self.recorded_values(critics, state, actions), of_policy

    def action_values(self, transitions: Transitions, policy: PolicyDistribution) -> tuple[Tensor, Tensor]:
        """Values (B, L, C, G, 1) of the recorded actions, and of the policy's actions for the actor loss.

        Gradients of the latter reach only the policy, not the critics or their state input.
        """
        state = transitions.current.state
        if isinstance(policy, Categorical):
            values = self.all_values(self.critics, state)
            return expectation(values, transitions.recorded), expectation(values.detach(), policy.probs)
        q_data = self.recorded_values(self.critics, state, transitions.recorded)
        num_samples = self.num_actions_for_value_in_actor_loss
        return q_data, self.policy_values(self.critics.frozen(), state.detach(), policy, num_samples)

    @torch.no_grad()
    def get_values(self, batch: Batch) -> Values:
        """Q, V, advantages and imitation weights of stored transitions, by the online critics.

        They are computed in evaluation mode, regardless of the agent's mode. V of MultiDiscrete and
        continuous actions is a mean over num_actions_for_value_in_actor_loss samples, drawn from torch's
        generator.
        """
        was_training = self.training
        self.eval()
        try:
            q, v, advantages, weights = self.estimate(self.transitions(batch))
        finally:
            self.train(was_training)
        deviation = q.std(2, correction=int(q.shape[2] > 1))
        return Values(q.mean(2), v, advantages, weights, deviation, batch.mask, self.discounts)

    def estimate(self, transitions: Transitions) -> Estimates:
        """Compute the estimates for `get_values`; agents with other advantages override this."""
        policy, state = self.policies(self.actor, transitions.current), transitions.current.state
        num_samples = self.num_actions_for_value_in_actor_loss
        both = self.values_of_both(self.critics, state, policy, transitions.recorded, num_samples)
        return self._estimates_of(*both)

    def _estimates_of(self, q: Tensor, v: Tensor) -> Estimates:
        """Estimates from values (B, L, C, G, 1) of recorded and of the policy's actions, in loss units."""
        q, v = q / self.reward_multiplier, v / self.reward_multiplier
        return Estimates(q, v.mean(2), (q - v).mean(2))

    def need_gradient_of_samples(self, remedy: str) -> None:
        """Raise ValueError if samples of the policy carry no gradient; remedy: a setting that avoids that."""
        kind: Any = self.distribution
        if not getattr(kind, "has_gradient", True):
            name = type(self).__name__
            raise ValueError(
                f"Samples of {kind.__name__} carry no gradient, which the loss of {name} needs. "
                f"Fix: choose another {name}.distribution_type, or bind {name}.{remedy}."
            )

    # --- targets -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def policy_targets(
        self, transitions: Transitions, policy: PolicyDistribution, bonus: Tensor | None = None
    ) -> Tensor:
        """(B, L, G, 1) targets for a policy at the following timesteps, by the target critics.

        bonus: (B, L, G, 1), what the policy receives at these timesteps in addition to rewards, such as its
            entropy. Targets of any length contain it for each of their timesteps.
        """
        critics, reduce = self.drawn_critics(transitions.following.state)
        steps = self.steps(transitions)
        if bonus is not None:
            steps = steps._replace(rewards=steps.rewards + steps.discounts * bonus * ~steps.terminated)
        return self.returns.targets(steps, _Following(self, transitions, critics, policy), reduce)

    def steps(self, transitions: Transitions) -> Steps:
        """The batch's transitions in the form that `returns` takes."""
        batch = transitions.batch
        rewards = self.reward_multiplier * batch.rews[..., None]
        return Steps(rewards, batch.dones[..., None], batch.mask[..., None], self.discounts)

    def drawn_critics(self, state: Tensor) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
        """Draw target critics for states (B, L, D); also return the function that reduces their values."""
        shape = state.shape[0], state.shape[1]
        return self.critic_subset.draw(self.target_critics, shape, len(self.discounts), state.device)

    def critic_errors(self, values: Tensor, targets: Tensor) -> Tensor:
        """(B, L, C, G, 1) squared differences of values from targets (B, L, G, 1), at unit scale."""
        return ((values - targets[:, :, None]) / self.values.sigma).square()

    def gather_targets(self, targets: Tensor, transitions: Transitions) -> None:
        """Add targets to the statistics of `values`, in training mode."""
        if self.training:
            self.values.gather(targets, transitions.mask)

    def gather_advantages(self, advantages: Tensor, transitions: Transitions) -> None:
        """Add rewards and the advantages (B, L, C, G, 1) of all critics to the statistics of `loss_weights`.

        Outside training mode, nothing is added.
        """
        if self.training and self.loss_weights is not None:
            steps = self.steps(transitions)
            self.loss_weights.gather(steps.rewards, advantages / self.values.sigma, transitions.mask)

    # --- metrics -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def metrics(
        self,
        transitions: Transitions,
        *,
        q: Tensor,
        targets: Tensor,
        policy: PolicyDistribution | None = None,
        advantages: Tensor | None = None,
        filter_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Metrics that all agents have; per-discount metrics without a suffix are those of `gamma`.

        Args:
            transitions: the batch.
            q: (B, L, C, G, 1) values of recorded actions, in environment units times the reward multiplier.
            targets: (B, L, G, 1), in the same units.
            policy: distribution over (B, L, G, A).
            advantages: (B, L, G, 1), environment units.
            filter_weights: (B, L, G, 1) imitation weights.
        """
        mask, mask_g = transitions.mask, transitions.mask[..., None]
        q, y = q / self.reward_multiplier, targets / self.reward_multiplier
        per_discount = {"q": q.mean(2), "td_target": y}
        found = {"reward": masked_mean(transitions.batch.rews, mask)}
        found["q_ensemble_std"] = q.new_zeros(())
        if q.shape[2] > 1:
            found["q_ensemble_std"] = masked_mean(q[..., -1, :].std(2), mask)
        found["td_target_min"] = y[:, :, -1].where(mask, torch.inf).min()
        found["td_target_max"] = y[:, :, -1].where(mask, -torch.inf).max()
        if advantages is not None:
            per_discount["advantage"] = advantages
            per_discount["filter_approved"] = (advantages > 0).float()
        if filter_weights is not None:
            per_discount["filter_weight"] = filter_weights
        rows = mask.flatten()
        if policy is not None:
            per_discount["policy_entropy"] = policy.entropy()
            log_probs = self.imitation_log_prob(policy, transitions.recorded)
            found["action_log_prob"] = masked_mean(log_probs[:, :, -1], mask)
            if isinstance(self.actor, Actor):
                layers = self.actor.activations(
                    self.actor_input(transitions.current.state, transitions.current.obs)
                )
                found["dead_units/actor"] = dead_units([layer.flatten(0, 1) for layer in layers], rows)
        actions = None if self.critics.from_action is None else transitions.recorded
        layers, _ = self.critics.activations(transitions.current.state, actions)
        # Some critics have one row per discount.
        rows = rows.repeat_interleave(layers[0].shape[-2] // len(rows))
        found["dead_units/critics"] = dead_units(layers, rows)
        scales = {"target_mu": self.values.mu, "target_sigma": self.values.sigma}
        for name, values in per_discount.items():
            scales[name] = values.where(mask_g, 0.0).sum((0, 1)) / mask.sum().clamp(min=1)
        for name, by_discount in scales.items():
            found |= self._by_discount(name, by_discount)
        return found

    def _by_discount(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """A metric with values (G, 1): one for each discount; without a suffix, that of `gamma`."""
        found = {name: values[-1, 0].clone()}
        for discount, value in zip(self.discounts[:, 0].tolist(), values[:, 0], strict=True):
            found[f"{name}/{discount:.6g}"] = value.clone()
        return found

    # --- between updates -----------------------------------------------------------------------------------

    @torch.no_grad()
    def after_update(self) -> None:
        """Move running statistics, then the target networks by tau."""
        super().after_update()
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.critics, self.target_critics)]
        if self.has_target_actor:
            pairs.append((self.actor, self.target_actor))
        for online, target in pairs:
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), self.tau)
            for copied, buffer in zip(target.buffers(), online.buffers(), strict=True):
                copied.copy_(buffer)

    def _check_settings(self, num_critics: int, discounts: Sequence[float]) -> None:
        name = type(self).__name__
        require_positive(
            name,
            num_critics=num_critics,
            num_actions_for_value_in_critic_loss=self.num_actions_for_value_in_critic_loss,
            num_actions_for_value_in_actor_loss=self.num_actions_for_value_in_actor_loss,
        )
        check_count(f"{name}.burn_in", self.burn_in, lowest=0)
        if self.burn_in >= self.max_seq_len:
            raise ValueError(
                f"{name}.burn_in is {self.burn_in}, but windows have {self.max_seq_len} transitions "
                "(Experiment.max_seq_len), so most of them would have no losses. Fix: lower burn_in."
            )
        self.critic_subset.check(num_critics, name)
        if not all(0.0 <= g <= 1.0 for g in discounts):
            raise ValueError(
                f"Discounts are {list(discounts)}, but must lie in [0, 1]. Fix: bind {name}.gamma, and each "
                f"of {name}.training_discounts, to a number from 0 to 1."
            )
        if len(set(discounts)) < len(discounts):
            raise ValueError(
                f"{name}.training_discounts names a discount twice: {list(discounts[:-1])}. Fix: remove the "
                "repetition."
            )
        check_number(f"{name}.tau", self.tau, above=0, highest=1)
        check_number(f"{name}.reward_multiplier", self.reward_multiplier, above=0, highest=sys.float_info.max)


@dataclass(frozen=True)
class _Following:
    """The `Lookahead` of target critics and a policy."""

    agent: OffPolicyAgent
    transitions: Transitions
    critics: Callable[..., Tensor]
    policy: PolicyDistribution

    def policy_values(self) -> Tensor:
        return self.agent.policy_values(self.critics, self.transitions.following.state, self.policy)

    def corrections(self) -> tuple[Tensor, Tensor, Tensor]:
        recorded = self.transitions.recorded
        # The action after each transition; it is 0 at the end of a window, where it is not used.
        actions = torch.cat([recorded[:, 1:], torch.zeros_like(recorded[:, :1])], dim=1)
        q, values = self.agent.values_of_both(
            self.critics, self.transitions.following.state, self.policy, actions
        )
        log_ratio = self.policy.log_prob(actions)
        if (taken := self.transitions.batch.log_probs) is not None:
            behaviour = torch.cat([taken[:, 1:], torch.zeros_like(taken[:, :1])], dim=1)
            log_ratio = log_ratio - behaviour.nan_to_num(nan=0.0)[:, :, None]
        return values, q, log_ratio


def _require_parts(name: str, **parts: Any) -> None:
    """Raise TypeError for a setting of the agent `name` that is not a part of its kind."""
    kinds: dict[str, tuple[Any, str]] = {
        "critic_subset": (RandomSubset, "@RandomSubset()"),
        "returns": (Returns, "@NStep()"),
        "values": (ValueScale, "@PopArt()"),
        "loss_weights": (WeighByAdvantage | None, "@WeighByAdvantage()"),
        "acting": (ActByReturn | None, "@ActByReturn()"),
    }
    for setting, part in parts.items():
        kind, example = kinds[setting]
        if not isinstance(part, kind):
            raise TypeError(
                f"{name}.{setting} is {part!r}, but must be an object from loxodon.agents.parts (in gin, a "
                f"reference with parentheses). Fix: bind {name}.{setting} = {example}, for example."
            )


def expectation(values: Tensor, probs: Tensor) -> Tensor:
    """(B, L, C, G, 1) means of values (B, L, C, G, A) over discrete actions.

    probs: (B, L, G or 1, A), probabilities or one-hots of recorded actions.
    """
    return (values * probs[:, :, None]).sum(-1, keepdim=True)
