"""On-policy training: from a full rollout to several passes of updates on shuffled sequences."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import gin
import numpy as np
import torch
from torch import Tensor, nn

from ...agents import GAE, AdvantageNorm, OnPolicyAgent, RewardNormalizer
from ...data import RolloutBatch, Sink
from ...data.errors import check_choice, check_count, check_number
from ...nets import summed_over_processes
from ..contracts import RunContext, Stateful, Trainer
from ..learn.learner import Learner, log_metrics, stacked
from ..process.distributed import StopPoller, merge_metrics, merged
from ..process.rng import derive_seed
from . import sequences
from .buffer import CollectedRollout, RolloutBuffer, check_rollout, join
from .diagnostics import disagreement, max_rounding_error, means_over_processes, value_fit_metrics
from .kl_adaptive import KLAdaptiveLR
from .old_policy import old_policy_outputs, refreshed_states
from .sequences import GatherIndices, Pieces, Results, RolloutTensors

logger = logging.getLogger("loxodon")
_STEPS_WITHOUT_GRADIENT = 2  # at least this many fit in the memory of one with gradient
# In nats; far above the float32 error at a divergence of 0, far below the effect of any dropout.
_KL_ROUNDING = 1e-5
_PRECISIONS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@gin.configurable(
    denylist=[
        "agent",
        "learner",
        "ctx",
        "num_steps",
        "num_envs",
        "max_seq_len",
        "cast",
        "batches_per_update",
        "first_epoch",
        "keeps_trajectories",
    ]
)
class PPOLearner(Trainer):
    """Trains an on-policy agent on one rollout after the other.

    A rollout is cut into sequences of single episodes. One pass without gradient computes log-probs, values
    and the values of the following timesteps; GAE gives advantages. Then `update_epochs` passes over all
    sequences follow, in minibatches that are drawn anew each time. Sequences continue from the hidden states
    that acted.

    Args:
        agent: acts and learns.
        learner: applies updates.
        ctx: context of the run.
        num_steps: T, steps of a rollout in every env.
        num_envs: N, the number of envs of this process.
        max_seq_len: setting of the run.
        cast: makes the autocast context of the forward pass.
        batches_per_update: number of parts of a minibatch whose gradients are added up.
        first_epoch: first epoch with updates.
        keeps_trajectories: rollouts are also stored in files, with the values computed while acting.
        update_epochs: number of passes over each rollout.
        minibatches: number of minibatches of each pass, with about equally many steps.
        chunk_len: steps in the longest sequence; None for as many as T and max_seq_len allow. Agents without
            memory always train on single steps.
        burn_in: timesteps before a sequence that are read again, without loss, so that its hidden state comes
            from the present weights. For recurrent encoders.
        context_mode: start of a sequence for an encoder with a limited context. "episode" reads the episode's
            earlier timesteps again, as far as they matter (exact after each update). "segment" continues from
            the keys and values that acted (cheaper; they age during the updates).
        target_kl: updates stop when the minibatch KL divergence from the collecting policy exceeds this, in
            nats (k3 estimate, all processes); that update is skipped. None disables it.
        stop_scope: what `target_kl` stops: only this "batch", this "epoch", or the whole "update" of this
            rollout.
        recompute_old: train against the log-probs and values of the pass without gradient instead of those
            computed while acting.
        advantage_estimator: makes the estimator.
        advantage_norm: makes the normaliser of advantages.
        reward_normalizer: makes the normaliser of rewards, such as @RewardNormalizer; None for none.
        lr_adapter: makes the adapter of the learning rate, such as @KLAdaptiveLR; None for none.
    Raises: ValueError for settings that do not work together.
    Source: Schulman et al. 2017, arXiv:1707.06347.
    """

    explores = False

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        agent: OnPolicyAgent,
        learner: Learner,
        ctx: RunContext,
        num_steps: int,
        num_envs: int,
        max_seq_len: int,
        cast: Callable[[], AbstractContextManager[Any]],
        batches_per_update: int,
        first_epoch: int = 0,
        keeps_trajectories: bool = False,
        *,
        update_epochs: int = 4,
        minibatches: int = 4,
        chunk_len: int | None = None,
        burn_in: int = 0,
        context_mode: str = "episode",
        target_kl: float | None = None,
        stop_scope: str = "update",
        recompute_old: bool = True,
        advantage_estimator: Callable[[], GAE] = GAE,
        advantage_norm: Callable[[], AdvantageNorm] = AdvantageNorm,
        reward_normalizer: Callable[[], RewardNormalizer] | None = None,
        lr_adapter: Callable[[], KLAdaptiveLR] | None = None,
    ) -> None:
        self.agent, self.learner, self.ctx, self.accelerator = agent, learner, ctx, ctx.accelerator
        self.cast, self.first_epoch = cast, first_epoch
        self.batches_per_update, self.num_steps = batches_per_update, num_steps
        self.chunk_len = min(num_steps, max_seq_len) if chunk_len is None else chunk_len
        self.update_epochs, self.minibatches, self.burn_in = update_epochs, minibatches, burn_in
        self.context_mode, self.target_kl, self.stop_scope = context_mode, target_kl, stop_scope
        self.recompute_old = recompute_old
        self._check_settings(num_envs, max_seq_len)
        self.timesteps_per_forward = num_envs * num_steps // minibatches
        self.advantage_estimator, self.advantage_norm = advantage_estimator(), advantage_norm()
        self.reward_normalizer = None if reward_normalizer is None else reward_normalizer()
        self.lr_adapter = None if lr_adapter is None else lr_adapter()
        agent.values_when_acting = keeps_trajectories or not recompute_old
        self.buffers: list[RolloutBuffer] = []
        self._has_warned = False
        self._kls: list[Tensor] = []  # sums of each minibatch so far, see `mean_kl`

    def check(self, *, has_schedule: bool) -> None:
        """Raise ValueError if two settings control the learning rate."""
        if self.lr_adapter is not None and has_schedule:
            raise ValueError(
                "Both Experiment.lr_schedule and PPOLearner.lr_adapter are bound, but only one can set the "
                "learning rate. Fix: set Experiment.lr_schedule = None or PPOLearner.lr_adapter = None."
            )

    def _check_settings(self, num_envs: int, max_seq_len: int) -> None:
        check_choice("PPOLearner.context_mode", self.context_mode, ("episode", "segment"))
        check_choice("PPOLearner.stop_scope", self.stop_scope, ("batch", "epoch", "update"))
        for name in ("update_epochs", "minibatches", "chunk_len"):
            check_count(f"PPOLearner.{name}", getattr(self, name))
        check_number("PPOLearner.target_kl", self.target_kl, above=0, optional=True)
        if self.chunk_len > max_seq_len:
            raise ValueError(
                f"PPOLearner.chunk_len is {self.chunk_len}, but must be at most Experiment.max_seq_len = "
                f"{max_seq_len}. Fix: lower it."
            )
        longest, has_memory = self.chunk_len, self.agent.context_len != 0
        if self.burn_in and (not 0 <= self.burn_in <= longest or self.num_steps % longest):
            raise ValueError(
                f"PPOLearner.burn_in is {self.burn_in} with chunk_len {longest} and rollouts of "
                f"{self.num_steps} steps; it must lie between 0 and chunk_len, which must divide the "
                "rollout. Fix: bind PPOLearner.burn_in, PPOLearner.chunk_len or "
                "Experiment.train_timesteps_per_epoch accordingly."
            )
        if self.burn_in and self.agent.context_len is not None:
            logger.warning(
                "PPOLearner.burn_in = %d has no effect, because the memory of this agent reads its context "
                "anyway (PPOLearner.context_mode). Fix: remove it.",
                self.burn_in,
            )
        most = num_envs * (-(-self.num_steps // longest) if has_memory else self.num_steps)
        if most < self.minibatches:
            raise ValueError(
                f"A rollout of {num_envs} envs x {self.num_steps} steps in sequences of {longest} has "
                f"{most} sequences, too few for PPOLearner.minibatches = {self.minibatches}. Fix: lower "
                "PPOLearner.minibatches or PPOLearner.chunk_len, or raise Experiment.parallel_actors."
            )

    @property
    def rereads_context(self) -> bool:
        """True when sequences begin with earlier timesteps of their episode instead of a hidden state."""
        return self.context_mode == "episode" and self.agent.context_len not in (None, 0)

    def sinks(self, num_envs: int) -> list[Sink]:
        """A buffer for the rollouts of `num_envs` envs; this learner trains on all that it has made."""
        history = self.agent.context_len if self.rereads_context else 0
        buffer = RolloutBuffer(
            num_envs,
            self.num_steps,
            chunk_len=self.chunk_len,
            burn_in=0 if self.rereads_context else self.burn_in,
            history=history or 0,
            keeps_states=self.agent.context_len != 0 and not self.rereads_context,
        )
        self.buffers.append(buffer)
        return [buffer]

    def train(self, epoch: int) -> None:
        """Learn from the rollout of this epoch, and log the metrics.

        Raises: ValueError when the rollout is incomplete or holds NaN; FloatingPointError for a loss that is
            not finite, unless such updates are left out.
        """
        self.ctx.status.state("learning")
        self.ctx.console.show(epoch, "learning", {})
        start_s = time.perf_counter()
        self.agent.set_progress(self.ctx.progress.share)
        should_stop = StopPoller(self.ctx.stop.requested, self.accelerator).after_update
        own = self.learn_from_rollout(epoch, should_stop, updates=epoch >= self.first_epoch)
        metrics = merge_metrics(own, 1.0, self.accelerator)
        elapsed_s = time.perf_counter() - start_s
        speed = {"time/learn_s": elapsed_s, "time/updates_per_s": metrics["updates"] / elapsed_s}
        speed |= self.learner.timer.update_metrics()
        self.ctx.status.put(gradient_steps=self.ctx.progress.gradient_steps)
        self.ctx.log({**{f"ppo/{name}": value for name, value in metrics.items()}, **speed}, "")
        self.check_consistency(metrics)
        num_skipped = round(metrics.get("skipped_updates", 0.0))
        self.learner.check_epoch(metrics, round(metrics["updates"]) + num_skipped, num_skipped)

    def learn_from_rollout(
        self, epoch: int, should_stop: Callable[[], bool] = lambda: False, *, updates: bool = True
    ) -> dict[str, float]:
        """Train on the rollout that fills the buffers, and free them.

        epoch: decides the minibatches, together with the seed. should_stop: called between updates.
        updates: False makes none; statistics are still updated.
        Returns: metrics of the updates, and of all processes' rollouts apart from extremes and losses.
        Raises: ValueError when the rollout is incomplete or holds NaN.
        """
        rollout = join([buffer.read() for buffer in self.buffers])
        check_rollout(rollout)
        actions = sequences.policy_actions(rollout.steps, self.agent.action_space)
        tensors = RolloutTensors(rollout, actions, self.accelerator.device)
        pieces = self._pieces(rollout)
        results, metrics = self._prepare(tensors, pieces)
        if updates:
            metrics = self._run_epochs(tensors, pieces, results, epoch, should_stop) | metrics
        else:
            self.agent.after_imitation()
            metrics |= {"updates": 0.0, "updates_share": 0.0}
        if self.rereads_context:  # so that acting, too, continues with the new weights' memory of the episode
            sizes = [buffer.num_envs for buffer in self.buffers]
            for buffer, state in zip(self.buffers, refreshed_states(self.agent, tensors, sizes), strict=True):
                buffer.carried_state = state
        for buffer in self.buffers:
            buffer.next_rollout()
        return metrics

    def describe(self) -> str:
        """A short description of the training on each rollout."""
        updates = self.update_epochs * self.minibatches
        return f"up to {updates:,} updates on sequences of up to {self.chunk_len} steps"

    def check_consistency(self, metrics: dict[str, float]) -> None:
        """Warn, once, if acting and training disagree on the outputs of the same weights."""
        found, limit = (metrics[f"initial_logratio_{name}_max"] for name in ("abs", "rounding"))
        # If all log-ratios are as large as the limit, the first minibatch has a divergence of limit^2 / 2.
        if (kl := metrics.get("initial_kl", 0.0)) > max(limit**2 / 2.0, _KL_ROUNDING):
            found = max(found, (2.0 * kl) ** 0.5)
        # Burn-in reads with new weights the timesteps of the old ones, so a difference means nothing there.
        if found > limit and not self.burn_in and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The log-probabilities of a rollout differ by up to %.3g nats from those that the same "
                "weights give in training (rounding explains %.3g). Either the encoder computes something "
                "else in training than in acting, or something changed in between; see "
                "ppo/initial_logratio_abs_max and ppo/initial_kl. Fix: if the encoder is your own, let "
                "`step` compute the same as `forward`, and let nothing pass a timestep where an episode "
                "begins; remove noise and statistics of batches.",
                found,
                limit,
            )

    # ---- before the updates ----

    def _precision(self) -> torch.dtype:
        """Precision of the agent's computations."""
        precision = _PRECISIONS[self.accelerator.mixed_precision]
        by_cudnn = torch.backends.cudnn.allow_tf32 and any(
            isinstance(module, (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d))
            for module in self.agent.modules()
        )
        uses_tf32 = self.accelerator.device.type == "cuda" and (
            by_cudnn or torch.get_float32_matmul_precision() != "highest"
        )
        # A float16 number has as many digits as TF32.
        return torch.float16 if precision == torch.float32 and uses_tf32 else precision

    def _pieces(self, rollout: CollectedRollout) -> Pieces:
        """The sequences to train on."""
        if self.agent.context_len == 0:
            return sequences.single_steps(rollout)
        context = self.agent.context_len if self.rereads_context else None
        return sequences.cut(rollout, self.chunk_len, context=context, burn_in=self.burn_in)

    def _prepare(self, tensors: RolloutTensors, pieces: Pieces) -> tuple[Results, dict[str, float]]:
        """Evaluate the rollout and estimate advantages: fields of batches (T * N, ...), and metrics."""
        acted = tensors.steps
        mask, ended = acted["valid"], acted["ended"]
        groups = self._old_policy_indices(tensors, pieces)
        found, next_values = old_policy_outputs(self.agent, tensors, groups, self.cast)
        metrics = disagreement(found, acted)
        metrics["initial_logratio_rounding_max"] = max_rounding_error(
            self.agent.distribution, found, tensors.actions, mask, self._precision()
        )
        if not self.recompute_old:
            found |= {name: acted[name].reshape(found[name].shape) for name in ("log_probs", "values")}
        rewards = acted["rewards"].float().where(mask, 0.0)
        if self.reward_normalizer is not None:
            if tensors.rollout.resets[tensors.rollout.history].all():  # no episode continues
                self.reward_normalizer.restart()
            rewards = self.reward_normalizer(rewards, ended, mask)
            (metrics["normalized_reward"],) = means_over_processes([rewards], mask)
        values = found["values"].view(mask.shape)
        advantages, returns = self.advantage_estimator(
            rewards, values, next_values, acted["terminated"], ended, mask
        )
        metrics |= value_fit_metrics(values, returns, advantages, mask)
        if not self.advantage_norm.per_minibatch:
            advantages = self.advantage_norm(advantages, mask)
        found["advantages"], found["returns"] = advantages.reshape(-1, 1), returns.reshape(-1, 1)
        self.agent.update_value_statistics(returns[..., None], mask[..., None])
        return found, metrics

    def _old_policy_indices(self, tensors: RolloutTensors, pieces: Pieces) -> Iterator[GatherIndices]:
        """All steps and the timesteps after them, in groups that need less memory than an update."""
        count = -(-self.minibatches * self.batches_per_update // _STEPS_WITHOUT_GRADIENT)
        if self.agent.context_len == 0:
            yield from tensors.all_timesteps().split(count)
            return
        by_length = np.argsort(pieces.lengths, kind="stable")  # so that there is little padding
        for index in np.array_split(by_length, min(count, len(pieces))):
            yield tensors.indices(pieces.take(index), tails=True)

    # ---- the updates ----

    def _run_epochs(
        self,
        tensors: RolloutTensors,
        pieces: Pieces,
        results: Results,
        epoch: int,
        should_stop: Callable[[], bool],
    ) -> dict[str, float]:
        """All passes over the rollout; returns the means of their metrics."""
        _switch_dropout_off(self.agent)
        seed = derive_seed(self.ctx.progress.seed, "minibatches")
        rng = np.random.default_rng([seed, epoch, self.accelerator.process_index])
        updates, self._kls = list[Mapping[str, Any]](), []
        last_kl, is_over, skipped_before = 0.0, False, self.learner.skipped_updates
        for i in range(self.update_epochs):
            num_before = len(self._kls)
            # Details cost a good part of an update; only one update of a pass that may be the last has them.
            has_details = self.target_kl is None and i < self.update_epochs - 1
            for part in sequences.shuffled_minibatches(pieces, self.minibatches, rng):
                num_skipped = self.learner.skipped_updates
                metrics = self._update(self._batches(tensors, results, part), with_metrics=not has_details)
                if self.learner.was_vetoed and self.stop_scope != "batch":
                    is_over = self.stop_scope == "update"
                    break
                if not self.learner.was_vetoed and self.learner.skipped_updates == num_skipped:
                    has_details = True
                    updates.append(metrics)
                if should_stop():
                    is_over = True
                    break
            last_kl = mean_kl(self._kls[num_before:])
            self._adapt(last_kl, per_minibatch=False)
            if is_over:
                break
        self.agent.after_rollout(last_kl)
        return _summary(updates) | {
            "kl_last": last_kl,
            "updates": float(len(updates)),
            "updates_share": len(updates) / (self.update_epochs * self.minibatches),
            "initial_kl": mean_kl(self._kls[:1]),
            "skipped_updates": float(self.learner.skipped_updates - skipped_before),
            "learning_rate": self.learner.learning_rate,
        }

    def _update(self, batches: Sequence[RolloutBatch], with_metrics: bool) -> dict[str, Tensor]:
        """One update on the parts of a minibatch."""
        if self.advantage_norm.per_minibatch:
            batches = self._normalized(batches)
        return log_metrics(
            self.learner.update(
                batches,
                with_metrics,
                lambda found: self._may_step(found, batches),
                checks_finite=not self._kls,  # only at the first minibatch of a rollout
            )
        )

    def _batches(self, tensors: RolloutTensors, results: Results, pieces: Pieces) -> list[RolloutBatch]:
        """A minibatch, divided into as many parts as there are batches per update."""
        indices = tensors.indices(pieces).split(min(self.batches_per_update, len(pieces)))
        return [tensors.gather(part, results) for part in indices]

    def _normalized(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Micro-batches with their advantages normalised over all of them."""
        advantages = torch.cat(
            [batch.advantages.reshape(-1) for batch in batches if batch.advantages is not None]
        )
        mask = torch.cat([batch.mask.reshape(-1) for batch in batches])
        sizes = [batch.mask.numel() for batch in batches]
        parts = torch.split(self.advantage_norm(advantages, mask), sizes)
        return [
            dataclasses.replace(batch, advantages=part.view(batch.mask.shape))
            for batch, part in zip(batches, parts, strict=True)
        ]

    def _may_step(self, found: Sequence[Mapping[str, Any]], batches: Sequence[RolloutBatch]) -> bool:
        """Called before the step: keep the KL divergence of all processes, and decide alike in all.

        found: the results of compute_loss on each of the batches.
        """
        counts = torch.stack([batch.mask.sum().double() for batch in batches])
        kls = torch.stack([one["kl"].detach().double() for one in found])
        self._kls.append(summed_over_processes(torch.stack([(kls * counts).sum(), counts.sum()])))
        adapts = self.lr_adapter is not None and self.lr_adapter.per_minibatch
        if self.target_kl is None and not adapts:
            return True  # nothing waits for the device to know the divergence
        kl = mean_kl(self._kls[-1:])
        if self.target_kl is not None and not kl <= self.target_kl:  # NaN does not pass
            return False
        self._adapt(kl, per_minibatch=True)
        return True

    def _adapt(self, kl: float, per_minibatch: bool) -> None:
        """Adapt the learning rate if the adapter runs at this interval."""
        if self.lr_adapter is not None and self.lr_adapter.per_minibatch is per_minibatch:
            self.learner.lr_scale = self.lr_adapter.adapt(kl, self.learner.base_learning_rate)

    def _parts(self) -> dict[str, Stateful]:
        names = ("advantage_norm", "reward_normalizer", "lr_adapter")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def state_dict(self) -> dict[str, Any]:
        """State of this process for exact resumption, as JSON values."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; parts that either run does without are left out."""
        for name, part in self._parts().items():
            if state.get(name) is not None:
                part.load_state_dict(state[name])
        if self.lr_adapter is not None:
            self.learner.lr_scale = self.lr_adapter.scale


def _switch_dropout_off(agent: OnPolicyAgent) -> None:
    """Switch dropout off in updates, as in acting, so that ratios are 1 before the first step."""
    agent.eval()
    for module in agent.modules():
        if isinstance(module, nn.RNNBase) and not module.dropout:
            module.train()  # the same outputs, but cuDNN has gradients in this mode only


def _summary(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One metric of each name that updates reported.

    `effective_sample_size` is the effective number of steps of all updates and processes, weighted by their
    ratios, as a share of their number.
    """
    found = merged([(update, 1.0) for update in _numbers(updates)])
    if "ratio_mean_square" in found:
        mean, mean_square = found.pop("ratio_mean"), found.pop("ratio_mean_square")
        found["effective_sample_size"] = mean**2 / max(mean_square, 1e-12)
    return found


def _numbers(updates: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The metrics of all updates as numbers, after one copy from the device."""
    if not any(updates):
        return [{} for _ in updates]
    values = [torch.as_tensor(value) for one in updates for value in one.values()]
    numbers = iter(stacked(values).tolist())
    return [dict(zip(one, numbers)) for one in updates]  # noqa: B905 - each takes as many as it has names


def mean_kl(sums: Sequence[Tensor]) -> float:
    """Mean of KL divergences over timesteps; minibatches whose divergence is not finite are left out.

    sums: (2,) for each minibatch, the sum over its timesteps and their number.
    Returns: the mean; 0 without minibatches, NaN if no divergence is finite.
    """
    if not sums:
        return 0.0
    known = [(total, n) for total, n in torch.stack(list(sums)).tolist() if math.isfinite(total)]
    if not known:
        return math.nan
    mean: float = sum(total for total, _ in known) / max(sum(n for _, n in known), 1.0)
    return mean
