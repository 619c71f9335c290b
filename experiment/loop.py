"""The order of events: the epochs of `learn`, and what happens in each part of one."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import building, resume
from .checkpoints import PolicyInfo
from .collector import Collector, Histories
from .console import ConsoleView
from .signals import StopRequest

if TYPE_CHECKING:
    from ..data import Batch
    from .experiment import Experiment
    from .settings import MakeEnv

logger = logging.getLogger("loxodon")
_POLL_S = 0.5  # between looks at a dataset that is not ready yet
_REMIND_S = 30.0
_SHOW_LOSS_EVERY_S = 0.3


def run_epochs(exp: Experiment) -> dict[str, float]:
    """Run the epochs from exp.epoch on; see Experiment.learn."""
    collects_only = exp.mode == "collect"
    first = exp.epoch
    if first >= exp.epochs and not collects_only:
        logger.info("All %d epochs are done already. Raise Experiment.epochs to go on.", exp.epochs)
        return exp.last_val_metrics
    shows = exp.verbose and exp.accelerator.is_main_process
    _begin_new_run(exp)
    with (
        StopRequest() as exp.stop,
        ConsoleView(shows, None if collects_only else exp.epochs, first) as exp.view,
    ):
        if exp.mode == "learn":
            exp.write_latest_policy()
        for epoch in itertools.count(first) if collects_only else range(first, exp.epochs):
            exp.epoch = epoch
            is_final = _run_epoch(exp)
            if _stop_agreed(exp):
                _stop(exp)
            exp.epoch = epoch + 1
            if is_final:
                break
            if not collects_only and exp.epoch < exp.epochs:
                if exp.ckpt_interval is not None and exp.epoch % exp.ckpt_interval == 0:
                    exp.save_checkpoint()
                if exp.always_save_latest or exp.mode == "learn":
                    exp.write_latest_policy()
        _finish(exp)
    return exp.last_val_metrics


def _begin_new_run(exp: Experiment) -> None:
    """Do not train a run that starts from scratch on what an earlier run of its name has collected."""
    from_scratch = exp.mode == "both" and exp.env_steps == 0 and exp.start_collecting_at_epoch == 0
    if from_scratch and exp.has_dset_edit_rights and exp.accelerator.is_main_process:
        num_files = exp.dataset.begin_new_run()
        if num_files:
            logger.warning(
                "%d trajectories of an earlier run named %r were moved to buffer/superseded/ of its folder. "
                "To train on them, name the dataset: DiskTrajDataset.dset_name.",
                num_files,
                exp.run_name,
            )
    exp.accelerator.wait_for_everyone()


def _run_epoch(exp: Experiment) -> bool:
    """One epoch up to its training; True when nothing is left to do after it.

    That is when an evaluation reaches the return to stop at, or when a collecting process learns that the
    learner is done.
    """
    is_final = False
    if exp.always_load_latest or exp.mode == "collect":
        is_final = _follow_latest(exp)
    if exp.val_timesteps_per_epoch > 0 and exp.val_interval is not None and exp.epoch % exp.val_interval == 0:
        exp.view.show(exp.epoch, "evaluating", {})
        exp.evaluate_val()
        if _is_good_enough(exp):
            return True
    if exp.stop.requested():
        return is_final
    if exp.collector is not None and exp.epoch >= exp.start_collecting_at_epoch:
        exp.view.show(exp.epoch, "collecting", {})
        exp.collect_new_training_data()
    if exp.mode != "collect" and not exp.stop.requested():
        train(exp)
    exp.view.show(exp.epoch + 1, "done", {})
    return is_final


def _is_good_enough(exp: Experiment) -> bool:
    """True when the last evaluation reached stop_at_val_return."""
    score = exp.last_val_metrics.get("val/return")
    if exp.mode == "collect" or exp.stop_at_val_return is None or score is None:
        return False
    if score < exp.stop_at_val_return:
        return False
    exp.view.say(f"Mean return {score:.3f} reaches {exp.stop_at_val_return}: training stops.")
    return True


def _follow_latest(exp: Experiment) -> bool:
    """Load newer weights; True when they are the last ones of a learner that was at work meanwhile."""
    before = exp.loaded_policy
    info = exp.read_latest_policy()
    if info is None:
        if exp.epoch == 0:
            logger.warning(
                "There is no published policy in %s yet; acting with new weights.", exp.checkpoints.root
            )
        return False
    if info.is_final and before is None:
        logger.warning("The learner of this run has finished before; collecting with its final policy.")
    return exp.mode == "collect" and info.is_final and before is not None and before != info


def _stop_agreed(exp: Experiment) -> bool:
    """True when any process was asked to stop."""
    if exp.accelerator.num_processes == 1:
        return exp.stop.requested()
    flag = torch.tensor(float(exp.stop.requested()), device=exp.DEVICE)
    return bool(exp.accelerator.reduce(flag, reduction="sum") > 0)


def _stop(exp: Experiment) -> None:
    """Store what there is, say how to go on, and exit."""
    name = exp.stop.signal_name or "a signal to another process"
    if exp.mode == "collect":
        exp.close()
        line = (
            f"Stopped by {name}: all finished trajectories are stored. Start the same command again to go on."
        )
    else:
        # The running epoch is repeated on resume; its checkpoint bears its number.
        folder = resume.save(exp, epoch=exp.epoch, next_epoch=exp.epoch)
        exp.close()
        line = f"Stopped by {name} in epoch {exp.epoch}: saved {folder}. "
        line += "To go on: the same command with --resume."
    if exp.accelerator.is_main_process:
        exp.view.console.print(line, markup=False)
    raise SystemExit(0)


def _finish(exp: Experiment) -> None:
    """Last evaluation, last checkpoint, last policy."""
    if exp.collector is not None:
        exp.collector.flush()
    if exp.mode == "collect":
        return
    if exp.evaluate_at_end and exp.val_timesteps_per_epoch > 0:
        exp.evaluate_val()
    exp.save_checkpoint()
    if exp.always_save_latest or exp.mode == "learn":
        exp.write_latest_policy(is_final=True)


# ---- collecting ----


def collect(exp: Experiment) -> dict[str, float]:
    """Go on with the training rollout; see Experiment.collect_new_training_data."""
    collector = exp.collector
    if collector is None:
        raise ValueError(
            f"Nothing can be collected: mode is {exp.mode!r} and train_timesteps_per_epoch "
            f"{exp.train_timesteps_per_epoch}. Fix: use mode 'both' or 'collect' and a positive number."
        )
    every = exp.force_reset_train_envs_every
    if collector.state is None or (every is not None and exp.epoch > 0 and exp.epoch % every == 0):
        exp.restart_train_envs(exp.epoch)
    exp.policy.eval()
    start_s = time.perf_counter()
    taken = collector.collect(exp.train_timesteps_per_epoch)
    collector.wait()
    elapsed_s = time.perf_counter() - start_s
    exp.env_steps += taken * exp.accelerator.num_processes
    metrics = building.average_over_processes(collector.histories.summary("collect"), exp.accelerator)
    collector.histories.clear()
    exp.log({**metrics, "time/collect_s": elapsed_s, "time/env_steps_per_s": taken / elapsed_s})
    if "collect/return" in metrics:
        exp.view.show(exp.epoch, "collecting", {"return": metrics["collect/return"]})
    return metrics


# ---- training ----


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
    exp.log({**losses, "train/updates": num_updates, **speed})
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
    shown_s = time.perf_counter()
    last = exp.train_batches_per_epoch - 1
    # The number of batches so far follows from the epoch, so that a resumed run logs at the same points.
    seen = exp.epoch * exp.train_batches_per_epoch
    for i, batch in enumerate(_batches(exp)):
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
        if exp.stop.requested() and exp.accelerator.num_processes == 1:
            break
    return sums, num_updates


def _batches(exp: Experiment) -> Iterator[Batch]:
    """The batches of the epoch.

    Torch's DataLoader seeds its workers from the global generator, and more often when it starts than later
    on. The generator is put back, or a resumed run would draw other numbers than the uninterrupted one.
    """
    rng_state = torch.get_rng_state()
    for i, batch in enumerate(exp.loader.epoch(exp.epoch, exp.train_batches_per_epoch)):
        if i == 0:
            torch.set_rng_state(rng_state)
        yield batch


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
        if _stop_agreed(exp):
            return False
        if time.monotonic() - reminded_s > _REMIND_S:
            reminded_s = time.monotonic()
            exp.view.say(
                f"Waiting for trajectories in {exp.dataset.save_new_trajs_to} (start --mode collect)."
            )
        time.sleep(_POLL_S)
        exp.dataset.refresh()
    return True


# ---- evaluating ----


def interact(
    exp: Experiment,
    envs: Any,
    timesteps: int,
    hidden_state: Any,
    render: bool,
    save_on_done: bool | str,
    episodes: int | None,
) -> tuple[Any, Histories]:
    """Roll out from a reset; see Experiment.interact."""
    folder = exp.dataset.save_new_trajs_to if save_on_done is True else (save_on_done or None)
    writer = None if folder is None else building.make_writer(exp, Path(folder), envs.num_envs, "interact")
    histories = Histories.create(envs.num_envs)
    sample = exp.sample_actions if exp.sample_actions_val is None else exp.sample_actions_val
    collector = Collector(
        envs,
        exp.policy,
        exp.DEVICE,
        None,
        writer,
        histories,
        sample,
        should_stop=exp.stop.requested,
        cast=exp.caster,
    )
    was_training = exp.policy.training
    exp.policy.eval()
    # Drawn from torch's generator, so that whoever seeds that one decides the episodes too.
    collector.restart(int(torch.randint(2**31 - 1, ())))
    assert collector.state is not None
    if hidden_state is not None:
        collector.state.hidden_state = hidden_state
    collector.collect(timesteps, episodes=episodes, render=render)
    exp.policy.train(was_training)
    if writer is not None:
        writer.close()
    return collector.state.hidden_state, histories


def evaluate_val(exp: Experiment) -> dict[str, float]:
    """Evaluate, log, and keep the best policy; see Experiment.evaluate_val."""
    if exp.val_envs is None:
        exp.val_envs = building.make_envs(exp, exp.make_val_env)
    start_s = time.perf_counter()
    seed = building.stream_seed(exp, "val", exp.epoch)
    metrics = exp.evaluator.evaluate(exp.val_envs, exp.val_timesteps_per_epoch, seed=seed)
    if exp.stop.requested():  # cut short: the figures would favour short episodes
        return {}
    named = {f"val/{name}": value for name, value in metrics.items()}
    exp.last_val_metrics = named
    if named:
        exp.log({**named, "time/val_s": time.perf_counter() - start_s})
    score = metrics.get("return")
    if score is not None:
        exp.view.show(exp.epoch, "evaluating", {"val return": score})
        if exp.mode != "collect" and (exp.best_score is None or score > exp.best_score):
            exp.best_score = score
            if exp.accelerator.is_main_process:
                info = PolicyInfo(exp.policy_version, exp.epoch, False)
                exp.checkpoints.save_policy(exp.checkpoints.best_path, exp.policy, info)
    return named


def evaluate_test(
    exp: Experiment,
    make_test_env: MakeEnv | Sequence[MakeEnv],
    timesteps: int,
    render: bool,
    save_trajs_to: str | None,
    episodes: int | None,
) -> dict[str, float]:
    """Evaluate in new environments; see Experiment.evaluate_test."""
    envs = building.make_envs(exp, make_test_env)
    try:
        seed = building.stream_seed(exp, "test")
        metrics = exp.evaluator.evaluate(
            envs, timesteps, seed=seed, render=render, save_trajs_to=save_trajs_to, episodes=episodes
        )
    finally:
        envs.close()
    named = {f"test/{name}": value for name, value in metrics.items()}
    exp.log(named)
    return named
