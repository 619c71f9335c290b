"""What agents that learn from stored trajectories share: values and their targets; losses are left open."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast, get_type_hints

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch
from ..nets import (
    ActionMemory,
    Actor,
    Categorical,
    CriticEnsemble,
    DistributionType,
    PolicyDistribution,
    PopArt,
    TrajEncoder,
    TstepEncoder,
    dead_units,
)
from ..nets.traj_encoders import MemorylessTrajEncoder
from .base import ActOutput, BaseAgent, LossTerms
from .objectives import fit_mask, masked_mean
from .targets import lambda_returns, n_step_targets, retrace_targets

TRAINING_DISCOUNTS = (0.1, 0.5, 0.9, 0.99)
CODE_SUPPLIED = ["obs_space", "action_space", "tstep_encoder_type", "traj_encoder_type", "max_seq_len"]
_RETURNS, _SUBSETS = ("n_step", "lambda", "retrace"), ("update", "element")


@dataclass(frozen=True)
class Timesteps:
    """L timesteps of B sequences: states (B, L, D), and observations (B, L, ...)."""

    state: Tensor
    obs: dict[str, Tensor]


@dataclass(frozen=True)
class View:
    """A batch as losses see it.

    Attributes:
        batch: as it came.
        here: the timestep of every transition.
        following: the timestep after it, without gradient.
        mask: (B, L, 1) bool, True on the transitions that are learned from.
    """

    batch: Batch
    here: Timesteps
    following: Timesteps
    mask: Tensor

    @property
    def recorded(self) -> Tensor:
        """(B, L, 1, A) the actions that were taken, for all discounts."""
        return self.batch.actions[:, :, None]


@dataclass(frozen=True)
class Values:
    """What an agent makes of stored transitions, for each of G discounts; the last one acts.

    All but `mask` and `discounts` are (B, L, G, 1) float, in environment units, and meaningful only where
    the mask is True.

    Attributes:
        q: values of the recorded actions, means of the critics.
        v: values of what the policy would do.
        advantages: how much better the recorded actions are, as the actor's loss sees it.
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


class Judgement(NamedTuple):
    """Parts of `Values` as losses have them: q and v times the reward multiplier.

    q (B, L, C, G, 1), v (B, L, G, 1), advantages (B, L, G, 1), filter_weights (B, L, G, 1) or None.
    """

    q: Tensor
    v: Tensor
    advantages: Tensor
    filter_weights: Tensor | None = None


