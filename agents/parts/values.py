"""The map from outputs of critics to values, and the unit of the errors in the losses.

Axes: G discounts, A actions (1 for critics that read the action). Statistics are (G, 1). Values and targets
are in environment units times the reward multiplier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import gin
import torch
from torch import Tensor

from ...data.errors import check_number
from ...nets import RunningStatistics, debiased_rate
from ...nets.recurrence import running_sum

_LEAST_SIGMA = 1e-4  # keeps divisions finite


class ValueScale(RunningStatistics):
    """Base of the parts that turn outputs (..., G, A) into values (..., G, A).

    The loss of a critic is ((value(output) - target) / sigma)^2, and the actor's loss uses
    (value - mu) / sigma. An agent calls `build` once, and then `gather` for every training batch, before it
    computes the losses of that batch.
    """

    mixes_discounts: ClassVar[bool] = False
    """True if the value of a discount depends on the outputs for other discounts."""

    mu: Tensor
    sigma: Tensor

    def build(self, discounts: Sequence[float]) -> None:
        """Set the discounts of the agent, in the order of the critics' outputs."""

    def value(self, outputs: Tensor) -> Tensor:
        """Values (..., G, A) float32 for outputs of critics with the same shape."""
        raise NotImplementedError

    def normalize(self, value: Tensor) -> Tensor:
        """Values (..., G, 1) in the unit of the losses."""
        return ((value - self.mu) / self.sigma).float()

    def gather(self, targets: Tensor, mask: Tensor) -> None:
        """Add targets (B, L, G, 1) where mask (B, L, 1) bool is True."""


@gin.configurable
class PlainValues(ValueScale):
    """Values are the outputs of the critics, and errors are not rescaled.

        value_g = x_g,  sigma_g = 1

    For comparisons: the published agent without value normalisation.
    """

    def build(self, discounts: Sequence[float]) -> None:
        shape = (len(discounts), 1)
        self.register_buffer("mu", torch.zeros(shape), persistent=False)
        self.register_buffer("sigma", torch.ones(shape), persistent=False)

    def value(self, outputs: Tensor) -> Tensor:
        return outputs.float()

    def normalize(self, value: Tensor) -> Tensor:
        return value

    def pending_sums(self) -> Tensor:
        return self.mu.new_zeros(0, dtype=torch.float64)

    def set_pending_sums(self, sums: Tensor) -> None:
        pass

    def commit(self) -> None:
        pass


class _MovingMoments(ValueScale):
    """Bias-corrected moving averages of the targets and of their squares, for each discount."""

    updates: Tensor
    pending: Tensor

    def __init__(self, beta: float) -> None:
        super().__init__()
        check_number(f"{type(self).__name__}.beta", beta, above=0, highest=1)
        self.beta = beta

    def build(self, discounts: Sequence[float]) -> None:
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        # Rows: number of targets, their sum, and the sum of their squares.
        self.register_buffer("pending", torch.zeros(3, len(discounts), 1), persistent=False)

    @torch.no_grad()
    def gather(self, targets: Tensor, mask: Tensor) -> None:
        kept = targets.float().where(mask[..., None], 0.0)
        self.pending[0] += mask.sum()
        self.pending[1] += kept.sum((0, 1))
        self.pending[2] += kept.square().sum((0, 1))

    def pending_sums(self) -> Tensor:
        return self.pending.double().flatten()

    def set_pending_sums(self, sums: Tensor) -> None:
        self.pending.copy_(sums.view_as(self.pending))


@gin.configurable
class PopArt(_MovingMoments):
    """Critics predict targets at unit scale; when the scale changes, all values stay the same.

        value_g = sigma_g (w_g x_g + b_g) + mu_g
        mu, nu: moving averages of y and y^2;  sigma = sqrt(clip(nu - mu^2, 1e-4, 1e8))
        w <- w sigma_old / sigma,  b <- (sigma_old b + mu_old - mu) / sigma

    mu and sigma in the losses of a batch include the targets of that batch, and all others since the last
    update. With several processes, each gathers its own statistics; they are merged after each update.

    Reason: one learning rate fits all discounts and scales of rewards. Source: van Hasselt et al. 2016,
    arXiv:1602.07714; one set of statistics per discount: Grigsby et al. 2023, arXiv:2310.09971.
    Off: `values = @PlainValues()`.

    Args:
        beta: rate of the moving averages; higher at first, to correct the bias of their initial values.
        init_nu: initial mean square of the targets; it has the weight of the targets of one update.
    """

    _mu: Tensor
    _nu: Tensor
    _w: Tensor
    _b: Tensor

    def __init__(self, *, beta: float = 5e-4, init_nu: float = 100.0) -> None:
        super().__init__(beta)
        check_number("PopArt.init_nu", init_nu, above=0)
        self.init_nu = float(init_nu)

    def build(self, discounts: Sequence[float]) -> None:
        super().build(discounts)
        self.updates.fill_(1)  # init_nu counts as one update
        shape = (len(discounts), 1)
        for name, value in (("_mu", 0.0), ("_nu", self.init_nu), ("_w", 1.0), ("_b", 0.0)):
            self.register_buffer(name, torch.full(shape, value))

    def _moved(self) -> tuple[Tensor, Tensor]:
        """Mu and nu (G, 1), including everything that was gathered."""
        n, total, squares = self.pending
        rate = debiased_rate(self.beta, self.updates + 1).where(n > 0, 0.0)
        n = n.clamp(min=1.0)
        return self._mu.lerp(total / n, rate), self._nu.lerp(squares / n, rate)

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        """Mean of the targets, (G, 1)."""
        return self._moved()[0]

    @property
    def sigma(self) -> Tensor:  # type: ignore[override]
        """Standard deviation of the targets, (G, 1)."""
        return _deviation(*self._moved())

    def value(self, outputs: Tensor) -> Tensor:
        # commit() preserves values, so the map can use the statistics from before the gathered targets.
        sigma = _deviation(self._mu, self._nu)
        return sigma * (self._w * outputs.float() + self._b) + self._mu

    @torch.no_grad()
    def commit(self) -> None:
        mu, nu = self._moved()
        old, new = _deviation(self._mu, self._nu), _deviation(mu, nu)
        self._b.copy_((old * self._b + self._mu - mu) / new)
        self._w.mul_(old / new)
        self._mu.copy_(mu)
        self._nu.copy_(nu)
        self.updates += self.pending[0, 0, 0] > 0
        self.pending.zero_()


