"""Windows of different lengths into zero-padded arrays with a leading batch axis, in numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .action_forms import holds_indices
from .trajectory import Array, Trajectory

if TYPE_CHECKING:
    from .layout import Layout

Name: TypeAlias = tuple[str, str]  # field of a Batch, and the observation's key ("" for other fields)
Specs: TypeAlias = "dict[Name, tuple[tuple[int, ...], np.dtype[Any]]]"  # shape and dtype by name
Arrays: TypeAlias = dict[Name, Array]

# Fields other than observations: dtype, and whether the field also describes the timestep after the last
# transition. Widths are 1 except those of rl2s and actions.
_FIELDS: dict[str, tuple[np.dtype[Any], bool]] = {
    "rl2s": (np.dtype(np.float32), True),
    "time_idxs": (np.dtype(np.int64), True),
    "actions": (np.dtype(np.float32), False),
    "rews": (np.dtype(np.float32), False),
    "dones": (np.dtype(np.bool_), False),
    "mask": (np.dtype(np.bool_), False),
}
_PER_WINDOW = ("sources", "policy_versions")  # (B,) int64
UNKNOWN = -1  # source or policy version


def new_arrays(specs: Specs) -> Arrays:
    """Make one uninitialised array per entry."""
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in specs.items()}


def pad_windows(
    trajs: Sequence[Trajectory],
    layout: Layout | None = None,
    allocate: Callable[[Specs], Arrays] = new_arrays,
) -> Arrays:
    """Copy windows into zero-padded arrays, as long as the longest of them. See `pad_batch`.

    Args:
        trajs: B windows.
        layout: what they have to look like; None takes that of the first.
        allocate: makes the arrays of the batch, which need not be initialised.

    Returns: the fields of a Batch, (B, L, ...) or (B, L+1, ...).

    Raises:
        ValueError: If there is no window, one does not fit the layout, or a discrete action is out of range.
    """
    if not trajs:
        raise ValueError(
            "pad_batch received no trajectories, but a batch needs at least one. Fix: pass one or more "
            "windows."
        )
    lengths = [len(traj) for traj in trajs]
    wanted = trajs[0].layout if layout is None else layout
    arrays = allocate(_specs(wanted, len(trajs), max(lengths)))
    try:
        _fill(arrays, trajs, lengths, wanted)
    except (KeyError, TypeError, ValueError) as error:
        # Copying compares keys, shapes and dtypes anyway, so they are looked at here only if it failed.
        whose = f"window 0 (environment {trajs[0].env_name!r}) has" if layout is None else "the run expects"
        mismatch = _describe_mismatch(trajs, wanted, whose)
        if mismatch is None:
            raise
        raise ValueError(mismatch) from error
    return arrays


def _specs(layout: Layout, num_rows: int, longest: int) -> Specs:
    specs: Specs = {
        ("obs", key): ((num_rows, longest + 1, *shape), dtype) for key, (shape, dtype) in layout.obs.items()
    }
    widths = {"rl2s": 1 + layout.action_width, "actions": layout.action_width}
    for field, (dtype, has_last) in _FIELDS.items():
        specs[field, ""] = ((num_rows, longest + has_last, widths.get(field, 1)), dtype)
    for field in _PER_WINDOW:
        specs[field, ""] = ((num_rows,), np.dtype(np.int64))
    return specs


def _fill(arrays: Arrays, trajs: Sequence[Trajectory], lengths: list[int], layout: Layout) -> None:
    """Copy every field of every window."""
    longest = arrays["mask", ""].shape[1]
    pads = [longest - length for length in lengths]
    num_keys = len(arrays) - len(_FIELDS) - len(_PER_WINDOW)
    for (field, key), out in arrays.items():
        if field == "obs":
            _copy(out, [traj.obs[key] for traj in trajs], pads)
        elif field == "actions":
            _copy_actions(out, [traj.actions for traj in trajs], pads, _factors(layout))
        elif field == "mask":
            out[..., 0] = np.arange(longest) < np.array(lengths)[:, None]
        elif field == "sources":
            out[:] = [traj.source for traj in trajs]
        elif field == "policy_versions":
            versions = (traj.policy_version for traj in trajs)
            out[:] = [UNKNOWN if version is None else version for version in versions]
        else:
            _copy(out, [getattr(traj, field) for traj in trajs], pads)
    if any(len(traj.obs) != num_keys or traj.nvec != layout.nvec for traj in trajs):
        raise KeyError("a window has observations or factors of actions that the batch lacks")


def _copy(out: Array, windows: list[Array], pads: list[int]) -> None:
    """Write windows to the rows of out (B, L, ...), each followed by its number of rows of zeros."""
    if any(pads):
        zeros = np.zeros((max(pads), *out.shape[2:]), out.dtype)
        windows = [part for window, pad in zip(windows, pads, strict=True) for part in (window, zeros[:pad])]
    # One call for the whole field; it refuses other shapes and casts that lose the kind of number.
    np.concatenate(windows, out=out.reshape(out.shape[0] * out.shape[1], *out.shape[2:]), casting="same_kind")


def _factors(layout: Layout) -> tuple[int, ...]:
    """Numbers of actions of the factors of an action; a plain discrete one is one factor."""
    return layout.nvec or (layout.action_width,)


def _copy_actions(out: Array, actions: list[Array], pads: list[int], nvec: tuple[int, ...]) -> None:
    """Write actions of all forms to out (B, L, A) float32: indices become one-hot rows."""
    are_indices = [holds_indices(window, nvec) for window in actions]
    if not any(are_indices):
        _copy(out, actions, pads)
    elif all(are_indices):
        indices = np.empty((*out.shape[:2], len(nvec)), np.int64)
        _copy(indices, actions, pads)
        out[...] = 0
        out.reshape(-1)[_flat_positions(indices.reshape(-1, len(nvec)), nvec)] = 1
        for row, pad in zip(out, pads, strict=True):
            if pad:
                row[-pad:] = 0
    else:
        rows = [_one_hot(w, nvec) if at else w for w, at in zip(actions, are_indices, strict=True)]
        _copy(out, rows, pads)


def _one_hot(indices: Array, nvec: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Turn action indices (T, K) into rows (T, A)."""
    rows = np.zeros((len(indices), sum(nvec)), np.float32)
    rows.reshape(-1)[_flat_positions(indices.astype(np.int64), nvec)] = 1
    return rows


