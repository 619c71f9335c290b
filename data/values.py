"""Checks for values that cannot be trained on, or that a cast would silently change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .rows import StoredRows
from .trajectory import Array, Layout, Trajectory, is_one_hot

_CHUNK_BYTES = 1 << 18  # part of an array that fits into the processor's cache while it is checked
_FLOAT32, _FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


def find_bad_value(traj: Trajectory, layout: Layout | None = None) -> str | None:
    """Describe the first value that cannot be trained on; None if there is none.

    Floats must be finite as float32, the dtype of the networks, and discrete actions must be one-hot. With
    the layout of the run, observations must also fit its dtypes and its numbers of values.
    """
    named: dict[str, Array | StoredRows] = {f"observation {key!r}": rows for key, rows in traj.obs.items()}
    named |= {"rl2s": traj.rl2s, "actions": traj.actions, "rews": traj.rews}
    obs = {} if layout is None else layout.obs
    narrow = {f"observation {key!r}" for key, (_, expected) in obs.items() if expected == _FLOAT16}
    for name, rows in named.items():
        dtype = _FLOAT16 if name in narrow else _FLOAT32
        is_bad = functools.partial(_is_not_finite, dtype)
        if rows.dtype.kind in "fc" and (found := _find_row(rows, is_bad)):
            return (
                f"{name} ({rows.dtype}) is {found[1]} at timestep {found[0]}, which is not finite in {dtype}"
            )
    if traj.actions.dtype == np.uint8 and not is_one_hot(traj.actions, traj.nvec):
        return "actions are uint8 rows that are not one-hot"
    if layout is None:
        return None
    for key, rows in traj.obs.items():
        expected = layout.obs[key][1]
        allowed = _range_of(rows.dtype, expected, layout.num_values.get(key))
        if allowed is not None and (found := _find_row(rows, functools.partial(_is_outside, *allowed))):
            return (
                f"observation {key!r} ({rows.dtype}) is {found[1]} at timestep {found[0]}, but this run has "
                f"{expected} from {np.min(allowed[0])} to {np.max(allowed[1])}"
            )
    return None


def cast(name: str, values: Array, dtype: Any) -> Array:
    """Return values (T, ...) in another dtype.

    Raises:
        ValueError: If whole numbers or flags would change, or finite numbers would become infinite.
    """
    wanted = np.dtype(dtype)
    if np.can_cast(values.dtype, wanted, "safe"):
        return values.astype(wanted, copy=False)
    with np.errstate(all="ignore"):
        result = values.astype(wanted)
        has_changed = result != values
        if wanted.kind == "f":
            has_changed = ~np.isfinite(result) & np.isfinite(values)
    if has_changed.any():
        row = int(np.argwhere(has_changed)[0][0])
        raise ValueError(
            f"{name} is {values.dtype} and holds {values[has_changed][0]} at timestep {row}, which {wanted} "
            "cannot hold. Fix: store it in the dtype of the space, or correct the values."
        )
    return result


def _find_row(rows: Array | StoredRows, is_bad: Callable[[Array], Array]) -> tuple[int, Any] | None:
    """The first bad value of an array, and its index on the first axis; the array is read in chunks."""
    size = max(1, _CHUNK_BYTES // max(1, rows.nbytes // max(1, len(rows))))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        bad = is_bad(part)
        if bad.any():
            return start + int(np.argwhere(bad)[0][0]), part[bad][0]
    return None


def _is_not_finite(dtype: np.dtype[Any], part: Array) -> Array:
    if part.dtype.kind == "f" and part.dtype.itemsize > dtype.itemsize:
        with np.errstate(over="ignore"):
            part = part.astype(dtype)
    result: Array = ~np.isfinite(part)
    return result


def _is_outside(low: Any, high: Any, part: Array) -> Array:
    result: Array = (part < low) | (part > high)
    return result


def _range_of(found: np.dtype[Any], expected: np.dtype[Any], num_values: Any) -> tuple[Any, Any] | None:
    """Lowest and highest whole number that the run accepts for an observation; None if it accepts all."""
    if num_values is not None:
        return 0, num_values - 1
    if expected.kind not in "iu" or np.can_cast(found, expected, "safe"):
        return None
    return np.iinfo(expected).min, np.iinfo(expected).max
