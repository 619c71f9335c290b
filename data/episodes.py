"""Flat arrays of consecutive steps, as offline data sets hold them, into one trajectory per episode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .trajectory import Array, Trajectory


def split_episodes(
    obs: Array | Mapping[str, Array],
    actions: Array,
    rews: Array,
    terminated: Array,
    truncated: Array,
    *,
    next_obs: Array | Mapping[str, Array] | None = None,
    num_actions: int | None = None,
    env_name: str = "offline",
) -> list[Trajectory]:
    """Cut flat arrays of consecutive steps, as offline data sets hold them, into one trajectory per episode.

    Row i says: obs[i] was seen, actions[i] was taken, rews[i] was paid for it, and the episode terminated or
    was truncated on arriving at the next observation. rl2s are the rewards and actions shifted by one
    timestep, time indices count from 0 in each episode, and only termination becomes `dones`.

    A trajectory of T transitions has T+1 observations, so the one that follows the last action is needed:
    - with `next_obs` it is the last row of the episode there;
    - without, it is unknown, since the next row of `obs` belongs to another episode. The last transition of
      every episode that ended by truncation (or with the arrays) is dropped then, as its value could only be
      learned from that observation. After a termination nothing is learned from it, so the transition is kept
      and the last observation repeated in its place.

    Args:
        obs: (S, ...) or a dict of such arrays; alone, its key is "observation".
        actions: (S,) or (S, 1) integers if discrete, else (S, A) floats in [-1, 1].
        rews: (S,) or (S, 1), environment units.
        terminated: (S,) or (S, 1), True where the environment reached an end ("terminals").
        truncated: (S,) or (S, 1), True where a time limit cut the episode ("timeouts").
        next_obs: like obs, what followed each action, before any reset.
        num_actions: number of discrete actions; None takes the largest index plus one.
        env_name: name of the environment.

    Returns: the trajectories in order; episodes without a transition are left out.

    Raises:
        ValueError: If the lengths differ, or the actions are out of range.
    """
    columns = _as_columns(obs)
    following = {} if next_obs is None else _as_columns(next_obs)
    actions, rows = _action_rows(np.asarray(actions), num_actions)
    rews = np.asarray(rews, np.float32).reshape(-1, 1)
    ends, cuts = (np.asarray(flags).reshape(-1).astype(bool) for flags in (terminated, truncated))
    named = {**{f"obs[{key!r}]": value for key, value in columns.items()}, "actions": actions, "rews": rews}
    named |= {f"next_obs[{key!r}]": value for key, value in following.items()}
    named |= {"terminated": ends, "truncated": cuts}
    _check_lengths({name: len(value) for name, value in named.items()})
    if next_obs is not None and following.keys() != columns.keys():
        raise ValueError(
            f"next_obs has the keys {sorted(following)}, obs has {sorted(columns)}; they must be equal. "
            "Fix: pass the same observations in both."
        )
    last_steps = np.flatnonzero(ends | cuts)
    trajs, start = [], 0
    for stop in sorted({*(last_steps + 1).tolist(), len(rews)}):
        repeats = next_obs is None and bool(ends[stop - 1 : stop].any())
        num = stop - start - (0 if repeats or next_obs is not None else 1)
        span, start = slice(start, start + num), stop
        if num < 1:
            continue
        rl2s = np.zeros((num + 1, 1 + rows.shape[1]), np.float32)
        rl2s[1:, :1], rl2s[1:, 1:] = rews[span], rows[span]
        trajs.append(
            Trajectory(
                obs={
                    key: _with_last(value, following.get(key), span, repeats)
                    for key, value in columns.items()
                },
                rl2s=rl2s,
                time_idxs=np.arange(num + 1)[:, None],
                actions=actions[span],
                rews=rews[span],
                dones=ends[span, None],
                env_name=env_name,
            )
        )
    return trajs


def _as_columns(obs: Array | Mapping[str, Array]) -> dict[str, Array]:
    columns = obs if isinstance(obs, Mapping) else {"observation": obs}
    return {key: np.asarray(value) for key, value in columns.items()}


def _action_rows(actions: Array, num_actions: int | None) -> tuple[Array, npt.NDArray[np.float32]]:
    """Return actions as a trajectory stores them, and as rows (S, A) for rl2s."""
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


def _check_lengths(lengths: dict[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
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
