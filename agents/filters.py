"""Advantage filters: how much each recorded action is worth imitating."""

from __future__ import annotations

import gin
import torch
from torch import Tensor
from torch.nn import functional as F


@gin.configurable(denylist=["advantages"])
def binary_filter(advantages: Tensor, *, threshold: float = 0.0) -> Tensor:
    """1 where the advantage exceeds the threshold, else 0. Any shape, values in environment units.

    Args:
        advantages: given by the agent.
        threshold: least advantage that is imitated.
    Source: Wang et al. 2020 (CRR), arXiv:2006.15134, eq. 3.
    """
    return (advantages > threshold).float()


@gin.configurable(denylist=["advantages"])
def exp_filter(
    advantages: Tensor, *, beta: float = 1.0, clip_weights_low: float = 1e-7, clip_weights_high: float = 10.0
) -> Tensor:
    """exp(beta A), clipped. Any shape. Source: Nair et al. 2020 (AWAC), arXiv:2006.09359, eq. 13.

    Args:
        advantages: given by the agent, environment units.
        beta: how sharply better actions are preferred.
        clip_weights_low: lower bound of the result.
        clip_weights_high: upper bound of it.
    """
    return (beta * advantages).clamp(max=50.0).exp().clamp(clip_weights_low, clip_weights_high)


@gin.configurable(denylist=["advantages"])
def leaky_relu_filter(
    advantages: Tensor,
    *,
    beta: float = 1.0,
    threshold: float = 0.0,
    bias: float = 0.01,
    negative_slope: float = 0.05,
    clip_weights_low: float = 1e-7,
    clip_weights_high: float = 10.0,
) -> Tensor:
    """A ramp above the threshold: bias + leaky_relu((A - threshold) / beta), clipped. Any shape.

    Args:
        advantages: given by the agent, environment units.
        beta: advantage over which the result rises by 1.
        threshold: advantage at which the ramp begins.
        bias: the result there.
        negative_slope: rise below the threshold, as a share of that above.
        clip_weights_low: lower bound of the result.
        clip_weights_high: upper bound of it.
    """
    ramp = bias + F.leaky_relu((advantages - threshold) / beta, negative_slope)
    return torch.clamp(ramp, clip_weights_low, clip_weights_high)
