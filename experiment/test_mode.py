"""`Experiment.test_run`: one of everything in seconds, away from the real run's folder and data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .onpolicy_settings import is_on_policy

if TYPE_CHECKING:
    from .experiment import Experiment

FEW_STEPS = 8  # env steps per actor
LONGEST_EPISODE = 1_000  # env steps; evaluations play one episode per actor, cut there
TINY: dict[str, Any] = {
    "mode": "both",
    "log_to_wandb": False,
    "artifact_store": None,
    "restore_from": None,
    "warm_start": None,
    "start_collecting_at_epoch": 0,
}
"""Settings of everything that is only tried."""
_OF_A_RUN: dict[str, Any] = {
    **TINY,
    "log_to_tensorboard": False,
    "has_dset_edit_rights": False,
    "start_learning_at_epoch": 0,
    "epochs": 1,
    "ckpt_interval": 1,
    "val_interval": 1,
    "log_interval": 1,
    "evaluate_at_end": False,
    "force_reset_train_envs_every": None,
    "replay_ratio": None,
    "stop_at_val_return": None,
    "max_wall_clock_s": None,
}
_AT_MOST = {
    "train_timesteps_per_epoch": FEW_STEPS,
    "val_timesteps_per_epoch": LONGEST_EPISODE,
    "test_timesteps": LONGEST_EPISODE,
    "batch_size": 4,
    "dloader_workers": 1,
}


def shrink(exp: Experiment) -> None:
    """Change the settings of a test run: `<run_name>-test`, one epoch, tiny numbers, nothing published."""
    exp.run_name += "-test"
    for name, value in _OF_A_RUN.items():
        setattr(exp, name, value)
    for name, most in _AT_MOST.items():
        if name == "train_timesteps_per_epoch" and is_on_policy(exp.agent_type):
            continue  # sequences and minibatches are made for rollouts of this length
        setattr(exp, name, min(getattr(exp, name), most))
    exp.train_batches_per_epoch = min(exp.train_batches_per_epoch, 2 * exp.batches_per_update)
    _redirect(exp.dataset)


def _redirect(dataset: Any) -> None:
    """Let what takes new trajectories keep them in the test run's folder; what is only read stays."""
    if getattr(dataset, "takes_new_trajs", False):
        dataset.dset_root = dataset.dset_name = None
    for part in getattr(dataset, "datasets", ()):
        _redirect(part)


def report(exp: Experiment) -> str:
    """What the test run has done, in a line."""
    updates = exp.learner.gradient_steps
    trained = f"{updates} updates" if updates else "no update (the dataset was not ready for training)"
    return f"test run passed: {exp.env_steps} env steps, {trained}, one checkpoint, all in {exp.run_dir}"
