"""Values as distributions over bins, so that value functions can be learned by classification."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .precision import in_full_precision

_MEANS_PER_BIN = 16  # entries of the table that inverts the means of Gaussian labels
_SPACINGS, _LABELS, _MEANS = ("symlog", "linear"), ("two_hot", "hl_gauss"), ("bins", "values")


@gin.configurable
class ValueBins(nn.Module):
    """Converts between values and probabilities of bins.

    Bin centers are evenly spaced in z, where z = y ("linear") or sign(y) log(1 + |y| / unit) ("symlog"). With
    mean_of "bins", an expectation is the mean of z, converted back to y. This is robust to outliers, but with
    symlog it is below the true mean of mixed outcomes. With "values" it is the mean of y itself, to which the
    ends of a wide range add noise as long as they have any probability.

    Shapes: values (...) float <-> probabilities or logits (..., num_bins).

    Args:
        num_bins: number of bins K.
        low: value of the first center, in units of the critics (times the reward multiplier); lower values
            are clipped to it.
        high: value of the last center; higher values are clipped to it.
        spacing: "symlog" or "linear".
        unit: with "symlog", values well below this are spaced linearly, others logarithmically.
        labels: "two_hot" uses the two nearest centers; "hl_gauss" uses a Gaussian around the value.
        sigma: standard deviation of that Gaussian, in bins.
        mean_of: what is averaged: "bins" (robust; below the true mean with symlog) or "values".
    Raises: ValueError for settings out of range.
    Source: two-hot: Schrittwieser et al. 2020, arXiv:1911.08265, appendix F, with symlog as in Hafner et al.
        2023, arXiv:2301.04104; HL-Gauss: Farebrother et al. 2024, arXiv:2403.03950, section 3.
    """

    centers: Tensor
    support: Tensor
    means: Tensor

    def __init__(
        self,
        *,
        num_bins: int = 128,
        low: float = -100_000.0,
        high: float = 100_000.0,
        spacing: str = "symlog",
        unit: float = 1.0,
        labels: str = "two_hot",
        sigma: float = 0.75,
        mean_of: str = "bins",
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("spacing", spacing, _SPACINGS),
            ("labels", labels, _LABELS),
            ("mean_of", mean_of, _MEANS),
        ):
            if value not in allowed:
                raise ValueError(
                    f"ValueBins.{name} is {value!r}, but must be one of {', '.join(map(repr, allowed))}. "
                    f"Fix: bind ValueBins.{name} to one of these."
                )
        if not (num_bins >= 2 and low < high and unit > 0 and sigma > 0):  # noqa: PLR2004 - a range
            raise ValueError(
                f"ValueBins has num_bins={num_bins}, low={low}, high={high}, unit={unit} and sigma={sigma}, "
                "but needs at least two bins, low below high, and unit and sigma above 0. Fix: bind values "
                "in these ranges."
            )
        self.num_bins, self.is_symlog, self.unit = num_bins, spacing == "symlog", unit
        self.labels, self.sigma, self.is_mean_of_values = labels, sigma, mean_of == "values"
        ends = self._to_z(torch.tensor([low, high], dtype=torch.float64))
        centers = torch.linspace(ends[0], ends[1], num_bins, dtype=torch.float64)
        self.register_buffer("centers", centers.float(), persistent=False)
        # Expectations are weighted means of the support, and two-hot labels interpolate between its entries.
        support = self._to_value(centers) if self.is_mean_of_values else centers
        self.register_buffer("support", support.float(), persistent=False)
        # Means of the labels of Gaussians whose centers are evenly spaced, in ascending order.
        spaced = torch.linspace(ends[0], ends[1], _MEANS_PER_BIN * num_bins, dtype=torch.float64)
        self.register_buffer("means", (self._hl_gauss(spaced) @ support).float(), persistent=False)

    def encode(self, values: Tensor) -> Tensor:
        """Convert values to probabilities of bins."""
        values = values.float()
        if self.labels == "hl_gauss":
            return self._hl_gauss(self._gaussian_for(values))
        return self._two_hot(values if self.is_mean_of_values else self._to_z(values))

    @in_full_precision
    def decode(self, logits: Tensor) -> Tensor:
        """Convert logits of bins to expected values."""
        mean = F.softmax(logits.float(), dim=-1) @ self.support
        return mean if self.is_mean_of_values else self._to_value(mean)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy (...) of logits and labels, (..., K) each, broadcast."""
        logits = logits.float()
        return torch.logsumexp(logits, dim=-1) - (labels * logits).sum(-1)

    def _two_hot(self, x: Tensor) -> Tensor:
        """Weights of the two neighbours of x in `support`, with weighted mean x."""
        x = x.clamp(self.support[0], self.support[-1])
        above = torch.searchsorted(self.support, x.contiguous()).clamp(1, self.num_bins - 1)
        low, high = self.support[above - 1], self.support[above]
        share = ((x - low) / (high - low))[..., None]
        probs = torch.zeros(*x.shape, self.num_bins, device=x.device)
        return probs.scatter(-1, above[..., None] - 1, 1.0 - share).scatter(-1, above[..., None], share)

    def _gaussian_for(self, values: Tensor) -> Tensor:
        """Centers of the Gaussians whose labels have these means; otherwise, bootstrapping adds up errors."""
        if not self.is_mean_of_values:
            return self._to_z(values)
        values = values.clamp(self.means[0], self.means[-1])
        above = torch.searchsorted(self.means, values.contiguous()).clamp(1, len(self.means) - 1)
        low, high = self.means[above - 1], self.means[above]
        places = above - 1 + (values - low) / (high - low)
        return self.centers[0] + places * (self.centers[-1] - self.centers[0]) / (len(self.means) - 1)

    def _hl_gauss(self, z: Tensor) -> Tensor:
        """Probability mass of a Gaussian around z in each bin, normalised over all bins."""
        width = (self.centers[-1] - self.centers[0]) / (self.num_bins - 1)
        edges = torch.cat([self.centers - 0.5 * width, self.centers[-1:] + 0.5 * width])
        z = z.clamp(self.centers[0], self.centers[-1])
        below = 0.5 * (1.0 + torch.erf((edges - z[..., None]) / (self.sigma * width * math.sqrt(2.0))))
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])

    def _to_z(self, y: Tensor) -> Tensor:
        return y.sign() * torch.log1p(y.abs() / self.unit) if self.is_symlog else y

    def _to_value(self, z: Tensor) -> Tensor:
        return z.sign() * torch.expm1(z.abs()) * self.unit if self.is_symlog else z
