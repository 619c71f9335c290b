"""Checks of Experiment's settings before anything is built."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import TYPE_CHECKING, Any

from .artifacts.stores import is_run_name
from .checkpoint.start_from import check_artifact_settings
from .gradient_guard import BAD_GRAD_CHOICES

if TYPE_CHECKING:
    from .experiment import Experiment

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "env_mode": ("async", "sync", "already_vectorized", "auto"),
    "mode": ("both", "learn", "collect"),
    "mixed_precision": ("no", "fp16", "bf16"),
    "save_trajs_as": ("npz", "npz-compressed", "traj"),
    "bad_grad": BAD_GRAD_CHOICES,
    "padded_sampling": ("none", "left", "right", "both"),
}
_LOWEST = {
    "max_seq_len": 1,
    "parallel_actors": 1,
    "actor_processes": 1,
    "batch_size": 1,
    "batches_per_update": 1,
    "log_interval": 1,
    "epochs": 0,
    "val_timesteps_per_epoch": 0,
    "train_timesteps_per_epoch": 0,
    "train_batches_per_epoch": 0,
    "start_learning_at_epoch": 0,
    "start_collecting_at_epoch": 0,
    "dloader_workers": 0,
    "lr_warmup_steps": 0,
    "test_timesteps": 0,
}
_POSITIVE = ("learning_rate", "adam_eps", "traj_save_len")
_PERIODS = (
    "val_interval",
    "ckpt_interval",
    "force_reset_train_envs_every",
    "keep_checkpoints",
    "keep_every_epochs",
    "torch_threads",
    "async_env_workers",
)
_HOOKS = {  # how they are called, as in AMAGO
    "compute_loss": ("batch", "log_step="),
    "train_step": ("batch", "log_step="),
    "edit_actor_mask": ("batch", "actor_loss", "pad_mask"),
    "edit_critic_mask": ("batch", "critic_loss", "pad_mask"),
    "policy_metrics": ("returns", "specials"),
    "summary": ("env_summary",),
}


def check_hooks(experiment: Experiment) -> None:
    """Raise TypeError for an overridden hook that cannot be called as it will be."""
    for name, form in _HOOKS.items():
        signature = inspect.signature(getattr(experiment, name))
        keywords = {one[:-1]: None for one in form if one.endswith("=")}
        try:
            signature.bind(*form[: len(form) - len(keywords)], **keywords)
        except TypeError as error:
            asked = ", ".join(one.rstrip("=") for one in form)
            raise TypeError(
                f"{type(experiment).__name__}.{name}{signature} cannot be called as {name}({asked}): "
                f"{error}. Fix: def {name}(self, {asked})."
            ) from None


def check_settings(experiment: Experiment) -> None:
    """Raise ValueError or TypeError for the first setting that cannot work."""
    for name, allowed in _CHOICES.items():
        value = getattr(experiment, name)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), [a for a in allowed if a], n=1)
            raise ValueError(
                f"Experiment.{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}. "
                f"Fix: set Experiment.{name} = {near[0] if near else allowed[0]!r}."
            )
    for name, lowest in _LOWEST.items():
        _check_number(
            name, getattr(experiment, name), f"a whole number of at least {lowest}", lowest, whole=True
        )
    multipliers = (experiment.lr_multipliers or {}).items()
    positive = [(name, getattr(experiment, name)) for name in _POSITIVE]
    for name, value in [*positive, *((f"lr_multipliers[{key!r}]", factor) for key, factor in multipliers)]:
        _check_number(name, value, "a number above 0", 1e-300, whole=False)
    _check_number("grad_clip", experiment.grad_clip, "a number, 0 for no clipping", -math.inf, whole=False)
    for name in ("l2_coeff", "critic_loss_weight"):
        _check_number(name, getattr(experiment, name), "a number of at least 0", 0, whole=False)
    for name in _PERIODS:
        value = getattr(experiment, name)
        if value is not None:
            _check_number(name, value, "None or a whole number of at least 1", 1, whole=True)
    _check_ratio(experiment)
    _check_lifecycle(experiment)
    if experiment.traj_save_len < experiment.max_seq_len:
        raise ValueError(
            f"Experiment.traj_save_len is {experiment.traj_save_len:g}, shorter than max_seq_len = "
            f"{experiment.max_seq_len}, so no training window could be full. Fix: set "
            f"Experiment.traj_save_len to {experiment.max_seq_len} or more."
        )
    if not is_run_name(experiment.run_name):
        raise ValueError(
            f"Experiment.run_name is {experiment.run_name!r}, but it names a folder: 1 to 128 bytes "
            "without '/', ':' and control characters, that does not begin with '.' or '-'. Fix: set "
            "Experiment.run_name = 'my-run' (--run-name my-run)."
        )
    _check_beginning(experiment)


def _check_beginning(experiment: Experiment) -> None:
    store, warm_start = experiment.artifact_store, experiment.warm_start
    check_artifact_settings(store, experiment.restore_from)
    check_artifact_settings(store, warm_start, "warm_start")
    if warm_start is not None and experiment.restore_from is not None:
        raise ValueError(
            "Experiment.restore_from and warm_start are both set, but a run begins from one of them. Fix: "
            "leave out warm_start to take all weights, or restore_from to take those that fit."
        )


def check_on_policy(experiment: Experiment) -> None:
    """Raise ValueError where settings do not go with an on-policy agent."""
    agent = type(experiment.policy).__name__
    wrong = {
        "mode": (
            experiment.mode,
            experiment.mode == "both",
            "'both': its data are of the newest policy alone",
        ),
        "sample_actions": (experiment.sample_actions, experiment.sample_actions, "True: it learns by chance"),
        "replay_ratio": (
            experiment.replay_ratio,
            experiment.replay_ratio is None,
            "None: it replays nothing",
        ),
        "train_timesteps_per_epoch": (
            experiment.train_timesteps_per_epoch,
            experiment.train_timesteps_per_epoch > 0,
            "the length of a rollout, such as 128",
        ),
        "start_collecting_at_epoch": (
            experiment.start_collecting_at_epoch,
            experiment.start_collecting_at_epoch == 0,
            "0: it trains on the rollout of each epoch",
        ),
    }
    for name, (found, is_fine, expected) in wrong.items():
        if not is_fine:
            raise ValueError(
                f"Experiment.{name} is {found!r}, but the on-policy agent {agent} needs {expected}. Fix: set "
                f"Experiment.{name} so, or use an off-policy agent such as Agent."
            )


def _check_ratio(experiment: Experiment) -> None:
    ratio, tolerance = experiment.replay_ratio, experiment.replay_ratio_tolerance
    if ratio is not None:
        _check_number("replay_ratio", ratio, "None or a number above 0", 1e-300, whole=False)
    allowed = "a number of at least 0 and below 1"
    _check_number("replay_ratio_tolerance", tolerance, allowed, 0, whole=False)
    if tolerance >= 1:
        raise ValueError(
            f"Experiment.replay_ratio_tolerance is {tolerance!r}, but must be {allowed}: it is a share of "
            "replay_ratio. Fix: set Experiment.replay_ratio_tolerance, e.g. 0.1."
        )


def _check_lifecycle(experiment: Experiment) -> None:
    for name in ("max_wall_clock_s", "ckpt_minutes"):
        if (limit := getattr(experiment, name)) is not None:
            _check_number(name, limit, "None or a number above 0", 1e-300, whole=False)
    if (seed := experiment.seed) is not None:
        _check_number("seed", seed, "None or a whole number of at least 0", 0, whole=True)
    if (epoch := experiment.profile_epoch) is not None:
        _check_number("profile_epoch", epoch, "None or a whole number of at least 0", 0, whole=True)
    shaper = experiment.reward_shaper
    if shaper is not None and (isinstance(shaper, type) or not callable(shaper)):
        raise TypeError(
            f"Experiment.reward_shaper is {shaper!r}, but must be a function of (rewards, progress). Fix: in "
            "gin write @ScaleRewards() with parentheses, in Python pass ScaleRewards() or a function."
        )


def _check_number(name: str, value: Any, allowed: str, lowest: float, *, whole: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and value != int(value)):
        raise TypeError(
            f"Experiment.{name} is {value!r}, but must be {allowed}. Fix: set Experiment.{name} to one."
        )
    if value < lowest:
        raise ValueError(
            f"Experiment.{name} is {value!r}, but must be {allowed}. Fix: set Experiment.{name} to one."
        )
