"""Normalisation of rewards by the scale of their discounted sum."""

from __future__ import annotations

from typing import Any

import gin
import torch
from torch import Tensor

from ..data.errors import check_number
from ..nets import summed_over_processes
from ..nets.recurrence import linear_recurrence


@gin.configurable
class RewardNormalizer:
    """Divide rewards by the running standard deviation of the discounted sum of rewards.

    Each env has an accumulator c <- gamma c + r, which starts at 0 in every episode. Statistics of c are kept
    in float64 over all steps of all processes that train together. Only the size of rewards changes, never
    their sign.

    Args:
        gamma: discount of the accumulators.
        clip: largest absolute reward afterwards.
        eps: added to the variance.
    Raises: ValueError for numbers out of range.
    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3; variances are merged as in Chan et al. 1979.
    """

    def __init__(self, *, gamma: float = 0.99, clip: float = 10.0, eps: float = 1e-8) -> None:
        check_number("RewardNormalizer.gamma", gamma, lowest=0, highest=1)
        check_number("RewardNormalizer.clip", clip, above=0)
        check_number("RewardNormalizer.eps", eps, above=0)
        self.gamma, self.clip, self.eps = gamma, clip, eps
        self._count, self._mean, self._m2 = 0.0, 0.0, 0.0
        self._accumulators: Tensor | None = None

    @torch.no_grad()
    def __call__(self, rewards: Tensor, ended: Tensor, mask: Tensor) -> Tensor:
        """Update the statistics with the rewards of a rollout, then return them normalised.

        All processes that train together have to call this at the same time.

        Args:
            rewards: (T, N) float32; not modified.
            ended: (T, N) bool, terminated or truncated.
            mask: (T, N) bool, True where a step was taken; other places are ignored and become 0.
        Returns: (T, N) float32.
        """
        kept = rewards.double().masked_fill(~mask, 0.0)
        self._merge(self._accumulate(kept, ended, mask), mask)
        if self._count > 1:
            kept = kept / (self._m2 / self._count + self.eps) ** 0.5
        return kept.clamp(-self.clip, self.clip).float()

    def restart(self) -> None:
        """Clear the accumulators, before all envs are reset; statistics are kept."""
        self._accumulators = None

    def _accumulate(self, kept: Tensor, ended: Tensor, mask: Tensor) -> Tensor:
        """The accumulators after every step, (T, N) float64."""
        carried = self._accumulators
        if carried is None or carried.shape != kept.shape[1:]:
            carried = torch.zeros_like(kept[0])
        decay = torch.ones_like(kept).masked_fill(mask, self.gamma)
        decay[1:].masked_fill_(ended[:-1], 0.0)
        sums = linear_recurrence(decay[None], kept[None], carried.to(kept.device)[None])[0]
        self._accumulators = sums[-1].masked_fill(ended[-1], 0.0)
        return sums

    def _merge(self, sums: Tensor, mask: Tensor) -> None:
        counted = sums[mask]
        parts = torch.stack([mask.sum().double(), counted.sum(), counted.square().sum()])
        count, total, squares = summed_over_processes(parts).tolist()
        if count == 0:
            return
        mean, all_steps = total / count, self._count + count
        delta = mean - self._mean
        m2 = max(squares - count * mean * mean, 0.0)
        self._m2 += m2 + delta * delta * self._count * count / all_steps
        self._mean += delta * count / all_steps
        self._count = all_steps

    def state_dict(self) -> dict[str, Any]:
        """Statistics and accumulators as plain numbers, for a checkpoint."""
        carried = self._accumulators
        return {
            "count": self._count,
            "mean": self._mean,
            "m2": self._m2,
            "accumulators": None if carried is None else carried.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._count, self._mean, self._m2 = state["count"], state["mean"], state["m2"]
        carried = state["accumulators"]
        self._accumulators = None if carried is None else torch.tensor(carried, dtype=torch.float64)
