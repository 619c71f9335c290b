"""Make environments and derive spaces and layouts from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import gin
from gymnasium import spaces

from ...data import Layout
from ...data.spaces import ActionCode, ObsLayout, PolicyActionSpace
from ...envs import AsyncVectorEnv, EnvHalves, EnvSpec, make_vector_env, resolve_env
from ...envs.vector.group import have_same_spaces
from ..checkpoint.spaces import EnvSpaces
from ..process.rng import derive_seed

MakeEnv = EnvSpec | str | Callable[..., Any]
"""The recipe of one environment, or of one that is vectorised already."""

_NO_LENGTH_LIMIT = 2**31  # transitions; a larger traj_save_len cuts only at the end of an episode


def make_envs(
    make_env: MakeEnv | Sequence[MakeEnv],
    num_envs: int,
    env_mode: str,
    *,
    context: str | None = None,
    seed: int | None = None,
) -> Any:
    """A vector env of `num_envs` environments.

    Args:
        make_env: makes each environment, or a list with one entry for each.
        num_envs: number of environments of this process.
        env_mode: the way they are run, see `make_vector_env`.
        context: start method of worker processes.
        seed: seeds the global random generators in these processes; None draws one.

    Raises: ValueError if the number of environments is not `num_envs`.
    """
    specs = _specs(make_env, num_envs)
    envs = make_vector_env(specs, env_mode, context=context, seed=seed)
    if envs.num_envs != num_envs:
        found = envs.num_envs
        envs.close()
        raise ValueError(
            f"The vectorised environment has {found} envs, but Experiment.parallel_actors is {num_envs}. "
            f"Fix: set Experiment.parallel_actors = {found}."
        )
    return envs


@gin.configurable("TrainingEnvs", allowlist=["overlap"])
def make_training_envs(
    make_env: MakeEnv | Sequence[MakeEnv],
    num_envs: int,
    env_mode: str,
    *,
    context: str | None = None,
    seed: int | None = None,
    overlap: bool = True,
) -> Any:
    """Make the environments for collecting, like `make_envs`.

    Args:
        make_env: see `make_envs`.
        num_envs: see `make_envs`.
        env_mode: see `make_envs`.
        context: see `make_envs`.
        seed: see `make_envs`.
        overlap: with "async" and several environments, make two vector envs with half of them each. The two
            share the workers and take turns, so that the policy acts for one half while the other steps; see
            `EnvHalves`.
    """
    if overlap and env_mode == "async" and num_envs > 1:
        return _make_halves(_specs(make_env, num_envs), context, seed)
    return make_envs(make_env, num_envs, env_mode, context=context, seed=seed)


def _make_halves(specs: Sequence[EnvSpec], context: str | None, seed: int | None) -> EnvHalves:
    middle = (len(specs) + 1) // 2
    with contextlib.ExitStack() as stack:  # closes the first one if the second cannot be made
        halves: list[Any] = []
        for number, part in enumerate((specs[:middle], specs[middle:])):
            own_seed = None if seed is None else derive_seed(seed, number)
            halves.append(AsyncVectorEnv(part, context=context, share=2, seed=own_seed))
            stack.callback(halves[-1].close)
        stack.pop_all()
    return EnvHalves(halves)


def _specs(make_env: MakeEnv | Sequence[MakeEnv], num_envs: int) -> list[EnvSpec]:
    """One recipe per environment; one of a vector environment is repeated `num_envs` times."""
    if not isinstance(make_env, Sequence) or isinstance(make_env, str):
        return [resolve_env(make_env)] * num_envs
    specs = [resolve_env(one) for one in make_env]
    if len(specs) != num_envs:
        raise ValueError(
            f"The list of environments has {len(specs)} entries, but Experiment.parallel_actors is "
            f"{num_envs}. Fix: give one entry per environment, or set Experiment.parallel_actors to the "
            "number of entries."
        )
    return specs


def describe_envs(train_envs: Any, env_mode: str) -> str:
    """A short description of the way training environments are run."""
    return "none for training" if train_envs is None else f"{train_envs.num_envs} x {env_mode}"


def spaces_of(
    envs: Any, make_env: MakeEnv | Sequence[MakeEnv], num_envs: int, env_mode: str
) -> tuple[spaces.Dict, PolicyActionSpace, EnvSpaces]:
    """Observations and actions as the agent sees them, and both as the environment itself defines them.

    envs: the environments; None makes them with `make_env` to read their spaces.
    """
    if envs is None:
        if env_mode != "already_vectorized":  # one environment is enough
            first: Any = make_env
            make_env, num_envs, env_mode = first[0] if isinstance(first, list | tuple) else first, 1, "sync"
        with contextlib.closing(make_envs(make_env, num_envs, env_mode)) as probe:
            return spaces_of(probe, make_env, num_envs, env_mode)
    own = EnvSpaces(envs.env_observation_space, envs.env_action_space)
    return envs.single_observation_space, envs.single_action_space, own


def check_evaluation(envs: Any, obs_space: spaces.Dict, action_space: PolicyActionSpace) -> None:
    """Close environments that an agent for these spaces cannot be evaluated in, and raise ValueError."""
    found = envs.single_observation_space, envs.single_action_space
    if have_same_spaces(*found, obs_space, action_space):
        return
    names = ", ".join(sorted(set(envs.env_names)))
    envs.close()
    raise ValueError(
        f"The evaluation environments ({names}) have observations {found[0]} and actions {found[1]}, but "
        f"the agent was built for {obs_space} and {action_space}. Fix: give Experiment.make_val_env and "
        "FinalTest.make_env environments with the spaces of the training environments."
    )


def layout_of(obs_space: spaces.Dict, action_space: PolicyActionSpace) -> Layout:
    """Layout of trajectories of these spaces; texts are not stored."""
    leaves = [leaf for leaf in ObsLayout(obs_space).leaves if leaf.dtype != object]
    obs = {leaf.key: (leaf.shape, leaf.dtype) for leaf in leaves}
    choices = {leaf.key: leaf.num_choices for leaf in leaves if leaf.num_choices is not None}
    code = ActionCode(action_space)
    return Layout(obs, code.width, code.nvec, choices)


def piece_lengths(traj_save_len: float, spread: int) -> tuple[int, int] | None:
    """The range of transitions after which trajectories are cut; None cuts them at the end of an episode.

    spread: random variation of that length, if it is shorter than traj_save_len.
    """
    if traj_save_len >= _NO_LENGTH_LIMIT:
        return None
    longest = int(traj_save_len)
    spread = spread if spread < longest else 0
    return longest - spread, longest + spread
