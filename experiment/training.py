"""The training part of an epoch: waiting for data, the updates, and their figures."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from .processes import StopWatch, any_process, merge_metrics

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_POLL_S = 0.5  # between looks at a dataset that is not ready yet
_REMIND_S = 30.0
_SHOW_LOSS_EVERY_S = 0.3


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
    own = {name: float(total) / num_updates for name, total in sums.items()}
    means = merge_metrics(own, 1.0, exp.accelerator)  # of equal shares of each update
    elapsed_s = time.perf_counter() - start_s
    speed = {"time/learn_s": elapsed_s, "time/updates_per_s": num_updates / elapsed_s}
    losses = {f"train/{name}": value for name, value in means.items()}
    figures = merge_metrics({**exp.loader.metrics(), **exp.dataset.metrics()}, 1.0, exp.accelerator)
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
    num_updates, micro_batches = 0, []
    stops = StopWatch(exp.stop.requested, exp.accelerator)
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
        if stops.after_update():
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
    while any_process(not exp.dataset.ready_for_training, exp.accelerator):
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
    """True when any process was asked to stop."""
    return any_process(exp.stop.requested(), exp.accelerator)
