"""One update of the agent: masked means over all micro-batches, backward, clip, step."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gin
import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...agents import BaseAgent, LossTerms, OnPolicyAgent, fit_mask, masked_mean
from ...data import Batch, RolloutBatch
from ...data.errors import check_choice
from ...nets import RunningStatistics
from ..collect import StageTimer
from ..contracts import Progress
from ..process.distributed import any_process, merge_metrics
from ..process.rng import isolated_rng
from .average import WeightAverage
from .finite import (
    HUGE_REWARD,
    bad_fields,
    bad_gradients,
    bad_losses,
    bad_weights,
    largest_reward,
    named,
    plain,
    save_batches,
)
from .optimizer import check_same_groups, warmup_factor

logger = logging.getLogger("loxodon")
AnyBatch = Batch | RolloutBatch
EditMask = Callable[[Any, Tensor, Tensor], Tensor]
EditExtraMask = Callable[[Any, str, Tensor, Tensor], Tensor]
ReportPriorities = Callable[[npt.NDArray[np.int64], npt.NDArray[Any]], None]
_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "prefix")  # settings of a parameter group
BeforeStep = Callable[[Sequence[Mapping[str, Any]]], bool]
PEAK_SHARE = 0.9
"""Weight of the largest TD error in a window's priority; the mean has the rest (eta of R2D2)."""
_LOG_NAMES = {"Loss": "loss", "Actor Loss": "actor_loss", "Critic Loss": "critic_loss"}
_MASKS = ("Actor Mask", "Critic Mask")
_EXTRA, _EXTRA_MASK = "{}_loss", "{}_mask"  # names of the mean and the mask of an extra term
_ON_NAN = ("stop", "stop_at_once", "skip")
_FIND_FIRST = (
    "run again, with --resume if there is a checkpoint, and with Learner.on_nan = 'stop_at_once', which "
    "finds the first such update and saves its batch; or lower Experiment.learning_rate or grad_clip"
)
_SIZES = ("Sequence Length", "Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)")
_COUNTS = ("batch_timesteps", "batch_places")


def masked_losses(
    batch: Any,
    terms: LossTerms,
    edit_actor_mask: EditMask | None = None,
    edit_critic_mask: EditMask | None = None,
    edit_extra_mask: EditExtraMask | None = None,
) -> dict[str, Any]:
    """Means of an agent's losses over the unmasked entries: the result of `Experiment.compute_loss`.

    Args:
        batch: its mask (B, L, 1) bool is the initial mask of every term, unless `terms` has another.
        terms: the losses, actor (B, L, G, 1), critic (B, L, C, G, 1) and extra ones (B, L, ...). NaN under
            False is ignored.
        edit_actor_mask: (batch, loss, mask) -> mask, where loss and masks have one shape; None for no edit.
        edit_critic_mask: the same for the critic loss.
        edit_extra_mask: (batch, name, loss, mask) -> mask, the same for an extra term.
    Returns: the scalar tensors "Actor Loss" and "Critic Loss"; the masks of both, "Actor Mask" and "Critic
        Mask"; "<name>_loss" and "<name>_mask" of each extra term; "terms", as given; "squared_errors"
        (B, L, C, G, 1) of the critics, without gradient, for datasets that keep priorities; "Sequence
        Length", the places L of a row, "Batch Size (in Timesteps)", those of all rows, and "Unmasked Batch
        Size (in Timesteps)", the real transitions in them (a scalar tensor); and the agent's metrics under
        their own names.
    Raises: ValueError for an edited mask of another shape or dtype, or a metric or extra term of another
        shape.
    """
    counts = batch.mask if terms.mask is None else terms.mask
    actor_mask = _edited("edit_actor_mask", edit_actor_mask, batch, terms.actor, counts)
    critic_mask = _edited("edit_critic_mask", edit_critic_mask, batch, terms.critic, counts)
    for name, value in terms.metrics.items():
        if not _is_scalar(value):
            raise ValueError(
                f"LossTerms.metrics[{name!r}] has the shape {tuple(value.shape)}, but must be a single "
                "number. Fix: take the mean over the timesteps of transitions.mask."
            )
    extra: dict[str, Tensor] = {}
    for name, loss in terms.extra.items():
        if loss.shape[:2] != batch.mask.shape[:2]:
            raise ValueError(
                f"LossTerms.extra[{name!r}] has the shape {tuple(loss.shape)}, but must begin with "
                f"{tuple(batch.mask.shape[:2])}, the sequences and timesteps of the batch. Fix: return a "
                "loss for each timestep (0 where there is none), without taking the mean."
            )
        edit = None if edit_extra_mask is None else _for_term(edit_extra_mask, name)
        mask = _edited("edit_extra_mask", edit, batch, loss, counts)
        extra |= {_EXTRA.format(name): masked_mean(_at_least_float32(loss), mask)}
        extra |= {_EXTRA_MASK.format(name): mask}
    return {
        **terms.metrics,
        **extra,
        "terms": terms,
        "Actor Loss": masked_mean(_at_least_float32(terms.actor), actor_mask),
        "Critic Loss": masked_mean(_at_least_float32(terms.critic), critic_mask),
        "Actor Mask": actor_mask,
        "Critic Mask": critic_mask,
        "squared_errors": terms.critic.detach(),
        **dict(zip(_SIZES, (batch.mask.shape[1], batch.mask.numel(), batch.mask.sum()), strict=True)),
    }


