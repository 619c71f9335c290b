"""One update of the agent: masked means over all micro-batches, backward, clip, AdamW with linear warm-up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..agents import BaseAgent, LossTerms, OnPolicyAgent
from ..data import Batch, RolloutBatch
from .freezing import FrozenParams
from .gradient_guard import GradientGuard, forget_pending
from .param_groups import check_same_groups
from .processes import merge_metrics
from .timing import StageTimer

AnyBatch = Batch | RolloutBatch
EditMask = Callable[[Any, Tensor], Tensor]
ReportPriorities = Callable[[npt.NDArray[np.int64], npt.NDArray[Any]], None]
_SETTINGS = ("initial_lr", "weight_decay", "eps", "prefix")  # of a group of parameters
BeforeStep = Callable[[Sequence["LossResult"], Sequence["LossWeights"]], bool]
_PEAK_SHARE = 0.9  # of the largest error in a sequence's priority
_LOSSES, _COUNTS = ("loss", "actor_loss", "critic_loss"), ("batch_timesteps", "batch_places")


@dataclass(frozen=True)
class LossWeights:
    """What belongs to one micro-batch: which timesteps count, and how many count in the whole update.

    Masks are (B, L, 1) bool, True where the loss counts. Counts are float scalars over all micro-batches of
    the update, and the mean over processes, because gradients are averaged over processes.
    """

    actor_mask: Tensor
    critic_mask: Tensor
    actor_count: Tensor
    critic_count: Tensor

    @classmethod
    def of_single_batch(cls, actor_mask: Tensor, critic_mask: Tensor) -> LossWeights:
        """Weights that make the loss the plain masked mean of one batch."""
        return cls(actor_mask, critic_mask, _at_least_one(actor_mask.sum()), _at_least_one(critic_mask.sum()))


@dataclass(frozen=True)
class LossResult:
    """Scalar losses; the micro-batches of an update add up to the loss of the update.

    squared_errors: of the critics, (B, L, ..., 1) without gradient, for datasets that keep priorities.
    """

    total: Tensor
    actor: Tensor
    critic: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    squared_errors: Tensor | None = None


def masked_share(terms: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Sum of `terms` (B, L, ..., 1) where `mask` (B, L, 1), over `count` timesteps and all other axes' sizes.

    Equals the masked mean when `count` is the number of True in `mask`. NaN under False is ignored.
    """
    axes = terms.dim() - mask.dim()
    terms = terms.float() if terms.dtype in (torch.float16, torch.bfloat16) else terms
    weights = mask.reshape(*mask.shape[:2], *([1] * (axes + 1)))
    per_timestep = terms[0, 0].numel()
    return terms.where(weights, 0.0).sum() / (count * per_timestep)


def combine_losses(terms: LossTerms, weights: LossWeights, critic_loss_weight: float) -> LossResult:
    """Actor + critic_loss_weight * critic, each a masked mean over timesteps, discounts (and critics)."""
    actor = masked_share(terms.actor, weights.actor_mask, weights.actor_count)
    critic = masked_share(terms.critic, weights.critic_mask, weights.critic_count)
    total = actor + critic_loss_weight * critic
    return LossResult(total, actor, critic, dict(terms.metrics), terms.critic.detach())


def sequence_priorities(squared_errors: Tensor, mask: Tensor) -> Tensor:
    """0.9 times the largest plus 0.1 times the mean TD error of each sequence, (B,) float.

    Args:
        squared_errors: (B, L, ..., 1) float, averaged over all axes after the second.
        mask: (B, L, 1) bool, the timesteps that count.
    Source: Kapturowski et al. 2019 (R2D2).
    """
    errors = squared_errors.float().flatten(2).mean(-1).sqrt() * mask.squeeze(-1)
    counts = mask.sum(dim=(1, 2)).clamp(min=1)
    return _PEAK_SHARE * errors.amax(1) + (1 - _PEAK_SHARE) * errors.sum(1) / counts


def make_optimizer(
    params: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    *,
    learning_rate: float,
    l2_coeff: float,
    fused: bool,
    eps: float = 1e-8,
) -> Any:
    """AdamW with decoupled weight decay `l2_coeff` (Loshchilov and Hutter 2019, arXiv:1711.05101).

    params: parameters, or groups of them with learning rates of their own; see `param_groups`.
    """
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=l2_coeff, fused=fused, eps=eps)


def warmup_factor(gradient_steps: int, lr_warmup_steps: int) -> float:
    """Share of the learning rate after `gradient_steps` updates: 1/warmup, 2/warmup, ..., 1."""
    return min(1.0, (gradient_steps + 1) / max(lr_warmup_steps, 1))


