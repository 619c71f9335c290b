"""The Experiment: the course of a run from its settings to the last checkpoint, and the hooks for users."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gin
import torch
from gymnasium import spaces
from torch import Tensor

from ..agents import BaseAgent, LossTerms, OnPolicyAgent, RolloutHooks, value_at
from ..data import (
    BatchLoader,
    DoNothingDataset,
    PrioritySampler,
    RLDataset,
    TrajectoryWriter,
    WritingClock,
)
from ..data.spaces import ActionCode, PolicyActionSpace
from ..envs import EnvHalves, ExplorationWrapper, Histories, ReturnHistory, SpecialMetricHistory
from ..nets import TrajEncoder, TstepEncoder, default_tstep_encoder
from .artifacts import RunAccess
from .artifacts.upload import Uploads
from .callbacks import OF_EVERY_RUN, CallbackList
from .checkpoint.policy_file import PolicyInfo, load_weights
from .checkpoint.published import PublishedPolicy
from .checkpoint.record import (
    RunRecord,
    check_checkpoint,
    environments_to_json,
    known_bindings,
    record_run,
    settings_from_python,
)
from .checkpoint.spaces import EnvSpaces
from .checkpoint.start_from import WarmStart, as_branch, fetched
from .checkpoint.store import CheckpointManager, TrainingState, read_metadata
from .collect import Collector, RolloutGroup, StageTimer, build
from .collect.build import MakeEnv
from .config.hash import config_hash
from .config.load import loaded, starts_from_recommended, unused_settings
from .contracts import Progress, Role, RunContext, Stateful, Trainer
from .evaluation import Evaluator
from .fleet import EpisodeReports, Membership, ReplayRatio
from .fleet.actors import SeparateActors
from .fleet.heartbeat import BY_SIGNAL
from .fleet.shared_folder import location_of
from .learn.average import WeightAverage
from .learn.batches import NUM_LENGTHS
from .learn.learner import AnyBatch, Learner, masked_losses
from .learn.off_policy import OffPolicyTrainer
from .learn.optimizer import make_optimizer
from .optional.pretraining import Pretraining
from .optional.reward_shaping import RewardShaping
from .output.console import ConsoleView
from .output.logs import MetricLogger, to_plain
from .output.plots import draw_if_possible
from .process.distributed import (
    explained_loss_of_contact,
    from_main,
    gather,
    make_accelerator,
    merge_episodes,
)
from .process.exits import INTERRUPTED, Stopped, close_each, without_foreign_exits
from .process.malloc import keep_freed_memory
from .process.rng import GlobalGenerators, derive_seed, draw_seed, isolated_rng, seed_global_generators
from .process.signals import Aborted
from .process.threads import choose_threads
from .settings import (
    Settings,
    check_for_on_policy,
    check_settings,
    set_by_user,
    shrink,
    without_effect,
)

logger = logging.getLogger("loxodon")
# Parts with a separate state in each process
_PER_PROCESS = {"trainer", "collector", "reward_shaping", "rng"}
_RESTORED_LAST = {"collector", "dataset", "rng"}  # parts that are restored only when all others fit
_CONSOLE_METRICS = {  # metrics of an epoch that the terminal shows
    "val/return": "val return",
    "collect/return": "train return",
    "train/loss": "loss",
    "ppo/loss": "loss",
    "time/env_steps_per_s": "env steps/s",
    "time/updates_per_s": "updates/s",
    "dataset/total_files": "files",
}
_ENV_STEPS_SPENT = "The env steps of the run have reached Experiment.max_env_steps"
_HOW_TO_RESUME = "To continue, run the same command with --resume."
_HOW_TO_RESUME_CORRECTED = "To continue, correct the error, then run the same command with --resume."


@gin.configurable
@dataclass
class Experiment(Settings):
    """One run: environments, agent, replay data, and the order in which they work. `start()`, then `learn()`.

    Its fields are those of `Settings`. Its parts get `ctx` and the values that they need.
    """

    def __post_init__(self) -> None:
        """Check the settings and set up Accelerate; nothing is built and nothing is written yet."""
        check_settings(self)
        self._config = loaded()
        self._is_set_by_user = set_by_user(self, self._config)
        if self.test_run:
            shrink(self)
        choose_threads(self.torch_threads)
        self.accelerator = make_accelerator(self.mixed_precision)
        role, shows = Role.of(self.mode), self.verbose and self.accelerator.is_main_process
        if role.learns and self.accelerator.device.type == "cpu":
            keep_freed_memory()
        seed = from_main(draw_seed, self.accelerator) if self.seed is None else self.seed
        self.fleet = Membership(self.run_dir, self.run_name, str(role), self.accelerator.process_index)
        self.ctx = RunContext(
            run_dir=self.run_dir,
            run_name=self.run_name,
            role=role,
            accelerator=self.accelerator,
            progress=Progress(self.epochs, seed),
            log=lambda metrics, key: self.log(metrics, key),  # noqa: PLW0108 - or a user's own
            console=ConsoleView(shows, None if role.is_actor else self.epochs),
            status=self.fleet,
        )
        self.hooks, self.timer = CallbackList(self, self.callbacks, (*OF_EVERY_RUN, WarmStart)), StageTimer()
        self.epoch_metrics: dict[str, Any] = {}  # everything that was logged in the running epoch
        self.last_val_metrics: dict[str, float] = {}
        self.actors: AbstractContextManager[Any] | None = None  # actors that run as long as learn() does
        self.collector: Collector | None = None
        self.average: WeightAverage | None = None
        self.episode_reports: EpisodeReports | None = None  # for an agent that chooses a discount by them
        self.begins_anew = True  # no checkpoint will be loaded after `start`
        self._is_started = False
        self._saved_s = 0.0  # time of the last checkpoint, in seconds since `learn` began
        self.train_envs: Any = None
        self.val_envs: Any = None
        self.obs_space: spaces.Dict
        self.action_space: PolicyActionSpace
        self.env_spaces: EnvSpaces  # spaces before anything is flattened or scaled

    # ---- progress of the run ----

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.ckpt_base_dir).expanduser() / self.run_name

    @property
    def DEVICE(self) -> torch.device:  # noqa: N802 - the name is part of the public interface
        """The device of the agent."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def policy(self) -> BaseAgent:
        """The agent itself, without the wrapper of Accelerate."""
        return self._policy

    @property
    def evaluated(self) -> BaseAgent:
        """The agent that is evaluated and stored as a policy: `policy`, or the average of its weights."""
        return self.policy if self.average is None else self.average.agent

    @property
    def epoch(self) -> int:
        """The running epoch, or the next."""
        return self.ctx.progress.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.ctx.progress.epoch = number

    @property
    def env_steps(self) -> int:
        """Env steps of the whole run, by all processes that collect for it."""
        return self.ctx.progress.env_steps

    @env_steps.setter
    def env_steps(self, number: int) -> None:
        self.ctx.progress.env_steps = number

    @property
    def run_seed(self) -> int:
        """The seed in use: from the settings, from the loaded checkpoint, or drawn."""
        return self.ctx.progress.seed

    @property
    def is_finished(self) -> bool:
        """True when nothing is left to do after the last epoch."""
        return self.ctx.progress.is_finished

    @property
    def unread_parts(self) -> tuple[str, ...]:
        """Settings that name parts which the kind of agent does not use; known after `start`."""
        if isinstance(self.policy, OnPolicyAgent):
            return ("Experiment.exploration_wrapper_type", "Experiment.weight_average")
        return ("Experiment.on_policy_learner_type",)

    @property
    def best_score(self) -> float | None:
        """Score of the best policy so far."""
        return self.ctx.progress.best_score

    # ---- building ----

    def start(self, *, resume: bool = False) -> None:
        """Build everything, in dependency order.

        resume: continue from the newest checkpoint, to the last bit if nothing else has changed. An actor
            ignores it, because it follows the newest policy.

        Raises: FileNotFoundError if there is no checkpoint to continue from.
        """
        if self._config is not loaded():
            raise ValueError(
                "load_config was called again after this Experiment was made, so its parts would get the "
                "settings of another config. Fix: call start() before the next load_config."
            )
        resume &= self.ctx.role.learns
        with self.fleet.joining(), without_foreign_exits():
            if resume:
                self.prepare_to_resume()
            self.pace = self._make_pace()
            self._seed_process()
            self.init_dsets()
            env_summary = self.init_envs()
            self.init_dloaders()
            seed_global_generators(derive_seed(self.ctx.progress.seed, "model"))  # the same in all processes
            self.hooks.around("model_init", self.init_model)
            self.init_checkpoints()
            self.init_logger()
            self._is_started = True  # hooks may load and evaluate
            try:
                self._restore_if_asked()
                self.hooks("on_start")
            except BaseException:
                self._is_started = False
                raise
        if self.ctx.role.learns and self.ctx.is_main and not starts_from_recommended():
            logger.warning(
                "This run includes no recommended preset, so settings that it does not name have the "
                "defaults of the code, which are AMAGO's. Fix: begin your gin file with include "
                "'base_offpolicy.gin' (PPO: 'ppo/ppo.gin'; AMAGO itself: 'amago.gin'). In Python, call "
                "load_config with one of these names before Experiment(...); its arguments override the "
                "preset (examples/from_python.py)."
            )
        if unused := unused_settings(self.unread_parts):
            logger.warning(unused)
        if self.ctx.role.learns and self.ctx.is_main and not self.test_run:
            for sentence in without_effect(self, self._is_set_by_user):
                logger.warning(sentence)
        self.summary(env_summary)
        if resume:
            self.load_newest_checkpoint()

    def prepare_to_resume(self) -> None:
        """Before `start`, if `load_checkpoint` follows it: use the seed of the newest checkpoint.

        Raises: FileNotFoundError if there is none.
        """
        earlier = CheckpointManager(self.run_dir, self.run_name)
        newest = earlier.state_dir(earlier.newest_epoch())
        if self.seed is None:
            self.ctx.progress.seed = read_metadata(newest).get("seed", self.run_seed)
        self.begins_anew = False  # its own checkpoint is newer than the one it began from

    @property
    def _is_offline(self) -> bool:
        """True if no process of the run takes env steps for it."""
        return self.ctx.role.does_both and self.train_timesteps_per_epoch == 0

    def _make_pace(self) -> ReplayRatio:
        """Make the object that lets learner and actors wait for each other."""
        env_steps_per_epoch = self.parallel_actors * self.train_timesteps_per_epoch
        pace: ReplayRatio = ReplayRatio(
            self.ctx,
            self.fleet.id,
            None if self._is_offline else self.replay_ratio,  # no env steps, no ratio
            epoch_updates=self.train_batches_per_epoch // self.batches_per_update,
            batches_per_update=self.batches_per_update,
            start_after=env_steps_per_epoch * (self.start_learning_at_epoch + 1),
            is_over=lambda: self.published.has_unread_final(),  # noqa: PLW0108 - it is made after this
        )
        return pace

    def keep_pace_of_preset(self, is_set_by_user: Callable[[str], bool]) -> None:
        """Before `start` of a learner with actors: give it the replay ratio and the epochs of mode "both".

        A preset then learns the same with actors, no matter how fast they are, and an epoch still takes as
        many env steps. So one of replay_ratio and train_batches_per_epoch follows from the other, as in mode
        "both". Without a phase of both in one epoch (start_collecting_at_epoch) there is nothing to compare.

        Args:
            is_set_by_user: True for the name of a setting that the user has set. A replay_ratio of None then
                lets both run as fast as they can, and train_batches_per_epoch stays.

        Raises: ValueError if an epoch collects nothing.
        """
        env_steps = self.parallel_actors * self.train_timesteps_per_epoch * self.accelerator.num_processes
        if not env_steps:
            raise ValueError(
                "Experiment.train_timesteps_per_epoch is 0, so actors would collect nothing. "
                "Fix: set it to a positive number, or leave out --actors."
            )
        updates = self.train_batches_per_epoch // self.batches_per_update
        if not updates or self.start_collecting_at_epoch:
            return
        if self.replay_ratio is None:
            if not is_set_by_user("Experiment.replay_ratio"):
                self.replay_ratio = updates / env_steps
        elif not is_set_by_user("Experiment.train_batches_per_epoch"):
            updates = max(1, round(self.replay_ratio * env_steps))
            self.train_batches_per_epoch = updates * self.batches_per_update

    def _check_offline_data(self) -> None:
        """Raise ValueError if there is nothing to train on, and nothing will be collected."""
        learns = self.epochs > 0 and self.train_batches_per_epoch > 0
        if self._is_offline and learns and not self.dataset.ready_for_training:
            raise ValueError(self.why_idle())

    def _seed_process(self) -> None:
        """Seed the global generators, from which environments may draw, differently in every process."""
        if self.seed is None:
            logger.info("Experiment.seed was not set; this run uses seed %d", self.ctx.progress.seed)
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports a lot
            torch.use_deterministic_algorithms(self.deterministic)
        if self.DEVICE.type == "cuda":
            torch.set_float32_matmul_precision(self.matmul_precision)
            if self.deterministic:  # cuBLAS reads this when it starts
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        seed_global_generators(self.ctx.seed_of("envs"))

    def init_dsets(self) -> RLDataset:
        """Pass the folder, window length and rights to the dataset; only one process may delete."""
        self.dataset.configure(
            max_seq_len=self.max_seq_len,
            padded_sampling=self.padded_sampling,
            has_edit_rights=self.has_dset_edit_rights and self.ctx.role.learns and self.ctx.is_main,
            default_root=str(self.run_dir.parent),
            default_name=self.run_name,
        )
        self.reward_shaping = RewardShaping(self.epochs, lambda: self.ctx.progress.schedule_epoch)
        self.reward_shaping.shape_relabeled(self.dataset)
        return self.dataset

    def init_envs(self) -> str:
        """Build the environments that this mode needs and store their spaces; returns a line about them."""
        if self.ctx.role.collects and self.train_timesteps_per_epoch > 0:
            self.train_envs = build.make_training_envs(
                self.make_train_env,
                self.parallel_actors,
                self.env_mode,
                context=self.async_env_mp_context,
                seed=self.ctx.seed_of("train_workers"),
            )
        if self.val_timesteps_per_epoch > 0 and (self.val_interval is not None or self.evaluate_at_end):
            self.val_envs = self._make_envs(self.make_val_env)
        envs = self.train_envs
        if envs is None and not self.ctx.role.only_learns:  # a learner trains for its actors' environments
            envs = self.val_envs
        self.obs_space, self.action_space, self.env_spaces = build.spaces_of(
            envs, self.make_train_env, self.parallel_actors, self.env_mode
        )
        if self.val_envs is not None:
            build.check_evaluation(self.val_envs, self.obs_space, self.action_space)
        self.tstep_encoder_type = self.tstep_encoder_type or default_tstep_encoder(self.obs_space)
        self.dataset.expect(build.layout_of(self.obs_space, self.action_space))
        return build.describe_envs(self.train_envs, self.env_mode)

    def init_dloaders(self) -> BatchLoader:
        """Build the batch loader, once for the whole run."""
        self.loader = BatchLoader(
            self.dataset,
            batch_size=self.sequences_per_batch,
            num_workers=self.dloader_workers,
            seed=derive_seed(self.ctx.progress.seed, "loader"),
            rank=self.accelerator.process_index,
            packs=self.packed_batches,
        )
        return self.loader

    def init_model(self) -> None:
        """Build agent and optimizer and place them on the device; then build what acts or learns."""
        self._policy = self.agent_type(
            self.obs_space,
            self.action_space,
            self.tstep_encoder_type,
            self.traj_encoder_type,
            self.max_seq_len,
        )
        if (own := getattr(self._policy, "obs_space", self.obs_space)) is not self.obs_space:
            # The agent adds observations of its own.
            self.dataset.expect(build.layout_of(own, self.action_space))
        if (choice := getattr(self._policy, "acting", None)) is not None:
            self.episode_reports = EpisodeReports(self.ctx, choice)
        optimizer = self.hooks.around("optimizer_init", self.init_optimizer, self._policy)
        if self.compile_learning:
            self._policy.compile_learning()
        self.model = self.accelerator.prepare(self._policy)
        if self.accelerator.scaler is not None:  # without a scaler, Accelerate's wrapper only takes time
            optimizer = self.accelerator.prepare(optimizer)
        self.optimizer = optimizer
        if self.weight_average is not None and self.ctx.role.learns:
            self.average = self.weight_average(self.policy)
        sampler = self.dataset.sampler
        self.learner = Learner(
            self.policy,
            self.model,
            self.optimizer,
            self.accelerator,
            compute_loss=self.compute_loss,
            critic_loss_weight=self.critic_loss_weight,
            lr_warmup_steps=self.lr_warmup_steps,
            grad_clip=self.grad_clip,
            extra_loss_weights=self.extra_loss_weights,
            report_priorities=sampler.update_priorities if isinstance(sampler, PrioritySampler) else None,
            timer=self.timer,
            edits_masks=self._overrides("edit_actor_mask", "edit_critic_mask", "edit_extra_mask"),
            progress=self.ctx.progress,
            run_dir=self.ctx.run_dir,
            average=self.average,
        )
        if self.compile_acting:
            self.policy.compile_acting()
            if self.average is not None:
                self.average.compile_acting()
        self.trainer = self._make_trainer()
        if self.torch_threads is None:
            choose_threads(None, self._forward_work())
        self.evaluator = Evaluator(
            self.DEVICE, self.sample_actions_val, should_stop=self.ctx.stop.requested, cast=self.caster
        )
        # From here on processes differ: each draws different actions.
        seed_global_generators(self.ctx.seed_of("process"))
        self.collector = self._make_collector()

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """The optimizer of the agent's trainable parameters."""
        optimizer: torch.optim.Optimizer = make_optimizer(
            policy,
            policy.trainable_params(),
            learning_rate=self.learning_rate,
            l2_coeff=self.l2_coeff,
            fused=self.mixed_precision != "fp16",  # a fused step hides whether the scaler skipped it
        )
        return optimizer

    def _make_trainer(self) -> Trainer:
        """Make the trainer that fits the kind of agent."""
        if self.ctx.role.learns and self.ctx.is_main and 0 < self.epochs <= self.start_learning_at_epoch:
            logger.warning(
                "This run makes no update: Experiment.epochs is %d, and learning begins after %d epoch(s). "
                "Fix: raise Experiment.epochs, or lower Experiment.start_learning_at_epoch.",
                self.epochs,
                self.start_learning_at_epoch,
            )
        if not isinstance(self.policy, OnPolicyAgent):
            learns = self.ctx.role.learns and self.train_batches_per_epoch > 0
            if learns and isinstance(self.dataset, DoNothingDataset):
                raise ValueError(
                    f"{type(self.policy).__name__} learns from stored trajectories, but Experiment.dataset "
                    "is a DoNothingDataset, which stores none. Fix: set Experiment.dataset = "
                    "@DiskTrajDataset(), or Experiment.agent_type to an on-policy agent, such as @PPOAgent."
                )
            return OffPolicyTrainer(
                self.ctx,
                self.learner,
                self.dataset,
                self.loader,
                self.pace,
                train_step=lambda *args, **kw: self.train_step(*args, **kw),  # noqa: PLW0108 - or a user's own
                why_idle=self.why_idle,
                batch_size=self.sequences_per_batch,
                num_batches=self.train_batches_per_epoch,
                first_epoch=self.start_learning_at_epoch,
                log_interval=self.log_interval,
                bucket_size=math.ceil(self.max_seq_len / NUM_LENGTHS) if self.compile_learning else None,
            )
        name = type(self.policy).__name__
        check_for_on_policy(
            self,
            name,
            self._is_set_by_user,
            stores=self.dataset.save_new_trajs_to is not None,
            imitates=any(isinstance(one, Pretraining) for one in self.hooks.callbacks),
        )
        if self._overrides("train_step"):
            logger.warning(
                "%s.train_step is not called: the on-policy agent %s makes the updates of an epoch in "
                "PPOLearner. Fix: override compute_loss, or write a callback.",
                type(self).__name__,
                name,
            )
        trainer = self.on_policy_learner_type(
            self.policy,
            self.learner,
            self.ctx,
            self.train_timesteps_per_epoch,
            self.parallel_actors,
            self.max_seq_len,
            self.caster,
            self.batches_per_update,
            self.start_learning_at_epoch,
            self.dataset.save_new_trajs_to is not None,
        )
        trainer.check(has_schedule=self.lr_schedule is not None)
        return trainer

    def _make_collector(self) -> Collector | None:
        """The training rollout; None if this process does not collect."""
        if self.train_envs is None:
            return None
        folder, explores = self.dataset.save_new_trajs_to, self.trainer.explores
        if explores and folder is None and self.ctx.is_main:
            logger.warning(
                "%s takes no new trajectories, so everything that is collected is discarded. Fix: set "
                "Experiment.train_timesteps_per_epoch = 0 to train on stored trajectories only, or use "
                "MixtureOfDatasets to add new ones.",
                type(self.dataset).__name__,
            )
        has_noise = explores and self.exploration_wrapper_type is not None
        halves = self.train_envs.halves if isinstance(self.train_envs, EnvHalves) else [self.train_envs]
        groups, clock = [], WritingClock()
        for i, envs in enumerate(halves):
            names = (i,) if len(halves) > 1 else ()
            group = RolloutGroup(envs, sinks=list(self.trainer.sinks(envs.num_envs)))
            if has_noise:
                group.exploration = self._make_exploration(
                    envs.num_envs, self.ctx.seed_of("exploration", *names)
                )
            if folder is not None:
                seed = self.ctx.seed_of("writer", *names)
                group.sinks = [*group.sinks, self._make_writer(folder, envs.num_envs, seed=seed, clock=clock)]
            groups.append(group)
        collector: Collector = Collector(
            groups,
            self.policy,
            self.DEVICE,
            self.sample_actions,
            should_stop=self.ctx.stop.requested,
            cast=self.caster,
            on_env_steps=self.pace.after_env_steps,
            shape_rewards=self.reward_shaping.of_rollouts(),
            timer=self.timer,
        )
        if self.episode_reports is not None:
            collector.on_episodes = self.episode_reports.add
        return collector

    def _make_exploration(self, num_envs: int, seed: int) -> ExplorationWrapper:
        assert self.exploration_wrapper_type is not None
        exploration = self.exploration_wrapper_type(self.action_space, num_envs, seed)
        exploration.steps_per_call = self.pace.actor_processes
        return exploration

    def _make_writer(self, folder: Path, num_envs: int, **settings: Any) -> TrajectoryWriter:
        """A writer that stores trajectories of `num_envs` envs in `folder`, cut at traj_save_len."""
        spread = self.max_seq_len if self.stagger_traj_file_lengths else 0
        return TrajectoryWriter(
            folder,
            num_envs,
            save_every=build.piece_lengths(self.traj_save_len, spread),
            save_as=self.save_trajs_as,
            actor_id=self.accelerator.process_index,
            nvec=ActionCode(self.action_space).nvec,
            terminates_within=self.max_seq_len if self._foresees_time_limits() else 0,
            **settings,
        )

    def _foresees_time_limits(self) -> bool:
        """True if `time_limits_terminate` is set and nothing but the environment truncates episodes."""
        if any(one.changes_episode_length for one in self.hooks.callbacks):
            return False
        hooks = RolloutHooks(self.policy, self.obs_space.spaces)
        return self.time_limits_terminate and not hooks.ends_episodes

    def _overrides(self, *hooks: str) -> bool:
        """True if the user overrides a hook, in a derived class or on this object."""
        own = (getattr(getattr(self, hook), "__func__", None) is getattr(Experiment, hook) for hook in hooks)
        return not all(own)

    def _forward_work(self) -> float:
        """Approximate multiply-adds of a forward pass: parameters times timesteps; no limit on a GPU."""
        if self.DEVICE.type != "cpu":
            return math.inf  # the limit was measured for agents on a CPU only
        num_timesteps = self.parallel_actors if self.ctx.role.is_actor else self.trainer.timesteps_per_forward
        return float(num_timesteps) * sum(p.numel() for p in self.policy.parameters())

    def init_checkpoints(self) -> None:
        """Create the checkpoint folders of the run."""
        self.checkpoints = CheckpointManager(
            self.run_dir,
            self.run_name,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            facts=lambda: self.record.header(),  # noqa: PLW0108 - it is made after this
        )
        self.checkpoints.make_folders(clean=self.ctx.role.learns)
        self.published = PublishedPolicy(self.ctx, self.policy, self.env_spaces, self.checkpoints)

    def init_logger(self) -> None:
        """Prepare the metric files; nothing is written before the first metric is logged."""
        self.artifacts = self._make_uploads()
        is_actor = self.ctx.role.is_actor  # an actor has its own file, next to that of the learner
        store, wandb = self.artifacts.store, None
        if self.ctx.is_main and (self.log_to_wandb or (store is not None and store.needs_wandb)):
            wandb = {
                "project": self.wandb_project,
                "entity": self.wandb_entity,
                "group": self.wandb_group_name,
                "name": self.run_name,
                "job_type": self.mode,
                "config": {
                    "gin": gin.operative_config_str(),
                    "seed": self.ctx.progress.seed,
                    "hash": self.config_hash,
                },
            }
        self.metric_logger = MetricLogger(
            self.run_dir,
            file_name=f"metrics_collect_{platform.node()}_{os.getpid()}.jsonl"
            if is_actor
            else "metrics.jsonl",
            has_tensorboard=not is_actor,
            wandb=wandb,
            wandb_metrics=self.log_to_wandb,
            x_axis="gradient_steps" if self._is_offline else "env_steps",
        )

    @functools.cached_property
    def config_hash(self) -> str:
        """A short name of the hyper-parameters."""
        return config_hash(self, known_bindings())

    @functools.cached_property
    def record(self) -> RunRecord:
        """The record of how this run was made, as of when it is first written or compared."""
        names = ("agent_type", "tstep_encoder_type", "traj_encoder_type")
        return record_run(
            spaces=self.env_spaces,
            types={name: getattr(self, name) for name in names},
            max_seq_len=self.max_seq_len,
            config_hash=self.config_hash,
            passed=settings_from_python(self),
        )

    def _make_uploads(self) -> Uploads:
        """Storage of checkpoints outside the run folder; only the process that uses the store has one."""
        uses_it = self.ctx.role.learns and self.ctx.is_main and not self.test_run
        access = RunAccess(
            self.run_dir,
            self.run_name,
            self.wandb_project,
            self.wandb_entity,
            start_wandb=lambda: self.metric_logger.start_wandb(),  # noqa: PLW0108 - made after this
        )
        return Uploads(
            access if uses_it else None,
            lambda: {"seed": self.run_seed, "best_score": self.best_score, **self.x_axis_metrics()},
        )

    def summary(self, env_summary: str) -> None:
        """Print a short summary of this run. env_summary: the line that init_envs returned."""
        self.ctx.console.say(self.describe(env_summary))

    def describe(self, env_summary: str) -> str:
        """A few lines on the environments, agent and devices of this run."""
        num_params = sum(p.numel() for p in self.policy.trainable_params())
        observations = ", ".join(f"{key} {space}" for key, space in self.obs_space.spaces.items())
        processes = self.accelerator.num_processes
        num_steps = processes * self.parallel_actors * self.train_timesteps_per_epoch
        most = "" if self.max_env_steps is None else f", at most {self.max_env_steps:,} env steps"
        lines = {
            "run": f"{self.run_dir} (mode {self.mode}, seed {self.ctx.progress.seed})",
            "device": f"{self.DEVICE}, precision {self.mixed_precision}, {processes} process(es), "
            f"{torch.get_num_threads()} torch thread(s)",
            "environments": env_summary,
            "observations": observations,
            "actions": self._describe_actions(),
            "encoders": self._describe_encoders(),
            "agent": f"{type(self.policy).__name__}, {num_params:,} trainable parameters, "
            f"sequences up to {self.max_seq_len} steps",
            "epoch": f"{num_steps:,} env steps, {self.trainer.describe()}; {self.epochs} "
            f"epoch{'s' if self.epochs != 1 else ''}{most}",
            "dataset": str(self.dataset),
        }
        return "\n".join(f"{name:>13}  {text}" for name, text in lines.items() if text)

    def _describe_actions(self) -> str:
        """The environment's actions, and those of the agent if they differ."""
        own, given = str(self.action_space), str(self.env_spaces.action)
        return own if own == given else f"{given}, for the agent {own}"

    def _describe_encoders(self) -> str:
        """Names, widths and sizes of both encoders; a user's agent may have none."""
        modules = [getattr(self.policy, name, None) for name in ("tstep_encoder", "traj_encoder")]
        found = [module for module in modules if isinstance(module, (TstepEncoder, TrajEncoder))]
        names = [one.describe() if isinstance(one, TstepEncoder) else type(one).__name__ for one in found]
        return ", then ".join(
            f"{name} -> {one.emb_dim} ({sum(p.numel() for p in one.parameters()):,} parameters)"
            for name, one in zip(names, found, strict=True)
        )

    def close(self) -> None:
        """End worker processes and background threads; finished trajectories and metrics are stored first.

        A part that cannot be closed costs a warning. This may be called at any time, and again.
        """
        # The newer workers hold ends of the older ones' pipes, so they are closed first. After a failed
        # `start` some parts are missing.
        names = ("collector", "loader", "dataset", "val_envs", "train_envs", "artifacts", "metric_logger")
        closing = {name: part.close for name in names if (part := vars(self).get(name)) is not None}
        if "artifacts" in closing:
            closing["artifacts"] = functools.partial(closing["artifacts"], self.ctx.stop.requested())
        close_each({**closing, "fleet": self.fleet.leave}.items())
        self.train_envs = self.val_envs = None

    # ---- the run ----

    def learn(self) -> dict[str, float]:
        """Run the remaining epochs; returns the metrics of the last evaluation.

        On SIGINT, SIGTERM or SIGUSR1 it stores trajectories and a checkpoint, prints how to continue, and
        raises SystemExit: 130 after SIGINT, otherwise 0. After an error the same is stored before the error
        is raised.
        """
        for _ in self.learn_iter():
            pass
        return self.last_val_metrics

    fit = learn  # the name of this method in scikit-learn and Lightning

    def learn_iter(self) -> Iterator[dict[str, Any]]:
        """Like `learn`, but epoch by epoch: yields the newest value of each metric that the epoch has logged.

        The values are those of logs/metrics.jsonl: numbers, texts, or None for what is not finite.
        To end early with a checkpoint, call `request_stop`. Leaving the loop without it saves nothing.
        """
        self._check_started()
        if (limit := self._limit_of_finished_run()) is not None:
            self._close_finished_run(limit)
            return
        self._check_offline_data()
        after = "finish"
        with self.fleet.reporting(), self._training_context():
            for epoch in self._epochs():
                is_last = self._load_newest_policy()
                if self._is_due(self.val_interval) and self.val_timesteps_per_epoch > 0:
                    self.evaluate_val()
                    self._exit_if_asked()
                is_good = self._is_good_enough()
                if self.collector is not None and epoch >= self.start_collecting_at_epoch and not is_good:
                    self.collect_new_training_data()
                    self._exit_if_asked()
                if self.ctx.role.learns and not is_good:
                    self._refresh_dataset()
                    if self.trainer.wait_for_data():
                        self.trainer.train(epoch)
                    self.hooks("after_train")
                    self._exit_if_asked()
                after = self._end_epoch(epoch, is_last or self._stops_at_limit())
                yield {name: to_plain(value) for name, value in self.epoch_metrics.items()}
                if after != "continue":
                    break
            if after != "stopped":
                self._finish()
            self.hooks("on_fit_end")
        keeps_best = self.ctx.role.learns and self.ctx.is_main
        if keeps_best and self.best_score is None and self.checkpoints.best_by != "val/return":
            logger.warning(
                "CheckpointManager.best_by is %r, but no such metric was logged, so no best policy was "
                "saved. Fix: name a metric that is logged, such as 'val/return'.",
                self.checkpoints.best_by,
            )

    def _check_started(self) -> None:
        """Raise RuntimeError unless `start` has succeeded."""
        if not self._is_started:
            raise RuntimeError("This Experiment has not been started. Fix: call start() first.")

    def request_stop(self, reason: str = "") -> None:
        """End training after the running epoch, with a checkpoint; `learn` then returns as usual.

        Any process may ask; all end at the same epoch. reason: a text that is printed.
        """
        self.ctx.stop.ask_after_epoch(reason or "request_stop")

    # ---- the steps of an epoch, and the hooks that users override ----

    def collect_new_training_data(self) -> dict[str, float]:
        """Continue the training rollout for one epoch's timesteps; returns its metrics."""
        collector, progress = self.collector, self.ctx.progress
        if collector is None:
            raise ValueError(
                f"Nothing can be collected: mode is {self.mode!r} and train_timesteps_per_epoch "
                f"{self.train_timesteps_per_epoch}. Fix: use mode 'both' or 'collect' and a positive number."
            )
        self.ctx.console.show(progress.epoch, "collecting", {})
        self.hooks("before_play_steps")
        every = self.force_reset_train_envs_every
        is_reset_due = every is not None and progress.epoch > 0 and progress.epoch % every == 0
        if not collector.has_begun or is_reset_due:
            self.restart_train_envs(progress.epoch)
        self.policy.eval()
        loaded = self.published.loaded
        version = progress.policy_version if loaded is None else loaded.version
        collector.set_policy_version(version)
        self.fleet.put(policy_version=version)
        self.fleet.state("collecting")
        start_s = time.perf_counter()
        self.ctx.console.measure(lambda: collector.share_done)
        taken = collector.collect(self.train_timesteps_per_epoch)
        collector.wait()
        if self.episode_reports is not None:
            self.episode_reports.after_collection()
        elapsed_s = time.perf_counter() - start_s
        stages = self.timer.step_metrics(taken / self.parallel_actors)
        taken = sum(gather(taken, self.accelerator))  # all processes; one may have stopped early
        progress.env_steps += taken
        others = [name for one in self.hooks.callbacks for name in one.collect_metrics]
        metrics = merge_episodes(collector.histories, self.accelerator).summary("collect", others)
        collector.histories.clear()
        if self.ctx.role.is_actor:
            metrics |= self.published.metrics() | self.pace.metrics()
        speed = {"time/collect_s": elapsed_s, "time/env_steps_per_s": taken / elapsed_s}
        self.log({**metrics, **collector.metrics, **self.reward_shaping.metrics(), **speed, **stages})
        if self.test_run:
            collector.flush()  # so few steps may not end any episode
        return metrics

    def restart_train_envs(self, epoch: int) -> None:
        """Begin fresh episodes in all training environments, seeded by the run's seed and `epoch`."""
        assert self.collector is not None
        self.collector.restart(self.ctx.seed_of("train_envs", epoch))

    def train_step(self, batch: AnyBatch | Sequence[AnyBatch], log_step: bool = False) -> dict[str, Tensor]:
        """One optimizer step; returns scalar tensors: "Loss", "Actor Loss", "Critic Loss", and others.

        batch: with batches_per_update above 1, a list of all batches of the update. Their gradients add up to
            those of one large batch.
        log_step: compute all metrics.
        """
        micro_batches = batch if isinstance(batch, Sequence) else [batch]
        return self.learner.update(micro_batches, log_step)

    def compute_loss(self, batch: AnyBatch, log_step: bool = False) -> dict[str, Any]:
        """Hook: the losses of one batch, averaged over its own masks; see `learner.masked_losses`.

        An override may change "Actor Loss" and "Critic Loss" or add metrics. Scalars are logged. A scalar
        called "<name>_loss" is also minimised if extra_loss_weights has a weight for the name. With several
        micro-batches or processes, each mean is weighted by its share of all unmasked entries.
        """
        with self.caster():
            terms: Any = self.model(batch, log_step)
        if not isinstance(terms, LossTerms):
            raise TypeError(
                f"{type(self.policy).__name__}.forward returned a {type(terms).__name__}, but must return "
                "LossTerms(actor (B, L, G, 1), critic (B, L, C, G, 1)), the losses of each timestep (an "
                "OffPolicyAgent returns them from `losses`). Fix: return such an object."
            )
        edits = self.edit_actor_mask, self.edit_critic_mask, self.edit_extra_mask
        return masked_losses(batch, terms, *edits)

    def edit_actor_mask(self, batch: AnyBatch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Hook: mask of the actor's loss, (B, L, G, 1) bool for G discounts.

        actor_loss: has the same shape, without gradient. pad_mask: True on real timesteps.
        """
        return pad_mask

    def edit_critic_mask(self, batch: AnyBatch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Hook: mask of the critics' loss, (B, L, C, G, 1) bool for C critics and G discounts."""
        return pad_mask

    def edit_extra_mask(self, batch: AnyBatch, name: str, loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Hook: mask of the extra loss of this name, (B, L, ...) bool, shaped like the loss."""
        return pad_mask

    def caster(self) -> AbstractContextManager[Any]:
        """Context of the forward pass: autocast to mixed_precision on the agent's device."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def evaluate_val(self) -> dict[str, float]:
        """Evaluate in the validation environments; logs and returns metrics named `val/...`."""
        if self.val_envs is None:
            self.val_envs = self.make_envs(self.make_val_env)
        self.ctx.console.show(self.epoch, "evaluating", {})
        seed = self.ctx.seed_of("val", self.epoch)
        return self._evaluate("val", self.val_envs, self.val_timesteps_per_epoch, seed=seed)

    def evaluate_test(
        self,
        make_test_env: MakeEnv | Sequence[MakeEnv],
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
    ) -> dict[str, float]:
        """Evaluate in new environments; logs and returns metrics named `test/...`.

        timesteps: every episode that begins within this many steps of its env counts, and is played to its
            end.
        episodes: limit on the number of episodes, shared equally by the envs.
        save_trajs_to: folder for trajectories.
        """
        self._check_started()
        with contextlib.closing(self.make_envs(make_test_env)) as envs:
            return self._evaluate(
                "test",
                envs,
                timesteps,
                seed=self.ctx.seed_of("test"),
                episodes=episodes,
                render=render,
                save_on_done=save_trajs_to or False,
            )

    def _evaluate(
        self, kind: str, envs: Any, timesteps: int, *, seed: int, episodes: int | None = None, **how: Any
    ) -> dict[str, float]:
        """Play every episode that begins within `timesteps` to its end, so that short ones are not preferred.

        Training continues as if nothing had been played. The result is empty when no episode ended, or after
        a stop.
        """
        self.fleet.state("evaluating")
        self.hooks("on_eval_start")
        start_s = time.perf_counter()
        with isolated_rng(seed):
            most = sys.maxsize if episodes is None else episodes
            _, histories = self.interact(envs, timesteps, episodes=most, **how)
        named = {f"{kind}/{name}": value for name, value in self.policy_metrics(*histories).items()}
        if self.ctx.stop_agreed():  # after an early stop, the metrics would favour short episodes
            return {}
        if kind == "val":
            self.last_val_metrics = named
            self.ctx.progress.val_return = named.get("val/return")
        if named:
            elapsed_s = time.perf_counter() - start_s
            about = {"time/val_s": elapsed_s, "val/after_env_steps": self.env_steps} if kind == "val" else {}
            self.log(named | about)
        self.hooks("on_eval_end", named)
        return named

    def make_envs(self, make_env: MakeEnv | Sequence[MakeEnv]) -> Any:
        """A vector env of parallel_actors environments that the agent fits.

        Raises: ValueError if their observations or actions differ from those the agent was built for.
        """
        envs = self._make_envs(make_env)
        build.check_evaluation(envs, self.obs_space, self.action_space)
        return envs

    def _make_envs(self, make_env: MakeEnv | Sequence[MakeEnv]) -> Any:
        return build.make_envs(
            make_env,
            self.parallel_actors,
            self.env_mode,
            context=self.async_env_mp_context,
            seed=self.ctx.seed_of("workers"),
        )

    def interact(
        self,
        envs: Any,
        timesteps: int,
        hidden_state: Any = None,
        render: bool = False,
        save_on_done: bool | str = False,
        episodes: int | None = None,
    ) -> tuple[Any, Histories]:
        """Act in `envs`, without exploration; returns hidden state, (returns, specials).

        For asynchronous training environments, which have two halves, it is a list of two hidden states.

        timesteps: number of steps to take in each env.
        hidden_state: the result of the previous call, to continue in the same `envs` where it stopped; None
            resets all.
        episodes: number of episodes that count, shared equally by `envs`, among those that begin within
            `timesteps`. Each is played to its end, see `Collector.collect`.
        save_on_done: a folder to store each trajectory in when it ends, or True for the folder of the
            dataset. False stores only trajectories of the training environments, in the dataset, by the end
            of the call at the latest. Running episodes of the training environments are stored up to their
            current step.
        """
        is_training = envs is self.train_envs
        folder: str | Path | None = None if isinstance(save_on_done, bool) else save_on_done
        if save_on_done is True or (folder is None and is_training):
            folder = self.dataset.save_new_trajs_to
        if is_training and self.collector is not None:
            self.collector.leave_envs()
        writers, clock = list[TrajectoryWriter](), WritingClock()

        def make_sinks(num_envs: int) -> list[TrajectoryWriter]:
            if folder is None:
                return []
            seed = self.ctx.seed_of("writer", "interact", *([len(writers)] if writers else []))
            writers.append(self._make_writer(Path(folder), num_envs, seed=seed, clock=clock))
            return writers[-1:]

        self.ctx.console.measure(lambda: self.evaluator.share_done)
        found = self.evaluator.play(
            self.evaluated,
            envs,
            timesteps,
            hidden_state=hidden_state,
            episodes=episodes,
            make_sinks=make_sinks,
            render=render,
        )
        for writer in writers:
            if is_training:
                writer.flush_partial()
            writer.close()
        return found

    def policy_metrics(self, returns: ReturnHistory, specials: SpecialMetricHistory) -> dict[str, float]:
        """Hook: metrics of a rollout, over the episodes of all processes; empty when no episode ended."""
        return merge_episodes(Histories(returns, specials), self.accelerator).summary("")

    def x_axis_metrics(self) -> dict[str, int]:
        """Axes that every record carries: the progress of the run."""
        progress = self.ctx.progress
        return {
            "epoch": progress.epoch,
            "env_steps": progress.env_steps,
            "gradient_steps": progress.gradient_steps,
        }

    def log(self, metrics_dict: Mapping[str, Any], key: str = "") -> None:
        """Write one record, each name as `<key>/<name>`; only the main process writes.

        The current policy is kept as the best one if these metrics say so.
        """
        named = {f"{key}/{name}" if key else name: value for name, value in metrics_dict.items()}
        self.epoch_metrics |= named
        if self.ctx.is_main:
            self.metric_logger.log(named, self.x_axis_metrics())
        # A process that only measures, before training or saving anything, leaves the folder alone.
        if not (self.ctx.role.learns and self.checkpoints.has_begun):
            return
        self._keep_policy_if_best(named)

    def _keep_policy_if_best(self, metrics: Mapping[str, Any]) -> None:
        """Keep the current policy as the best one if these metrics say so."""
        score = self.checkpoints.better_score(metrics, self.best_score)
        if score is not None:
            self.learner.check_weights()
            self.ctx.progress.best_score = score
            if self.ctx.is_main:
                info = PolicyInfo(self.ctx.progress.policy_version, self.epoch, False)
                self.checkpoints.save_policy(self.checkpoints.best_path, self.evaluated, info)
                self.artifacts.store_best(self.checkpoints.best_path)

    def why_idle(self) -> str:
        """Explain why there is nothing to train on, and how to fix it."""
        if self.ctx.role.only_learns:
            hint = "" if self.actors is not None else " (start actors with --mode collect)"
            folder = self.dataset.save_new_trajs_to
            place = "memory" if folder is None else location_of(folder)
            return f"Waiting for trajectories in {place}{hint}."
        if self.collector is None:
            return (
                f"Nothing is collected, and {self.dataset} {self.dataset.describe_lack()}. Fix: name "
                "a folder that has enough (DiskTrajDataset.dset_root, DiskTrajDataset.dset_name), or "
                "raise Experiment.train_timesteps_per_epoch."
            )
        if self.dataset.save_new_trajs_to is None:
            return (
                f"{self.dataset} {self.dataset.describe_lack()}, and takes no new trajectories. Fix: train "
                "from @DiskTrajDataset(), which stores what is collected or reads a folder that has enough "
                "(DiskTrajDataset.dset_root, DiskTrajDataset.dset_name)."
            )
        if self.epoch < self.start_collecting_at_epoch:
            return (
                f"Nothing is collected before epoch {self.start_collecting_at_epoch} "
                f"(Experiment.start_collecting_at_epoch), and {self.dataset} {self.dataset.describe_lack()}. "
                "Fix: lower it, or name a folder that has enough (DiskTrajDataset.dset_root, "
                "DiskTrajDataset.dset_name)."
            )
        if "collect/return" in self.epoch_metrics:
            return (
                "There are too few trajectories. Fix: collect longer, or lower DiskTrajDataset.dset_min_size."
            )
        return (
            f"No episode has ended: {self.env_steps} env steps in {self.parallel_actors} environments. Fix: "
            f"set Experiment.traj_save_len, e.g. to {max(500, self.max_seq_len)}, to train on parts of "
            "episodes, or end them with gymnasium's TimeLimit."
        )

    # ---- checkpoints and policies ----

    def save_checkpoint(self) -> Path | None:
        """Save everything needed to resume at epoch `self.epoch`; returns the folder in the main process."""
        return self._save(max(self.epoch - 1, 0))

    def load_checkpoint(self, epoch: int | None = None, resume_training_state: bool = True) -> int:
        """Load the checkpoint after `epoch` (None: the newest intact one); returns the epoch to resume at.

        With resume_training_state False, only the weights are loaded and the run starts at its first epoch.
        """
        self._check_started()
        if epoch is None:
            epoch, problems = from_main(self.checkpoints.newest_intact_epoch, self.accelerator)
            if problems and self.ctx.is_main:
                logger.warning(
                    "%s. Continuing from the checkpoint of epoch %d instead.", "; ".join(problems), epoch
                )
        path = self.checkpoints.state_dir(epoch)
        self.load_checkpoint_from_path(
            path if resume_training_state else path / "model.safetensors", resume_training_state
        )
        return self.epoch

    def load_newest_checkpoint(self) -> None:
        """Continue from the newest checkpoint, and print where; an error shows in the status of the run."""
        with self.fleet.reporting():
            self.ctx.console.say(f"Resuming at epoch {self.load_checkpoint()}.")

    def load_checkpoint_from_path(self, path: str | Path, is_accelerate_state: bool | None = None) -> None:
        """Load a training state (a folder; the whole run continues from it) or policy weights (a file).

        is_accelerate_state: True for a training state, False for weights; None decides by the kind of `path`.
        """
        path = Path(path)
        if path.is_dir() if is_accelerate_state is None else is_accelerate_state:
            self.hooks.around("load_checkpoint", self._load, path)
        else:
            self.hooks.around("load_checkpoint", load_weights, self.policy, path)
            self.learner.on_weights_loaded()

    def _parts(self) -> dict[str, Stateful]:
        """The parts saved in a checkpoint, by name; each process saves those of _PER_PROCESS for itself."""
        parts: dict[str, Any] = {
            "progress": self.ctx.progress,
            "learner": self.learner,
            "average": self.average,
            "logs": self.metric_logger,
            "callbacks": self.hooks,
            "pace": self.pace,
            "trainer": self.trainer,
            "collector": self.collector,
            "reward_shaping": self.reward_shaping,
            "dataset": self.dataset,
            "rng": GlobalGenerators(),
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _save(
        self, epoch: int, *, goes_on: bool = True, is_interim: bool = False, awaits_files: bool = True
    ) -> Path | None:
        """Write the checkpoint named after `epoch`; the rollout continues as if nothing had happened.

        The exception is exact_resume with training envs that a checkpoint cannot hold: they are restarted.
        Every run, interrupted or not, then has the same state after a checkpoint: fresh episodes with a seed
        derived from the run's seed and the epoch. Returns the folder in the main process.

        goes_on: False in a process that ends now, whose envs need not be restarted.
        is_interim: True for a safeguard that stays in the run folder and is deleted once the next checkpoint
            exists.
        awaits_files: False if trajectories cannot be written; the finished ones are then lost.

        Raises: OSError if it cannot be written, FloatingPointError if weights are not finite. Stored
        trajectories and earlier checkpoints stay.
        """
        self.learner.check_weights()
        self.begin_run()
        collector = self.collector
        restarts = self.checkpoints.exact_resume and collector is not None and not collector.is_storable
        if collector is not None and awaits_files:
            if restarts or not self.has_dset_edit_rights:
                # Without edit rights, files that repeat data of the checkpoint would stay in use on resuming.
                collector.flush()
            else:
                collector.wait()
        self.accelerator.wait_for_everyone()
        self.hooks("on_save_checkpoint_start")
        self.dataset.refresh()
        parts = self._parts()
        self.checkpoints.write_own(
            epoch, {n: part.state_dict() for n, part in parts.items() if n in _PER_PROCESS}
        )
        self.accelerator.wait_for_everyone()
        folder = None
        if self.ctx.is_main:
            shared = {name: part.state_dict() for name, part in parts.items() if name not in _PER_PROCESS}
            facts = {"seed": self.run_seed, "mode": self.mode, "world_size": self.accelerator.num_processes}
            metadata = self.record.metadata(**facts, is_interim=is_interim)
            folder = self.checkpoints.commit(epoch, self.policy, self.evaluated, shared, metadata)
            if not is_interim:
                self.artifacts.store_state(folder, epoch)
            if not self.checkpoints.config_path.exists():  # the folder was deleted
                self.store_config()
            self.checkpoints.prune()
        self.accelerator.wait_for_everyone()
        self.hooks("on_save_checkpoint_end")
        if restarts and goes_on and collector is not None and collector.has_begun:
            collector.warn_of_cut_episodes(self.train_timesteps_per_epoch * (self.ckpt_interval or 0))
            self.restart_train_envs(self.epoch)
        return folder

    def _load(self, folder: Path, *, is_branch: bool = False) -> None:
        """Restore the whole run from the checkpoint in `folder`; is_branch: begin a new run from there.

        Raises: FileNotFoundError if it is missing or incomplete; ValueError if it is damaged or does not fit.
        """
        state = self.checkpoints.read(folder)
        where = f"the training state {self.restore_from}" if is_branch else f"the checkpoint {folder}"
        check_checkpoint(state.metadata, self.record, where)
        load_weights(self.policy, folder / "model.safetensors")
        state = as_branch(state) if is_branch else state
        parts, states, seed_before = self._parts(), {**state.shared, **state.own}, self.run_seed
        parts = {name: part for name, part in parts.items() if name in states}
        if "dataset" in parts:
            self.dataset.check_state(states["dataset"])
        for name, part in parts.items():
            if name not in _RESTORED_LAST:
                part.load_state_dict(states[name])
        if self.run_seed != seed_before:
            self._take_over_seed()
        if state.metadata["best_by"] != self.checkpoints.best_by:
            self.ctx.progress.best_score = None
        is_cut = False  # running episodes were not restored
        if self.collector is not None and "collector" in parts:
            is_cut = states["collector"]["has_begun"] and not self._restore_rollout(self.collector, state)
        self.policy.on_checkpoint_loaded(is_resume=True)
        # All parts fit. Files are touched only from here on.
        self.checkpoints.continue_run(state.metadata["run_id"], folder)
        if "dataset" in parts:
            if self.ctx.role.does_both and self.ctx.is_main and self.has_dset_edit_rights:
                self.dataset.set_aside_newer(states["dataset"])
            self.accelerator.wait_for_everyone()
            self.dataset.load_state_dict(states["dataset"])
        self._restore_generators(parts["rng"], state)
        if is_cut:
            self.restart_train_envs(self.epoch)

    def _take_over_seed(self) -> None:
        """Use the seed of the checkpoint, which differs from that of this process."""
        self.loader.reseed(derive_seed(self.run_seed, "loader"))
        if self.seed is not None:
            logger.warning(
                "The checkpoint belongs to seed %d; Experiment.seed = %d is ignored. Fix: remove "
                "Experiment.seed, or start a new run with that seed.",
                self.run_seed,
                self.seed,
            )

    def _restore_rollout(self, collector: Collector, state: TrainingState) -> bool:
        """Restore the rollout; False if it has to begin new episodes."""
        now, before = self.accelerator.num_processes, state.num_ranks
        if before == now:
            seed = self.ctx.seed_of("train_envs", self.epoch)
            return collector.load_state_dict(state.own["collector"], seed=seed)
        return collector.take_over(
            [own["collector"] for own in state.inherited or [state.own]],
            f"it was saved by {before} process(es), but this run has {now}",
            "number of processes",
            stores_pieces=bool(state.inherited),
        )

    def _restore_generators(self, generators: Stateful, state: TrainingState) -> None:
        """Restore the global generators; seed them if another number of processes would share a state."""
        if state.num_ranks == self.accelerator.num_processes:
            generators.load_state_dict(state.own["rng"])
        else:
            seed_global_generators(self.ctx.seed_of("process", self.epoch))

    def _restore_if_asked(self) -> None:
        """Begin from the source that `restore_from` names; an actor follows its learner instead.

        A training state is continued; one of another run becomes a new branch (see `as_branch`). Policy
        weights only initialise the agent.

        Raises: FileNotFoundError, listing what exists; ValueError if it does not fit this run.
        """
        if self.ctx.role.is_actor or self.restore_from is None or not self.begins_anew:
            return
        with self.fetched(self.restore_from, "Experiment.restore_from") as (path, run):
            is_state = path.is_dir()
            if is_state and run != self.run_name:
                self.hooks.around("load_checkpoint", lambda: self._load(path, is_branch=True))
            else:
                self.load_checkpoint_from_path(path, is_state)
        if self.ctx.is_main:
            began = f"the training state, at epoch {self.epoch}" if is_state else "the weights"
            logger.info("Restored %s, from %s.", began, self.restore_from)

    def fetched(self, reference: str, name: str) -> AbstractContextManager[tuple[Path, str | None]]:
        """Local path of a file or an artifact, for all processes, and its run; see `start_from.fetched`."""
        return fetched(reference, name, self.ctx, self.artifacts.store)

    def write_latest_policy(self, is_final: bool = False) -> None:
        """Publish the weights for collecting processes under the next version number.

        Raises: FloatingPointError if they are not finite; the earlier policy file stays.
        """
        if self.episode_reports is not None:
            self.episode_reports.before_publication()
        self.learner.check_weights()
        self.begin_run()
        # Actors follow the newest weights, which also collect in one process. At the end of the run, nobody
        # follows them, and the file is a result.
        self.published.write(self.evaluated if is_final else self.policy, is_final=is_final)

    def read_latest_policy(self) -> PolicyInfo | None:
        """Load the published weights if they are newer than the loaded ones; None if there are none yet.

        Raises: ValueError if they are for another environment or have another format.
        """
        before = self.published.loaded
        info = self.published.load_newest()
        if self.ctx.role.is_actor and info is not None and info != before:
            self.ctx.progress.policy_epoch = info.epoch
            if self.collector is not None:
                self.collector.advance_exploration(info.env_steps or 0)
        return info

    def delete_buffer_from_disk(self) -> None:
        """Delete the collected trajectories; protected ones stay."""
        self.dataset.delete()

    # ---- start of a run ----

    def _limit_of_finished_run(self) -> str | None:
        """The setting at which this finished run ended; None if it can continue."""
        if not (self.ctx.role.learns and self.ctx.progress.is_finished):
            return None
        if self.epoch >= self.epochs:
            return f"Experiment.epochs = {self.epochs}"
        if self._is_good_enough():
            return f"Experiment.stop_at_val_return = {self.stop_at_val_return}"
        return f"Experiment.max_env_steps = {self.max_env_steps}" if self._has_spent_env_steps() else None

    def _close_finished_run(self, limit: str) -> None:
        """Say that nothing is left to do; publish the final policy if the process died before it could."""
        logger.info("This run has finished: %s is reached. Raise it to continue.", limit)
        if self.ctx.role.only_learns:
            published = from_main(self.published.header, self.accelerator)
            if published is None or not published.is_final:
                self.write_latest_policy(is_final=True)
        self.fleet.end("finished")

    @contextlib.contextmanager
    def _training_context(self) -> Iterator[None]:
        """Context around the epochs: signals, progress bar, actors, and saving after an error."""
        self.ctx.progress.is_finished = False
        self._saved_s = 0.0
        is_new = self.checkpoints.run_id is None
        if is_new:
            self._set_aside_earlier_data()
        self.dataset.on_run_start()
        self.accelerator.wait_for_everyone()
        with (
            explained_loss_of_contact(self.accelerator),
            self.ctx.stop,
            self.ctx.console.progress(self.epoch),
            contextlib.ExitStack() as stack,
            self._save_on_error(),
            without_foreign_exits(),
        ):
            stack.callback(self._draw_curves)  # no matter how the run ends
            if self.ctx.role.only_learns:
                self._continue_policy_versions()
            buffer = self.dataset.save_new_trajs_to
            self.fleet.put(buffer=None if buffer is None else str(buffer.parent.absolute()))
            self.pace.begin(is_new=is_new)
            if self.episode_reports is not None:
                self.episode_reports.begin(is_new=is_new)
            self.begin_run()
            if self.ctx.role.only_learns:
                self.write_latest_policy()
            if self.actors is not None:
                stack.enter_context(self.actors)
            self.hooks("on_fit_start")
            self._exit_if_asked()
            yield

    def _continue_policy_versions(self) -> None:
        """Number policies after those that actors may have seen, which may be later than the checkpoint."""
        published = from_main(self.published.header, self.accelerator)
        version = 0 if published is None else published.version
        self.ctx.progress.policy_version = max(self.ctx.progress.policy_version, version)

    def _set_aside_earlier_data(self) -> None:
        """Set aside the data of an earlier run of the same name, unless this run trains on them.

        Actors that were started by hand, or as jobs of their own, may have begun before their learner, so
        their data stay.
        """
        starts_actors = self.actors is not None and not isinstance(self.actors, SeparateActors)
        if self.ctx.is_main and (starts_actors or (self.ctx.role.does_both and not self._is_offline)):
            self.set_aside_earlier_data()

    def set_aside_earlier_data(self) -> None:
        """Move the data of an earlier run of the same name, before anything collects for this one."""
        if self.start_collecting_at_epoch == 0 and self.has_dset_edit_rights:
            num_files = self.dataset.begin_new_run()
            if num_files:
                logger.warning(
                    "%d trajectories of an earlier run named %r were moved to buffer/superseded/ of its "
                    "folder. To train on them, name the dataset: DiskTrajDataset.dset_name.",
                    num_files,
                    self.run_name,
                )

    def begin_run(self) -> None:
        """Before a learner writes to its run folder: set aside an earlier run's files, store the config.

        A run that was resumed has its own files there. Does nothing when called again.
        """
        if self.ctx.role.is_actor or self.checkpoints.has_begun:
            return
        if (old := self.checkpoints.begin_run()) is not None:
            logger.info("The checkpoints of an earlier run named %r are now in %s", self.run_name, old)
        if self.ctx.is_main:
            self.store_config()

    def store_config(self) -> None:
        """Write the config (as requested, and as operative) and the versions."""
        environments = environments_to_json(
            make_val_env=self.make_val_env,
            parallel_actors=self.parallel_actors,
            env_mode=self.env_mode,
            async_env_mp_context=self.async_env_mp_context,
        )
        facts = self.record.versions(seed=self.run_seed, mode=self.mode, environments=environments)
        # A resumed run has the seed of its checkpoint.
        config, requested = (
            re.sub(r"^Experiment\.seed = .*$", f"Experiment.seed = {self.run_seed}", text, flags=re.MULTILINE)
            for text in (self.record.config, self.record.config_requested)
        )
        self.checkpoints.write_record(config, requested, facts)

    # ---- between epochs ----

    def _epochs(self) -> Iterator[int]:
        """Numbers of the remaining epochs; endless for an actor."""
        first = self.epoch
        if self._has_spent_env_steps():  # after a stop within an epoch, or with a lower limit than before
            self.ctx.console.say(f"{_ENV_STEPS_SPENT}: training stops.")
            return
        for epoch in itertools.count(first) if self.ctx.role.is_actor else range(first, self.epochs):
            self.ctx.progress.epoch, self.epoch_metrics = epoch, {}
            self.pace.begin_epoch()
            if self.lr_schedule is not None:
                self.learner.lr_scale = self._lr_scale(self.lr_schedule)
            self.hooks("on_epoch_start", epoch)
            yield epoch

    def _lr_scale(self, schedule: Callable[[float], float]) -> float:
        """The factor of the learning rate in the epoch that begins."""
        share = self.ctx.progress.share
        scale = value_at(schedule, share)
        if scale < 0.0:
            raise ValueError(
                f"Experiment.lr_schedule {schedule!r} gives {scale} at training progress {share:.3f}, but "
                "it must be at least 0. Fix: bind a schedule that ends at 0 or above."
            )
        return scale

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.epoch % interval == 0

    def _load_newest_policy(self) -> bool:
        """Let an actor act with the newest weights; True when they are the last ones of its learner."""
        if not self.ctx.role.is_actor:
            return False
        self.accelerator.wait_for_everyone()  # the main process may still be writing it
        before = self.published.loaded
        info = self.read_latest_policy()
        if info is None and self.epoch == 0:
            logger.warning(
                "There is no published policy in %s yet; acting with untrained weights.",
                self.checkpoints.root,
            )
        # A final policy ends this actor only if its learner was still at work when the actor began.
        is_over = info is not None and info.is_final and before is not None and before != info
        if info is not None and info.is_final and before is None and self.ctx.role.is_actor:
            is_over = not self.pace.wait_for_continuation()
        return self.ctx.any(is_over and self.ctx.role.is_actor)

    def _stops_at_limit(self) -> bool:
        """True when a limit ends the run before its last epoch; that limit is printed."""
        if self._is_good_enough():
            score, limit = self.ctx.progress.val_return, self.stop_at_val_return
            reached = f"Mean return {score:.3f} has reached Experiment.stop_at_val_return = {limit}"
        elif self._has_spent_env_steps():
            reached = _ENV_STEPS_SPENT
        else:
            return False
        self.ctx.console.say(f"{reached}: training stops.")
        return True

    def _is_good_enough(self) -> bool:
        """True when the last evaluation reached stop_at_val_return."""
        score, limit = self.ctx.progress.val_return, self.stop_at_val_return
        return self.ctx.role.learns and limit is not None and score is not None and score >= limit

    def _has_spent_env_steps(self) -> bool:
        """True when all processes that collect for the run have taken max_env_steps together."""
        if self.ctx.role.is_actor or (limit := self.max_env_steps) is None:
            return False
        return from_main(self.pace.count_env_steps, self.accelerator) >= limit

    def _refresh_dataset(self) -> None:
        """Let the dataset find the collected data, and log its size."""
        self.accelerator.wait_for_everyone()
        metrics = self.dataset.on_end_of_collection()
        if self.ctx.role.only_learns and (newest_s := self.dataset.newest_time_s) is not None:
            metrics["newest_age_s"] = max(0.0, time.time() - newest_s)
        self.log(metrics, "dataset")
        self.accelerator.wait_for_everyone()

    def _end_epoch(self, epoch: int, is_last: bool) -> Literal["continue", "finish", "stopped"]:
        """Notify all parts, and publish and save what is due; returns what the run does next."""
        shown = {
            label: self.epoch_metrics[name]
            for name, label in _CONSOLE_METRICS.items()
            if name in self.epoch_metrics
        }
        progress = self.ctx.progress
        counts = {"env steps": progress.env_steps, "updates": progress.gradient_steps}
        self.ctx.console.show(epoch + 1, "done", {**counts, **shown})
        self.ctx.progress.epoch = epoch + 1
        if self.train_envs is not None:
            self.train_envs.call_if_defined("on_epoch_end", epoch)
        self.hooks("on_epoch_end", epoch)
        if is_last or (self.ctx.role.learns and self.epoch >= self.epochs):
            return "finish"
        if self.ctx.any(self.ctx.stop.after_epoch is not None):
            self._stop_between_epochs()
            return "stopped"
        if self.ctx.role.learns:
            self._publish_if_wanted()  # before the checkpoint, which stores the version
            if is_due := self._is_due(self.ckpt_interval):
                self.save_checkpoint()
            elif is_due := self._is_interim_save_due(epoch):
                self._save(epoch, is_interim=True)
            if is_due:
                self._saved_s = self.ctx.stop.age_s()
        return "continue"

    def _publish_if_wanted(self, *, is_final: bool = False) -> None:
        """Publish the policy if there are actors, or always_save_latest asks for it."""
        if self.always_save_latest or self.ctx.role.only_learns:
            self.write_latest_policy(is_final=is_final)

    def _is_interim_save_due(self, epoch: int) -> bool:
        """True after the first epoch, and `CheckpointManager.every_minutes` after any process last saved.

        Never with exact_resume: such a checkpoint may cut episodes, which has to happen at fixed epochs.
        """
        minutes = self.checkpoints.every_minutes
        if minutes is None or self.checkpoints.exact_resume:
            return False
        return self.ctx.any(epoch == 0 or self.ctx.stop.age_s() - self._saved_s >= 60.0 * minutes)

    # ---- end of a run ----

    def _finish(self) -> None:
        """Last evaluation, last checkpoint, last policy."""
        if self.collector is not None:
            self.collector.flush()
        if self.ctx.role.is_actor:
            self.fleet.end("finished")
            return
        self.accelerator.wait_for_everyone()
        self.dataset.on_end_of_collection()  # the flush may have left more than the dataset may keep
        if self.evaluate_at_end and self.val_timesteps_per_epoch > 0:
            self.evaluate_val()
            self._exit_if_asked()
        self.hooks("on_training_end")
        self._exit_if_asked()
        self.ctx.progress.is_finished = True
        self.save_checkpoint()
        self._publish_if_wanted(is_final=True)
        self.fleet.end("finished")

    def _stop_between_epochs(self) -> None:
        """Save everything after a stop request, and print how to continue; `learn` returns then."""
        self.hooks("on_training_stop")
        reason = self.ctx.stop.after_epoch or "another process asked for it"
        self.fleet.end("stopped", reason)
        where = f"Training stops after epoch {self.epoch - 1} ({reason}):"
        if self.ctx.role.is_actor:
            if self.collector is not None:
                self.collector.flush()
            line = f"{where} all finished trajectories are stored."
        else:
            self._publish_if_wanted()  # before the checkpoint, which stores the version
            line = f"{where} saved {self.save_checkpoint()}. {_HOW_TO_RESUME}"
        self._print_always(line)

    def _exit_if_asked(self) -> None:
        """After a signal to any process: save everything, print how to continue, and exit."""
        if not self.ctx.stop_agreed():
            return
        name = self.ctx.stop.signal_name or "a signal to another process"
        self.fleet.ends_as("stopped", BY_SIGNAL + name)
        self.hooks("on_training_stop")
        if self.ctx.role.is_actor:
            if self.collector is not None:
                self.collector.flush()  # raises where `close` would only warn
            self.close()
            self._print_always(
                f"Stopped by {name}: all finished trajectories are stored. "
                "Start the same command again to continue."
            )
        elif self.test_run:
            self.close()
            self._print_always(f"Stopped by {name} in a test run, which cannot be resumed.")
        else:
            folder = self._save_running_epoch()
            self.close()
            self._print_always(
                f"Stopped by {name} in {self._where_in_run()}: saved {folder}. {_HOW_TO_RESUME}"
            )
        is_alone = self.accelerator.num_processes == 1  # a launcher would treat the exit status as a failure
        raise Stopped(INTERRUPTED if is_alone and name == "SIGINT" else 0)

    def _save_running_epoch(self, *, awaits_files: bool = True) -> Path | None:
        """Save in the middle of an epoch; see `_save`.

        The epoch is repeated on resume, and the checkpoint has its number. After the last epoch only the
        final evaluation is left to repeat.
        """
        epoch = max(min(self.epoch, self.epochs - 1), 0)
        return self._save(epoch, goes_on=False, awaits_files=awaits_files)

    @contextlib.contextmanager
    def _save_on_error(self) -> Iterator[None]:
        """When an error ends the run, save its state, if that is sound, and print how to continue."""
        try:
            yield
        except (GeneratorExit, SystemExit):
            raise
        except BaseException as error:  # environments in other languages raise kinds of their own
            is_abort = isinstance(error, Aborted)
            progress = self.ctx.progress
            if self.ctx.role.does_both:
                progress.env_steps = max(progress.env_steps, self.pace.env_steps)  # with the running epoch's
            has_done_anything = progress.env_steps > 0 or progress.gradient_steps > 0
            if self.ctx.role.learns and not self.test_run and not is_abort and has_done_anything:
                saved = self._save_after_error(error)
                self._print_always(f"Stopped by an error in {self._where_in_run()}: {saved}")
            raise

    def _save_after_error(self, error: BaseException) -> str:
        """Try to save as after a signal; returns what was saved, and how to continue."""
        # A wrong setting, wrong code or NaN would end the same command again.
        repeats = isinstance(error, ValueError | TypeError | FloatingPointError)
        go_on = _HOW_TO_RESUME_CORRECTED if repeats else _HOW_TO_RESUME
        if self.accelerator.num_processes > 1:  # the other processes can no longer be asked for their part
            problem = "several processes train, and not all of them are still running"
        elif not self.learner.is_sound():
            problem = "the weights are not finite"
        else:
            try:
                return f"saved {self._save_running_epoch()}. {go_on}"
            except Exception as second:  # the first error is the one to raise
                problem = f"{type(second).__name__}: {second}"
            with contextlib.suppress(Exception):
                folder = self._save_running_epoch(awaits_files=False)
                return f"saved {folder}, but not the newest trajectories ({problem}). {go_on}"
        epochs = self.checkpoints.complete_epochs()
        newest = (
            f"The newest checkpoint is of epoch {epochs[-1]}. {go_on}"
            if epochs
            else "No checkpoint has been written yet."
        )
        return f"its state could not be saved ({problem}). {newest}"

    def _draw_curves(self) -> None:
        """Draw the learning curves of a run that people watch."""
        if self.verbose and self.ctx.role.learns and self.ctx.is_main and not self.test_run:
            draw_if_possible(self.run_dir)

    def _where_in_run(self) -> str:
        return f"epoch {self.epoch}" if self.epoch < self.epochs else "the final evaluation"

    def _print_always(self, line: str) -> None:
        """Print a line even if the run is silent."""
        if self.ctx.is_main:
            self.ctx.console.console.print(line, markup=False)
