"""Masks, and means over the entries that they select."""

from __future__ import annotations

from torch import Tensor


def fit_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Reshape the mask (B, L, 1) to as many axes as x (B, L, ...), so that it can be broadcast."""
    return mask.reshape(*mask.shape[:2], *[1] * (x.dim() - 2))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True.

    Args:
        x: any shape. Values where mask is False are ignored, even if NaN.
        mask: bool, broadcastable to x.
    Returns: a scalar tensor; 0 when nothing is True.
    """
    mask = mask.expand_as(x)
    return x.where(mask, 0.0).sum() / mask.sum().clamp(min=1)
