"""The training part of an epoch: waiting for data, the updates, and their figures."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_POLL_S = 0.5  # between looks at a dataset that is not ready yet
_REMIND_S = 30.0
_SHOW_LOSS_EVERY_S = 0.3
_AGREE_EVERY_S = 1.0
_MAX_PERIOD = 1000  # updates


def train(exp: Experiment) -> None:
    """Refresh the dataset and train on train_batches_per_epoch batches, if it is time and there are data."""
    if exp.epoch < exp.start_learning_at_epoch or exp.train_batches_per_epoch == 0:
        _log_dataset(exp)
        return
    if not _await_data(exp):
        return
    exp.policy.train()
    start_s = time.perf_counter()
    sums, num_updates = _run_updates(exp)
    if not num_updates:
        return
    means = {name: float(total) / num_updates for name, total in sums.items()}
    elapsed_s = time.perf_counter() - start_s
    speed = {"time/learn_s": elapsed_s, "time/updates_per_s": num_updates / elapsed_s}
    losses = {f"train/{name}": value for name, value in means.items()}
    figures = {**exp.loader.metrics(), **exp.dataset.metrics()}
    sampling = {f"dataset/{name}": value for name, value in figures.items()}
    exp.log({**losses, "train/updates": num_updates, **speed, **sampling})
    exp.view.show(exp.epoch, "learning", {"loss": means["loss"]})
    if not math.isfinite(means["loss"]) and exp.mixed_precision != "fp16":
        raise ValueError(
            f"The loss of epoch {exp.epoch} is {means['loss']} (actor {means['actor_loss']}, critic "
            f"{means['critic_loss']}), so the weights are spoilt. Fix: lower Experiment.learning_rate or "
            "grad_clip, check the environment for NaN observations or rewards, and resume from the last "
            "checkpoint."
        )


def _run_updates(exp: Experiment) -> tuple[dict[str, Any], int]:
    """The updates of one epoch; returns the sums of their losses (scalar tensors) and their number."""
    sums: dict[str, Any] = {"loss": 0.0, "actor_loss": 0.0, "critic_loss": 0.0}
    num_updates, micro_batches, stop = 0, [], StopAgreement(exp)
    shown_s = time.perf_counter()
    last = exp.train_batches_per_epoch - 1
    # The number of batches so far follows from the epoch, so that a resumed run logs at the same points.
    seen = exp.epoch * exp.train_batches_per_epoch
    for i, batch in enumerate(exp.loader.epoch(exp.epoch, exp.train_batches_per_epoch)):
        micro_batches.append(batch)
        if len(micro_batches) < exp.batches_per_update and i < last:
            continue
        logs = any((seen + i - j) % exp.log_interval == 0 for j in range(len(micro_batches)))
        metrics = exp.train_step(micro_batches, with_metrics=logs)
        micro_batches = []
        num_updates += 1
        sums = {name: total + metrics[name] for name, total in sums.items()}
        if logs:
            exp.log(metrics, "train-update")
        if exp.view.verbose and time.perf_counter() - shown_s > _SHOW_LOSS_EVERY_S:
            shown_s = time.perf_counter()
            exp.view.show(exp.epoch, "learning", {"loss": float(metrics["loss"])})
        if stop.agreed():
            break
    return sums, num_updates


def _log_dataset(exp: Experiment) -> None:
    exp.accelerator.wait_for_everyone()
    exp.log(exp.dataset.on_end_of_collection(), "dataset")
    exp.accelerator.wait_for_everyone()


def _await_data(exp: Experiment) -> bool:
    """True when the dataset is ready. A learner waits for collectors; other modes go on without training."""
    _log_dataset(exp)
    reminded_s = -math.inf
    while not exp.dataset.ready_for_training:
        if exp.mode != "learn":
            logger.info("epoch %d: not enough trajectories to train on yet", exp.epoch)
            return False
        if stop_agreed(exp):
            return False
        if time.monotonic() - reminded_s > _REMIND_S:
            reminded_s = time.monotonic()
            exp.view.say(
                f"Waiting for trajectories in {exp.dataset.save_new_trajs_to} (start --mode collect)."
            )
        time.sleep(_POLL_S)
        exp.dataset.refresh()
    return True


def stop_agreed(exp: Experiment) -> bool:
    """True when any process was asked to stop. All processes have to call it at the same point."""
    if exp.accelerator.num_processes == 1:
        return exp.stop.requested()
    flag = torch.tensor(float(exp.stop.requested()), device=exp.DEVICE)
    return bool(exp.accelerator.reduce(flag, reduction="sum") > 0)


class StopAgreement:
    """Lets processes that train together stop after the same update, without talking after each one.

    About once per second they tell each other whether one of them was asked to stop, and how long the updates
    took, from which the number of updates until the next time follows for all alike.
    """

    def __init__(self, exp: Experiment) -> None:
        self._exp, self._num_updates, self._period = exp, 0, 1
        self._since_s = time.perf_counter()

    def agreed(self) -> bool:
        """True when all processes stop now. To be called by all of them, after every update."""
        exp = self._exp
        if exp.accelerator.num_processes == 1:
            return exp.stop.requested()
        self._num_updates += 1
        if self._num_updates < self._period:
            return False
        elapsed_s = time.perf_counter() - self._since_s
        own = torch.tensor([float(exp.stop.requested()), elapsed_s], device=exp.DEVICE)
        num_asked, seconds = exp.accelerator.reduce(own, reduction="mean").tolist()
        self._period = max(1, min(int(self._num_updates * _AGREE_EVERY_S / max(seconds, 1e-6)), _MAX_PERIOD))
        self._num_updates, self._since_s = 0, time.perf_counter()
        return bool(num_asked > 0)
