"""The settings of a run: every field of Experiment, its default, what it may be, and what a test run has.

The defaults are those of AMAGO 3.3, so that a name means the same in both. What is recommended here stands in
`gin_configs/base_offpolicy.gin` and `gin_configs/ppo/ppo.gin`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..agents import BaseAgent, OnPolicyAgent
from ..data import RLDataset
from ..data.errors import check_choice
from ..data.sampling import PADDED_SAMPLING_MODES
from ..envs import EpsilonGreedy, ExplorationWrapper
from ..nets import TrajEncoder, TstepEncoder
from .artifacts.stores import is_run_name
from .callbacks import Callback
from .collect.build import MakeEnv
from .ppo import PPOLearner
from .process.ranges import check_number

AUTO_BATCH_TIMESTEPS = 1_536
"""Timesteps that a batch of full sequences has with `Experiment.batch_size = 'auto'`, so that an update costs
about the same at any length."""
AUTO_BATCH_SIZES = (4, 24)
"""The smallest and the largest number of sequences of such a batch."""


@dataclass(kw_only=True)
class Settings:
    """What Experiment is constructed from.

    Required, except tstep_encoder_type:
        run_name, ckpt_base_dir: the run folder is `<ckpt_base_dir>/<run_name>`.
        max_seq_len: longest training sequence, in transitions.
        dataset: where trajectories are kept; by default in the run folder.
        tstep_encoder_type: a type; its keywords are set in gin. None takes FFTstepEncoder for
            numbers, else DictTstepEncoder.
        traj_encoder_type, agent_type: types too, which must always be named.
        val_timesteps_per_epoch: an evaluation counts every episode that begins within so many env steps of
            its actor, and plays each to its end (but for ten times as many steps, and 1,000 more, at most);
            0 never evaluates.
        make_train_env, make_val_env: an EnvSpec, an id, a callable, or a list with one of these per actor.
    Environments:
        parallel_actors: number of environments. async_env_mp_context: start method of their processes.
        env_mode: "async", "sync", "already_vectorized" or "auto" (tries both, takes the faster).
        exploration_wrapper_type: noise on training actions; None for none.
        sample_actions: draw actions in training; otherwise the most likely one is taken.
        sample_actions_val: the same in evaluation.
        force_reset_train_envs_every: period in epochs of a reset of all training environments.
    Logs:
        log_to_wandb: log to Weights & Biases too.
        wandb_project, wandb_entity: there; by default what the variables WANDB_PROJECT, WANDB_ENTITY say.
        wandb_group_name: there; None for no group.
        verbose: show progress, and draw the learning curves at the end.
        log_interval: batches between records of training metrics.
    Replay:
        traj_save_len: longest trajectory file, in transitions.
        has_dset_edit_rights: this process may delete old files.
        stagger_traj_file_lengths: draw file lengths within max_seq_len of traj_save_len.
        save_trajs_as: "npz", "npz-compressed", "traj".
        padded_sampling: where windows may hang over ends of a trajectory: "none", "left", "right", "both", or
            "shifted": those of "both", moved inside.
        dloader_workers: sampling processes; 0 samples in this process.
    Schedule (one epoch collects, then learns):
        epochs: their number.
        start_learning_at_epoch, start_collecting_at_epoch: first epoch in which that is done.
        train_timesteps_per_epoch: env steps per actor; 0 collects nothing.
        train_batches_per_epoch: batches per process, off-policy.
        val_interval: epochs between evaluations; None for never.
        ckpt_interval: epochs between checkpoints; None for none beside those of
            CheckpointManager.every_minutes and the last one.
        always_save_latest: publish the policy of every epoch. always_load_latest: follow the newest one.
    Optimisation:
        batch_size: sequences per batch and process; "auto" takes as many as make about 1,500 timesteps if
            all are full, 4 to 24. batches_per_update: gradient accumulation.
        learning_rate: of AdamW. l2_coeff: weight decay of AdamW. lr_warmup_steps: updates of linear warm-up.
        critic_loss_weight: the actor's is 1. grad_clip: largest norm of the gradient; 0 or less: no clipping.
            Where it is often exceeded, values of rare rewards stay far below their targets (docs/choices.md).
        mixed_precision: of the updates: "no", "fp16", "bf16".
    Extras:
        mode: "both", "learn" (never collects) or "collect" (never learns).
        seed: of all randomness; None draws one and logs it.
        deterministic: forbid irreproducible torch operations.
        evaluate_at_end: evaluate once more, on new episodes, after the last epoch.
        stop_at_val_return: end training once an evaluation has this mean return; None never does.
        max_env_steps: end training after the epoch in which all collecting processes of the run together have
            taken so many env steps; None for no limit. Schedules still follow Experiment.epochs.
        torch_threads: of this process, never more than
            OMP_NUM_THREADS and its share of the cores; None for one, and as many as that on large models.
        compile_learning: compile the losses of updates with torch.compile (slow to start, for GPUs).
        compile_acting: compile the policy for acting with torch.compile (slow to start, for GPUs).
        restore_from: what a new run begins from: an artifact (`latest`, `other-run:best`) or a path.
        packed_batches: put short windows behind each other in one row instead of padding each; the losses are
            the same. It saves what padding costs without sorting windows by length.
        replay_ratio: gradient updates per collected env step, all collecting processes together; None for
            no fixed ratio. Learner and actors wait for each other when they are further off than
            ReplayRatio.tolerance. In mode "both" it sets the number of updates of each epoch instead of
            train_batches_per_epoch. Counting begins when training may begin.
        lr_schedule: factor of the learning rate by training progress in [0, 1], such as @LinearSchedule()
            or @TorchSchedule(); it multiplies the warm-up. None for 1.
        extra_loss_weights: of the auxiliary losses of an agent (`LossTerms.extra`), by name.
        on_policy_learner_type: what trains an on-policy agent; its keywords are set in gin.
        callbacks: what makes each Callback: hooks of your own at the points of a run, or ParamFreezer,
            Pretraining, EpisodeLengthCurriculum. WallClockLimit, FinalTest and ProfileEpoch are always there.
        test_run: try one of everything in seconds, in the run folder `<run_name>-test`.
    """

    run_name: str
    ckpt_base_dir: str
    max_seq_len: int
    dataset: RLDataset
    tstep_encoder_type: Callable[..., TstepEncoder] | None = None
    traj_encoder_type: Callable[..., TrajEncoder]
    agent_type: Callable[..., BaseAgent]
    val_timesteps_per_epoch: int
    make_train_env: MakeEnv | Sequence[MakeEnv]
    make_val_env: MakeEnv | Sequence[MakeEnv]

    parallel_actors: int = 12
    env_mode: str = "async"
    async_env_mp_context: str | None = None
    exploration_wrapper_type: Callable[..., ExplorationWrapper] | None = EpsilonGreedy
    sample_actions: bool = True
    sample_actions_val: bool = True
    force_reset_train_envs_every: int | None = None

    log_to_wandb: bool = False
    wandb_project: str | None = field(default_factory=lambda: os.environ.get("WANDB_PROJECT"))
    wandb_entity: str | None = field(default_factory=lambda: os.environ.get("WANDB_ENTITY"))
    wandb_group_name: str | None = None
    verbose: bool = True
    log_interval: int = 300

    traj_save_len: float = 1e10
    has_dset_edit_rights: bool = True
    stagger_traj_file_lengths: bool = True
    save_trajs_as: str = "npz"
    padded_sampling: str = "none"
    dloader_workers: int = 6

    epochs: int = 1000
    start_learning_at_epoch: int = 0
    start_collecting_at_epoch: int = 0
    train_timesteps_per_epoch: int = 1000
    train_batches_per_epoch: int = 1000
    val_interval: int | None = 20
    ckpt_interval: int | None = 50
    always_save_latest: bool = True
    always_load_latest: bool = False

    batch_size: int | Literal["auto"] = 24
    batches_per_update: int = 1
    learning_rate: float = 1e-4
    critic_loss_weight: float = 10.0
    lr_warmup_steps: int = 500
    grad_clip: float = 1.0
    l2_coeff: float = 1e-3
    mixed_precision: str = "no"

    mode: str = "both"
    seed: int | None = None
    deterministic: bool = False
    evaluate_at_end: bool = True
    stop_at_val_return: float | None = None
    max_env_steps: int | None = None
    torch_threads: int | None = None
    compile_learning: bool = False
    compile_acting: bool = False
    restore_from: str | None = None
    packed_batches: bool = False
    replay_ratio: float | None = None
    lr_schedule: Callable[[float], float] | None = None
    extra_loss_weights: Mapping[str, float] = field(default_factory=dict)
    on_policy_learner_type: Callable[..., PPOLearner] = PPOLearner
    callbacks: Sequence[Callable[[], Callback]] = ()
    test_run: bool = False

    @property
    def sequences_per_batch(self) -> int:
        """`batch_size`, or the number that "auto" stands for."""
        if self.batch_size != "auto":
            return self.batch_size
        fewest, most = AUTO_BATCH_SIZES
        return min(max(AUTO_BATCH_TIMESTEPS // self.max_seq_len, fewest), most)


# ---- checks, before anything is built ----

_CHOICES = {
    "env_mode": ("async", "sync", "already_vectorized", "auto"),
    "mode": ("both", "learn", "collect"),
    "mixed_precision": ("no", "fp16", "bf16"),
    "save_trajs_as": ("npz", "npz-compressed", "traj"),
    "padded_sampling": PADDED_SAMPLING_MODES,
}
_COUNTS = {  # whole numbers, and the lowest
    "max_seq_len": 1,
    "parallel_actors": 1,
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
}
_OPTIONAL_COUNTS = {
    "val_interval": 1,
    "ckpt_interval": 1,
    "force_reset_train_envs_every": 1,
    "max_env_steps": 1,
    "torch_threads": 1,
    "seed": 0,
}
_NUMBERS: dict[str, dict[str, Any]] = {
    "learning_rate": {"above": 0},
    "traj_save_len": {"above": 0},
    "replay_ratio": {"above": 0, "optional": True},
    "l2_coeff": {"lowest": 0},
    "critic_loss_weight": {"lowest": 0},
    "grad_clip": {},
    **{name: {"lowest": lowest, "whole": True} for name, lowest in _COUNTS.items()},
    **{name: {"lowest": low, "whole": True, "optional": True} for name, low in _OPTIONAL_COUNTS.items()},
}
_TAKEN = ("actor", "critic", "value")  # names of other losses in the logs
_HOOKS = {  # how they are called, as in AMAGO
    "compute_loss": ("batch", "log_step="),
    "train_step": ("batch", "log_step="),
    "edit_actor_mask": ("batch", "actor_loss", "pad_mask"),
    "edit_critic_mask": ("batch", "critic_loss", "pad_mask"),
    "edit_extra_mask": ("batch", "name", "loss", "pad_mask"),
    "policy_metrics": ("returns", "specials"),
    "summary": ("env_summary",),
}


def check_hooks(kind: type) -> None:
    """Raise TypeError for a hook of this class that cannot be called as it will be."""
    for name, form in _HOOKS.items():
        signature = inspect.signature(getattr(kind, name))
        keywords = {one[:-1]: None for one in form if one.endswith("=")}
        try:
            signature.bind(None, *form[: len(form) - len(keywords)], **keywords)
        except TypeError as error:
            asked = ", ".join(one.rstrip("=") for one in form)
            raise TypeError(
                f"{kind.__name__}.{name}{signature} cannot be called as {name}({asked}): "
                f"{error}. Fix: def {name}(self, {asked})."
            ) from None


def check_settings(settings: Settings) -> None:
    """Raise ValueError or TypeError for the first setting that cannot work."""
    for name, allowed in _CHOICES.items():
        check_choice(f"Experiment.{name}", getattr(settings, name), allowed)
    for name, limits in _NUMBERS.items():
        check_number(f"Experiment.{name}", getattr(settings, name), **limits)
    if settings.batch_size != "auto":
        check_number("Experiment.batch_size", settings.batch_size, lowest=1, whole=True)
    for term, weight in settings.extra_loss_weights.items():
        check_number(f"Experiment.extra_loss_weights[{term!r}]", weight, lowest=0)
        if term in _TAKEN:
            raise ValueError(
                f"Experiment.extra_loss_weights names {term!r}, but the logs have another {term}_loss. Fix: "
                "give the extra loss another name in LossTerms.extra."
            )
    if settings.traj_save_len < settings.max_seq_len:
        raise ValueError(
            f"Experiment.traj_save_len is {settings.traj_save_len:g}, shorter than max_seq_len = "
            f"{settings.max_seq_len}, so no training window could be full. Fix: set "
            f"Experiment.traj_save_len to {settings.max_seq_len} or more."
        )
    if not is_run_name(settings.run_name):
        raise ValueError(
            f"Experiment.run_name is {settings.run_name!r}, but it names a folder: 1 to 128 bytes "
            "without '/', ':' and control characters, that does not begin with '.' or '-'. Fix: set "
            "Experiment.run_name = 'my-run' (--run-name my-run)."
        )


# ---- a test run: one of everything in seconds, away from the real run's folder and data ----

FEW_STEPS = 8  # env steps per actor
TINY: dict[str, Any] = {
    "mode": "both",
    "log_to_wandb": False,
    "restore_from": None,
    "start_collecting_at_epoch": 0,
    "has_dset_edit_rights": False,
}
"""Settings of everything that is only tried."""
_OF_A_RUN: dict[str, Any] = {
    **TINY,
    "start_learning_at_epoch": 0,
    "epochs": 1,
    "ckpt_interval": 1,
    "val_interval": 1,
    "log_interval": 1,
    "evaluate_at_end": False,
    "force_reset_train_envs_every": None,
    "replay_ratio": None,
    "stop_at_val_return": None,
    "max_env_steps": None,
}
_AT_MOST = {
    "train_timesteps_per_epoch": FEW_STEPS,
    "val_timesteps_per_epoch": FEW_STEPS,
    "dloader_workers": 1,
}
_FEW_SEQUENCES = 4


def is_on_policy(agent_type: Any) -> bool:
    """Whether the agent will be one that learns from its newest rollout; False where that cannot be told."""
    while isinstance(agent_type, functools.partial):
        agent_type = agent_type.func
    agent_type = inspect.unwrap(agent_type)
    return isinstance(agent_type, type) and issubclass(agent_type, OnPolicyAgent)


def shrink(settings: Settings) -> None:
    """Change the settings of a test run: `<run_name>-test`, one epoch, tiny numbers, nothing published."""
    settings.run_name += "-test"
    for name, value in _OF_A_RUN.items():
        setattr(settings, name, value)
    for name, most in _AT_MOST.items():
        if name == "train_timesteps_per_epoch" and is_on_policy(settings.agent_type):
            continue  # sequences and minibatches are made for rollouts of this length
        setattr(settings, name, min(getattr(settings, name), most))
    settings.batch_size = min(settings.sequences_per_batch, _FEW_SEQUENCES)
    settings.train_batches_per_epoch = min(settings.train_batches_per_epoch, 2 * settings.batches_per_update)
    keep_in_own_folder(settings.dataset)


def keep_in_own_folder(dataset: Any) -> None:
    """Let what takes new trajectories keep them in the folder of the run; what is only read stays."""
    if getattr(dataset, "takes_new_trajs", False):
        dataset.dset_root = dataset.dset_name = None
    for part in getattr(dataset, "datasets", ()):
        keep_in_own_folder(part)
