"""Flat arrays of consecutive steps, as offline data sets hold them, into one trajectory per episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .action_forms import factor_indices, factor_rows
from .trajectory import Array, Trajectory


def split_episodes(
    obs: Array | Mapping[str, Array],
    actions: Array,
    rews: Array,
    terminated: Array,
    truncated: Array,
    *,
    next_obs: Array | Mapping[str, Array] | None = None,
    num_actions: int | Sequence[int] | None = None,
    env_name: str = "offline",
) -> list[Trajectory]:
    """Cut flat arrays of consecutive steps, as offline data sets hold them, into one trajectory per episode.

    Row i says: obs[i] was seen, actions[i] taken, rews[i] paid for it, and the episode terminated or was
    truncated on arriving at the next observation. rl2s are rewards and actions shifted by one timestep, time
    indices count from 0 in each episode, and only termination becomes `dones`.

    The observation after an episode's last action is the last row of the episode in `next_obs`. Without it,
    that observation is unknown, as the next row of `obs` belongs to another episode: after a termination,
    where nothing is learned from it, the last one is repeated; after a truncation, and at the end of the
    arrays, the last transition is dropped.

    Args:
        obs: (S, ...) or a dict of such arrays; alone, its key is "observation".
        actions: (S,) or (S, 1) integers if discrete, (S, K) if MultiDiscrete, else (S, A) floats in [-1, 1].
        rews: (S,) or (S, 1), environment units.
        terminated: (S,) or (S, 1), True where the environment reached an end ("terminals").
        truncated: (S,) or (S, 1), True where a time limit cut the episode ("timeouts").
        next_obs: like obs, what followed each action, before any reset.
        num_actions: number of discrete actions; None takes the largest index plus one. K numbers in a
            sequence mean MultiDiscrete actions.
        env_name: name of the environment.

    Returns: the trajectories in order; episodes without a transition are left out.

    Raises:
        ValueError: If the lengths differ, or the actions are out of range.
    """
    columns = _as_columns(obs)
    following = {} if next_obs is None else _as_columns(next_obs)
    nvec = tuple(num_actions) if isinstance(num_actions, Sequence) else None
    actions, rows = _action_rows(np.asarray(actions), num_actions)
    rews = np.asarray(rews, np.float32).reshape(-1, 1)
    ends, cuts = (np.asarray(flags).reshape(-1).astype(bool) for flags in (terminated, truncated))
    _check_columns(columns, following, actions=actions, rews=rews, terminated=ends, truncated=cuts)
    last_steps = np.flatnonzero(ends | cuts)
    trajs, start = [], 0
    for stop in sorted({*(last_steps + 1).tolist(), len(rews)}):
        repeats = not following and bool(ends[stop - 1 : stop].any())
        span = slice(start, stop if repeats or following else stop - 1)
        start = stop
        if span.start < span.stop:
            seen = {k: _with_last(v, following.get(k), span, repeats) for k, v in columns.items()}
            trajs.append(_episode(seen, actions[span], rows[span], rews[span], ends[span, None]))
            trajs[-1] = dataclasses.replace(trajs[-1], env_name=env_name, nvec=nvec)
    return trajs


def _episode(obs: dict[str, Array], actions: Array, rows: Array, rews: Array, dones: Array) -> Trajectory:
    rl2s = np.zeros((len(rews) + 1, 1 + rows.shape[1]), np.float32)
    rl2s[1:, :1], rl2s[1:, 1:] = rews, rows
    return Trajectory(
        obs=obs,
        rl2s=rl2s,
        time_idxs=np.arange(len(rews) + 1)[:, None],
        actions=actions,
        rews=rews,
        dones=dones,
    )


def load_episodes(path: str | Path) -> list[Trajectory]:
    """Read flat arrays from an .npz file and cut them into episodes; see split_episodes.

    The arrays are named as in D4RL: observations, actions, rewards, terminals, timeouts, and
    next_observations if there are any.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If an array is missing, or they contradict each other.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path} with offline data. Fix: set MemoryTrajDataset.npz_path to an .npz file."
        )
    names = ("observations", "actions", "rewards", "terminals", "timeouts")
    with np.load(path, allow_pickle=False) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(
                f"{path} has the arrays {sorted(file)}, but lacks {missing}. Fix: name the columns as in "
                f"D4RL: {', '.join(names)}, and next_observations if you have them."
            )
        columns = dict(file.items())
    following = columns.get("next_observations")
    return split_episodes(*(columns[name] for name in names), next_obs=following, env_name=path.stem)


def _as_columns(obs: Array | Mapping[str, Array]) -> dict[str, Array]:
    columns = obs if isinstance(obs, Mapping) else {"observation": obs}
    return {key: np.asarray(value) for key, value in columns.items()}


def _action_rows(
    actions: Array, num_actions: int | Sequence[int] | None
) -> tuple[Array, npt.NDArray[np.float32]]:
    """Return actions as a trajectory stores them, and as rows (S, A) for rl2s."""
    if isinstance(num_actions, Sequence):
        indices = factor_indices(actions, num_actions)
        return indices, factor_rows(indices, num_actions).astype(np.float32)
    if actions.dtype.kind not in "iu":
        rows = actions.reshape(len(actions), -1).astype(np.float32)
        if not np.abs(rows).max(initial=0.0) <= 1.0:
            raise ValueError(
                f"Continuous actions range from {rows.min()} to {rows.max()}, but must lie in [-1, 1]. "
                "Fix: scale them from the bounds of the action space to [-1, 1] first."
            )
        return rows, rows
    indices = actions.reshape(len(actions), -1).astype(np.int64)
    lowest, highest = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
    num_actions = highest + 1 if num_actions is None else num_actions
    if indices.shape[1] != 1 or lowest < 0 or highest >= num_actions:
        raise ValueError(
            f"Discrete actions have the shape {actions.shape} and range from {lowest} to {highest}, but must "
            f"be (S,) or (S, 1) and lie in 0 to {num_actions - 1}. Fix: subtract the action space's start, "
            "and pass num_actions."
        )
    return indices, (indices == np.arange(num_actions)).astype(np.float32)


def _check_columns(columns: dict[str, Array], following: dict[str, Array], **others: Array) -> None:
    """Raise ValueError unless all have one row per step, and both kinds of observations the same keys."""
    if following and following.keys() != columns.keys():
        raise ValueError(
            f"next_obs has the keys {sorted(following)}, obs has {sorted(columns)}; they must be equal. "
            "Fix: pass the same observations in both."
        )
    named = {f"obs[{key!r}]": value for key, value in columns.items()}
    named |= {f"next_obs[{key!r}]": value for key, value in following.items()} | others
    if len({len(value) for value in named.values()}) > 1:
        found = ", ".join(f"{name} {len(value)}" for name, value in named.items())
        raise ValueError(
            f"These arrays have different numbers of rows: {found}. Each needs one row per step. "
            "Fix: pass all columns of the same steps."
        )


def _with_last(columns: Array, following: Array | None, span: slice, repeats: bool) -> Array:
    """The observations of the steps `span` and the one after them."""
    if following is not None:
        return np.concatenate([columns[span], following[span.stop - 1 : span.stop].astype(columns.dtype)])
    if repeats:
        return np.concatenate([columns[span], columns[span.stop - 1 : span.stop]])
    return columns[span.start : span.stop + 1]
