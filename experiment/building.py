"""How Experiment's parts are made: processes and seeds, environments, loader, collector, logger, summary."""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import gin
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from gymnasium import spaces

from ..agents import OnPolicyAgent
from ..data import BatchLoader, Layout, TrajectoryWriter, WritingClock
from ..data.sink import Sink
from ..data.spaces import PolicyActionSpace
from ..envs import ActionCode, EnvSpec, Histories, is_text, make_vector_env, num_usable_cores, resolve_env
from .artifacts import RunAccess
from .artifacts.upload import Uploads
from .checkpoint.spaces import EnvSpaces
from .collector import Collector
from .freezing import FrozenParams
from .logs import MetricLogger
from .onpolicy import OnPolicyCollector, PPOLearner
from .onpolicy_settings import check_learner
from .overlap import EnvHalves, OverlappedCollector
from .reward_shaping import make_shaping, shape_relabeled
from .rng import derive_seed, draw_seed, seed_global_generators
from .tee import TeeSink
from .validate import check_on_policy

if TYPE_CHECKING:
    from .experiment import Experiment
    from .settings import MakeEnv

logger = logging.getLogger("loxodon")
_NO_LENGTH_LIMIT = 2**31  # transitions; a longer traj_save_len only cuts at the end of an episode
_LONGEST_WAIT = timedelta(minutes=30)  # of a process for another one that evaluates or writes a checkpoint


def make_accelerator(mixed_precision: str) -> Accelerator:
    """Accelerate's view of devices and processes. Accumulation is the learner's own, so it is off here."""
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()  # an earlier Experiment of this process had another precision
    waits = InitProcessGroupKwargs(timeout=_LONGEST_WAIT)
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[waits])
    if not accelerator.is_main_process:
        logger.setLevel(logging.WARNING)
    asked_for_more = {"MASTER_PORT", "ACCELERATE_USE_CPU"} <= os.environ.keys() and "RANK" not in os.environ
    if asked_for_more and accelerator.num_processes == 1:
        logger.warning(
            "The launcher was asked for several processes but has started only this one, as "
            "`accelerate launch --cpu` does without MPI. Fix: ACCELERATE_USE_CPU=true accelerate launch "
            "--multi_gpu --num_processes 2 ... starts two on the CPU."
        )
    return accelerator


def agree_on_seed(seed: int | None, accelerator: Accelerator) -> int:
    """The run's seed, the same in all processes."""
    if seed is not None:
        return seed
    drawn = [draw_seed()]
    if accelerator.num_processes > 1:
        broadcast_object_list(drawn)
    return drawn[0]


def stream_seed(exp: Experiment, *names: str | int) -> int:
    """Seed of a random stream of this process. Collecting processes never repeat each other."""
    own = (os.getpid(), time.time_ns() % 2**31) if exp.mode == "collect" else ()
    return derive_seed(exp.run_seed, *names, exp.accelerator.process_index, *own)


def seed_process(exp: Experiment) -> None:
    """Seed the global generators; every process builds the same weights."""
    if exp.seed is None:
        logger.info("Experiment.seed was not set; this run uses seed %d", exp.run_seed)
    if exp.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports much
        torch.use_deterministic_algorithms(exp.deterministic)
    seed_global_generators(derive_seed(exp.run_seed, "model"))


def configure_dataset(exp: Experiment) -> None:
    """Folder, window length and rights of the dataset; only one process may delete."""
    may_delete = exp.has_dset_edit_rights and exp.mode != "collect" and exp.accelerator.is_main_process
    exp.dataset.configure(
        max_seq_len=exp.max_seq_len,
        padded_sampling=exp.padded_sampling,
        has_edit_rights=may_delete,
        default_root=str(exp.run_dir.parent),
        default_name=exp.run_name,
    )
    if exp.reward_shaper is not None:
        shape_relabeled(exp.dataset, exp.reward_shaper, exp.epochs)


# ---- environments ----


def make_envs(exp: Experiment, make_env: MakeEnv | Sequence[MakeEnv]) -> Any:
    """A vector env of parallel_actors environments.

    Raises: ValueError when a list of another length than parallel_actors is given.
    """
    envs: Any = make_vector_env(
        _specs(exp, make_env),
        exp.env_mode,
        context=exp.async_env_mp_context,
        num_workers=exp.async_env_workers,
    )
    if envs.num_envs != exp.parallel_actors:
        found = envs.num_envs
        envs.close()
        raise ValueError(
            f"The vectorised environment has {found} envs, but Experiment.parallel_actors is "
            f"{exp.parallel_actors}. "
            f"Fix: set Experiment.parallel_actors = {found}."
        )
    return envs


