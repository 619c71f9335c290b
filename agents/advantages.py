"""Normalisation of advantages."""

from __future__ import annotations

from typing import Any

import gin
import torch
from torch import Tensor

from ..data.errors import check_choice, check_number
from ..nets import summed_over_processes

_MODES = ("none", "batch", "minibatch", "ema")
_MIN_STD = 1e-8  # keeps equal advantages finite


@gin.configurable
class AdvantageNorm:
    """Shift advantages to mean 0 and scale them to standard deviation 1.

    Statistics cover only the places where the mask is True, in all processes that train together. These
    processes have to call at the same time. Fewer than two places are left unchanged.

    Args:
        mode: "none"; "batch" normalises a whole rollout at once; "minibatch", each minibatch separately;
            "ema", each rollout by moving averages over earlier rollouts (the first by its own statistics).
        ema_alpha: weight of the newest rollout in those averages.
        ema_min_std: smallest deviation in mode "ema".
        ema_clip: largest absolute result in mode "ema".
    Raises: ValueError for an unknown mode, or numbers out of range.
    """

    def __init__(
        self,
        *,
        mode: str = "batch",
        ema_alpha: float = 0.05,
        ema_min_std: float = 0.02,
        ema_clip: float = 4.0,
    ) -> None:
        check_choice("AdvantageNorm.mode", mode, _MODES)
        check_number("AdvantageNorm.ema_alpha", ema_alpha, above=0, highest=1)
        check_number("AdvantageNorm.ema_min_std", ema_min_std, above=0)
        check_number("AdvantageNorm.ema_clip", ema_clip, above=0)
        self.mode, self.ema_alpha, self.ema_min_std, self.ema_clip = mode, ema_alpha, ema_min_std, ema_clip
        self._mean: float | None = None
        self._var: float | None = None

    @property
    def per_minibatch(self) -> bool:
        """True if this is called for every minibatch, rather than once per rollout."""
        return self.mode == "minibatch"

    @torch.no_grad()
    def __call__(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Normalise advantages (any shape, float) where mask (the same shape, bool) is True; 0 elsewhere.

        Returns: float32, of the same shape.
        """
        kept = advantages.double().masked_fill(~mask, 0.0)
        if self.mode == "none":
            return kept.float()
        # The sums are taken in float64, where the variance survives a mean far from 0.
        count, total, squares = _sums(kept, mask).unbind()
        mean = total / count
        var = (squares - count * mean * mean).clamp(min=0.0) / (count - 1)
        if self.mode != "ema":
            normalized = (kept - mean) / var.sqrt().clamp(min=_MIN_STD)
            return normalized.where(mask & (count > 1), kept).float()
        is_known = float(count) > 1
        old_mean, old_var = self._averages(*((float(mean), float(var)) if is_known else (None, None)))
        if old_mean is None or old_var is None:
            return kept.float()
        normalized = (kept - old_mean) / max(old_var**0.5, self.ema_min_std)
        result: Tensor = normalized.clamp(-self.ema_clip, self.ema_clip).masked_fill(~mask, 0.0).float()
        return result

    def _averages(self, mean: float | None, var: float | None) -> tuple[float | None, float | None]:
        """Add this rollout's statistics; return the earlier ones, or this rollout's if it is the first."""
        old_mean, old_var = self._mean, self._var
        if mean is None or var is None:
            return old_mean, old_var
        if old_mean is None or old_var is None:
            self._mean, self._var = mean, var
            return mean, var
        self._mean = old_mean + self.ema_alpha * (mean - old_mean)
        self._var = old_var + self.ema_alpha * (var - old_var)
        return old_mean, old_var

    def state_dict(self) -> dict[str, Any]:
        """Moving averages as plain numbers, for a checkpoint."""
        return {"mean": self._mean, "var": self._var}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages that `state_dict` returned."""
        self._mean, self._var = state["mean"], state["var"]


def _sums(kept: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over all processes, (3,) float64."""
    return summed_over_processes(torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()]))
