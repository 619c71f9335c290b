"""Proximal policy optimisation on the same encoders as the off-policy agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ..data import RolloutBatch
from ..nets import (
    PolicyDistribution,
    PolicyHead,
    TanhGaussian,
    TrajEncoder,
    TstepEncoder,
    ValueHead,
    ValueNorm,
)
from .base import ActOutput, LossTerms
from .imitation import Demonstrations, imitation_loss
from .on_policy import Evaluation, OnPolicyAgent
from .ppo_loss import PPOLoss
from .ppo_metrics import kl_estimate, policy_metrics, value_metrics
from .ppo_settings import check_sharing, chosen_distribution, is_normed, numeric_keys, output_layer, part_of


@gin.configurable(
    denylist=["obs_space", "action_space", "tstep_encoder_type", "traj_encoder_type", "max_seq_len"]
)
class PPOAgent(OnPolicyAgent):
    """A policy and a value function, on a shared sequence model or on one each.

    Log-probabilities, ratios, values and losses are float32 in mixed precision too.

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
        value_norm: "none"; "running" has the value function predict returns at unit scale; "popart" does too,
            and keeps its values when that scale moves.
        value_norm_window: timesteps after which older returns fade from that scale.
        distribution_type: of the policy; None: Categorical, MultiCategorical or Gaussian, as the space asks.
            "TanhGaussian" for Box spaces (by name in gin), or any class of that kind.
        policy_head_type: builds the policy from states.
        value_head_type: builds the value function from states.
        loss_type: builds the objective.
    Raises: ValueError for settings that do not fit together.
    """

    critic_tstep_encoder: TstepEncoder | None
    critic_traj_encoder: TrajEncoder | None

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
        distribution_type: type[PolicyDistribution] | str | None = None,
        policy_head_type: Callable[..., nn.Module] = PolicyHead,
        value_head_type: Callable[..., nn.Module] = ValueHead,
        loss_type: Callable[..., PPOLoss] = PPOLoss,
    ) -> None:
        check_sharing(share_encoder, actor_obs_keys, critic_obs_keys)
        actor_space = part_of(obs_space, actor_obs_keys, "actor_obs_keys")
        critic_space = part_of(obs_space, critic_obs_keys, "critic_obs_keys")
        super().__init__(actor_space, action_space, tstep_encoder_type, traj_encoder_type, max_seq_len)
        self.obs_space = obs_space
        self.actor_obs_keys, self.critic_obs_keys = numeric_keys(actor_space), numeric_keys(critic_space)
        if (chosen := chosen_distribution(distribution_type, action_space)) is not None:
            self.distribution = chosen
        self.factor_sizes: list[int] = []
        if isinstance(action_space, spaces.MultiDiscrete):
            self.factor_sizes = action_space.nvec.tolist()
        self.critic_tstep_encoder = self.critic_traj_encoder = None
        if not share_encoder:
            self.critic_tstep_encoder = tstep_encoder_type(critic_space, 1 + self.action_dim)
            self.critic_traj_encoder = traj_encoder_type(self.critic_tstep_encoder.emb_dim, max_seq_len)
        width, critic_width = (
            self.traj_encoder.emb_dim,
            (self.critic_traj_encoder or self.traj_encoder).emb_dim,
        )
        self.policy_head = policy_head_type(width, self.action_dim, self.distribution)
        self.value_head = value_head_type(critic_width)
        self.loss = loss_type()
        self.value_norm = ValueNorm(window=value_norm_window, enabled=is_normed(value_norm))
        self.rescales_output = value_norm == "popart"
        if self.rescales_output:
            output_layer(self.value_head)  # may say that there is none

    # --- acting --------------------------------------------------------------------------------------------

    def policy(self, state: Tensor) -> PolicyDistribution:
        distribution: PolicyDistribution = self.policy_head(state)
        return distribution

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
        actor = self.traj_encoder.init_hidden_state(num_envs, device)
        if self.critic_traj_encoder is None:
            return actor
        return actor, self.critic_traj_encoder.init_hidden_state(num_envs, device)

    def reset_hidden_state(self, hidden_state: Any, ended: Tensor) -> Any:
        if self.critic_traj_encoder is None:
            return self.traj_encoder.reset_hidden_state(hidden_state, ended)
        actor, critic = hidden_state
        actor = self.traj_encoder.reset_hidden_state(actor, ended)
        return actor, self.critic_traj_encoder.reset_hidden_state(critic, ended)

    @property
    def context_len(self) -> int | None:
        lengths = [self.traj_encoder.context_len]
        if self.critic_traj_encoder is not None:
            lengths.append(self.critic_traj_encoder.context_len)
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def export_hidden_state(self, state: Any) -> dict[str, Tensor]:
        if self.critic_traj_encoder is None:
            return self.traj_encoder.export_hidden_state(state)
        actor = self.traj_encoder.export_hidden_state(state[0])
        critic = self.critic_traj_encoder.export_hidden_state(state[1])
        return _with_prefixes(actor, critic)

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        if self.critic_traj_encoder is None:
            return self.traj_encoder.import_hidden_state(rows)
        actor = self.traj_encoder.import_hidden_state(_under("actor.", rows))
        return actor, self.critic_traj_encoder.import_hidden_state(_under("critic.", rows))

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        embedded = self.tstep_encoder({key: batch.obs[key] for key in self.actor_obs_keys}, batch.rl2s)
        rows = self.traj_encoder.remember(embedded, batch.time_idxs, batch.resets)
        if self.critic_tstep_encoder is None or self.critic_traj_encoder is None:
            return rows
        embedded = self.critic_tstep_encoder({k: batch.obs[k] for k in self.critic_obs_keys}, batch.rl2s)
        critic = self.critic_traj_encoder.remember(embedded, batch.time_idxs, batch.resets)
        return _with_prefixes(rows, critic)

    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        return ActOutput(*self._act_and_judge(obs, rl2s, time_idxs, hidden_state, sample))

    def compile_acting(self, backend: str | Callable[..., Any] = "inductor") -> None:
        super().compile_acting(backend)
        if self.critic_traj_encoder is not None:
            self.critic_traj_encoder.use_static_shapes()

    def _act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any]:
        """The policy's part alone: the value function's memory stays as it is."""
        is_shared = self.critic_traj_encoder is None
        state, hidden = self._actor_step(obs, rl2s, time_idxs, hidden_state if is_shared else hidden_state[0])
        policy = self.policy(state)
        actions = self._env_actions(policy.sample() if sample else policy.mode())
        return actions, hidden if is_shared else (hidden, hidden_state[1])

    def _act_and_judge(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        critic_state: Tensor | None = None
        if self.critic_tstep_encoder is None or self.critic_traj_encoder is None:
            state, hidden_state = self._actor_step(obs, rl2s, time_idxs, hidden_state)
            critic_state = state
        else:
            state, actor_hidden = self._actor_step(obs, rl2s, time_idxs, hidden_state[0])
            critic_hidden = hidden_state[1]
            if self.values_when_acting or self.critic_traj_encoder.context_len != 0:
                seen = {key: obs[key][:, None] for key in self.critic_obs_keys}
                embedded = self.critic_tstep_encoder(seen, rl2s[:, None])
                encoded, critic_hidden = self.critic_traj_encoder(embedded, time_idxs[:, None], critic_hidden)
                critic_state = encoded[:, 0]
            hidden_state = actor_hidden, critic_hidden
        policy = self.policy(state)
        samples = policy.sample() if sample else policy.mode()
        extras = {"log_probs": policy.log_prob(samples).float()}
        if critic_state is not None:
            extras["values"] = self.value_norm.value(self.value_head(critic_state))
        if not (self.is_discrete or isinstance(policy, TanhGaussian)):
            extras["samples"] = samples
        return self._env_actions(samples), hidden_state, extras

    def _actor_step(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any
    ) -> tuple[Tensor, Any]:
        """The policy's state (N, D) after one timestep, and its memory."""
        embedded = self.tstep_encoder({key: obs[key][:, None] for key in self.actor_obs_keys}, rl2s[:, None])
        state, hidden_state = self.traj_encoder(embedded, time_idxs[:, None], hidden_state)
        return state[:, 0], hidden_state

    def _env_actions(self, samples: Tensor) -> Tensor:
        """(N, A) one-hot or real samples -> what the envs take."""
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
            policy, outputs = self._judge(batch)
        finally:
            if was_training:  # setting the mode of all modules takes as long as judging a small batch
                self.train()
        log_probs, entropy = policy.log_prob(batch.actions).float(), policy.entropy().float()
        return Evaluation(log_probs, self.value_norm.value(outputs), entropy, policy.params.float())

    def forward(  # type: ignore[override]
        self, batch: RolloutBatch | Demonstrations, with_metrics: bool = False
    ) -> LossTerms:
        if isinstance(batch, Demonstrations):
            return imitation_loss(self, batch, with_metrics)
        policy, outputs = self._judge(batch)
        old, mask = _Evaluated(batch), batch.mask
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
            values = self.value_norm.value(outputs.detach())
            metrics |= value_metrics(values, old.values, old.returns, critic.detach(), mask)
            if kl is not None:
                metrics["kl_exact"] = kl.detach().where(mask, 0.0).sum() / mask.sum().clamp(min=1)
        return LossTerms(actor[:, :, None], critic[:, :, None, None], metrics)

    def gather_statistics(self, batch: RolloutBatch) -> None:
        seen = {key: batch.obs[key] for key in self.actor_obs_keys}
        self.tstep_encoder.gather_statistics(seen, batch.rl2s, batch.mask)
        if self.critic_tstep_encoder is not None:
            seen = {key: batch.obs[key] for key in self.critic_obs_keys}
            self.critic_tstep_encoder.gather_statistics(seen, batch.rl2s, batch.mask)

    def update_values_statistics(self, returns: Tensor, mask: Tensor) -> None:
        self.value_norm.gather(returns, mask)
        self.value_norm.move(output_layer(self.value_head) if self.rescales_output else None)

    def after_imitation(self) -> None:
        self.value_norm.move(output_layer(self.value_head) if self.rescales_output else None)
        super().after_imitation()

    def after_rollout(self, kl: float) -> None:
        super().after_rollout(kl)
        self.loss.after_rollout(kl)

    def set_progress(self, progress: float) -> None:
        self.loss.set_progress(progress)

    def _judge(self, batch: RolloutBatch) -> tuple[PolicyDistribution, Tensor]:
        """The policy over (B, L, A), and values (B, L, 1) in units of the value head."""
        is_shared = self.critic_traj_encoder is None
        rows = batch.start if is_shared else _under("actor.", batch.start)
        state = _encode(self.tstep_encoder, self.traj_encoder, self.actor_obs_keys, batch, rows)
        critic_state = state
        if self.critic_tstep_encoder is not None and self.critic_traj_encoder is not None:
            rows = _under("critic.", batch.start)
            critic_state = _encode(
                self.critic_tstep_encoder, self.critic_traj_encoder, self.critic_obs_keys, batch, rows
            )
        outputs: Tensor = self.value_head(critic_state)
        return self.policy(state), outputs.float()


