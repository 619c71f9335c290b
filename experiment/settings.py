"""The settings of a run: every field of Experiment that gin can set, with its default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..agents import BaseAgent
from ..data import RLDataset
from ..envs import EnvSpec, EpsilonGreedy, ExplorationWrapper
from ..nets import TrajEncoder, TstepEncoder
from .artifacts import ArtifactStore
from .callbacks import Callback
from .freezing import ParamFreezer
from .onpolicy import PPOLearner
from .pretraining import Pretraining
from .reward_shaping import ShapeRewards

MakeEnv = EnvSpec | str | Callable[..., Any]


def _from_environment(name: str) -> Callable[[], str | None]:
    def read() -> str | None:
        return os.environ.get(name)

    read.__name__ = f"the environment variable {name}"  # what --print-config shows
    return read


@dataclass
class Settings:
    """What Experiment is constructed from.

    Required:
        run_name, ckpt_base_dir: the run folder is `<ckpt_base_dir>/<run_name>`.
        max_seq_len: longest training sequence, in transitions.
        dataset: where trajectories are kept; by default in the run folder.
        tstep_encoder_type, traj_encoder_type, agent_type: types; their keywords are set in gin.
        val_timesteps_per_epoch: env steps per actor and evaluation; 0 never evaluates.
        make_train_env, make_val_env: an EnvSpec, an id, a callable, or a list with one of these per actor.
    Environments:
        parallel_actors: number of environments. async_env_mp_context: start method of their processes.
        env_mode: "async", "sync", "already_vectorized" or "auto" (tries both, takes the faster).
        exploration_wrapper_type: noise on training actions; None for none.
        sample_actions: in training and evaluation; otherwise the most likely one is taken.
        force_reset_train_envs_every: period in epochs of a reset of all training environments.
    Logs:
        log_to_wandb, wandb_project, wandb_entity, wandb_group_name: Weights & Biases.
        verbose: show progress, and draw the learning curves at the end.
        log_interval: batches between records of training metrics.
    Replay:
        traj_save_len: longest trajectory file, in transitions.
        has_dset_edit_rights: this process may delete old files.
        stagger_traj_file_lengths: draw file lengths within max_seq_len of traj_save_len.
        save_trajs_as: "npz", "npz-compressed", "traj". padded_sampling: "none", "left", "right", "both".
        dloader_workers: sampling processes; 0 samples in this process.
    Schedule (one epoch collects, then learns):
        epochs: their number.
        start_learning_at_epoch, start_collecting_at_epoch: first epoch of each.
        train_timesteps_per_epoch, train_batches_per_epoch: per actor; per process.
        val_interval, ckpt_interval: epochs between evaluations, checkpoints; None for never, and for
            checkpoints beside that of ckpt_minutes and the last one.
        always_save_latest, always_load_latest: publish, follow the newest policy file.
    Optimisation:
        batch_size: sequences per batch and process. batches_per_update: gradient accumulation.
        learning_rate, l2_coeff: of AdamW. lr_warmup_steps: updates of linear warm-up.
        critic_loss_weight: the actor's is 1. grad_clip: largest norm; 0 or less does not clip.
        mixed_precision: "no", "fp16", "bf16".
    Extras:
        mode: "both", "learn" (never collects) or "collect" (never learns).
        seed: None draws one and logs it. deterministic: forbid irreproducible torch operations.
        sample_actions_val: as sample_actions, for evaluation only; None for the same.
        evaluate_at_end: evaluate once more, on new episodes, after the last epoch.
        stop_at_val_return: end training once an evaluation has this mean return; None never does.
        ckpt_minutes: after so many without a checkpoint, the running epoch ends with one, which is there only
            until the next; None never does.
        keep_checkpoints: newest training states that stay; None for all. keep_every_epochs: those after a
            multiple of so many epochs stay too.
        log_to_tensorboard: if it is installed. torch_threads: of this process, never more than
            OMP_NUM_THREADS and its share of the cores; None for one, and as many as that on large models.
        overlap_sampling: with "async" envs, act for one half of them while the other half steps.
        async_env_workers: worker processes of "async" envs; None for one per CPU core.
        compile_acting: compile the policy for acting with torch.compile (slow to start, for GPUs).
        artifact_store: where checkpoints and the best policy go too, such as FolderStore; None for nowhere.
        restore_from: what a new run begins from: an artifact (`latest`, `other-run:best`) or a path.
        actor_processes: collecting processes, which share schedules of exploration; set by --actors.
        replay_ratio: gradient updates per collected env step, all collecting processes together; None for
            whatever comes. Learner and actors wait for each other when they are further off than
            replay_ratio_tolerance, a share of the updates so far (at least of one epoch's). In mode "both" it
            sets the number of updates of each epoch instead of train_batches_per_epoch. Counting begins when
            training may begin.
        lr_multipliers: factor of the learning rate by name of a module of the agent, such as "actor" or
            "traj_encoder"; the longest name that fits a parameter wins. adam_eps: epsilon of AdamW.
        freeze: makes what leaves some parameters as they are, such as ParamFreezer; None freezes nothing.
        bad_grad: what happens to an update whose gradient is not finite: "skip" leaves it out, "raise" stops
            with the name of the parameter, None lets it be.
        save_env_state: store the training environments in checkpoints, so that a resumed rollout goes on in
            the middle of its episodes: None where all of them offer `get_state` and `set_state`, True
            requires that they do, False never. Where they are not stored, a resumed run begins new episodes.
        exact_resume: where they are not stored, begin new episodes at every checkpoint too, so that a run
            that was killed and resumed is the one that was not, to the last bit. The price: every running
            episode is cut, and none that is longer than ckpt_interval epochs ever ends.
        lr_schedule: factor of the learning rate by training progress in [0, 1], such as @LinearSchedule();
            it multiplies the warm-up. None for 1.
        on_policy_learner_type: what trains an on-policy agent; its keywords are set in gin.
        callbacks: what makes each Callback: hooks of your own at the points of a run.
        max_wall_clock_s: training stops after the epoch in which so many seconds of `learn` have passed, with
            a checkpoint to go on from; None for no limit.
        test_run: try one of everything in seconds, in the run folder `<run_name>-test`.
        make_test_env, test_timesteps: after the last epoch, evaluate for so many env steps per actor in these
            environments (None: those of make_val_env); 0 does not.
        reward_shaper: (rewards (N,) float32, progress from 0 to 1) -> (N,), what is stored for training; the
            policy's input and all figures keep the environment's own. None changes nothing.
        profile_epoch: write a trace of this epoch to the run folder's logs; None for none.
        pretraining: makes the stage that trains on stored data before the first epoch, such as Pretraining;
            for on-policy agents. None for none.
        warm_start: what a new run takes those weights from that fit, named as in restore_from; None for
            nothing.
    """

    run_name: str
    ckpt_base_dir: str
    max_seq_len: int
    dataset: RLDataset
    tstep_encoder_type: Callable[..., TstepEncoder]
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
    force_reset_train_envs_every: int | None = None

    log_to_wandb: bool = False
    wandb_project: str | None = field(default_factory=_from_environment("WANDB_PROJECT"))
    wandb_entity: str | None = field(default_factory=_from_environment("WANDB_ENTITY"))
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

    batch_size: int = 24
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
    sample_actions_val: bool | None = None
    evaluate_at_end: bool = True
    stop_at_val_return: float | None = None
    keep_checkpoints: int | None = None
    log_to_tensorboard: bool = True
    torch_threads: int | None = None
    overlap_sampling: bool = True
    async_env_workers: int | None = None
    compile_acting: bool = False
    keep_every_epochs: int | None = None
    artifact_store: Callable[[], ArtifactStore] | None = None
    restore_from: str | None = None
    actor_processes: int = 1
    replay_ratio: float | None = None
    replay_ratio_tolerance: float = 0.1
    lr_multipliers: Mapping[str, float] | None = None
    adam_eps: float = 1e-8
    freeze: Callable[[], ParamFreezer] | None = None
    bad_grad: str | None = None
    save_env_state: bool | None = None
    exact_resume: bool = False
    lr_schedule: Callable[[float], float] | None = None
    on_policy_learner_type: Callable[..., PPOLearner] = PPOLearner
    callbacks: Sequence[Callable[[], Callback]] = ()
    max_wall_clock_s: float | None = None
    test_run: bool = False
    make_test_env: MakeEnv | Sequence[MakeEnv] | None = None
    test_timesteps: int = 0
    reward_shaper: ShapeRewards | None = None
    profile_epoch: int | None = None
    pretraining: Callable[[], Pretraining] | None = None
    warm_start: str | None = None
    ckpt_minutes: float | None = 5.0
