"""The forms in which trajectory files hold actions, and what discrete ones mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .trajectory import Array


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
