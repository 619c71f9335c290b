"""The training part of an epoch: waiting for data, the updates, and their figures."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .distributed import StopWatch, any_process, merge_metrics
from .fleet import pacing
from .fleet.ratio import NOT_ENOUGH_DATA
from .learner import log_figures

if TYPE_CHECKING:
    from .experiment import Experiment
    from .onpolicy import PPOLearner

logger = logging.getLogger("loxodon")
_POLL_S = 0.5  # between looks at a dataset that is not ready yet
_REMIND_S = 30.0
_PATIENCE_EPOCHS = 2  # without anything to train on, before a word about the likely cause
_SHOW_LOSS_EVERY_S = 0.3


def train(exp: Experiment) -> None:
    """Refresh the dataset and train on train_batches_per_epoch batches, if it is time and there are data.

    An on-policy agent trains on the newest rollout instead.
    """
    exp.learner.lr_scale = (
        exp.lr_schedule(progress_of(exp)) if exp.lr_schedule is not None else exp.learner.lr_scale
    )
    if exp.on_policy is not None:
        _train_on_policy(exp, exp.on_policy)
        return
    if exp.epoch < exp.start_learning_at_epoch or exp.train_batches_per_epoch == 0:
        _log_dataset(exp)
        return
    if not _await_data(exp):
        return
    exp.fleet.state("learning")
    if not (num_batches := pacing.plan_batches(exp)):
        return
    exp.policy.train()
    start_s, lag = time.perf_counter(), pacing.PolicyLag(exp.policy_version)
    skipped_before = exp.learner.skipped_updates
    sums, num_updates = _run_updates(exp, num_batches, lag)
    if not num_updates:
        return
    skips = 0 if exp.bad_grad is None else exp.learner.skipped_updates - skipped_before
    own = {name: float(total) / max(num_updates - skips, 1) for name, total in sums.items()}
    means = merge_metrics(own, 1.0, exp.accelerator)  # of equal shares of each update
    elapsed_s = time.perf_counter() - start_s
    speed = {"time/learn_s": elapsed_s, "time/updates_per_s": num_updates / elapsed_s}
    speed |= exp.timer.update_figures()
    losses = {f"train/{name}": value for name, value in means.items()}
    figures = merge_metrics({**exp.loader.metrics(), **exp.dataset.metrics()}, 1.0, exp.accelerator)
    sampling = {f"dataset/{name}": value for name, value in figures.items()}
    skipped = {} if exp.bad_grad is None else {"train/skipped_updates": skips}
    pace = {**lag.figures(), **pacing.ratio_figures(exp)}
    exp.log({**losses, "train/updates": num_updates, **skipped, **pace, **speed, **sampling})
    exp.view.show(exp.epoch, "learning", {"loss": means["loss"]})
    _check_loss(exp, means)


def _check_loss(exp: Experiment, means: Mapping[str, float]) -> None:
    """Raise ValueError for a loss that is not finite, unless such updates are left out."""
    is_fine = math.isfinite(means.get("loss", 0.0))  # the first update may have been vetoed
    if not is_fine and exp.mixed_precision != "fp16" and exp.bad_grad != "skip":
        raise ValueError(
            f"The loss of epoch {exp.epoch} is {means['loss']} (actor {means['actor_loss']}, critic "
            f"{means['critic_loss']}), so the weights are spoilt. Fix: lower Experiment.learning_rate or "
            "grad_clip, check the environment for NaN observations or rewards, and resume from the last "
            "checkpoint."
        )


def progress_of(exp: Experiment) -> float:
    """Share of the epochs that are done, in [0, 1]."""
    return min(1.0, exp.epoch / max(exp.epochs, 1))


def _train_on_policy(exp: Experiment, learner: PPOLearner) -> None:
    """Train on the rollout of this epoch."""
    _log_dataset(exp)
    exp.fleet.state("learning")
    start_s = time.perf_counter()
    learner.set_progress(progress_of(exp))
    should_stop = StopWatch(exp.stop.requested, exp.accelerator).after_update
    own = learner.train(exp.epoch, should_stop, updates=exp.epoch >= exp.start_learning_at_epoch)
    figures = merge_metrics(own, 1.0, exp.accelerator)
    elapsed_s = time.perf_counter() - start_s
    speed = {"time/learn_s": elapsed_s, "time/updates_per_s": figures["updates"] / elapsed_s}
    speed |= exp.timer.update_figures()
    exp.fleet.put(gradient_steps=exp.learner.gradient_steps)
    exp.log({**{f"ppo/{name}": value for name, value in figures.items()}, **speed})
    exp.view.show(exp.epoch, "learning", {"loss": figures.get("loss", math.nan)})
    learner.raise_alarm(figures)
    _check_loss(exp, figures)


def _run_updates(exp: Experiment, num_batches: int, lag: pacing.PolicyLag) -> tuple[dict[str, Any], int]:
    """The updates of one epoch; returns the sums of their losses (scalar tensors) and their number."""
    sums: dict[str, Any] = {"loss": 0.0, "actor_loss": 0.0, "critic_loss": 0.0}
    num_updates, micro_batches = 0, []
    stops = StopWatch(exp.stop.requested, exp.accelerator)
    shown_s = time.perf_counter()
    last = num_batches - 1
    # The number of batches so far follows from the epoch, so that a resumed run logs at the same points.
    seen = exp.epoch * exp.train_batches_per_epoch
    for i, batch in enumerate(exp.loader.epoch(exp.epoch, num_batches)):
        micro_batches.append(batch)
        lag.add(batch)
        if len(micro_batches) < exp.batches_per_update and i < last:
            continue
        if not pacing.await_actors(exp, stop_agreed):
            break
        logs = any((seen + i - j) % exp.log_interval == 0 for j in range(len(micro_batches)))
        skipped_before = exp.learner.skipped_updates
        batch_or_list = micro_batches if exp.batches_per_update > 1 else micro_batches[0]
        metrics = log_figures(exp.train_step(batch_or_list, log_step=logs))
        micro_batches = []
        num_updates += 1
        exp.fleet.put(gradient_steps=exp.learner.gradient_steps)
        if exp.bad_grad is None or exp.learner.skipped_updates == skipped_before:
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
    figures = exp.dataset.on_end_of_collection()
    exp.fleet.put(buffer_files=figures.get("total_files"))
    if exp.mode == "learn" and (newest_s := exp.dataset.newest_time_s) is not None:
        figures["newest_age_s"] = max(0.0, time.time() - newest_s)
    exp.log(figures, "dataset")
    exp.accelerator.wait_for_everyone()


def _await_data(exp: Experiment) -> bool:
    """True when the dataset is ready. A learner waits for collectors; other modes go on without training."""
    _log_dataset(exp)
    reminded_s = -math.inf
    while True:
        is_warm = exp.mode != "learn" or pacing.is_warm(exp)
        if not any_process(not (is_warm and exp.dataset.ready_for_training), exp.accelerator):
            exp.idle_epochs = 0
            return True
        if exp.mode != "learn":
            exp.idle_epochs += 1
            logger.info("epoch %d: not enough trajectories to train on yet", exp.epoch)
            if exp.idle_epochs == _PATIENCE_EPOCHS:
                logger.warning("After %d epochs there was no update. %s", exp.idle_epochs, why_idle(exp))
            return False
        if stop_agreed(exp):
            return False
        exp.fleet.state("waiting", NOT_ENOUGH_DATA if is_warm else "for the first env steps of actors")
        if time.monotonic() - reminded_s > _REMIND_S:
            reminded_s = time.monotonic()
            hint = "" if exp.actors is not None else " (start --mode collect)"
            exp.view.say(f"Waiting for trajectories in {exp.dataset.save_new_trajs_to}{hint}.")
        time.sleep(_POLL_S)
        exp.dataset.refresh()


def why_idle(exp: Experiment) -> str:
    """What is wrong when there is nothing to train on, and how to mend it."""
    if exp.collector is None:
        return "Nothing is collected. Fix: raise Experiment.train_timesteps_per_epoch, or name stored data."
    if "collect/return" in exp.epoch_figures:
        return "There are too few trajectories. Fix: collect longer, or lower DiskTrajDataset.dset_min_size."
    return (
        f"No episode has ended: {exp.env_steps} env steps in {exp.parallel_actors} environments. Fix: set "
        f"Experiment.traj_save_len, e.g. to {max(500, exp.max_seq_len)}, to train on parts of episodes, or "
        "end them with gymnasium's TimeLimit."
    )


def stop_agreed(exp: Experiment) -> bool:
    """True when any process was asked to stop."""
    return any_process(exp.stop.requested(), exp.accelerator)
