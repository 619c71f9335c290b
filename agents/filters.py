"""Advantage filters: how much each recorded action is worth imitating."""

from __future__ import annotations

import gin
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
    advantages: Tensor,
    *,
    beta: float = 1.0,
    clip_advantages_low: float | None = None,
    clip_advantages_high: float | None = None,
    clip_weights_low: float = 1e-7,
    clip_weights_high: float = 10.0,
) -> Tensor:
    """exp(beta A) of clipped advantages A, clipped. Any shape.

    Args:
        advantages: given by the agent, environment units.
        beta: how sharply better actions are preferred.
        clip_advantages_low: lower bound of the advantages, environment units; None for none.
        clip_advantages_high: upper bound of the advantages; None for none.
        clip_weights_low: lower bound of the result.
        clip_weights_high: upper bound of the result.
    Source: Nair et al. 2020 (AWAC), arXiv:2006.09359, eq. 13.
    """
    if clip_advantages_low is not None or clip_advantages_high is not None:
        advantages = advantages.clamp(clip_advantages_low, clip_advantages_high)
    return (beta * advantages).clamp(max=50.0).exp().clamp(clip_weights_low, clip_weights_high)


@gin.configurable(denylist=["advantages"])
def leaky_relu_filter(
    advantages: Tensor,
    *,
    beta: float = 2.0,
    tau: float = 0.01,
    negative_slope: float = 0.05,
    at_zero: float = 0.01,
    clip_weights_low: float = 1e-7,
    clip_weights_high: float = 10.0,
) -> Tensor:
    """`binary_filter` plus a ramp that distinguishes good actions from better ones. Any shape.

        f(A) = 1[A > 0] + clip(bias + leaky_relu((A - tau) / beta))
    with the bias that gives the ramp the height `at_zero` at A = 0.

    Args:
        advantages: given by the agent, environment units.
        beta: advantage over which the ramp rises by 1.
        tau: advantage at which the ramp becomes steep.
        negative_slope: slope below tau, as a share of the slope above it.
        at_zero: height of the ramp at an advantage of 0.
        clip_weights_low: lower bound of the ramp.
        clip_weights_high: upper bound of the ramp.
    """

    def ramp(x: Tensor) -> Tensor:
        return F.leaky_relu((x - tau) / beta, negative_slope)

    height = at_zero - ramp(advantages.new_zeros(())) + ramp(advantages)
    approved: Tensor = binary_filter(advantages)
    return approved + height.clamp(clip_weights_low, clip_weights_high)
