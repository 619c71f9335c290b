"""Advantage filters: how much each recorded action is worth imitating."""

from __future__ import annotations

import gin
from torch import Tensor
from torch.nn import functional as F

_LEAST, _MOST = 1e-7, 10.0  # bounds of a weight that depends on the size of the advantage
_SLOPE_BELOW, _AT_ZERO = 0.05, 0.01  # slope of the ramp below tau, relative to the slope above; height at 0


@gin.configurable(denylist=["advantages"])
def binary_filter(advantages: Tensor) -> Tensor:
    """1 where the advantage is positive, else 0. Any shape.

    Args:
        advantages: given by the agent.
    Source: Wang et al. 2020 (CRR), arXiv:2006.15134, eq. 3.
    """
    return (advantages > 0.0).float()


@gin.configurable(denylist=["advantages"])
def exp_filter(advantages: Tensor, *, beta: float = 1.0) -> Tensor:
    """Exponential weights exp(beta A) of advantages A, clipped to [1e-7, 10]. Any shape.

    Args:
        advantages: given by the agent, in environment units.
        beta: how sharply better actions are preferred.
    Source: Nair et al. 2020 (AWAC), arXiv:2006.09359, eq. 13.
    """
    return (beta * advantages).clamp(max=50.0).exp().clamp(_LEAST, _MOST)


@gin.configurable(denylist=["advantages"])
def leaky_relu_filter(advantages: Tensor, *, beta: float = 2.0, tau: float = 0.01) -> Tensor:
    """`binary_filter` plus a ramp that distinguishes good actions from better ones. Any shape.

        f(A) = 1[A > 0] + clip(bias + leaky_relu((A - tau) / beta))
    The bias sets the height of the ramp at A = 0 to 0.01; the ramp is clipped to [1e-7, 10].

    Args:
        advantages: given by the agent, in environment units.
        beta: advantage over which the ramp rises by 1.
        tau: advantage at which the ramp becomes steep; below, its slope is a twentieth.
    """

    def ramp(x: Tensor) -> Tensor:
        return F.leaky_relu((x - tau) / beta, _SLOPE_BELOW)

    height = _AT_ZERO - ramp(advantages.new_zeros(())) + ramp(advantages)
    approved: Tensor = binary_filter(advantages)
    return approved + height.clamp(_LEAST, _MOST)