def _for_term(edit: EditExtraMask, name: str) -> EditMask:
    """The hook for one extra term, with the signature of the actor's and critics' hooks."""
    return lambda batch, loss, mask: edit(batch, name, loss, mask)


def _edited(name: str, edit: EditMask | None, batch: Any, loss: Tensor, counts: Tensor) -> Tensor:
    """The edited mask of a loss (B, L, ...), of the same shape; counts: (B, L, 1), the initial mask."""
    mask = fit_mask(counts, loss).expand_as(loss)
    if edit is None:
        return mask
    edited: Tensor = edit(batch, loss.detach(), mask.clone())  # a copy, which may be edited in place
    if edited.shape != loss.shape or edited.dtype != torch.bool:
        raise ValueError(
            f"{name} returned {edited.dtype} {tuple(edited.shape)}, but a mask must be torch.bool "
            f"{tuple(loss.shape)}, like the one that it received. Fix: return pad_mask & your own condition."
        )
    return edited


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def log_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The scalar results of `Learner.update`, under the names used in logs."""
    return {_LOG_NAMES.get(name, name): value for name, value in metrics.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def sequence_priorities(
    squared_errors: Tensor, mask: Tensor, windows: Tensor, num_windows: int
) -> tuple[Tensor, Tensor]:
    """Priorities (W,) float of W windows, and whether each has an error that counts, (W,) bool.

    A priority is PEAK_SHARE times the largest plus the rest times the mean TD error.

    Args:
        squared_errors: (B, L, ..., 1) float, averaged over all axes after the second.
        mask: bool, of the same shape; True where an error counts.
        windows: (B, L) int64, the window that a place belongs to.
        num_windows: W.
    Source: Kapturowski et al. 2019 (R2D2).
    """
    counts = mask.flatten(2).sum(-1)
    errors = squared_errors.float().where(mask, 0.0).flatten(2).sum(-1).div(counts.clamp(min=1)).sqrt()
    places, none = windows.flatten(), errors.new_zeros(num_windows)
    largest = none.scatter_reduce(0, places, errors.flatten(), "amax")
    total = none.index_add(0, places, errors.flatten())
    timesteps = none.index_add(0, places, (counts > 0).flatten().to(none.dtype))
    return PEAK_SHARE * largest + (1 - PEAK_SHARE) * total / timesteps.clamp(min=1), timesteps > 0


@gin.configurable(allowlist=["on_nan"])
class Learner:
    """Holds the optimizer side of an agent and applies updates.

    Processes that train together take the same steps: each update equals that of one process with all their
    batches. Random draws within the losses (critic subsets, sampled actions, dropout) are separate in each
    process, just as they are separate for each of several micro-batches.

    Args:
        agent: the agent itself; targets and statistics move in its `after_update`.
        model: the module called for the loss: the agent as Accelerate prepared it.
        optimizer: the optimizer as Accelerate prepared it, which only a loss scaler needs.
        accelerator: device, precision and processes.
        compute_loss: (batch, log_step=) -> the result of `masked_losses`; the hook of Experiment.
        critic_loss_weight: weight of the critics' loss; that of the actor's loss is 1.
        extra_loss_weights: weights by name of a `LossTerms.extra`, or of a mean "<name>_loss" that
            compute_loss adds.
        lr_warmup_steps: updates until the full learning rate is reached.
        grad_clip: largest global gradient norm, over the optimizer's parameters only; 0 or less: no limit.
        report_priorities: called with priority slots (W,) and priorities (W,) of every batch; None for no
            priorities.
        on_nan: what happens if losses or gradients are NaN or infinite. "stop" looks at the updates that are
            logged and ends the run, naming the loss term, discount and timestep. "stop_at_once" looks at
            every update, to find the first bad one. "skip" leaves out updates with such gradients; the loss
            scaler of fp16 always does so.
        timer: measures the time of updates.
        edits_masks: True if hooks edit masks, so that their sizes are known only after a forward pass.
        progress: counts the optimizer steps; None for a count of its own.
        run_dir: folder in which the batch of an update that is not finite is saved; None does not save it.
        average: an average that follows the weights; None for none.

    Attributes:
        before_clipping: called between the last backward pass and clipping, for example to drop gradients.
        skipped_updates: updates skipped for their gradients since the start of this process.
    """

    def __init__(  # noqa: PLR0913 - one for each thing it needs
        self,
        agent: BaseAgent,
        model: nn.Module,
        optimizer: Any,
        accelerator: Accelerator,
        *,
        compute_loss: Callable[..., Mapping[str, Any]],
        critic_loss_weight: float,
        lr_warmup_steps: int,
        grad_clip: float,
        extra_loss_weights: Mapping[str, float] | None = None,
        report_priorities: ReportPriorities | None = None,
        on_nan: str = "stop",
        timer: StageTimer | None = None,
        edits_masks: bool = False,
        progress: Progress | None = None,
        run_dir: Path | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self.average = average
        self.report_priorities, self.skipped_updates = report_priorities, 0
        self.before_clipping: list[Callable[[], None]] = []
        check_choice("Learner.on_nan", on_nan, _ON_NAN)
        self.on_nan, self.run_dir = on_nan, run_dir
        self.timer = timer or StageTimer()
        self.agent, self.model, self.optimizer, self.accelerator = agent, model, optimizer, accelerator
        self.compute_loss, self.critic_loss_weight = compute_loss, critic_loss_weight
        self.extra_loss_weights = dict(extra_loss_weights or {})
        self.edits_masks = edits_masks or agent.leaves_out_transitions
        self.lr_warmup_steps, self.grad_clip = lr_warmup_steps, grad_clip if grad_clip > 0 else math.inf
        self.progress = progress or Progress(epochs=0, seed=0)
        self.lr_scale = 1.0  # factor of schedules and adaptation, next to the warm-up
        self.was_vetoed = False
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_new = True
        if isinstance(model, DistributedDataParallel):
            # Buffers are statistics that the agent merges; DDP would replace them by those of one process
            # before every forward pass. The attribute is set because the name of the constructor's flag has
            # changed.
            model.broadcast_buffers = False
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @property
    def skips_updates(self) -> bool:
        """True if updates with gradients that are not finite are left out, as by a loss scaler."""
        return self.on_nan == "skip" or self.accelerator.scaler is not None

    @property
    def gradient_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.progress.gradient_steps

    @property
    def base_learning_rate(self) -> float:
        """The configured learning rate."""
        rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        warmup = warmup_factor(self.gradient_steps, self.lr_warmup_steps)
        return self.base_learning_rate * warmup * self.lr_scale

    def update(
        self,
        micro_batches: Sequence[AnyBatch],
        log_step: bool = False,
        before_step: BeforeStep | None = None,
        checks_finite: bool = False,
    ) -> dict[str, Tensor]:
        """One optimizer step on all micro-batches together; returns scalar tensors by name.

        The update equals one step on a single batch that holds all sequences of all processes: for each loss
        term, the mean of a micro-batch is weighted by its share of the unmasked entries. These sizes must be
        known before the first backward pass. They are those of `batch.mask` unless masks are edited. With
        edited masks, the forward pass of a single micro-batch gives them; several micro-batches are passed
        forward an extra time, without gradients, leaving random generators and statistics as they were.

        Metrics are those of this process's share (the mean of the losses over processes is the update's
        loss). With `log_step` there are more metrics, each of all processes together.

        before_step: called once the gradients are computed, with the results of compute_loss. False leaves
            the weights as they are (`was_vetoed`). All processes have to answer alike.
        checks_finite: check that losses and gradients are finite; with log_step this is always done.
        Raises: FloatingPointError if they are not finite, before anything is updated; see `on_nan`.
        """
        checks_finite = checks_finite or log_step or self.on_nan == "stop_at_once"
        checks_finite = checks_finite and not self.skips_updates
        start_s = time.perf_counter()
        batches = [batch.to(self.accelerator.device) for batch in micro_batches]
        shares, found, losses = self._shares_ahead(batches), [], []
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                found.append(self.compute_loss(batch, log_step=log_step and is_last))
                if shares is None:
                    shares = self._shares([self._mask_sizes(batch, found[0])])
                losses.append(self.weighted(found[-1], shares[i]))
                self.accelerator.backward(losses[-1]["Loss"])
        if checks_finite:
            self._check_losses(found, _sum([one["Loss"].detach() for one in losses]), batches)
        if self._is_new:
            self._check_gradients()
        skipped_before = self.skipped_updates
        self.was_vetoed = before_step is not None and not before_step(found)
        grad_norms: dict[str, Tensor] = {}
        if self.was_vetoed:
            self.optimizer.zero_grad()
        else:
            grad_norms = self._step(log_step, batches if checks_finite else None)
        if self.skipped_updates == skipped_before:
            for batch, one in zip(batches, found, strict=True):
                self._report_priorities(batch, one)
        metrics = {name: _sum([one[name].detach() for one in losses]) for name in losses[0]}
        if log_step:
            metrics = self._with_details({**found[-1], **metrics}, batches, grad_norms)
        self.timer.num_updates += 1
        self.timer.lap("update", start_s)
        return metrics

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the T loss terms, by the names under which compute_loss returns their means."""
        extra = {_EXTRA.format(name): weight for name, weight in self.extra_loss_weights.items()}
        return {"Actor Loss": 1.0, "Critic Loss": self.critic_loss_weight, **extra}

    def weighted(self, found: Mapping[str, Any], share: Tensor | None = None) -> dict[str, Tensor]:
        """The part of the update's losses that one micro-batch adds: "Loss", and one for each term.

        share: (T,), the share of each term; None for 1.
        Raises: TypeError without the losses of actor and critic; ValueError if terms and weights differ.
        """
        if not (isinstance(found, Mapping) and {"Actor Loss", "Critic Loss"} <= found.keys()):
            raise TypeError(
                f"compute_loss returned a {type(found).__name__} without 'Actor Loss' and 'Critic Loss'. "
                "Fix: add your entries to the result of super().compute_loss(batch, log_step) and return "
                "that."
            )
        weights = self.loss_weights
        _check_extra_terms(found, self.extra_loss_weights)
        shares = [1.0] * len(weights) if share is None else list(share)
        parts = {name: part * found[name] for name, part in zip(weights, shares, strict=True)}
        return {"Loss": sum(weights[name] * part for name, part in parts.items()), **parts}

    def _shares_ahead(self, batches: Sequence[AnyBatch]) -> Tensor | None:
        """The shares (K, T) of K micro-batches before the first backward pass; None if not known by then."""
        if not self.edits_masks:
            num_terms = len(self.loss_weights)
            return self._shares([batch.mask.sum().expand(num_terms) for batch in batches])
        if len(batches) == 1:
            return None
        buffers = [buffer.clone() for buffer in self.agent.buffers()]
        with torch.no_grad(), isolated_rng(None):
            sizes = [self._mask_sizes(batch, self.compute_loss(batch, log_step=False)) for batch in batches]
            for buffer, before in zip(self.agent.buffers(), buffers, strict=True):
                buffer.copy_(before)
        return self._shares(sizes)

    def _shares(self, sizes: Sequence[Tensor]) -> Tensor:
        """Shares (K, T) float32 from the mask sizes (T,) of K micro-batches, counting those of all processes.

        The shares add up to the number of processes, because gradients are averaged over processes.
        """
        own = torch.stack(list(sizes)).float()
        total: Tensor = own.sum(0)
        if (processes := self.accelerator.num_processes) > 1:
            total = self.accelerator.reduce(total, reduction="sum") / processes
        return own / total.clamp(min=1 / processes)

    def _mask_sizes(self, batch: AnyBatch, found: Mapping[str, Any]) -> Tensor:
        """Mask sizes (T,) int64 of the loss terms; that of the batch's mask if compute_loss returns none."""
        masks = [*_MASKS, *map(_EXTRA_MASK.format, self.extra_loss_weights)]
        return torch.stack([found.get(name, batch.mask).sum() for name in masks])

    def _step(self, log_step: bool, checked: Sequence[AnyBatch] | None) -> dict[str, Tensor]:
        """Clip the gradients and update the weights, if allowed; returns norms before clipping.

        log_step: add the norms of the agent's parts. checked: the batches to save if a gradient is not
        finite; None skips the check.
        """
        for call in self.before_clipping:
            call()
        # Clipping by a norm that is NaN would make every gradient NaN.
        if checked is not None and (bad := bad_gradients(self.agent)):
            self._stop([f"the losses are finite, but not the gradient of {named(bad)}"], checked)
        grad_norm: Tensor | None = self.accelerator.clip_grad_norm_(self._params, self.grad_clip)
        norms = {} if grad_norm is None else {"grad_norm": grad_norm.detach()}
        if log_step and grad_norm is not None:  # the fp16 scaler has released the gradients by now
            undo = (grad_norm.detach() / self.grad_clip).clamp(min=1.0)
            norms |= {name: norm * undo for name, norm in norms_of_parts(self.agent).items()}
        # The check follows the average over processes, so that all processes decide alike. A loss scaler
        # checks by itself, and lowers its scale only within the optimizer's step.
        decides_skip = self.on_nan == "skip" and self.accelerator.scaler is None
        if decides_skip and grad_norm is not None and not bool(torch.isfinite(grad_norm)):
            self._skip_update()
            return norms
        factor = warmup_factor(self.gradient_steps, self.lr_warmup_steps) * self.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if getattr(self.optimizer, "step_was_skipped", False):  # the fp16 scaler found an overflow
            self._skip_update()
        else:
            self.progress.gradient_steps += 1
            self.agent.after_update()
            if self.average is not None:
                self.average.follow()
        return norms

    def on_weights_loaded(self) -> None:
        """Notify the agent and the average that weights were loaded, without the rest of a training state."""
        self.agent.on_checkpoint_loaded(is_resume=False)
        if self.average is not None:
            self.average.restart()

    def _check_losses(
        self, found: Sequence[Mapping[str, Any]], loss: Tensor, batches: Sequence[AnyBatch]
    ) -> None:
        """Stop all processes if any of them has a loss that is not finite; found: of each micro-batch."""
        is_bad = not bool(torch.isfinite(loss))
        if not any_process(is_bad, self.accelerator):
            return
        extra = {_EXTRA.format(name): name for name in self.extra_loss_weights}
        names = {"Actor Loss": "actor", "Critic Loss": "critic", **extra}
        problems = _numbered([bad_losses(one, names, self.agent) for one in found])
        whose = "the sum of the losses is" if is_bad else "the losses of another process are"
        self._stop(problems or [f"{whose} not finite"], batches)

    def _stop(self, problems: Sequence[str], batches: Sequence[AnyBatch]) -> NoReturn:
        """Drop the update, save its batches, and report everything that is not finite.

        Raises: FloatingPointError.
        """
        self._skip_update()
        fields = _numbered([bad_fields(plain(batch)) for batch in batches])
        reward = max(largest_reward(plain(batch)) for batch in batches)
        if not fields and reward > HUGE_REWARD:
            fields = [f"the largest reward is {reward:.3g}, whose square is not finite"]
            fix = "scale the rewards of the environment down"
        elif fields:
            fix = "correct the environment, or the data (`loxodon data check` finds broken files)"
        elif not self.is_sound():
            fix = _FIND_FIRST
        else:
            fix = "lower Experiment.learning_rate or grad_clip, or set Learner.on_nan = 'skip'"
        causes = [*(fields or ["the batch is finite"]), self._state_of_weights()]
        raise FloatingPointError(
            f"Update {self.gradient_steps} of epoch {self.progress.epoch} cannot be applied: "
            f"{'; '.join([*problems, *causes])}. {self._save(batches)} Fix: {fix}."
        )

    def _state_of_weights(self) -> str:
        """A clause that names weights that are not finite, if any."""
        bad = bad_weights(self.agent)
        return f"the weights {named(bad)} are not finite" if bad else "the weights are finite"

    def _save(self, batches: Sequence[AnyBatch]) -> str:
        """Save the batches of an update; returns a sentence that says where, or why not."""
        if self.run_dir is None:
            return "The batch was not saved."
        process = f"_process{self.accelerator.process_index}" if self.accelerator.num_processes > 1 else ""
        path = self.run_dir / "not_finite" / f"update_{self.gradient_steps}{process}.pt"
        try:
            save_batches(batches, path)
        except OSError as error:
            return f"The batch could not be saved ({error})."
        return f"The batch is saved: torch.load({str(path)!r}, weights_only=True)."

    def _skip_update(self) -> None:
        """Drop an update: weights, moments, targets and statistics stay."""
        self.optimizer.zero_grad()
        self.skipped_updates += 1
        if isinstance(self.agent, OnPolicyAgent):  # it has already updated statistics from the whole rollout
            return
        for module in self.agent.modules():
            if isinstance(module, RunningStatistics):
                module.set_pending_sums(torch.zeros_like(module.pending_sums()))

    def _check_gradients(self) -> None:
        """Check gradients after the first backward pass; processes wait for that of every parameter."""
        self._is_new = False
        if self.accelerator.num_processes == 1:
            return
        idle = [name for name, p in self.agent.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise ValueError(
                f"The loss does not depend on these parameters: {', '.join(idle)}. A single process can "
                "train like this, but several processes wait for each other's gradients of all parameters. "
                "Fix: switch off the parts without weight in the loss, or freeze these parameters with "
                "requires_grad_(False)."
            )

    def _report_priorities(self, batch: AnyBatch, found: Mapping[str, Any]) -> None:
        """Report to the dataset how badly the critics predict each window of a batch."""
        if self.report_priorities is None or not isinstance(batch, Batch) or batch.priority_slots is None:
            return
        if "squared_errors" not in found:
            raise ValueError(
                "The dataset keeps priorities, but compute_loss returned no squared_errors. Fix: return "
                "the result of super().compute_loss(batch, log_step) with your entries added, or set "
                "RLDataset.sampler = @Sampler()."
            )
        windows = batch.window_idxs[:, :-1]
        priorities, has_errors = sequence_priorities(
            found["squared_errors"], found["Critic Mask"], windows, num_windows=len(batch.priority_slots)
        )
        # A window of burn-in alone says nothing about its trajectory.
        slots = batch.priority_slots.where(has_errors, -1)
        # Every process draws by priorities, so each needs those of all sequences.
        slots, priorities = self.accelerator.gather((slots, priorities))
        self.report_priorities(slots.cpu().numpy(), priorities.cpu().numpy())

    def _with_details(
        self, metrics: dict[str, Any], batches: Sequence[AnyBatch], grad_norms: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The metrics of all processes. Those of the agent are from the last micro-batch, with its weight."""
        details = {
            name: torch.as_tensor(value).detach()
            for name, value in metrics.items()
            if _is_scalar(value) and name not in _SIZES  # sizes of all micro-batches are added below
        }
        details["batch_timesteps"] = torch.stack([b.mask.sum() for b in batches]).sum()
        details["batch_places"] = torch.tensor(sum(b.mask.numel() for b in batches))
        details["sequence_length_max"] = torch.tensor(max(b.mask.shape[1] for b in batches))
        details, grad_norms = _on_host(details), _on_host(grad_norms)
        if self.accelerator.num_processes > 1:
            own = {name: value.item() for name, value in details.items()}
            weight = batches[-1].mask.sum().item()
            shares = ("Loss", *self.loss_weights)
            merged = merge_metrics(own, weight, self.accelerator, sums=_COUNTS, shares=shares)
            details = {name: torch.tensor(value) for name, value in merged.items()}
        details["batch_padded_share"] = 1.0 - details["batch_timesteps"] / details["batch_places"]
        details["sequence_length"] = details.pop("sequence_length_max")
        details["learning_rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return {**details, **grad_norms}

    def check_epoch(self, means: Mapping[str, float], num_updates: int, num_skipped: int) -> None:
        """Check the result of an epoch's updates, most of which were not checked themselves.

        means: "loss", "actor_loss" and "critic_loss"; none of them if no update was made.
        num_updates: includes the num_skipped updates whose gradients were not finite.
        Raises: FloatingPointError if the loss is not finite; if such updates are skipped, for weights that
            are not finite, or if all updates were skipped (a loss scaler may need several to find its scale).
        """
        if self.skips_updates:
            self.check_weights()
            if self.on_nan == "skip" and num_skipped:
                self._report_skips(num_updates, num_skipped)
            return
        if math.isfinite(means.get("loss", 0.0)):
            return
        losses = f"{means['loss']} (actor {means['actor_loss']}, critic {means['critic_loss']})"
        raise FloatingPointError(
            f"The loss of epoch {self.progress.epoch} is {losses}; {self._state_of_weights()}. It became so "
            f"in an update that was not checked. Fix: {_FIND_FIRST}."
        )

    def _report_skips(self, num_updates: int, num_skipped: int) -> None:
        """Log how many updates of an epoch were skipped; FloatingPointError if it was all of them."""
        reason = "skipped because their gradients were not finite"
        if num_skipped == num_updates:
            raise FloatingPointError(
                f"All {num_updates} updates of epoch {self.progress.epoch} were {reason}. Fix: {_FIND_FIRST}."
            )
        if self.accelerator.is_main_process:
            logger.warning(
                "Epoch %d: %d of %d updates were %s.", self.progress.epoch, num_skipped, num_updates, reason
            )

    def check_weights(self) -> None:
        """Raise FloatingPointError, naming them, if any weights are not finite."""
        if not self.is_sound():
            raise FloatingPointError(
                f"In epoch {self.progress.epoch} {self._state_of_weights()}, so they are neither saved nor "
                f"published. Fix: {_FIND_FIRST}."
            )

    def is_sound(self) -> bool:
        """True if all weights and statistics are finite."""
        return not bad_weights(self.agent)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and loss scaler; tensors and plain values only, so that a safe load can read it back."""
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "gradient_steps": self.gradient_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict.

        Raises: ValueError if the optimizer's groups of parameters differ.
        """
        groups = self.optimizer.param_groups
        check_same_groups(state["optimizer"]["param_groups"], groups)
        # Moments and counts are state. These are settings: the ones of this run apply.
        chosen = [{name: group[name] for name in _SETTINGS if name in group} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update(settings)
        for param, parts in self.optimizer.state.items():
            for name, part in parts.items():
                if part.shape == param.shape:  # fused steps need equal strides, which files do not keep
                    parts[name] = torch.empty_like(param).copy_(part)
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.progress.gradient_steps = int(state["gradient_steps"])
        if self.average is not None:
            self.average.restart()  # until its own state is loaded, if there is one


def norms_of_parts(agent: nn.Module) -> dict[str, Tensor]:
    """Gradient norms of all direct parts that have any, scalar tensors by "grad_norm/<part>"."""
    found = {}
    for name, part in agent.named_children():
        if grads := [p.grad for p in part.parameters() if p.grad is not None]:
            found[f"grad_norm/{name}"] = torch.stack(torch._foreach_norm(grads)).norm()
    return found


def _on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scalar tensors on the CPU in float64, by one copy, because each copy from a GPU waits for it."""
    if all(x.device.type == "cpu" for x in metrics.values()):
        return dict(metrics)
    return dict(zip(metrics, stacked([*metrics.values()]).cpu().unbind(), strict=True))


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Scalar tensors as (n,) float64 on the device of the agent; some of them may be on the CPU."""
    device = next((x.device for x in scalars if x.device.type != "cpu"), None)
    return torch.stack([x.to(device, torch.float64) for x in scalars])


def _sum(scalars: Sequence[Tensor]) -> Tensor:
    return scalars[0] if len(scalars) == 1 else torch.stack(list(scalars)).sum()


def _numbered(clauses: Sequence[Sequence[str]]) -> list[str]:
    """The clauses about each micro-batch, with its number if there are several."""
    several = len(clauses) > 1
    return [f"in micro-batch {i} {one}" if several else one for i, of in enumerate(clauses) for one in of]


def _check_extra_terms(found: Mapping[str, Any], weights: Mapping[str, float]) -> None:
    """Raise ValueError unless each extra term has a weight, and each weight a term."""
    terms = found["terms"].extra if "terms" in found else {}
    unknown = [name for name in weights if _EXTRA.format(name) not in found]
    if without := [name for name in terms if name not in weights]:
        fitting = {name: weight for name, weight in weights.items() if name not in unknown}
        raise ValueError(
            f"The agent returned the extra loss {without[0]!r}, but Experiment.extra_loss_weights is "
            f"{weights}. Fix: set Experiment.extra_loss_weights = {fitting | dict.fromkeys(without, 1.0)}."
        )
    if unknown:
        has, fix = "the agent has no extra losses", "remove it"
        if terms:
            has, fix = f"the extra losses of the agent are {sorted(terms)}", "name one of these"
        raise ValueError(
            f"Experiment.extra_loss_weights names {unknown[0]!r}, but {has}. Fix: {fix}, or let the agent "
            f"return LossTerms(..., extra={{{unknown[0]!r}: ...}})."
        )
