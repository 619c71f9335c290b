"""Figures that tell how an update of proximal policy optimisation goes."""

from __future__ import annotations

import torch
from torch import Tensor

from .objectives import masked_mean


@torch.no_grad()
def kl_estimate(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Divergence of the new policy from the one that acted, a scalar that is never negative.

    The mean of r - 1 - log r, which has the mean of -log r, but less variance.

    Args:
        log_ratio: (..., 1) float, new minus old log-probability of actions that the old policy drew.
        mask: (..., 1) bool, the timesteps that count.
    Source: Schulman 2020, "Approximating KL Divergence" (estimator k3).
    """
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)


@torch.no_grad()
def policy_metrics(log_ratio: Tensor, entropy: Tensor, clip_eps: float, mask: Tensor) -> dict[str, Tensor]:
    """Figures of the policy, over timesteps where mask is True; arguments (..., 1)."""
    ratio = log_ratio.exp()
    return {
        "kl_k1": masked_mean(-log_ratio, mask),
        "clip_fraction": masked_mean(((ratio - 1.0).abs() > clip_eps).float(), mask),
        "entropy": masked_mean(entropy, mask),
        "ratio_min": ratio.masked_fill(~mask, torch.inf).amin(),
        "ratio_max": ratio.masked_fill(~mask, -torch.inf).amax(),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_mean_square": masked_mean(ratio.square(), mask),
    }


@torch.no_grad()
def value_metrics(
    values: Tensor, old_values: Tensor, returns: Tensor, losses: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Figures of the value function, over timesteps where mask is True; arguments (..., 1).

    `explained_variance` is that of the values from before the updates: 1 is perfect, 0 as good as a constant.
    """
    residual = _variance(returns - old_values, mask)
    return {
        "value": masked_mean(values, mask),
        "return": masked_mean(returns, mask),
        "value_loss": masked_mean(losses, mask),
        "explained_variance": 1.0 - residual / _variance(returns, mask).clamp(min=1e-12),
    }


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, mask)).square(), mask)
