"""Conversion of arrays, from files of any program or offline data sets, to trajectories in our dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import FormatError
from .trajectory import Array, Trajectory, action_rows, is_one_hot
from .values import cast, find_bad_value

OBS_PREFIX, EXTRA_PREFIX = "_OBS_KEY_", "_EXTRA_"  # prefixes of names in a file
NVEC, POLICY_VERSION = "action_nvec", "policy_version"  # (1, K), for actions with several factors; (1,)
_MATRIX = 2  # axes: rows and columns
_MIN_RL2_WIDTH = 2  # one column for the reward, and one for an action
_DTYPES: dict[str, np.dtype[Any]] = {
    "rl2s": np.dtype(np.float32),
    "time_idxs": np.dtype(np.int64),
    "rews": np.dtype(np.float32),
    "dones": np.dtype(np.bool_),
}
_NAMES = (*_DTYPES, "actions")

# ---- files ----


def to_arrays(traj: Trajectory) -> dict[str, Array]:
    """Return the arrays that a file holds for a trajectory, by name; the environment's name is not included.

    Raises:
        ValueError: If an array holds Python objects, or rows of discrete actions are not one-hot.
    """
    arrays: dict[str, Array] = {f"{OBS_PREFIX}{key}": value for key, value in traj.obs.items()}
    arrays |= {name: getattr(traj, name) for name in _NAMES}
    arrays |= {f"{EXTRA_PREFIX}{name}": value for name, value in traj.extras.items()}
    for name, array in arrays.items():
        if array.dtype.kind in "OV":
            raise ValueError(
                f"{name} of a trajectory of {traj.env_name!r} holds Python objects or records (dtype "
                f"{array.dtype}), but only plain arrays are stored, because reading objects would require "
                "unpickling. Fix: encode it as numbers in the environment."
            )
    if traj.nvec is not None:
        arrays[NVEC] = np.array([traj.nvec], np.int64)
    if traj.policy_version is not None:
        arrays[POLICY_VERSION] = np.array([traj.policy_version], np.int64)
    if traj.actions.dtype == np.uint8 and not is_one_hot(traj.actions, traj.nvec):
        raise ValueError(
            f"Discrete actions {list(traj.actions.shape)} of a trajectory of {traj.env_name!r} are not "
            "one-hot rows. Fix: give Trajectory indices of shape (T, 1) that start at 0, or one-hot rows."
        )
    return arrays


def from_arrays(arrays: dict[str, Array], env_name: str) -> Trajectory:
    """Make a Trajectory of a file's arrays; only arrays with other dtypes or shapes are converted.

    Args:
        arrays: by name in the file; observations in the byte order of this machine may be StoredRows.
        env_name: name of the environment.

    Returns: the trajectory; its arrays are read-only.

    Raises:
        FormatError: If an array is missing or has an impossible shape or dtype.
    """
    missing = [name for name in _NAMES if name not in arrays]
    if not any(name.startswith(OBS_PREFIX) for name in arrays):
        missing.append(f"{OBS_PREFIX}*")
    if missing:
        raise FormatError(f"it lacks {', '.join(missing)}; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    nvec, version = _read_counts(arrays, NVEC, 1), _read_counts(arrays, POLICY_VERSION)
    if version is not None and len(version) != 1:
        raise FormatError(f"{POLICY_VERSION} holds {len(version)} numbers, not one")
    columns: dict[str, Any] = {name: _convert(name, arrays[name], dtype) for name, dtype in _DTYPES.items()}
    others: dict[str, dict[str, Array]] = {OBS_PREFIX: {}, EXTRA_PREFIX: {}}
    for name, array in arrays.items():
        for prefix, found in others.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = _native(name, array)
    try:
        traj = Trajectory(
            obs=others[OBS_PREFIX],
            actions=_native("actions", arrays["actions"]),
            env_name=env_name,
            policy_version=None if version is None else version[0],
            nvec=nvec,
            extras=others[EXTRA_PREFIX],
            **columns,
        )
    except ValueError as error:  # inconsistent lengths, or actions out of range
        raise FormatError(str(error)) from error
    for array in arrays_of(traj):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return traj


def arrays_of(traj: Trajectory) -> list[Array]:
    """All arrays of a trajectory, observations first."""
    return [*traj.obs.values(), *(getattr(traj, name) for name in _NAMES), *traj.extras.values()]


def _convert(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert numbers to `dtype`; a column that was stored as (T,) becomes (T, 1)."""
    if array.dtype != dtype or array.ndim != _MATRIX:
        if array.dtype.kind not in "fiub" or array.ndim not in (1, _MATRIX):
            raise FormatError(f"{name} is {array.dtype}{list(array.shape)}, but must be rows of numbers")
        try:
            array = cast(name, array[:, None] if array.ndim == 1 else array, dtype)
        except ValueError as error:
            raise FormatError(str(error)) from error
    width = array.shape[-1]
    if width < _MIN_RL2_WIDTH if name == "rl2s" else width != 1:
        raise FormatError(
            f"{name} is {array.dtype}{list(array.shape)}, but must have "
            f"{'a reward and at least one action column' if name == 'rl2s' else '1 column'}"
        )
    return array


