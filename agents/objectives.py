"""Pure tensor functions of the off-policy objective.

Axes: B batch, L time, C critics, G discounts.
"""

from __future__ import annotations

import torch
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


def n_step_targets(
    rewards: Tensor, terminated: Tensor, mask: Tensor, next_values: Tensor, discounts: Tensor, *, n_step: int
) -> Tensor:
    """TD targets that look up to n steps ahead, cut at termination and at the end of the real data.

    y_t = sum_{i<k} discount^i r_{t+i} + discount^k (1 - d_{t+k-1}) V_{t+k}, where k is n, or the number of
    steps until the first terminal step or the last real one, whichever comes first. With n_step = 1 it is
    r + discount (1 - d) V'. No importance correction.

    Args:
        rewards: (B, L, 1, 1) float.
        terminated: (B, L, 1, 1) bool, True where the environment terminated; truncation is not termination.
        mask: (B, L, 1, 1) bool, True on real steps; False only after the last True.
        next_values: (B, L, G, 1) float, value of the timestep after each step, per discount.
        discounts: (G, 1) float in [0, 1].
        n_step: at least 1; may exceed L.
    Returns: (B, L, G, 1) float. Entries where mask is False are meaningless.
    """
    targets = rewards + discounts * next_values * ~terminated
    # extended[t] is the target with i + 1 steps; a step whose successor is terminal or padding keeps the
    # shorter one
    extended = targets
    can_look_on = ~terminated & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    for _ in range(min(n_step, rewards.shape[1]) - 1):
        following = torch.cat([extended[:, 1:], extended[:, -1:]], dim=1)
        extended = torch.where(can_look_on, rewards + discounts * following, targets)
    return extended