class Learner:
    """Holds the optimizer side of an agent and applies updates.

    Processes that train together take the same steps: each update is that of one process with all their
    batches. What the losses draw at random (critic subsets, sampled actions, dropout) each process draws for
    itself, just as it is drawn anew for each of several micro-batches.

    Args:
        agent: the agent itself; targets and statistics move in its `after_update`.
        model: what is called for the loss: the agent as Accelerate prepared it.
        optimizer: as Accelerate prepared it, which only a loss scaler needs.
        accelerator: device, precision and processes.
        compute_loss: (batch, weights, with_metrics) -> LossResult; the hook of Experiment.
        edit_actor_mask, edit_critic_mask: (batch, mask (B, L, 1)) -> mask; hooks of Experiment.
        lr_warmup_steps: updates until the full learning rate is reached.
        grad_clip: largest global gradient norm, over the optimizer's parameters only.
        report_priorities: takes sources (B,) and priorities (B,) of every batch; None for no priorities.
        bad_grad: "skip" or "raise" for gradients that are not finite; see `GradientGuard`.
        timer: told how long updates take.

    Attributes:
        frozen: parameters that some epochs leave as they are; None for none.
        skipped_updates: updates since the start of this process that were left out for their gradients.
    """

    def __init__(
        self,
        agent: BaseAgent,
        model: nn.Module,
        optimizer: Any,
        accelerator: Accelerator,
        *,
        compute_loss: Callable[[AnyBatch, LossWeights, bool], LossResult],
        edit_actor_mask: EditMask,
        edit_critic_mask: EditMask,
        lr_warmup_steps: int,
        grad_clip: float,
        report_priorities: ReportPriorities | None = None,
        bad_grad: str | None = None,
        timer: StageTimer | None = None,
    ) -> None:
        self.report_priorities, self.skipped_updates = report_priorities, 0
        self.frozen: FrozenParams | None = None
        self._guard = GradientGuard(agent, bad_grad, accelerator.scaler is not None)
        self.timer = timer or StageTimer()
        self.agent, self.model, self.optimizer, self.accelerator = agent, model, optimizer, accelerator
        self.compute_loss = compute_loss
        self.edit_actor_mask, self.edit_critic_mask = edit_actor_mask, edit_critic_mask
        self.lr_warmup_steps, self.grad_clip = lr_warmup_steps, grad_clip
        self.gradient_steps = 0
        self.lr_scale = 1.0  # of schedules and adaptation, beside the warm-up
        self.was_vetoed = False
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_new = True
        if isinstance(model, DistributedDataParallel):
            # Buffers are statistics that the agent merges; DDP would replace them by those of one process
            # before every forward pass. Set here, since its constructor's flag has changed its name.
            model.broadcast_buffers = False
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @property
    def base_learning_rate(self) -> float:
        """The configured one."""
        rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return rate

    @property
    def learning_rate(self) -> float:
        """The one of the next update."""
        warmup = warmup_factor(self.gradient_steps, self.lr_warmup_steps)
        return self.base_learning_rate * warmup * self.lr_scale

    def update(
        self,
        micro_batches: Sequence[AnyBatch],
        with_metrics: bool = False,
        before_step: BeforeStep | None = None,
    ) -> dict[str, Tensor]:
        """One optimizer step on all micro-batches together; returns scalar tensors.

        Equals one step on a single batch that holds all their sequences, those of all processes. Figures are
        of this process's share (the losses of all processes have the update's loss as their mean), or with
        `with_metrics` of all processes together.

        before_step: asked when the gradients are there; False leaves the weights as they are (`was_vetoed`).
            All processes have to answer alike.
        """
        start_s = time.perf_counter()
        batches = [batch.to(self.accelerator.device) for batch in micro_batches]
        weights = self._weigh(batches)
        results = []
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            is_last = i == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                result = self.compute_loss(batch, weight, with_metrics and is_last)
                self.accelerator.backward(result.total)
            self._report(batch, weight, result)
            results.append(result)
        if self._is_new:
            self._check_gradients()
        self.was_vetoed = before_step is not None and not before_step(results, weights)
        grad_norm = None
        if self.was_vetoed:
            self.optimizer.zero_grad()
        else:
            grad_norm = self._step()
        metrics = {
            "loss": _sum([r.total.detach() for r in results]),
            "actor_loss": _sum([r.actor.detach() for r in results]),
            "critic_loss": _sum([r.critic.detach() for r in results]),
        }
        if with_metrics:
            metrics = self._with_details(metrics | results[-1].metrics, batches, grad_norm)
        self.timer.num_updates += 1
        self.timer.lap("update", start_s)
        return metrics

    def _gradients_are_bad(self, grad_norm: Tensor | None) -> bool:
        """True for an update that is left out: weights, moments, targets and statistics stay."""
        if not self._guard.is_bad(grad_norm):
            return False
        self.optimizer.zero_grad()
        if not isinstance(self.agent, OnPolicyAgent):  # it has gathered them from the whole rollout
            forget_pending(self.agent)
        self.skipped_updates += 1
        return True

    def _step(self) -> Tensor | None:
        """Clip the gradients and move the weights, if they may; returns the norm before clipping."""
        if self.frozen is not None:
            self.frozen.drop_gradients()
        self._guard.before_clipping(self._params)
        grad_norm: Tensor | None = self.accelerator.clip_grad_norm_(self._params, self.grad_clip)
        if self._gradients_are_bad(grad_norm):
            return grad_norm
        factor = warmup_factor(self.gradient_steps, self.lr_warmup_steps) * self.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if getattr(self.optimizer, "step_was_skipped", False):  # by the fp16 scaler: gradients overflowed
            self.skipped_updates += 1
        else:
            self.gradient_steps += 1
            self.agent.after_update()
        return grad_norm

    def _check_gradients(self) -> None:
        """After the first backward pass: processes wait for the gradient of every parameter."""
        self._is_new = False
        if self.accelerator.num_processes == 1:
            return
        idle = [name for name, p in self.agent.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise ValueError(
                f"The loss does not depend on these parameters: {', '.join(idle)}. One process can train so, "
                "several cannot, because they wait for each other's gradients of all parameters. Fix: switch "
                "off what has no weight in the loss, or freeze these with requires_grad_(False)."
            )

    def _report(self, batch: AnyBatch, weights: LossWeights, result: LossResult) -> None:
        """Tell the dataset how badly the critics predict each sequence of a batch."""
        sources = getattr(batch, "sources", None)
        if self.report_priorities is None or sources is None:
            return
        if result.squared_errors is None:
            raise ValueError(
                "The dataset keeps priorities, but compute_loss returned a LossResult without "
                "squared_errors. Fix: hand on what combine_losses returns, or bind "
                "DiskTrajDataset.priority_exponent = None."
            )
        priorities = sequence_priorities(result.squared_errors, weights.critic_mask)
        # Every process draws by priorities, so every one hears of all sequences.
        sources, priorities = self.accelerator.gather((sources, priorities))
        self.report_priorities(sources.cpu().numpy(), priorities.cpu().numpy())

    def _weigh(self, batches: Sequence[AnyBatch]) -> list[LossWeights]:
        masks = [(self.edit_actor_mask(b, b.mask), self.edit_critic_mask(b, b.mask)) for b in batches]
        counts = torch.stack([torch.stack([a.sum(), c.sum()]) for a, c in masks]).sum(0).float()
        if (processes := self.accelerator.num_processes) > 1:
            counts = _at_least_one(self.accelerator.reduce(counts, reduction="sum")) / processes
        else:
            counts = _at_least_one(counts)
        return [LossWeights(a, c, counts[0], counts[1]) for a, c in masks]

    def _with_details(
        self, metrics: dict[str, Tensor], batches: Sequence[AnyBatch], grad_norm: Tensor | None
    ) -> dict[str, Tensor]:
        """The figures of all processes. The agent's own are of the last micro-batch, and weigh so."""
        details = {k: v.detach() for k, v in metrics.items() if v.numel() == 1}
        details["batch_timesteps"] = torch.stack([b.mask.sum() for b in batches]).sum()
        details["batch_places"] = torch.tensor(sum(b.mask.numel() for b in batches))
        details["sequence_length_max"] = torch.tensor(max(b.mask.shape[1] for b in batches))
        if self.accelerator.num_processes > 1:
            own = {name: value.item() for name, value in details.items()}
            weight = batches[-1].mask.sum().item()
            merged = merge_metrics(own, weight, self.accelerator, sums=_COUNTS, shares=_LOSSES)
            details = {name: torch.tensor(value) for name, value in merged.items()}
        details["batch_padded_share"] = 1.0 - details["batch_timesteps"] / details.pop("batch_places")
        details["sequence_length"] = details.pop("sequence_length_max")
        details["learning_rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        if grad_norm is not None:
            details["grad_norm"] = grad_norm.detach()
        return details

    def is_sound(self) -> bool:
        """True if all weights are finite."""
        return all(bool(torch.isfinite(p).all()) for p in self.agent.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and loss scaler; tensors and plain values only, so that a safe load can read it back."""
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "gradient_steps": self.gradient_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict returned.

        Raises: ValueError if the optimizer's groups of parameters are others.
        """
        groups = self.optimizer.param_groups
        check_same_groups(state["optimizer"]["param_groups"], groups, [len(g["params"]) for g in groups])
        # Moments and counts are state, these are settings: the ones of this run hold.
        chosen = [{name: group[name] for name in _SETTINGS if name in group} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update(settings)
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.gradient_steps = int(state["gradient_steps"])


def _sum(scalars: Sequence[Tensor]) -> Tensor:
    return scalars[0] if len(scalars) == 1 else torch.stack(list(scalars)).sum()


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1)
