"""Proximal policy optimisation on the same encoders as the off-policy agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ..data import RolloutBatch
from ..data.errors import check_choice
from ..nets import (
    DistributionType,
    PolicyDistribution,
    PolicyHead,
    TrajEncoder,
    TstepEncoder,
    ValueHead,
    ValueNorm,
)
from .base import CODE_SUPPLIED, ActOutput, LossTerms, under
from .imitation import Demonstrations, imitation_loss
from .on_policy import Evaluation, OnPolicyAgent
from .policies import ActionMask
from .ppo_loss import PPOLoss, kl_estimate, policy_metrics
from .sequence_model import SequenceModel, build_encoders

_VALUE_NORMS = ("none", "running", "popart")


@gin.configurable(denylist=CODE_SUPPLIED)
class PPOAgent(OnPolicyAgent):
    """A policy and a value function, on a shared sequence model or on one each.

    Log-probabilities, ratios, values and losses are float32, also in mixed precision.

    Source: Schulman et al. 2017, arXiv:1707.06347.

    Args:
        obs_space: see BaseAgent.
        action_space: see BaseAgent.
        tstep_encoder_type: see BaseAgent.
        traj_encoder_type: see BaseAgent.
        max_seq_len: see BaseAgent.
        share_encoder: one sequence model for both; otherwise the value function gets one of its own.
        actor_obs_keys: observations that the policy sees; None: all. Only without share_encoder.
        critic_obs_keys: observations that the value function sees; None: all. Only without share_encoder.
        value_norm: "none"; with "running" the value function predicts returns at unit scale; "popart" also
            preserves its values when that scale moves.
        value_norm_window: number of timesteps after which older returns fade from that scale.
        distribution_type: see BaseAgent; here None means Gaussian for Box spaces.
        action_mask_key: see BaseAgent.
        policy_head_type: builds the policy from states.
        value_head_type: builds the value function from states.
        loss_type: builds the objective.
    Raises: ValueError for settings that do not fit together.
    """

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box,
        tstep_encoder_type: Callable[..., TstepEncoder],
        traj_encoder_type: Callable[..., TrajEncoder],
        max_seq_len: int,
        *,
        share_encoder: bool = True,
        actor_obs_keys: Sequence[str] | None = None,
        critic_obs_keys: Sequence[str] | None = None,
        value_norm: str = "none",
        value_norm_window: float = 1e6,
        distribution_type: DistributionType | str | None = None,
        action_mask_key: str | None = None,
        policy_head_type: Callable[..., nn.Module] = PolicyHead,
        value_head_type: Callable[..., nn.Module] = ValueHead,
        loss_type: Callable[..., PPOLoss] = PPOLoss,
    ) -> None:
        _check_sharing(share_encoder, actor_obs_keys, critic_obs_keys)
        actor_space = _part_of(obs_space, actor_obs_keys, "actor_obs_keys")
        critic_space = _part_of(obs_space, critic_obs_keys, "critic_obs_keys")
        if distribution_type is None and isinstance(action_space, spaces.Box):
            distribution_type = "Gaussian"
        super().__init__(
            actor_space,
            action_space,
            tstep_encoder_type,
            traj_encoder_type,
            max_seq_len,
            distribution_type=distribution_type,
        )
        self.obs_space = obs_space
        if action_mask_key is not None:  # the mask may be an observation that the encoders do not see
            self.action_mask = ActionMask.of(
                action_mask_key, obs_space, action_space, "PPOAgent.action_mask_key"
            )
        self.factor_sizes: list[int] = []
        if isinstance(action_space, spaces.MultiDiscrete):
            self.factor_sizes = action_space.nvec.tolist()
        if not share_encoder:
            self.critic_tstep_encoder, self.critic_traj_encoder = build_encoders(
                tstep_encoder_type, traj_encoder_type, critic_space, 1 + self.action_dim, max_seq_len
            )
            critic = SequenceModel(self.critic_tstep_encoder, self.critic_traj_encoder)
            self.sequence_models = {"actor.": self.sequence_models[""], "critic.": critic}
        self.policy_head = policy_head_type(self.actor_dim, self.action_dim, self.distribution)
        self.value_head = value_head_type(self._models[-1].dim)  # the last model is the value function's
        self.loss = loss_type()
        check_choice("PPOAgent.value_norm", value_norm, _VALUE_NORMS)
        self.value_norm = ValueNorm(window=value_norm_window, enabled=value_norm != "none")
        self.rescales_output = value_norm == "popart"
        if self.rescales_output:
            _output_layer(self.value_head)  # raises if there is none

    # --- acting --------------------------------------------------------------------------------------------

    def policy(self, state: Tensor) -> PolicyDistribution:
        distribution: PolicyDistribution = self.policy_head(state)
        return distribution

    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        return ActOutput(*self._act_and_evaluate(obs, rl2s, time_idxs, hidden_state, sample))

    def _act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Act with the policy alone: the value function's memory does not change."""
        actor_memory, *others = hidden_state
        state, actor_memory = self._models[0].encode_timestep(obs, rl2s, time_idxs, actor_memory)
        policy = self.restrict(self.policy(state), obs)
        return self._env_actions(policy.sample() if sample else policy.mode()), (actor_memory, *others), {}

    def _act_and_evaluate(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        models, memories, states = self._models, list(hidden_state), []
        if not self.values_when_acting and models[-1].traj_encoder.context_len == 0:
            models = models[:1]  # nobody reads the values, and the value function has no memory to update
        for i, model in enumerate(models):
            state, memories[i] = model.encode_timestep(obs, rl2s, time_idxs, memories[i])
            states.append(state)
        policy = self.restrict(self.policy(states[0]), obs)
        samples = policy.sample() if sample else policy.mode()
        extras = {"log_probs": policy.log_prob(samples).float()}
        if len(models) == len(memories):
            extras["values"] = self.value_norm.value(self.value_head(states[-1]))
        if not policy.is_bounded:
            extras["samples"] = samples
        return self._env_actions(samples), tuple(memories), extras

    def _env_actions(self, samples: Tensor) -> Tensor:
        """Convert (N, A) one-hot or real samples to actions of the envs."""
        if self.factor_sizes:
            factors = torch.split(samples, self.factor_sizes, dim=-1)
            return torch.stack([factor.argmax(-1) for factor in factors], dim=-1)
        return samples.argmax(-1) if self.is_discrete else samples.clamp(-1.0, 1.0)

    # --- learning ------------------------------------------------------------------------------------------

    def evaluate(self, batch: RolloutBatch) -> Evaluation:
        was_training = self.training
        if was_training:
            self.eval()
        try:
            policy, outputs, _ = self._policy_and_values(batch)
        finally:
            if was_training:  # setting the mode of all modules costs as much as evaluating a small batch
                self.train()
        log_probs, entropy = policy.log_prob(batch.actions).float(), policy.entropy().float()
        return Evaluation(log_probs, self.value_norm.value(outputs), entropy, policy.params.float())

    def forward(  # type: ignore[override]
        self, batch: RolloutBatch | Demonstrations, with_metrics: bool = False
    ) -> LossTerms:
        if isinstance(batch, Demonstrations):
            return imitation_loss(self, batch, with_metrics)
        policy, outputs, states = self._policy_and_values(batch)
        old, mask = _OldPolicyOutputs(batch), batch.mask
        log_probs = policy.log_prob(batch.actions)
        entropy = policy.entropy() if with_metrics or self.loss.entropy_coef else None
        kl = None
        if with_metrics or self.loss.kind == "kl_penalty":
            kl = self.distribution(old.params).kl(policy)
        actor = self.loss.actor(log_probs, old.log_probs, old.advantages, entropy, kl)
        critic = self.loss.critic(outputs, self.value_norm(old.values), self.value_norm(old.returns))
        log_ratio = self.loss.log_ratio(log_probs.detach(), old.log_probs)
        metrics = {"kl": kl_estimate(log_ratio, mask)}
        if with_metrics and entropy is not None:
            metrics |= policy_metrics(log_ratio, entropy.detach(), self.loss.clip_eps, mask)
            if kl is not None:
                metrics["kl_exact"] = kl.detach().where(mask, 0.0).sum() / mask.sum().clamp(min=1)
        extra = self.extra_losses(batch, states)
        return LossTerms(actor[:, :, None], critic[:, :, None, None], metrics, extra)

    def extra_losses(self, batch: RolloutBatch, states: Sequence[Tensor]) -> dict[str, Tensor]:
        """Hook: auxiliary losses, see `LossTerms.extra`.

        states: (B, L, D) outputs of the policy's sequence model, and of the value function's if it has one.
        """
        return {}

    def update_value_statistics(self, returns: Tensor, mask: Tensor) -> None:
        self.value_norm.gather(returns, mask)
        self.value_norm.move(_output_layer(self.value_head) if self.rescales_output else None)

    def after_imitation(self) -> None:
        self.value_norm.move(_output_layer(self.value_head) if self.rescales_output else None)
        super().after_imitation()

    def after_rollout(self, kl: float) -> None:
        super().after_rollout(kl)
        self.loss.after_rollout(kl)

    def set_progress(self, progress: float) -> None:
        self.loss.set_progress(progress)

    def _policy_and_values(self, batch: RolloutBatch) -> tuple[PolicyDistribution, Tensor, list[Tensor]]:
        """The policy over (B, L, A), outputs (B, L, 1) of the value head, and `states`."""
        states = [  # without a mask, so that minibatches do not move the input statistics
            model.encode(
                batch,
                resets=batch.resets,
                start=None if batch.start is None else under(prefix, batch.start),
            )
            for prefix, model in self.sequence_models.items()
        ]
        outputs: Tensor = self.value_head(states[-1])
        return self.restrict(self.policy(states[0]), batch.obs), outputs.float(), states


class _OldPolicyOutputs:
    """Results of the evaluation pass and of advantage estimation for a batch; 0 where no step was taken.

    Raises: ValueError if something is missing.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        found: dict[str, Tensor] = {}
        no_step = ~batch.mask
        for name in ("log_probs", "values", "params", "advantages", "returns"):
            value = getattr(batch, name)
            if value is None:
                raise ValueError(
                    f"The rollout batch has no {name}, but the losses need them. Fix: add the results of "
                    "agent.evaluate() and GAE to the batch first, as PPOLearner does."
                )
            found[name] = value.masked_fill(no_step, 0.0)
        self.log_probs, self.values, self.params = found["log_probs"], found["values"], found["params"]
        self.advantages, self.returns = found["advantages"], found["returns"]


def _check_sharing(share_encoder: bool, *keys: Sequence[str] | None) -> None:
    """Raise ValueError if a shared encoder is to see different observations for policy and value function."""
    if share_encoder and any(part is not None for part in keys):
        raise ValueError(
            "actor_obs_keys and critic_obs_keys give the policy and the value function different "
            "observations, but PPOAgent.share_encoder is True. Fix: bind PPOAgent.share_encoder = False."
        )


def _part_of(obs_space: spaces.Dict, keys: Sequence[str] | None, setting: str) -> spaces.Dict:
    """The observations under `keys`."""
    if keys is None:
        return obs_space
    unknown = [key for key in keys if key not in obs_space.spaces]
    if unknown or not keys:
        raise ValueError(
            f"PPOAgent.{setting} names {unknown or 'nothing'}, but the environment offers "
            f"{sorted(obs_space.spaces)}. Fix: bind PPOAgent.{setting} to some of these names."
        )
    return spaces.Dict({key: obs_space[key] for key in keys})


def _output_layer(head: nn.Module) -> nn.Linear:
    """The layer that the values come from: the last linear one with a single output."""
    layers = [m for m in head.modules() if isinstance(m, nn.Linear) and m.out_features == 1]
    if not layers or layers[-1].bias is None:
        raise ValueError(
            f"{type(head).__name__} does not end in a linear layer with bias and a single output, which "
            "PPOAgent.value_norm = 'popart' has to rescale. Fix: bind PPOAgent.value_norm = 'running'."
        )
    return layers[-1]