class OffPolicyAgent(BaseAgent, ABC):
    """Critics, and mostly an actor, over every timestep of a sequence, for several discount factors at once.

    Values of a discount add to those of the discount below it (see PopArt). Subclasses say in `losses` what
    is learned. Their settings are these and their own: what their constructor hands on by `**shared` belongs
    to its signature, for gin, checks of configs and people.

    Args:
        obs_space: see BaseAgent.
        action_space: see BaseAgent.
        tstep_encoder_type: see BaseAgent.
        traj_encoder_type: see BaseAgent.
        max_seq_len: see BaseAgent.
        gamma: discount of the acting policy.
        training_discounts: trained in addition to it (empty: none).
        training_discounts_continuous: these instead, if actions are continuous (Box); None for the same.
        reward_multiplier: rewards count times this; metrics are reported without it.
        tau: Polyak rate per update of the target networks.
        num_critics: ensemble size C.
        num_critics_td: critics that each target is made of, drawn without repetition.
        critic_subset: draw these once per "update", or anew for every "element" of the batch.
        returns: "n_step"; "lambda", uncorrected lambda-returns; "retrace", for discrete actions; or None for
            "retrace" if actions are discrete, else "lambda". Runs of "retrace" store with which probability
            each action was taken; where data do not say, its upper bound 1 stands for it (that is tree
            backup).
        n_step: of "n_step".
        trace_decay: lambda, of the other two; None for 0.9 of "retrace" and 0.8 of "lambda", which looks
            the less far ahead as nothing corrects it.
        burn_in: transitions at the begin of a window that only refresh memory, unless the episode begins
            there: they have no losses.
        num_actions_for_value_in_critic_loss: policy samples per expectation over MultiDiscrete or continuous
            actions, in targets.
        num_actions_for_value_in_actor_loss: those in the actor's loss.
        popart: normalise values per discount.
        popart_beta: rate of the moving averages behind that.
        popart_floor: least standard deviation of the targets that it reckons with, as a share of their root
            mean square; 0 for whatever they have.
        weigh_discounts: with popart, losses of a discount count by `discount_weights`; False for all alike.
        distribution_type: see BaseAgent.
        action_mask_key: see BaseAgent.
        pass_obs_keys_to_actor: see BaseAgent.
        pass_timestep_to_heads: see BaseAgent.
        action_memory_type: builds what remembers what came of each action, ActionMemory or None for none.
            There is one where heads can use it: actions are Discrete and as many as it is for, the policy is
            Categorical, the trajectory encoder has memory, and constructors of heads take memory_dim.
        actor_type: builds the policy head.
        critic_type: builds the critics.
    Raises: ValueError for impossible sizes, names or discounts.
    """

    has_actor: ClassVar[bool] = True
    has_target_actor: ClassVar[bool] = False
    is_pessimistic: ClassVar[bool] = True  # the minimum of the critics in targets, or their mean

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box,
        tstep_encoder_type: Callable[..., TstepEncoder],
        traj_encoder_type: Callable[..., TrajEncoder],
        max_seq_len: int,
        *,
        gamma: float = 0.999,
        training_discounts: Sequence[float] = TRAINING_DISCOUNTS,
        training_discounts_continuous: Sequence[float] | None = None,
        reward_multiplier: float = 10.0,
        tau: float = 0.03,
        num_critics: int = 4,
        num_critics_td: int = 2,
        critic_subset: str = "update",
        returns: str | None = "n_step",
        n_step: int = 1,
        trace_decay: float | None = None,
        burn_in: int = 0,
        num_actions_for_value_in_critic_loss: int = 1,
        num_actions_for_value_in_actor_loss: int = 1,
        popart: bool = True,
        popart_beta: float = 5e-4,
        popart_floor: float = 0.1,
        weigh_discounts: bool = True,
        distribution_type: DistributionType | str | None = None,
        action_mask_key: str | None = None,
        pass_obs_keys_to_actor: Sequence[str] | None = None,
        pass_timestep_to_heads: bool = False,
        action_memory_type: Callable[..., ActionMemory] | None = ActionMemory,
        actor_type: Callable[..., nn.Module] = Actor,
        critic_type: Callable[..., CriticEnsemble] = CriticEnsemble,
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
        if training_discounts_continuous is not None and isinstance(action_space, spaces.Box):
            training_discounts = training_discounts_continuous
        discounts = [*training_discounts, gamma]
        self.num_critics_td, self.n_step, self.tau = num_critics_td, n_step, tau
        if returns is None:
            returns = "retrace" if self.is_discrete else "lambda"
        if trace_decay is None:
            trace_decay = 0.9 if returns == "retrace" else 0.8
        self.critic_subset, self.returns, self.trace_decay = critic_subset, returns, trace_decay
        self.reward_multiplier = reward_multiplier
        self.num_actions_for_value_in_critic_loss = num_actions_for_value_in_critic_loss
        self.num_actions_for_value_in_actor_loss = num_actions_for_value_in_actor_loss
        self.burn_in, self.weigh_discounts = burn_in, weigh_discounts
        self._check_settings(num_critics, discounts)
        self.discounts: Tensor
        column = torch.tensor(discounts, dtype=torch.float32)[:, None]
        self.register_buffer("discounts", column, persistent=False)
        width, num_discounts = self.state_dim, len(discounts)
        if self.actor_obs_keys and not self.has_actor:
            name = type(self).__name__
            raise ValueError(
                f"{name}.pass_obs_keys_to_actor is {list(self.actor_obs_keys)}, but {name} has no actor. "
                f"Fix: leave {name}.pass_obs_keys_to_actor out."
            )
        has_all_values = isinstance(action_space, spaces.Discrete)  # one output per action
        heads = [critic_type, actor_type] if self.has_actor else [critic_type]
        self.action_memory = self._memory_of_actions(action_memory_type, heads)
        of_memory = {} if self.action_memory is None else {"memory_dim": self.action_memory.width}
        if self.has_actor:
            self.actor = actor_type(
                self.actor_dim, self.action_dim, num_discounts, self.distribution, **of_memory
            )
        self.critics = critic_type(
            width, self.action_dim, num_discounts, has_all_values, num_critics=num_critics, **of_memory
        )
        if self.has_target_actor:
            self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.popart = PopArt(discounts, beta=popart_beta, floor=popart_floor, enabled=popart)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = vars(cls).get("__init__")
        parent: Any = cls.__mro__[1]
        base = parent.__init__
        # A base class that gin has wrapped gets its settings by its own name, which must not be given twice.
        if own is not None and inspect.unwrap(base) is base:
            _show_settings_of_base(own, base)

    def _memory_of_actions(
        self, kind: Callable[..., ActionMemory] | None, heads: Sequence[Callable[..., nn.Module]]
    ) -> ActionMemory | None:
        """What remembers what came of each action, or None where heads could make nothing of it."""
        can_be_read = (
            isinstance(self.action_space, spaces.Discrete)
            and self.distribution is Categorical
            and not isinstance(self.traj_encoder, MemorylessTrajEncoder)
            and all("memory_dim" in inspect.signature(head).parameters for head in heads)
        )
        if kind is None or not can_be_read:
            return None
        with torch.random.fork_rng(devices=[]):  # what follows begins as without it
            memory = kind(self.tstep_encoder.emb_dim, self.action_dim, self.max_seq_len)
        return memory if memory.is_for_these else None

    @abstractmethod
    def losses(self, view: View, with_metrics: bool) -> LossTerms:
        """The losses of all transitions; moves the statistics of targets in training mode."""

    def policy(self, state: Tensor) -> PolicyDistribution:
        return self.distribution(self.actor(state).params[..., -1, :])

    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        if self.returns != "retrace":
            return super().act(obs, rl2s, time_idxs, hidden_state, sample)
        return ActOutput(*self._act(obs, rl2s, time_idxs, hidden_state, sample))

    def _said_of(self, policy: PolicyDistribution, sample: bool) -> dict[str, Tensor]:
        if self.returns != "retrace":
            return {}
        probs: Tensor = cast(Any, policy).probs  # as all discrete ones have
        return {"action_probs": probs if sample else F.one_hot(policy.act(False), probs.shape[-1]).float()}

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        view = self.view(batch)
        terms, weights = self.losses(view, with_metrics), self.discount_weights
        if weights is not None:
            terms = replace(terms, actor=terms.actor * weights, critic=terms.critic * weights)
        if view.mask is batch.mask:
            return terms
        kept = view.mask[..., None]
        extra = {name: loss * fit_mask(view.mask, loss) for name, loss in terms.extra.items()}
        return replace(terms, actor=terms.actor * kept, critic=terms.critic * kept[..., None], extra=extra)

    @property
    def discount_weights(self) -> Tensor | None:
        """(G, 1) what losses of each discount g count, as a share of the largest; None for all alike.

        ((1 - g) sigma_g)^2 where every timestep pays, with sigma_g the deviation of the targets, as (1 - g)
        makes a mean reward of a return. What discounts share then learns from those whose returns tell
        actions apart. If all count alike and an action pays at once, chance makes most of a return over a
        long horizon, and recall is learned late or not at all (docs/choices.md). Where rewards are rare there
        is no chance of others, and horizons that hold one count alike (see PopArt.per_reward).
        """
        if not (self.weigh_discounts and self.popart.enabled):
            return None
        deviation = self.popart.per_reward.float() * self.popart.scale
        return (deviation / deviation.max()).square()

    def view(self, batch: Batch) -> View:
        """Encode a batch."""
        state = self.encode(batch)
        here, following = state[:, :-1], state[:, 1:].detach()
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
        return View(batch, Timesteps(here, before), Timesteps(following, after), mask)

    def policies(self, actor: nn.Module, at: Timesteps) -> PolicyDistribution:
        """One policy per discount, over (B, L, G, A)."""
        return self.restrict(actor(self.actor_input(at.state, at.obs)), at.obs)

    # --- values, in environment units times the reward multiplier -------------------------------------------

    def all_values(self, critics: Any, state: Tensor) -> Tensor:
        """Values (..., C, G, A) of all discrete actions in states (..., D)."""
        return self.popart.value(critics(state))

    def policy_values(
        self, critics: Any, state: Tensor, policy: PolicyDistribution, num_samples: int | None = None
    ) -> Tensor:
        """Values (B, L, C, G, 1) of the policy's actions: exact mean if Discrete, else that of samples.

        num_samples: None for num_actions_for_value_in_critic_loss.
        """
        if isinstance(policy, Categorical):
            return expectation(self.all_values(critics, state), policy.probs)
        num_samples = num_samples or self.num_actions_for_value_in_critic_loss
        return self.own_values(critics, state, self.draw(policy, num_samples))

    @staticmethod
    def draw(policy: PolicyDistribution, num_samples: int) -> Tensor:
        """(K, B, L, G, A) samples of policies, within what actions can be."""
        actions = torch.stack([policy.sample() for _ in range(num_samples)])
        return actions if policy.is_bounded else actions.clamp(-1.0, 1.0)

    def own_values(self, critics: Any, state: Tensor, actions: Tensor) -> Tensor:
        """Values (B, L, C, G, 1) of actions (K, B, L, G, A): means over K, each for its discount."""
        values = self.popart.value(critics(state, rearrange(actions, "k b l g a -> b l (k g) a")))
        # g2 counts the actions' discounts, g those of the values: the critic of g judges the action of g
        values = rearrange(values, "b l (k g2) c g 1 -> b l k c g2 g", g2=len(self.discounts))
        sampled: Tensor = reduce(values.diagonal(dim1=-2, dim2=-1), "b l k c g -> b l c g 1", "mean")
        return sampled

    def recorded_values(self, critics: Any, state: Tensor, actions: Tensor) -> Tensor:
        """Values (B, L, C, G, 1) of actions (B, L, 1, A)."""
        if isinstance(self.action_space, spaces.Discrete):
            return expectation(self.all_values(critics, state), actions)
        return self.popart.value(critics(state, actions).squeeze(2))

    def values_of_both(
        self,
        critics: Any,
        state: Tensor,
        policy: PolicyDistribution,
        actions: Tensor,
        num_samples: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Of the policy and of recorded actions, as the two above, in one pass if it tells of all actions."""
        if isinstance(policy, Categorical):
            values = self.all_values(critics, state)
            return expectation(values, policy.probs), expectation(values, actions)
        of_policy = self.policy_values(critics, state, policy, num_samples)
        return of_policy, self.recorded_values(critics, state, actions)

    @torch.no_grad()
    def get_values(self, batch: Batch) -> Values:
        """Q, V, advantages and weights of imitation of stored transitions, by the critics that learn.

        They are computed in evaluation mode, regardless of the agent's mode. Values of MultiDiscrete and
        continuous actions are those of num_actions_for_value_in_actor_loss samples, drawn from torch's
        generator.
        """
        was_training = self.training
        self.eval()
        try:
            q, v, advantages, weights = self.judge(self.view(batch))
        finally:
            self.train(was_training)
        q, v = q / self.reward_multiplier, v / self.reward_multiplier
        deviation = q.std(2, correction=int(q.shape[2] > 1))
        return Values(q.mean(2), v, advantages, weights, deviation, batch.mask, self.discounts)

    def judge(self, view: View) -> Judgement:
        """Compute `get_values`; an agent whose losses treat transitions differently overrides this."""
        policy, state = self.policies(self.actor, view.here), view.here.state
        num_samples = self.num_actions_for_value_in_actor_loss
        v, q = self.values_of_both(self.critics, state, policy, view.recorded, num_samples)
        return Judgement(q, v.mean(2), (q - v).mean(2) / self.reward_multiplier)

    def need_gradient_of_samples(self, remedy: str) -> None:
        """Raise ValueError for a policy whose samples carry no gradient; remedy: a setting without that."""
        kind: Any = self.distribution
        if not getattr(kind, "has_gradient", True):
            name = type(self).__name__
            raise ValueError(
                f"Samples of {kind.__name__} carry no gradient, which the loss of {name} needs. "
                f"Fix: choose another {name}.distribution_type, or bind {name}.{remedy}."
            )

    # --- targets -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def policy_targets(self, view: View, policy: PolicyDistribution, bonus: Tensor | None = None) -> Tensor:
        """(B, L, G, 1) targets for a policy at the following timesteps, by the target critics.

        bonus: (B, L, G, 1), added to the values of these timesteps.
        """
        state = view.following.state
        critics, reduced = self.drawn_critics(state)
        added = 0.0 if bonus is None else bonus[:, :, None]
        if self.returns != "retrace":
            return self.returns_from(view, reduced(self.policy_values(critics, state, policy) + added))
        none = torch.zeros_like(view.recorded[:, :1])
        actions = torch.cat([view.recorded[:, 1:], none], dim=1)
        values, q = self.values_of_both(critics, state, policy, actions)
        log_ratio = policy.log_prob(actions)
        if (taken := view.batch.log_probs) is not None:
            behavior = torch.cat([taken[:, 1:], torch.zeros_like(taken[:, :1])], dim=1)
            log_ratio = log_ratio - behavior.nan_to_num(nan=0.0)[:, :, None]
        traces = self.trace_decay * log_ratio.clamp(max=0.0).exp()
        # Each critic is corrected by its own values: the least of several is lower for one action than for a
        # mean of actions, and every step would add the difference.
        rewards, dones, mask = (x[:, :, None] for x in self._steps(view))
        steps = (rewards, dones, mask, values + added, self.discounts)
        return reduced(retrace_targets(*steps, next_q=q, next_traces=traces[:, :, None]))

    @torch.no_grad()
    def returns_from(self, view: View, next_values: Tensor) -> Tensor:
        """(B, L, G, 1) returns that bootstrap from values (B, L, G, 1) of the following timesteps."""
        steps = (*self._steps(view), next_values, self.discounts)
        if self.returns == "lambda":
            return lambda_returns(*steps, trace_decay=self.trace_decay)
        return n_step_targets(*steps, n_step=self.n_step)

    def _steps(self, view: View) -> tuple[Tensor, Tensor, Tensor]:
        batch = view.batch
        rewards = self.reward_multiplier * batch.rews[..., None]
        return rewards, batch.dones[..., None], batch.mask[..., None]

    def drawn_critics(self, state: Tensor) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
        """Target critics for states (B, L, D), and what makes one value (B, L, G, 1) of their values."""

        def of_all(q: Tensor) -> Tensor:
            return q.amin(2) if self.is_pessimistic else q.mean(2)

        num_critics = self.target_critics.num_critics
        if self.num_critics_td == num_critics:
            return self.target_critics, of_all
        if self.critic_subset == "update":
            members = torch.randperm(num_critics, device=state.device)[: self.num_critics_td]
            return self.target_critics.frozen(members), of_all
        chances = torch.rand(*state.shape[:2], num_critics, len(self.discounts), 1, device=state.device)
        subset = chances.argsort(2)[:, :, : self.num_critics_td]
        return self.target_critics, lambda q: of_all(q.gather(2, subset))

    def critic_errors(self, values: Tensor, targets: Tensor) -> Tensor:
        """(B, L, C, G, 1) squared differences of values from targets (B, L, G, 1), at unit scale."""
        return ((values - targets[:, :, None]) / self.popart.scale).square()

    def gather_targets(self, targets: Tensor, view: View) -> None:
        """Let the scale of values follow the targets, and where they begin the rewards, in training mode."""
        if self.training:
            self.popart.gather(targets, view.mask)
            self.popart.gather_rewards(*self._steps(view))

    # --- figures -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def figures(
        self,
        view: View,
        *,
        q: Tensor,
        targets: Tensor,
        policy: PolicyDistribution | None = None,
        advantages: Tensor | None = None,
        filter_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Figures that all agents have; those that are there per discount are plain for the acting one.

        Args:
            view: the batch.
            q: (B, L, C, G, 1) of recorded actions, in environment units times the reward multiplier.
            targets: (B, L, G, 1), likewise.
            policy: over (B, L, G, A).
            advantages: (B, L, G, 1), environment units.
            filter_weights: (B, L, G, 1), of imitation.
        """
        mask, mask_g = view.mask, view.mask[..., None]
        q, y = q / self.reward_multiplier, targets / self.reward_multiplier
        per_discount = {"q": q.mean(2), "td_target": y}
        found = {"reward": masked_mean(view.batch.rews, mask)}
        found["q_ensemble_std"] = q.new_zeros(())
        if q.shape[2] > 1:
            found["q_ensemble_std"] = masked_mean(q[..., -1, :].std(2), mask)
        found["td_target_min"] = y[:, :, -1].where(mask, torch.inf).min()
        found["td_target_max"] = y[:, :, -1].where(mask, -torch.inf).max()
        if advantages is not None:
            per_discount["advantage"] = advantages
            found["filter_approved"] = masked_mean((advantages > 0).float(), mask_g)
        if filter_weights is not None:
            found["filter_weight"] = masked_mean(filter_weights, mask_g)
        places = mask.flatten()
        if policy is not None:
            per_discount["policy_entropy"] = policy.entropy()
            log_probs = policy.log_prob(view.recorded)
            found["action_log_prob"] = masked_mean(log_probs[:, :, -1], mask)
            if isinstance(self.actor, Actor):
                layers = self.actor.activations(self.actor_input(view.here.state, view.here.obs))
                found["dead_units/actor"] = dead_units([layer.flatten(0, 1) for layer in layers], places)
        actions = None if self.critics.from_action is None else view.recorded
        layers, _ = self.critics.activations(view.here.state, actions)
        found["dead_units/critics"] = dead_units(layers, places)
        scales = {"popart_mu": self.popart.mu, "popart_sigma": self.popart.sigma}
        for name, values in per_discount.items():
            scales[name] = values.where(mask_g, 0.0).sum((0, 1)) / mask.sum().clamp(min=1)
        for name, by_discount in scales.items():
            found[name] = by_discount[-1, 0].clone()
            for discount, value in zip(self.discounts[:, 0].tolist(), by_discount[:, 0], strict=True):
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

    def _check_settings(self, num_critics: int, discounts: Sequence[float]) -> None:
        name = type(self).__name__
        if not 1 <= self.num_critics_td <= num_critics:
            raise ValueError(
                f"num_critics_td is {self.num_critics_td}, but must lie between 1 and num_critics = "
                f"{num_critics}. Fix: bind {name}.num_critics_td or {name}.num_critics."
            )
        lowest = {
            "n_step": 1,
            "num_actions_for_value_in_critic_loss": 1,
            "num_actions_for_value_in_actor_loss": 1,
            "burn_in": 0,
        }
        for setting, least in lowest.items():
            if getattr(self, setting) < least:
                raise ValueError(
                    f"{setting} is {getattr(self, setting)}, but must be at least {least}. "
                    f"Fix: bind {name}.{setting} to such an integer."
                )
        if not all(0.0 <= g <= 1.0 for g in (*discounts, self.trace_decay)):
            raise ValueError(
                f"Discounts are {list(discounts)} and trace_decay is {self.trace_decay}, but must lie in "
                f"[0, 1]. Fix: bind {name}.gamma, {name}.training_discounts (or "
                f"training_discounts_continuous), {name}.trace_decay."
            )
        if self.returns not in _RETURNS or self.critic_subset not in _SUBSETS:
            raise ValueError(
                f"returns is {self.returns!r} and critic_subset {self.critic_subset!r}, but allowed are "
                f"{', '.join(map(repr, _RETURNS))} and {', '.join(map(repr, _SUBSETS))}. "
                f"Fix: bind {name}.returns and {name}.critic_subset to one of these."
            )
        if self.returns == "retrace" and not self.is_discrete:
            raise ValueError(
                f"returns is 'retrace', but the action space is {self.action_space}, whose actions have "
                f"densities, not probabilities. Fix: bind {name}.returns = 'lambda' or 'n_step'."
            )


def expectation(values: Tensor, probs: Tensor) -> Tensor:
    """(B, L, C, G, 1) means of values (B, L, C, G, A) by probabilities (B, L, G or 1, A) of discrete actions.

    One-hots of recorded actions are probabilities, too.
    """
    return (values * probs[:, :, None]).sum(-1, keepdim=True)


def _show_settings_of_base(own: Any, base: Any) -> None:
    """Put the keywords that a constructor hands on to that of its base class into its signature."""
    params = inspect.signature(own).parameters
    kept = {name: p for name, p in params.items() if p.kind is not p.VAR_KEYWORD}
    if len(kept) == len(params):
        return
    for name, p in inspect.signature(base).parameters.items():
        if p.kind is p.KEYWORD_ONLY:
            kept.setdefault(name, p)
    own.__signature__ = inspect.Signature(list(kept.values()))
    try:
        hints = get_type_hints(base)
    except NameError:  # something that only type checkers import
        hints = {}
    own.__annotations__ = hints | own.__annotations__