def make_train_envs(exp: Experiment) -> Any:
    """As make_envs; with overlap, two vector envs of half the environments each, sharing the CPU cores."""
    if not (exp.overlap_sampling and exp.env_mode == "async" and exp.parallel_actors > 1):
        return make_envs(exp, exp.make_train_env)
    specs = _specs(exp, exp.make_train_env)
    middle = (len(specs) + 1) // 2
    num_workers = -(-(exp.async_env_workers or num_usable_cores()) // 2)
    halves: list[Any] = []
    try:
        for part in (specs[:middle], specs[middle:]):
            context = exp.async_env_mp_context
            halves.append(make_vector_env(part, "async", context=context, num_workers=num_workers))
    except BaseException:
        for envs in halves:
            envs.close()
        raise
    return EnvHalves(halves)


def _specs(exp: Experiment, make_env: MakeEnv | Sequence[MakeEnv]) -> list[EnvSpec]:
    """One recipe per actor; for an env that is vectorised already, their number is its size."""
    if not isinstance(make_env, Sequence) or isinstance(make_env, str):
        return [resolve_env(make_env)] * exp.parallel_actors
    specs = [resolve_env(one) for one in make_env]
    if len(specs) != exp.parallel_actors:
        raise ValueError(
            f"The list of environments has {len(specs)} entries, but Experiment.parallel_actors is "
            f"{exp.parallel_actors}. Fix: give one entry per actor, or set parallel_actors to fit."
        )
    return specs


def build_envs(exp: Experiment) -> None:
    """Vector envs this mode needs, and the spaces of the agent, which trajectories have to fit."""
    if exp.mode != "learn" and exp.train_timesteps_per_epoch > 0:
        exp.train_envs = make_train_envs(exp)
    if exp.val_timesteps_per_epoch > 0 and (exp.val_interval is not None or exp.evaluate_at_end):
        exp.val_envs = make_envs(exp, exp.make_val_env)
    envs = exp.train_envs if exp.train_envs is not None else exp.val_envs
    if envs is not None:
        _take_spaces(exp, envs)
    elif exp.env_mode == "already_vectorized":
        envs = make_envs(exp, exp.make_train_env)
        _take_spaces(exp, envs)
        envs.close()
    else:
        first: Any = exp.make_train_env
        env: Any = resolve_env(first[0] if isinstance(first, list | tuple) else first).build()
        exp.obs_space, exp.action_space = env.observation_space, env.action_space
        exp.env_spaces = EnvSpaces(*env.raw_spaces)
        env.close()
    exp.dataset.expect(layout_of(exp.obs_space, exp.action_space))


def describe_envs(exp: Experiment) -> str:
    """How training environments are run, in a few words."""
    return f"{exp.parallel_actors} x {exp.env_mode}" if exp.train_envs is not None else "none for training"


def _take_spaces(exp: Experiment, envs: Any) -> None:
    """The agent's spaces, and those of the environments themselves."""
    exp.obs_space, exp.action_space = envs.single_observation_space, envs.single_action_space
    exp.env_spaces = EnvSpaces(envs.env_observation_space, envs.env_action_space)


def layout_of(obs_space: spaces.Dict, action_space: PolicyActionSpace) -> Layout:
    """What trajectories of these spaces look like; texts are not stored."""
    obs: dict[str, Any] = {
        key: (tuple(space.shape or ()), np.dtype(space.dtype))
        for key, space in obs_space.spaces.items()
        if not is_text(space)
    }
    code = ActionCode(action_space)
    return Layout(obs, code.width, code.nvec)


def make_writer(
    exp: Experiment, folder: Any, num_envs: int, *names: str | int, clock: WritingClock | None = None
) -> TrajectoryWriter:
    """Stores trajectories of `num_envs` envs in `folder`, cut as traj_save_len says."""
    save_every = None
    if exp.traj_save_len < _NO_LENGTH_LIMIT:
        longest, spread = int(exp.traj_save_len), 0
        if exp.stagger_traj_file_lengths and exp.max_seq_len < longest:
            spread = exp.max_seq_len
        save_every = (longest - spread, longest + spread)
    return TrajectoryWriter(
        folder,
        num_envs,
        save_every=save_every,
        save_as=exp.save_trajs_as,
        seed=stream_seed(exp, "writer", *names),
        actor_id=exp.accelerator.process_index,
        clock=clock,
        nvec=ActionCode(exp.action_space).nvec,
    )


def make_frozen(exp: Experiment) -> FrozenParams | None:
    """What Experiment.freeze leaves as it is; None without."""
    if exp.freeze is None:
        return None
    return FrozenParams(exp.freeze(), exp.policy, exp.policy.trainable_params(), lambda: exp.epoch)


def make_on_policy_learner(exp: Experiment) -> PPOLearner | None:
    """What trains an on-policy agent; None for an off-policy one."""
    if not isinstance(exp.policy, OnPolicyAgent):
        return None
    check_on_policy(exp)
    learner = exp.on_policy_learner_type(
        exp.policy,
        exp.learner,
        exp.accelerator,
        exp.train_timesteps_per_epoch,
        exp.parallel_actors,
        exp.max_seq_len,
        derive_seed(exp.run_seed, "minibatches"),
        exp.caster,
        exp.batches_per_update,
    )
    check_learner(exp, learner)
    if exp.test_run:
        learner.set_random_steps(0)  # the only rollout is learned from
    return learner


def forward_work(exp: Experiment) -> float:
    """About how many multiply-adds a forward pass takes: parameters times timesteps; on a GPU no limit."""
    if exp.DEVICE.type != "cpu":
        return math.inf  # what is left to the CPU was not measured
    num_timesteps = exp.batch_size * exp.max_seq_len
    if exp.mode == "collect":
        num_timesteps = exp.parallel_actors
    elif exp.on_policy is not None:
        num_timesteps = exp.parallel_actors * exp.train_timesteps_per_epoch // exp.on_policy.minibatches
    return float(num_timesteps) * sum(p.numel() for p in exp.policy.parameters())


def build_collector(exp: Experiment) -> None:
    """The training rollout: exploration, writer and collector; nothing where this mode does not collect."""
    # From here on processes differ: each draws its own actions.
    seed_global_generators(stream_seed(exp, "process"))
    if exp.train_envs is None:
        return
    if exp.on_policy is None and exp.dataset.save_new_trajs_to is None and exp.accelerator.is_main_process:
        logger.warning(
            "%s takes no new trajectories, so what every epoch collects is thrown away. Fix: "
            "Experiment.train_timesteps_per_epoch = 0 trains on stored trajectories alone; "
            "MixtureOfDatasets joins them with new ones.",
            type(exp.dataset).__name__,
        )
    histories = Histories.create(exp.train_envs.num_envs)
    if not isinstance(exp.train_envs, EnvHalves):
        exp.collector = _make_collector(exp, exp.train_envs, histories)
        return
    clock = WritingClock()
    halves = [
        _make_collector(exp, envs, histories.share(envs.num_envs), i, clock=clock)
        for i, envs in enumerate(exp.train_envs.halves)
    ]
    exp.collector = OverlappedCollector(halves, histories)


def _make_collector(
    exp: Experiment, envs: Any, histories: Histories, *names: int, clock: WritingClock | None = None
) -> Collector:
    """A collector with its own exploration and writer, whose random streams bear `names`."""
    exploration, folder = None, exp.dataset.save_new_trajs_to
    sinks: list[Sink] = []
    if exp.exploration_wrapper_type is not None and exp.on_policy is None:
        seed = stream_seed(exp, "exploration", *names)
        exploration = exp.exploration_wrapper_type(exp.action_space, envs.num_envs, seed)
        exploration.steps_per_call = exp.actor_processes
    if folder is not None:
        sinks.append(make_writer(exp, folder, envs.num_envs, *names, clock=clock))
    kind: Callable[..., Collector] = Collector
    if exp.on_policy is not None:
        buffer = exp.on_policy.make_buffer(envs.num_envs)
        exp.on_policy.agent.values_when_acting = folder is not None or not exp.on_policy.recompute_old
        sinks.insert(0, buffer)
        kind = functools.partial(OnPolicyCollector, buffer)
    return kind(
        envs,
        exp.policy,
        exp.DEVICE,
        exploration,
        TeeSink(sinks) if len(sinks) > 1 else next(iter(sinks), None),
        histories,
        exp.sample_actions,
        should_stop=lambda: exp.stop.requested(),  # noqa: PLW0108 - learn() puts another object there
        cast=exp.caster,
        on_env_steps=exp.fleet.on_env_steps,
        shape_rewards=make_shaping(exp),
        timer=exp.timer,
    )


def build_loader(exp: Experiment) -> BatchLoader:
    """Batches of this process; the samples of an epoch follow from seed, process and epoch."""
    return BatchLoader(
        exp.dataset,
        batch_size=exp.batch_size,
        num_workers=exp.dloader_workers,
        seed=derive_seed(exp.run_seed, "loader"),
        rank=exp.accelerator.process_index,
        pin_memory=exp.DEVICE.type == "cuda",
    )


# ---- logs ----


def build_logger(exp: Experiment) -> MetricLogger:
    """The metric files; a collecting process has its own, beside those of the learner."""
    collects = exp.mode == "collect"
    wandb = {
        "project": exp.wandb_project,
        "entity": exp.wandb_entity,
        "group": exp.wandb_group_name,
        "name": exp.run_name,
        "job_type": exp.mode,
        "config": {"gin": gin.operative_config_str(), "seed": exp.run_seed, "hash": exp.config_hash},
    }
    store = exp.artifacts.store
    needs_wandb = exp.log_to_wandb or (store is not None and store.needs_wandb)
    return MetricLogger(
        exp.run_dir,
        file_name=f"metrics_collect_{platform.node()}_{os.getpid()}.jsonl" if collects else "metrics.jsonl",
        tensorboard=exp.log_to_tensorboard and not collects,
        wandb=wandb if needs_wandb and exp.accelerator.is_main_process else None,
        wandb_metrics=exp.log_to_wandb,
    )


def make_uploads(exp: Experiment) -> Uploads:
    """Where checkpoints go beside the run folder; the store is there in the process that uses it."""
    store = None
    if exp.artifact_store is not None and exp.mode != "collect" and exp.accelerator.is_main_process:
        store = exp.artifact_store()
        store.attach(
            RunAccess(
                exp.run_dir,
                exp.run_name,
                exp.wandb_project,
                exp.wandb_entity,
                start_wandb=lambda: exp.metric_logger.start_wandb(),  # noqa: PLW0108 - it is made after this
            )
        )
    return Uploads(
        store,
        exp.checkpoints.root / "artifacts_pending",
        exp.run_name,
        lambda: {"seed": exp.run_seed, "best_score": exp.best_score, **exp.x_axis_metrics()},
    )


def begin_run(exp: Experiment) -> None:
    """Before a learner writes to its run folder: set aside what an earlier run left there, store the config.

    A run that went on from a checkpoint has its own files there. Does nothing when called again.
    """
    if exp.mode == "collect" or exp.checkpoints.has_begun:
        return
    if (old := exp.checkpoints.begin_run()) is not None:
        logger.info("The checkpoints of an earlier run named %r are now in %s", exp.run_name, old)
    if exp.accelerator.is_main_process:
        store_config(exp)


def store_config(exp: Experiment) -> None:
    """Write the config as requested and as operative, and the versions."""
    record = exp.record
    facts = record.versions(seed=exp.run_seed, mode=exp.mode)
    exp.checkpoints.write_record(record.config, record.config_requested, facts)


def summarize(exp: Experiment, env_summary: str) -> str:
    """A few lines on what runs where."""
    num_params = sum(p.numel() for p in exp.policy.trainable_params())
    observations = ", ".join(f"{key} {space}" for key, space in exp.obs_space.spaces.items())
    processes = exp.accelerator.num_processes
    num_steps = processes * exp.parallel_actors * exp.train_timesteps_per_epoch
    num_sequences = processes * exp.batch_size * exp.batches_per_update
    updates = (
        f"{exp.train_batches_per_epoch // exp.batches_per_update:,} updates of {num_sequences} sequences"
    )
    if exp.on_policy is not None:
        updates = exp.on_policy.summary()
    lines = {
        "run": f"{exp.run_dir} (mode {exp.mode}, seed {exp.run_seed})",
        "device": f"{exp.DEVICE}, precision {exp.mixed_precision}, {processes} process(es), "
        f"{torch.get_num_threads()} torch thread(s)",
        "environments": env_summary,
        "observations": observations,
        "actions": str(exp.action_space),
        "agent": f"{type(exp.policy).__name__}, {num_params:,} trainable parameters, "
        f"sequences up to {exp.max_seq_len} steps",
        "epoch": f"{num_steps:,} env steps, {updates}; {exp.epochs} epoch{'s' if exp.epochs != 1 else ''}",
        "dataset": f"{type(exp.dataset).__name__} {exp.dataset.save_new_trajs_to or ''}".rstrip(),
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items())


def close(exp: Experiment) -> None:
    """End everything that runs beside this thread."""
    if exp.collector is not None:
        exp.collector.close()
    exp.loader.close()
    exp.dataset.close()
    for envs in (exp.val_envs, exp.train_envs):  # the newer workers hold ends of the older ones' pipes
        if envs is not None:
            envs.close()
    exp.train_envs = exp.val_envs = None
    exp.artifacts.close(exp.stop.requested())
    exp.metric_logger.close()
    exp.fleet.leave()
