"""Figures of the updates on one rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class UpdateFigures:
    """Scalar tensors by name, over however many updates reported them.

    Names that end in `_min` or `_max` become the extreme, all others the mean. `effective_sample_size` is
    that of weighting the steps of all updates and processes by their ratios, as a share of their number.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in what an update reported."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach().float())

    def summary(self) -> dict[str, float]:
        """One figure of each name."""
        found = {}
        for name, values in self._values.items():
            numbers = torch.stack([value.to(values[0].device) for value in values])
            if name.endswith("_min"):
                found[name] = float(numbers.min())
            elif name.endswith("_max"):
                found[name] = float(numbers.max())
            else:
                found[name] = float(numbers.mean())
        if "ratio_mean_square" in found:
            mean, mean_square = found.pop("ratio_mean"), found.pop("ratio_mean_square")
            found["effective_sample_size"] = mean**2 / max(mean_square, 1e-12)
        return found


def mean_kl(kls: Sequence[tuple[float, float]]) -> float:
    """Of (divergence, timesteps) pairs, weighted; those that are not finite are left out."""
    known = [(kl, n) for kl, n in kls if math.isfinite(kl)]
    count = sum(n for _, n in known)
    return sum(kl * n for kl, n in known) / count if count else 0.0
