"""Between the arrays of a file, whoever wrote it, and a Trajectory in our own dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .action_forms import holds_indices
from .errors import FormatError
from .extras import Column, Extras
from .trajectory import ARRAY_NAMES, Array, Trajectory

if TYPE_CHECKING:
    from .compressed import BlockStore

OBS_PREFIX = "_OBS_KEY_"
NVEC = "action_nvec"  # (1, K), of actions with several factors
_MATRIX = 2  # axes: rows and columns
_MIN_RL2_WIDTH = 2  # the reward and one action column
_DTYPES: dict[str, np.dtype[Any]] = {
    "rl2s": np.dtype(np.float32),
    "time_idxs": np.dtype(np.int64),
    "rews": np.dtype(np.float32),
    "dones": np.dtype(np.bool_),
}
_INT64, _FLOAT32, _UINT8 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint8)


@dataclass
class FileContent:
    """What one file holds.

    Attributes:
        arrays: read-only arrays by name, observations with OBS_PREFIX.
        ram_bytes: memory that keeping the arrays costs; mapped ones count nothing.
        env_name: if the file says it.
        policy_version: if the file says it.
        blocks: decodes the arrays where they are needed; None if they are complete.
        extras: by name, without a prefix; not read, and so of any dtype and length.
        is_buffer_used: True if arrays or blocks need the bytes of the file.
    """

    arrays: dict[str, Array]
    ram_bytes: int = 0
    env_name: str | None = None
    policy_version: int | None = None
    blocks: BlockStore | None = None
    is_buffer_used: bool = False
    extras: dict[str, Column] = field(default_factory=dict)


def build_trajectory(content: FileContent, env_name: str) -> Trajectory:
    """Make a Trajectory of a file's arrays, converting only what is not in our dtype and shape.

    Args:
        content: its `ram_bytes` grow by what had to be converted, and its `blocks` are decoded and dropped if
            an array has to be converted that they would fill later.
        env_name: taken if the file does not say it.

    Raises:
        FormatError: If an array is missing or has an impossible shape or dtype.
    """
    arrays = content.arrays
    nvec = _read_nvec(arrays.pop(NVEC, None))
    _check_names(arrays)
    if content.blocks is not None and not _is_ours(arrays):
        content.blocks.fill_all()
        content.blocks = None
    fixed: dict[str, Array] = {}
    for name, dtype in _DTYPES.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != _MATRIX:
            array = _convert(name, array, dtype)
        fixed[name] = array
    fixed["actions"] = _convert_actions(arrays["actions"], fixed["rl2s"].shape[1] - 1, nvec)
    for name, array in fixed.items():
        if array is not arrays[name]:
            array.flags.writeable = False
            content.ram_bytes += array.nbytes
    _check_widths(fixed)
    obs: dict[str, Array] = {}
    for name in arrays:
        if name.startswith(OBS_PREFIX):
            obs[name.removeprefix(OBS_PREFIX)] = _fix_byte_order(name, content)
    try:
        return Trajectory(
            obs=obs,
            env_name=content.env_name or env_name,
            policy_version=content.policy_version,
            source=-1,
            nvec=nvec,
            extras=_check_extras(content.extras, len(fixed["rews"])) if content.extras else {},
            **fixed,
        )
    except ValueError as error:  # lengths that contradict each other
        raise FormatError(str(error)) from error


def _check_names(arrays: dict[str, Array]) -> None:
    missing = [name for name in ARRAY_NAMES if name not in arrays]
    if not any(name.startswith(OBS_PREFIX) for name in arrays):
        missing.append(f"{OBS_PREFIX}*")
    if missing:
        raise FormatError(f"it lacks {', '.join(missing)}; it holds {', '.join(sorted(arrays)) or 'nothing'}")


def _check_extras(columns: dict[str, Column], num_transitions: int) -> Extras:
    for name, column in columns.items():
        if column.shape[:1] != (num_transitions,):
            raise FormatError(
                f"extra {name!r} is {column.dtype}{list(column.shape)}, but there are {num_transitions} "
                "transitions"
            )
    return Extras(columns, 0, num_transitions)


def _is_ours(arrays: dict[str, Array]) -> bool:
    """True if nothing has to be converted."""
    actions = arrays["actions"]
    return (
        all(arrays[name].dtype == dtype and arrays[name].ndim == _MATRIX for name, dtype in _DTYPES.items())
        and (actions.dtype == _FLOAT32 or (actions.dtype == _UINT8 and actions.shape[-1] > 1))
        and all(array.dtype.isnative for array in arrays.values())
    )


def _fix_byte_order(name: str, content: FileContent) -> Array:
    """Return an observation in the byte order of this machine."""
    array = content.arrays[name]
    if array.ndim == 0:
        raise FormatError(f"{name} is a single number, not one row per timestep")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
        array.flags.writeable = False
        content.ram_bytes += array.nbytes
    return array


def _convert(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers as `dtype`; a column that was stored as (T,) becomes (T, 1)."""
    if array.dtype.kind not in "fiub" or array.ndim not in (1, _MATRIX):
        raise FormatError(f"{name} is {array.dtype}{list(array.shape)}, but must be rows of numbers")
    if array.ndim == 1:
        array = array[:, None]
    return array.astype(dtype, copy=False)