def _native(name: str, array: Array) -> Array:
    """An array in the byte order of this machine."""
    if array.ndim == 0:
        raise FormatError(f"{name} is a single number, not one row per timestep")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _read_counts(arrays: dict[str, Array], name: str, lowest: int | None = None) -> tuple[int, ...] | None:
    """The whole numbers of a small array; None if the file has no array of this name."""
    stored = arrays.get(name)
    if stored is None:
        return None
    is_low = stored.dtype.kind in "iu" and lowest is not None and (stored < lowest).any()
    if stored.dtype.kind not in "iu" or not stored.size or is_low:
        raise FormatError(
            f"{name} is {stored.dtype}{list(stored.shape)}, but must hold whole numbers (counts)"
        )
    return tuple(stored.reshape(-1).tolist())


# ---- flat arrays of consecutive steps ----


def split_episodes(
    obs: Array | Mapping[str, Array],
    actions: Array,
    rews: Array,
    terminated: Array,
    truncated: Array,
    *,
    next_obs: Array | Mapping[str, Array] | None = None,
    num_actions: int | Sequence[int] | Array | None = None,
    env_name: str = "offline",
) -> list[Trajectory]:
    """Cut flat arrays of consecutive steps, as in offline data sets, into one trajectory per episode.

    In row i, obs[i] was seen, actions[i] was taken, rews[i] was paid for it, and the episode terminated or
    was truncated on arriving at the next observation. The rl2s are rewards and actions shifted by one
    timestep, time indices count from 0 in each episode, and only termination becomes `dones`.

    The observation after an episode's last action is the last row of the episode in `next_obs`. Without
    `next_obs` it is unknown, because the next row of `obs` belongs to another episode. After a termination,
    where its value is not used for learning, the last observation is repeated. After a truncation, and at the
    end of the arrays, the last transition is dropped.

    Args:
        obs: (S, ...) or a dict of such arrays; the key of a single array is "observation".
        actions: (S,) or (S, 1) integers or bools, or (S, A) one-hot rows, if discrete; (S, K) integers if
            MultiDiscrete, which needs `num_actions`; else (S, A) floats in [-1, 1].
        rews: (S,) or (S, 1), environment units.
        terminated: (S,) or (S, 1), True where the environment reached an end ("terminals").
        truncated: (S,) or (S, 1), True where a time limit cut the episode ("timeouts").
        next_obs: like obs, the observation after each action, before any reset.
        num_actions: number of discrete actions; None for the largest index plus one. A sequence of K numbers
            means MultiDiscrete actions.
        env_name: name of the environment.

    Returns: the trajectories in order; episodes without a transition are left out.

    Raises:
        ValueError: If the lengths differ, the actions are out of range, a value is not finite, or a value
            would change in the dtype of its column.
    """
    columns = _as_columns(obs)
    following = None if next_obs is None else _as_columns(next_obs)
    has_factors = num_actions is not None and np.ndim(num_actions) > 0
    nvec: tuple[int, ...] | None = tuple(np.asarray(num_actions).tolist()) if has_factors else None
    actions = np.asarray(actions)
    actions = action_rows(actions, sum(nvec), nvec) if nvec else _rows_of(actions, num_actions)
    rews = cast("rews", np.asarray(rews), np.float32).reshape(-1, 1)
    ends = cast("terminated", np.asarray(terminated), np.bool_).reshape(-1)
    cuts = cast("truncated", np.asarray(truncated), np.bool_).reshape(-1)
    _check_columns(columns, following, actions=actions, rews=rews, terminated=ends, truncated=cuts)
    last_steps = np.flatnonzero(ends | cuts)
    trajs, start = [], 0
    for stop in sorted({*(last_steps + 1).tolist(), len(rews)}):
        is_known = following is not None or bool(ends[stop - 1 : stop].any())
        span = slice(start, stop if is_known else stop - 1)
        start, last = stop, slice(stop - 1, stop)  # slice of the last row
        if span.start < span.stop:
            after = columns if following is None else following
            seen = {
                key: np.concatenate([value[span], cast(f"next_obs[{key!r}]", after[key][last], value.dtype)])
                for key, value in columns.items()
            }
            traj = episode(seen, actions[span], rews[span], ends[span, None], env_name, nvec=nvec)
            if problem := find_bad_value(traj):
                raise ValueError(
                    f"The episode of rows {span.start} to {span.stop - 1} cannot be trained on: {problem}. "
                    "Fix: correct the values, or leave the episode out."
                )
            trajs.append(traj)
    return trajs