class _Evaluated:
    """What the evaluation pass and advantage estimation found for a batch, with 0 where no step was taken.

    Raises: ValueError if something is missing.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        found: dict[str, Tensor] = {}
        no_step = ~batch.mask
        for name in ("log_probs", "values", "params", "advantages", "returns"):
            value = getattr(batch, name)
            if value is None:
                raise ValueError(
                    f"The rollout batch has no {name}, but the losses need them. "
                    "Fix: put what agent.evaluate() and GAE return into the batch first, as PPOLearner does."
                )
            found[name] = value.masked_fill(no_step, 0.0)
        self.log_probs, self.values, self.params = found["log_probs"], found["values"], found["params"]
        self.advantages, self.returns = found["advantages"], found["returns"]


def _encode(
    tstep_encoder: TstepEncoder,
    traj_encoder: TrajEncoder,
    keys: Sequence[str],
    batch: RolloutBatch,
    rows: dict[str, Tensor] | None,
) -> Tensor:
    """States (B, L, D). No mask: that would move the input statistics with every minibatch."""
    embedded = tstep_encoder({key: batch.obs[key] for key in keys}, batch.rl2s)
    if rows is not None:
        return traj_encoder.encode_from(embedded, batch.time_idxs, rows, batch.resets)
    state: Tensor = traj_encoder(embedded, batch.time_idxs, resets=batch.resets)[0]
    return state


def _with_prefixes(actor: dict[str, Tensor], critic: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exported states of both encoders as one."""
    return {f"actor.{k}": v for k, v in actor.items()} | {f"critic.{k}": v for k, v in critic.items()}


def _under(prefix: str, rows: dict[str, Tensor] | None) -> Any:
    """The entries whose names begin with `prefix`, without it; None for None."""
    if rows is None:
        return None
    return {name[len(prefix) :]: row for name, row in rows.items() if name.startswith(prefix)}
