"""How Experiment's parts are made: processes and seeds, environments, loader, collector, logger, summary."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from ..data import Layout, TrajectoryWriter, WritingClock
from ..data.sink import Sink
from ..data.spaces import PolicyActionSpace
from ..envs import ActionCode, EnvSpec, Histories, is_text, make_vector_env, num_usable_cores, resolve_env
from .collector import Collector
from .env_spaces import EnvSpaces
from .onpolicy import OnPolicyCollector
from .overlap import EnvHalves, OverlappedCollector
from .reward_shaping import make_shaping
from .tee import TeeSink

if TYPE_CHECKING:
    from .experiment import Experiment
    from .settings import MakeEnv

logger = logging.getLogger("loxodon")
_NO_LENGTH_LIMIT = 2**31  # transitions; a longer traj_save_len only cuts at the end of an episode
_LONGEST_WAIT = timedelta(minutes=30)  # of a process for another one that evaluates or writes a checkpoint


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
        seed=exp.ctx.seed_of("writer", *names),
        actor_id=exp.accelerator.process_index,
        clock=clock,
        nvec=ActionCode(exp.action_space).nvec,
    )


def build_collector(exp: Experiment) -> None:
    """The training rollout: exploration, writer and collector; nothing where this mode does not collect."""
    if exp.train_envs is None:
        return
    if exp.trainer.explores and exp.dataset.save_new_trajs_to is None and exp.accelerator.is_main_process:
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
    if exp.exploration_wrapper_type is not None and exp.trainer.explores:
        seed = exp.ctx.seed_of("exploration", *names)
        exploration = exp.exploration_wrapper_type(exp.action_space, envs.num_envs, seed)
        exploration.steps_per_call = exp.pace.actor_processes
    if folder is not None:
        sinks.append(make_writer(exp, folder, envs.num_envs, *names, clock=clock))
    kind: Callable[..., Collector] = Collector
    for buffer in exp.trainer.sinks(envs.num_envs):
        sinks.insert(0, buffer)
        kind = functools.partial(OnPolicyCollector, buffer)  # type: ignore[arg-type]
    return kind(
        envs,
        exp.policy,
        exp.DEVICE,
        exploration,
        TeeSink(sinks) if len(sinks) > 1 else next(iter(sinks), None),
        histories,
        exp.sample_actions,
        should_stop=exp.ctx.stop.requested,
        cast=exp.caster,
        on_env_steps=exp.pace.after_env_steps,
        shape_rewards=make_shaping(exp),
        timer=exp.timer,
    )
