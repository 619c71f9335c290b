"""The weights of the losses of each discount."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import torch
from torch import Tensor

from ...nets import RunningStatistics, debiased_rate
from .checks import require_above_zero


@gin.configurable
class WeighByReward(RunningStatistics):
    """Weights that reduce the losses of long horizons if most timesteps are rewarded.

        w_g = (k_g sigma_g)^2 / max over discounts
        k_g = min(1, max(1 - g, 1 / max_horizon) / p),  p = min(1, rare E[|r|]^2 / E[r^2])

    sigma_g is the standard deviation of the targets of discount g. k_g converts a return to a mean reward per
    timestep: a return sums about 1 / (1 - g) timesteps, of which a share E[|r|]^2 / E[r^2] is rewarded
    (exactly, if all rewards other than 0 are equal). With `rare` = 10, a horizon with a tenth of a reward on
    average has full weight: it rarely contains more than one reward, so there is nothing to average.

    Reason: the layers that all discounts share then learn from the discounts whose returns distinguish
    actions. If all discounts have equal weight and actions are rewarded immediately, most of the variance of
    a long-horizon return is noise, and recall is learned late or not at all.
    Source: ours. Off: `loss_weights = None` (published).
    Effect: the area under learning curves is 0.15 [0.12, 0.18] larger with it (docs/algorithm.md).

    Shapes: `weights` is (G, 1).

    Args:
        beta: rate of the moving averages of |r| and r^2; higher at first, so that the initial values have no
            weight.
        rare: see above; with infinity, every return is divided by its horizon.
        max_horizon: in timesteps; longer horizons have the weight of this one.
    """

    reward_sizes: Tensor
    updates: Tensor
    pending: Tensor
    _discounts: Tensor

    def __init__(self, *, beta: float = 5e-4, rare: float = 10.0, max_horizon: float = 1_000.0) -> None:
        super().__init__()
        require_above_zero("WeighByReward", beta=beta, rare=rare, max_horizon=max_horizon)
        self.beta, self.rare, self.max_horizon = beta, rare, max_horizon

    def build(self, discounts: Sequence[float]) -> None:
        """Set the discounts of the agent, in the order of its losses."""
        self.register_buffer("reward_sizes", torch.zeros(2))  # means of |r| and r^2
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("pending", torch.zeros(3), persistent=False)  # sums of |r| and r^2, and number
        self.register_buffer("_discounts", torch.tensor(discounts)[:, None], persistent=False)

    def weights(self, sigma: Tensor) -> Tensor:
        """(G, 1) weights, the largest of them 1, for standard deviations (G, 1) of the targets."""
        size, square = self.reward_sizes.unbind()
        share = (size.square() / square).where(square > 0.0, 1.0)
        share = (self.rare * share).clamp(max=1.0)
        per_timestep = (1.0 - self._discounts).clamp(min=1.0 / self.max_horizon)
        deviation = (per_timestep / share).clamp(max=1.0) * sigma
        return (deviation / deviation.max()).square()

    @torch.no_grad()
    def gather(self, rewards: Tensor, mask: Tensor) -> None:
        """Add rewards where mask is True; both of one shape."""
        kept = rewards.where(mask, 0.0)
        self.pending += torch.stack([kept.abs().sum(), kept.square().sum(), mask.sum().float()])

    def pending_sums(self) -> Tensor:
        return self.pending.double()

    def set_pending_sums(self, sums: Tensor) -> None:
        self.pending.copy_(sums)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the averages, without waiting for a GPU."""
        *sizes, n = self.pending.unbind()
        moves = n > 0
        self.updates += moves
        rate = debiased_rate(self.beta, self.updates).where(moves, 0.0)
        self.reward_sizes.lerp_(torch.stack(sizes) / n.clamp(min=1.0), rate)
        self.pending.zero_()
