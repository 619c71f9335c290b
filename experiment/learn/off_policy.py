"""Off-policy training: the updates of an epoch, on batches of stored trajectories."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...data import Batch, BatchLoader, RLDataset
from ..contracts import RunContext, Trainer
from ..fleet import ReplayRatio
from ..process.distributed import merge_metrics
from .batches import copied_ahead, in_buckets
from .learner import Learner
from .loop import LossDisplay, LossSums, updates

logger = logging.getLogger("loxodon")
_POLL_S = 0.5  # interval between checks of a dataset that is not ready yet
_REMIND_S = 30.0
_IDLE_EPOCHS_BEFORE_WARNING = 2  # idle epochs before a warning about the likely cause


class OffPolicyTrainer(Trainer):
    """Trains on `num_batches` batches per epoch, once there are data.

    Args:
        ctx: context of the run.
        learner: its counters show whether an update was applied.
        dataset: refreshed before training.
        loader: makes its batches.
        pace: decides how many updates may be made, and when.
        train_step: (batch or list of batches, log_step=) -> metrics: one update.
        why_idle: returns the reason why there is nothing to train on.
        batch_size: sequences of a batch.
        num_batches: per epoch and process.
        first_epoch: first epoch with updates.
        log_interval: batches between records.
        bucket_size: batches are padded to multiples of so many transitions; None for no padding.
    """

    def __init__(
        self,
        ctx: RunContext,
        learner: Learner,
        dataset: RLDataset,
        loader: BatchLoader,
        pace: ReplayRatio,
        *,
        train_step: Callable[..., Mapping[str, Any]],
        why_idle: Callable[[], str],
        batch_size: int,
        num_batches: int,
        first_epoch: int,
        log_interval: int,
        bucket_size: int | None = None,
    ) -> None:
        self.ctx, self.learner, self.dataset, self.loader, self.pace = ctx, learner, dataset, loader, pace
        self.train_step, self.why_idle = train_step, why_idle
        self.num_batches, self.batches_per_update = num_batches, pace.batches_per_update
        self.first_epoch, self.log_interval, self.bucket_size = first_epoch, log_interval, bucket_size
        self.batch_size, self.timesteps_per_forward = batch_size, batch_size * dataset.max_seq_len

    def describe(self) -> str:
        """Updates per epoch, or per env step if a ratio decides."""
        num_sequences = self.ctx.accelerator.num_processes * self.batch_size * self.batches_per_update
        of_sequences = f"of {num_sequences} sequences"
        if self.ctx.role.does_both and self.pace.ratio is not None:
            return f"{self.pace.ratio.value:g} updates {of_sequences} per env step"
        return f"{self.num_batches // self.batches_per_update:,} updates {of_sequences}"

    def wait_for_data(self) -> bool:
        """True when the dataset is ready. A learner waits for actors; other modes skip the training."""
        if self.ctx.progress.epoch < self.first_epoch or self.num_batches == 0:
            return False
        waits, reminded_s = self.ctx.role.only_learns, -math.inf
        while True:
            is_warm = not waits or self.pace.is_warm()
            if not self.ctx.any(not (is_warm and self.dataset.ready_for_training)):
                self.idle_epochs = 0
                if waits:
                    self.ctx.status.put(lacks_data=False)
                return True
            if not waits:
                self._note_idle_epoch()
                return False
            if self.ctx.stop_agreed():
                return False
            self.ctx.status.put(lacks_data=is_warm)
            what = "trajectories to train on" if is_warm else "the first env steps of actors"
            self.ctx.status.state("waiting", f"for {what}")
            if time.monotonic() - reminded_s > _REMIND_S:
                reminded_s = time.monotonic()
                self.ctx.console.say(self.why_idle())
            time.sleep(_POLL_S)
            self.dataset.refresh()

    def _note_idle_epoch(self) -> None:
        self.idle_epochs += 1
        logger.info("epoch %d: not enough trajectories to train on yet", self.ctx.progress.epoch)
        if self.idle_epochs == _IDLE_EPOCHS_BEFORE_WARNING:
            logger.warning("After %d epochs there has been no update. %s", self.idle_epochs, self.why_idle())

    def train(self, epoch: int) -> None:
        """All updates of an epoch; logs their means and the pace.

        Raises: FloatingPointError for a loss that is not finite, unless such updates are left out.
        """
        self.ctx.status.state("learning")
        if not (num_batches := self.pace.batches(self.num_batches)):
            return
        self.learner.agent.train()
        start_s, sums, display = time.perf_counter(), LossSums(self.learner), LossDisplay(self.ctx, epoch)
        versions = list[Tensor]()  # versions of the collecting policies
        self.ctx.console.show(epoch, "learning", {})
        self.ctx.console.measure(lambda: sums.num_updates * self.batches_per_update / num_batches)
        for metrics, logs in updates(
            self._batches(epoch, num_batches, versions),
            num_batches,
            self._step,
            ctx=self.ctx,
            batches_per_update=self.batches_per_update,
            log_interval=self.log_interval,
            # Checkpoints keep the number of updates, so a resumed run logs at the same points.
            num_before=self.ctx.progress.gradient_steps * self.batches_per_update,
            may_update=self.pace.before_update,
        ):
            self.ctx.status.put(gradient_steps=self.ctx.progress.gradient_steps)
            sums.add(metrics)
            if logs:
                self.ctx.log(metrics, "train-update")
            display.show("learning", metrics["loss"])
        if sums.num_updates:
            more = self._policy_lag(versions) | self.pace.metrics()
            self._log_and_check(sums, more, time.perf_counter() - start_s)

    def _step(self, batches: Sequence[Batch], logs: bool) -> Mapping[str, Any]:
        """One update; a single batch is passed on as such."""
        return self.train_step(batches if self.batches_per_update > 1 else batches[0], log_step=logs)

    def _batches(self, epoch: int, num_batches: int, versions: list[Tensor]) -> Iterator[Batch]:
        """The batches of an epoch on the device; adds the versions of their policies to `versions`."""
        batches = in_buckets(self.loader.epoch(epoch, num_batches), self.bucket_size)
        for batch in copied_ahead(batches, self.ctx.accelerator.device):
            versions += [] if batch.policy_versions is None else [batch.policy_versions]
            yield batch

    def _log_and_check(self, sums: LossSums, more: Mapping[str, float], elapsed_s: float) -> None:
        accelerator = self.ctx.accelerator
        # Each process has an equal share of each update.
        means = merge_metrics(sums.means(), 1.0, accelerator)
        metrics: dict[str, float] = {f"train/{name}": value for name, value in means.items()}
        metrics["train/updates"] = sums.num_updates
        if self.learner.skips_updates:
            metrics["train/skipped_updates"] = sums.num_skipped
        metrics |= more
        metrics |= {"time/learn_s": elapsed_s, "time/updates_per_s": sums.num_updates / elapsed_s}
        metrics |= self.learner.timer.update_metrics()
        sampling = merge_metrics({**self.loader.metrics(), **self.dataset.metrics()}, 1.0, accelerator)
        self.ctx.log({**metrics, **{f"dataset/{name}": value for name, value in sampling.items()}}, "")
        self.learner.check_epoch(means, sums.num_updates, sums.num_skipped)

    def _policy_lag(self, versions: Sequence[Tensor]) -> dict[str, float]:
        """Number of versions that the trajectories are behind the learning policy; empty if none is known.

        Policies of other runs have versions of their own, so later ones than the newest do not count.
        """
        known = torch.cat(list(versions)).cpu().double() if versions else torch.zeros(0)
        newest = self.ctx.progress.policy_version
        known = known[(known >= 0) & (known <= newest)]
        return {"train/policy_lag": newest - float(known.mean())} if len(known) else {}
