"""The forms in which trajectory files hold actions, and what discrete ones mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .trajectory import Array, Trajectory


def discrete_indices(actions: Array) -> npt.NDArray[np.int64] | None:
    """Indices of discrete actions, or None if the actions are continuous.

    Args:
        actions: (T, 1) integer indices, (T, A) uint8 one-hot rows, or (T, A) float. Float rows count as
            discrete if A is at least 2 and every row is one-hot, which is how AMAGO 3.x stores discrete
            actions.

    Returns: (T,) int64 from 0 to A - 1, or None.
    """
    if actions.dtype.kind in "iu" and actions.shape[1] == 1 and actions.dtype != np.uint8:
        return np.asarray(actions[:, 0], np.int64)
    if actions.dtype == np.uint8 or is_one_hot(actions):
        return np.asarray(actions.argmax(axis=1), np.int64)
    return None


def is_one_hot(actions: Array) -> bool:
    """True if every row (of width 2 or more) holds a single one among zeros."""
    width = actions.shape[1]
    if width < 2:  # noqa: PLR2004 (one number can always be a continuous action)
        return False
    is_one = actions == 1
    return bool((is_one.sum(axis=1) == 1).all() and ((actions == 0).sum(axis=1) == width - 1).all())


def one_hot_rows(indices: npt.NDArray[np.int64], num_actions: int) -> npt.NDArray[np.float32]:
    """Indices (T,) as rows (T, num_actions) float32."""
    return np.asarray(indices[:, None] == np.arange(num_actions), np.float32)


def action_indices(traj: Trajectory) -> npt.NDArray[np.int64] | None:
    """Indices of a trajectory's discrete actions, (T, 1) or (T, K) with factors; None if continuous."""
    if traj.nvec is not None:
        return factor_indices(traj.actions, traj.nvec)
    indices = discrete_indices(traj.actions)
    return None if indices is None else indices[:, None]


def holds_indices(actions: Array, nvec: Sequence[int]) -> bool:
    """Whether these are indices (T, K), rather than rows (T, A); where K is A, uint8 means rows."""
    num_factors, dtype = len(nvec), actions.dtype
    return (
        dtype.kind in "iu"
        and actions.shape[1] == num_factors
        and (sum(nvec) > num_factors or dtype != np.uint8)
    )


def factor_indices(actions: Array, nvec: Sequence[int]) -> npt.NDArray[np.int64]:
    """Actions of several factors, indices (T, K) or rows of their one-hots (T, A), as indices (T, K).

    Raises:
        ValueError: If they have another shape, or an index is out of range, or a row is not one-hot.
    """
    if holds_indices(actions, nvec):
        indices = actions.astype(np.int64)
        if ((indices >= 0) & (indices < np.array(nvec))).all():
            return indices
    elif actions.shape[1] == sum(nvec):
        parts = np.split(actions, np.cumsum(nvec)[:-1], axis=1)
        if all(((part == 0) | (part == 1)).all() and (part.sum(axis=1) == 1).all() for part in parts):
            return np.stack([part.argmax(axis=1) for part in parts], axis=1)
    raise ValueError(
        f"Actions {actions.dtype}{list(actions.shape)} that range from {actions.min(initial=0)} to "
        f"{actions.max(initial=0)} are none of factors of {', '.join(map(str, nvec))}. Fix: store indices "
        f"(T, {len(nvec)}) that start at 0, or the one-hots of all factors side by side (T, {sum(nvec)})."
    )


def factor_rows(indices: npt.NDArray[np.int64], nvec: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Indices (T, K) in range as rows (T, A) uint8: the one-hots of all factors side by side."""
    rows = np.zeros((len(indices), sum(nvec)), np.uint8)
    rows[np.arange(len(indices))[:, None], indices + np.cumsum((0, *nvec[:-1]))] = 1
    return rows
