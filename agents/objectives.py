"""Means over what counts."""

from __future__ import annotations

from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True.

    Args:
        x: any shape. Values under False do not matter, NaN included.
        mask: bool, broadcastable to x.
    Returns: a scalar tensor; 0 when nothing is True.
    """
    mask = mask.expand_as(x)
    return x.where(mask, 0.0).sum() / mask.sum().clamp(min=1)