def _flat_positions(indices: npt.NDArray[np.int64], nvec: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Where the ones of rows lie in the flattened rows, for indices (T, K)."""
    if indices.min() < 0 or (indices >= np.array(nvec)).any():
        sizes = " + ".join(map(str, nvec))
        raise ValueError(
            f"Discrete actions range from {indices.min()} to {indices.max()}, but rl2s has room for "
            f"{sizes} actions (0 to {max(nvec) - 1}). Fix: store action indices that start at 0, and "
            "one-hot rl2s of width 1 + number of actions."
        )
    width = sum(nvec)
    starts = np.arange(0, len(indices) * width, width)[:, None] + np.cumsum((0, *nvec[:-1]))
    positions: npt.NDArray[np.int64] = indices + starts
    return positions


def _describe_mismatch(trajs: Sequence[Trajectory], wanted: Layout, whose: str) -> str | None:
    """Say which window does not fit, or return None if all do."""
    width, nvec = wanted.action_width, _factors(wanted)
    for row, traj in enumerate(trajs):
        problem = wanted.describe_mismatch(traj.layout)
        if problem is None and not holds_indices(traj.actions, nvec) and traj.actions.shape[1:] != (width,):
            shapes = f"(T, {len(nvec)}) indices or (T, {width})"
            problem = f"actions have the shape {traj.actions.shape}, expected {shapes}"
        if problem is not None:
            return (
                f"Window {row} of the batch (environment {traj.env_name!r}) has the layout [{traj.layout}], "
                f"but {whose} [{wanted}]: {problem}. Fix: keep trajectories of different spaces in "
                "different datasets, or give the environments one space."
            )
    return None