def _read_nvec(stored: Array | None) -> tuple[int, ...] | None:
    if stored is None:
        return None
    if stored.dtype.kind not in "iu" or not stored.size or stored.min() < 1:
        raise FormatError(f"{NVEC} is {stored.dtype}{list(stored.shape)}, but must hold counts of actions")
    return tuple(stored.reshape(-1).tolist())


def _convert_actions(actions: Array, num_actions: int, nvec: tuple[int, ...] | None) -> Array:
    """Return indices as int64 (T, 1), one-hot rows of integers as uint8 and all others as float32 (T, A)."""
    if nvec is not None:
        return _convert_factors(actions, num_actions, nvec)
    if actions.ndim == 1 and actions.dtype.kind in "iu":
        actions = actions[:, None]
    if actions.ndim == _MATRIX and actions.dtype.kind in "iub":
        if actions.shape[1] == num_actions > 1:
            return actions.astype(_UINT8, copy=False)
        if actions.shape[1] == 1:
            # With a single action, a one-hot row is [1] and an index [0]; both mean the same.
            return actions.astype(_INT64, copy=False) if num_actions > 1 else np.zeros_like(actions, _INT64)
    elif actions.ndim == _MATRIX and actions.dtype.kind == "f" and actions.shape[1] == num_actions:
        return actions.astype(_FLOAT32, copy=False)
    raise FormatError(
        f"actions are {actions.dtype}{list(actions.shape)}, but rl2s has room for {num_actions} action "
        f"columns, so they must be (T, {num_actions}) or, as indices, (T, 1) integers"
    )


def _convert_factors(actions: Array, num_actions: int, nvec: tuple[int, ...]) -> Array:
    """Return indices of several factors as int64 (T, K), and rows as uint8 or float32 (T, A)."""
    if actions.ndim == _MATRIX and num_actions == sum(nvec):
        if holds_indices(actions, nvec):
            return actions.astype(_INT64, copy=False)
        if actions.shape[1] == num_actions and actions.dtype.kind in "iubf":
            return actions.astype(_FLOAT32 if actions.dtype.kind == "f" else _UINT8, copy=False)
    raise FormatError(
        f"actions are {actions.dtype}{list(actions.shape)} and rl2s has room for {num_actions} action "
        f"columns, but {NVEC} is {list(nvec)}: allowed are (T, {sum(nvec)}) rows and (T, {len(nvec)}) indices"
    )


def _check_widths(arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        width = array.shape[1]
        if width < _MIN_RL2_WIDTH if name == "rl2s" else width != 1 and name != "actions":
            raise FormatError(
                f"{name} is {array.dtype}{list(array.shape)}, but must have "
                f"{'a reward and at least one action column' if name == 'rl2s' else '1 column'}"
            )


def to_one_hot(actions: Array, num_actions: int) -> Array:
    """Return discrete actions, (T, 1) indices or one-hot rows, as rows (T, A) uint8.

    Raises:
        ValueError: If they are out of range.
    """
    rows = actions
    if not _are_rows(actions, num_actions):
        if actions.shape[1] != 1:
            raise _explain_range(actions, num_actions)
        rows = np.equal(actions, _count_up(num_actions))
    if np.count_nonzero(rows) != len(actions):
        raise _explain_range(actions, num_actions)
    return rows.view(_UINT8) if rows.itemsize == 1 else rows.astype(_UINT8)


def to_indices(actions: Array, num_actions: int) -> Array:
    """Return discrete actions as (T, 1) indices of the smallest dtype. Raises like to_one_hot."""
    if _are_rows(actions, num_actions):
        actions = to_one_hot(actions, num_actions).argmax(1)[:, None]
    indices: Array = _count_up(num_actions).take(actions, mode="clip")
    if actions.shape[1] != 1 or np.count_nonzero(indices == actions) != len(actions):
        raise _explain_range(actions, num_actions)
    return indices


@functools.lru_cache(maxsize=64)
def _count_up(num_actions: int) -> Array:
    """Return all action indices, in the smallest dtype that holds them."""
    return np.arange(num_actions, dtype=np.min_scalar_type(max(num_actions - 1, 0)))


def _are_rows(actions: Array, num_actions: int) -> bool:
    return actions.shape[1] == num_actions and (num_actions > 1 or actions.dtype == _UINT8)


def _explain_range(actions: Array, num_actions: int) -> ValueError:
    return ValueError(
        f"Discrete actions {actions.dtype}{list(actions.shape)} range from {actions.min()} to "
        f"{actions.max()}, but rl2s has room for {num_actions} actions (0 to {num_actions - 1}). Fix: store "
        "action indices (T, 1) that start at 0, and one-hot rl2s of width 1 + number of actions."
    )