def _deviation(mu: Tensor, nu: Tensor) -> Tensor:
    return (nu - mu.square()).clamp(1e-4, 1e8).sqrt()


@gin.configurable
class FixedUnits(_MovingMoments):
    """Values at a scale that the first targets fix; only the loss follows later statistics of the targets.

        value_g = origin_g + unit_g x_g
        sigma = max(sqrt(nu - mu^2), floor sqrt(nu));  mu, nu: moving averages of y and y^2

    unit and origin are sigma and mu of the first targets that are not all 0. Until then both are 0, so that
    no critic is trained, and its noise is not taken for rewards.

    Reason: values do not change when statistics do, so no weights have to be rescaled in compensation.
    Without a floor, the errors of targets that hardly vary (a constant reward under a small discount) would
    be amplified. Source: ours. Off: `values = @PopArt()` (published).
    Effect: together with `SummedValues`, the area under learning curves is 0.24 [0.20, 0.27] larger
    (docs/algorithm.md).

    Args:
        beta: rate of the moving averages; higher at first, to correct the bias of their initial values.
        floor: smallest sigma, as a share of the root mean square of the targets, above 0.
    Raises: ValueError for a rate or floor out of range.
    """

    mu: Tensor
    nu: Tensor
    unit: Tensor
    origin: Tensor

    def __init__(self, *, beta: float = 5e-4, floor: float = 0.1) -> None:
        super().__init__(beta)
        check_number(f"{type(self).__name__}.floor", floor, above=0, highest=1)
        self.floor = floor

    def build(self, discounts: Sequence[float]) -> None:
        super().build(discounts)
        shape = (len(discounts), 1)
        for name, value in (("mu", 0.0), ("nu", 1.0), ("unit", 0.0), ("origin", 0.0)):
            self.register_buffer(name, torch.full(shape, value))

    @property
    def sigma(self) -> Tensor:  # type: ignore[override]
        """Standard deviation of the targets, (G, 1), at least `floor` times their root mean square."""
        deviation = (self.nu - self.mu.square()).clamp(min=0.0).sqrt()
        return deviation.maximum(self.floor * self.nu.sqrt()).clamp(min=_LEAST_SIGMA)

    def value(self, outputs: Tensor) -> Tensor:
        return self.unit * outputs.float() + self.origin

    @torch.no_grad()
    def commit(self) -> None:
        """Update mu and nu, without waiting for a GPU."""
        n, total, squares = self.pending
        moves = n > 0  # equal for all discounts
        # Averages begin again while all targets are about 0. Otherwise a late first reward would be averaged
        # with them, and the unit would stay too small for good.
        self.updates *= (self.unit > _LEAST_SIGMA).any()
        self.updates += moves[0, 0]
        rate = debiased_rate(self.beta, self.updates).where(moves, 0.0)
        n = n.clamp(min=1.0)
        self.mu.lerp_(total / n, rate)
        self.nu.lerp_(squares / n, rate)
        is_new = moves & (self.nu > 0.0) & (self.unit <= _LEAST_SIGMA)
        self.unit.copy_(torch.where(is_new, self.sigma, self.unit))
        self.origin.copy_(torch.where(is_new, self.mu, self.origin))
        self.pending.zero_()


@gin.configurable
class SummedValues(FixedUnits):
    """Each output is the difference between the values of a discount and of the next lower discount.

        value_g = origin_g + sum over i <= g of unit_i x_i,  discounts in ascending order

    unit and origin are those of `FixedUnits`.

    Reason: knowledge of actions at a short horizon benefits all longer ones immediately. Source:
    Romoff et al. 2019, arXiv:1902.01883; in fixed units: ours. Off: `values = @FixedUnits()`, or `@PopArt()`
    (published).
    Effect: the area under learning curves is 0.06 [0.03, 0.09] larger than with `FixedUnits`, and 0.24
    [0.20, 0.27] larger than with `PopArt` (docs/algorithm.md).

    Args:
        beta: see FixedUnits.
        floor: see FixedUnits.
    """

    mixes_discounts = True
    _places: Tensor | None

    def build(self, discounts: Sequence[float]) -> None:
        super().build(discounts)
        # (2, G): the permutation that sorts the discounts, and its inverse.
        places, given = None, range(len(discounts))
        if (ascending := sorted(given, key=lambda place: discounts[place])) != list(given):
            places = torch.tensor([ascending, sorted(given, key=ascending.__getitem__)])
        self.register_buffer("_places", places, persistent=False)

    def value(self, outputs: Tensor) -> Tensor:
        added = self.unit * outputs.float()
        if self._places is None:
            return running_sum(added) + self.origin
        ascending, given = self._places
        values = running_sum(added.index_select(-2, ascending)).index_select(-2, given)
        return values + self.origin
