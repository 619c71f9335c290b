"""The weights of the losses of each discount."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import torch
from torch import Tensor

from ...data.errors import check_number
from ...nets import RunningStatistics, debiased_rate


@gin.configurable
class WeighByAdvantage(RunningStatistics):
    """Weights that reduce the losses of long horizons until their returns are known to depend on actions.

        w_g = max(h_g, min(1, e_g / enough))
        e_g = largest E[(Q_c - V_c) (Q_c' - V_c') / sigma_g^2] so far,  c and c' different critics
        h_g = (k_g sigma_g)^2 / max over discounts
        k_g = min(1, max(1 - g, 1 / max_horizon) / p),  p = min(1, rare E[|r|]^2 / E[r^2])

    sigma_g is the standard deviation of the targets of discount g. e_g is the share of their variance that
    the recorded actions explain. Independent errors of critics cancel in products of two critics' advantages;
    what all critics memorise of few stored episodes does not, and makes e_g too large. With one critic, e_g
    is 0. The moving average begins at 0, because advantages of initial weights say nothing. A discount that
    was once known to depend on actions keeps its weight when better policies make its returns vary more.

    h_g is small for long horizons if most timesteps are rewarded: k_g converts a return to a mean reward per
    timestep, as a return sums about 1 / (1 - g) timesteps, of which a share E[|r|]^2 / E[r^2] is rewarded
    (exactly, if all rewards other than 0 are equal). With `rare` = 10, a horizon with a tenth of a reward on
    average has full weight: it rarely contains more than one reward, so there is nothing to average.

    Reason: the layers that all discounts share then learn from the discounts whose returns distinguish
    actions. If all discounts have equal weight and actions are rewarded immediately, most of the variance of
    a long-horizon return is noise, and recall is learned late or not at all. If every timestep is rewarded
    alike and actions matter by their late effects, only long horizons distinguish actions, and h_g alone
    would keep them from being learned.
    Source: ours. Off: `loss_weights = None` (published).
    Effect: the area under learning curves is 0.15 [0.12, 0.18] larger with h_g alone, and 0.03 [0.01, 0.06]
    more with e_g (docs/algorithm.md).

    Shapes: `weights` is (G, 1).

    Args:
        beta: rate of the moving averages; for |r| and r^2 higher at first, so that the initial values have no
            weight.
        enough: share of the variance that gives full weight.
        rare: horizons with up to 1 / rare rewards on average have full weight in h_g.
        max_horizon: in timesteps; longer horizons count as this one in k_g.
    """

    reward_sizes: Tensor
    explained: Tensor
    most_explained: Tensor
    updates: Tensor
    pending: Tensor
    _discounts: Tensor

    def __init__(
        self, *, beta: float = 0.01, enough: float = 0.05, rare: float = 10.0, max_horizon: float = 1_000.0
    ) -> None:
        super().__init__()
        check_number("WeighByAdvantage.beta", beta, above=0, highest=1)
        settings = {"enough": enough, "rare": rare, "max_horizon": max_horizon}
        for name, value in settings.items():
            check_number(f"WeighByAdvantage.{name}", value, above=0)
        self.beta, self.enough, self.rare, self.max_horizon = beta, enough, rare, max_horizon

    def build(self, discounts: Sequence[float]) -> None:
        """Set the discounts of the agent, in the order of its losses."""
        self.register_buffer("reward_sizes", torch.zeros(2))  # means of |r| and r^2
        self.register_buffer("explained", torch.zeros(len(discounts), 1))
        self.register_buffer("most_explained", torch.zeros(len(discounts), 1))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        # Number of timesteps, sums of |r| and r^2, and sums of products of advantages.
        self.register_buffer("pending", torch.zeros(3 + len(discounts)), persistent=False)
        self.register_buffer("_discounts", torch.tensor(discounts)[:, None], persistent=False)

    def weights(self, sigma: Tensor) -> Tensor:
        """(G, 1) weights, the largest of them 1, for standard deviations (G, 1) of the targets."""
        size, square = self.reward_sizes.unbind()
        share = (size.square() / square).where(square > 0.0, 1.0)
        share = (self.rare * share).clamp(max=1.0)
        per_timestep = (1.0 - self._discounts).clamp(min=1.0 / self.max_horizon)
        deviation = (per_timestep / share).clamp(max=1.0) * sigma
        from_rewards: Tensor = (deviation / deviation.max()).square()
        return from_rewards.maximum((self.most_explained / self.enough).clamp(max=1.0))

    @torch.no_grad()
    def gather(self, rewards: Tensor, advantages: Tensor, mask: Tensor) -> None:
        """Add rewards (B, L, 1, 1) and each critic's advantages (B, L, C, G, 1) where mask (B, L, 1) is True.

        Advantages are in units of sigma.
        """
        rewards = rewards[..., 0].where(mask, 0.0)
        products = torch.zeros_like(self.pending[3:])
        if (num_critics := advantages.shape[2]) > 1:
            advantages = advantages[..., 0].where(mask[..., None], 0.0)
            both = advantages.sum(2).square() - advantages.square().sum(2)  # over all ordered pairs
            products = both.sum((0, 1)) / (num_critics * (num_critics - 1))
        sums = torch.stack([mask.sum().float(), rewards.abs().sum(), rewards.square().sum()])
        self.pending += torch.cat([sums, products])

    def pending_sums(self) -> Tensor:
        return self.pending.double()

    def set_pending_sums(self, sums: Tensor) -> None:
        self.pending.copy_(sums)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the averages, without waiting for a GPU."""
        n = self.pending[0]
        moves, means = n > 0, self.pending[1:] / n.clamp(min=1.0)
        self.updates += moves
        self.reward_sizes.lerp_(means[:2], debiased_rate(self.beta, self.updates).where(moves, 0.0))
        self.explained.lerp_(means[2:, None], self.beta * moves)
        self.most_explained.copy_(self.most_explained.maximum(self.explained))
        self.pending.zero_()
