"""The end of training before its last epoch that is no emergency: asked for, or because time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .distributed import any_process

if TYPE_CHECKING:
    from .experiment import Experiment


def end_epoch(exp: Experiment, epoch: int) -> None:
    """Tell environments and callbacks that an epoch is over."""
    if exp.train_envs is not None:
        exp.train_envs.tell("on_epoch_end", epoch)
    exp.hooks("on_epoch_end", epoch)


def ends_here(exp: Experiment) -> bool:
    """True in all processes if any was asked to end after this epoch, or has trained for too long."""
    limit_s = exp.max_wall_clock_s
    if limit_s is not None and exp.stop.age_s() >= limit_s:
        exp.stop.ask_after_epoch(f"Experiment.max_wall_clock_s = {limit_s:g} is reached")
    return any_process(exp.stop.after_epoch is not None, exp.accelerator)


def end_here(exp: Experiment) -> None:
    """Save everything between two epochs and say how to go on; `learn` returns then."""
    exp.hooks("on_training_stop")
    reason = exp.stop.after_epoch or "another process asked for it"
    exp.fleet.end("stopped", reason)
    where = f"Training stops after epoch {exp.epoch - 1} ({reason}):"
    if exp.mode == "collect":
        if exp.collector is not None:
            exp.collector.flush()
        line = f"{where} all finished trajectories are stored."
    else:
        if exp.always_save_latest or exp.mode == "learn":
            exp.write_latest_policy()  # before the checkpoint, which keeps the version
        line = f"{where} saved {exp.save_checkpoint()}. To go on: the same command with --resume."
    if exp.accelerator.is_main_process:
        exp.view.console.print(line, markup=False)