def episode(
    obs: dict[str, Array],
    actions: Array,
    rews: Array,
    dones: Array,
    env_name: str,
    *,
    policy_version: int | None = None,
    nvec: tuple[int, ...] | None = None,
) -> Trajectory:
    """Make a trajectory that begins at reset; its rl2s and time indices follow from the rest.

    Args:
        obs: each (T+1, ...).
        actions: (T, A) rows.
        rews: (T, 1) float32.
        dones: (T, 1) bool.
        env_name: see Trajectory, also for the other arguments.
        policy_version: number of the policy that acted last.
        nvec: number of actions of each factor, for actions with several.
    """
    rl2s = np.zeros((len(rews) + 1, 1 + actions.shape[1]), np.float32)
    rl2s[1:, :1], rl2s[1:, 1:] = rews, actions
    times = np.arange(len(rews) + 1)[:, None]
    return Trajectory(obs, rl2s, times, actions, rews, dones, env_name, policy_version, nvec=nvec)


def _as_columns(obs: Array | Mapping[str, Array]) -> dict[str, Array]:
    columns = obs if isinstance(obs, Mapping) else {"observation": obs}
    return {key: np.asarray(value) for key, value in columns.items()}


def _rows_of(actions: Array, num_actions: Any) -> Array:
    """Convert continuous actions, or those of one factor, to rows (S, A)."""
    if actions.dtype.kind in "iub":
        if actions.ndim > 1 and actions.shape[1] > 1 and num_actions is None and not is_one_hot(actions):
            sizes = ", ".join(str(int(size) + 1) for size in actions.max(0))
            raise ValueError(
                f"The actions are whole numbers in {actions.shape[1]} columns, as for MultiDiscrete actions, "
                f"which need num_actions. Fix: pass num_actions=({sizes}), or more if there are more choices."
            )
        is_row = actions.ndim > 1 and actions.shape[1] > 1
        highest = actions.shape[1] - 1 if is_row else int(actions.max(initial=0))
        return action_rows(actions.astype(np.int64), highest + 1 if num_actions is None else num_actions)
    rows = actions.reshape(len(actions), -1).astype(np.float32)
    if not np.abs(rows).max(initial=0.0) <= 1.0:
        raise ValueError(
            f"Continuous actions range from {rows.min()} to {rows.max()}, but must lie in [-1, 1]. "
            "Fix: scale them from the bounds of the action space to [-1, 1] first."
        )
    return rows


def _check_columns(columns: dict[str, Array], following: dict[str, Array] | None, **others: Array) -> None:
    """Raise ValueError unless all arrays have a row per step, and both kinds of observations equal keys."""
    if following is not None and following.keys() != columns.keys():
        raise ValueError(
            f"next_obs has the keys {sorted(following)}, obs has {sorted(columns)}; they must be equal. "
            "Fix: pass the same observations in both."
        )
    named = {f"obs[{key!r}]": value for key, value in columns.items()}
    named |= {f"next_obs[{key!r}]": value for key, value in (following or {}).items()} | others
    if len({len(value) for value in named.values()}) > 1:
        found = ", ".join(f"{name} {len(value)}" for name, value in named.items())
        raise ValueError(
            f"These arrays have different numbers of rows: {found}. Each needs one row per step. Fix: pass "
            "columns that cover the same steps."
        )
