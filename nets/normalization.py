"""Running statistics of network inputs and of value targets.

All modules only *gather* while batches pass through them and move their statistics in `commit()`, once per
optimizer step or rollout. So every micro-batch of an accumulated update is normalised alike, and k
micro-batches give the gradients of one batch k times as large. Between the two, `sum_over_processes` adds up
what processes that train together have gathered, so that all of them keep the same statistics: those of one
process that saw all the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import gin
import torch
from einops import rearrange
from torch import Tensor, distributed, nn


class RunningStatistics(nn.Module, ABC):
    """Something that is gathered from batches and moves once per update."""

    @abstractmethod
    def pending_sums(self) -> Tensor:
        """What was gathered since the last commit, (S,) float64; those of several processes add up."""

    @abstractmethod
    def set_pending_sums(self, sums: Tensor) -> None:
        """Replace what was gathered by what `sums` (S,) float64 stand for."""

    @abstractmethod
    def commit(self) -> None:
        """Merge what was gathered since the last commit into the statistics in use."""


@torch.no_grad()
def summed_over_processes(sums: Tensor) -> Tensor:
    """The sum of `sums`, of any shape, over all processes that train together; all have to call this."""
    if not _several_processes():
        return sums
    # NCCL sends nothing that lies in main memory.
    total = sums.to("cuda") if distributed.get_backend() == "nccl" else sums.clone()
    distributed.all_reduce(total)
    return total.to(sums.device)


@torch.no_grad()
def sum_over_processes(modules: Sequence[RunningStatistics]) -> None:
    """Give all processes that train together the sum of what they have gathered, in a single message.

    All of them have to call this at the same update. Without torch.distributed nothing happens.
    """
    if not _several_processes() or not modules:
        return
    parts = [module.pending_sums() for module in modules]
    sums = summed_over_processes(torch.cat(parts))
    for module, part in zip(modules, torch.split(sums, [len(part) for part in parts]), strict=True):
        module.set_pending_sums(part)


def _several_processes() -> bool:
    alone = not (distributed.is_available() and distributed.is_initialized())
    return not alone and distributed.get_world_size() > 1


@gin.configurable(denylist=["width"])
class RunningNorm(RunningStatistics):
    """Shift and scale every feature by its running mean and standard deviation.

    Statistics are merged with the parallel-variance formula of Chan et al. 1979 over real timesteps only.

    Shapes: x (..., D) float -> (..., D) float32, clipped to [-clip, clip].

    Args:
        width: D.
        window: timesteps; the weight of the past is capped at them, after which the mean moves exponentially.
        clip: largest normalised value.
        min_std: smallest deviation that counts.
        stop_after: timesteps after which the statistics stay as they are; None for never.
    Raises: ValueError for numbers that are not positive, or a stop_after beyond the window.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    pending_count: Tensor
    pending_mean: Tensor
    pending_m2: Tensor

    def __init__(
        self,
        width: int,
        *,
        window: float = 1e6,
        clip: float = 10.0,
        min_std: float = 1e-2,
        stop_after: float | None = None,
    ) -> None:
        super().__init__()
        end = window if stop_after is None else stop_after
        if not (min_std > 0 and clip > 0 and 0 < end <= window):
            raise ValueError(
                f"{type(self).__name__} has window={window}, clip={clip}, min_std={min_std} and "
                f"stop_after={stop_after}; allowed are numbers above 0, and for stop_after None or at most "
                "the window. Fix: bind such values."
            )
        self.window, self.clip, self.min_std, self.stop_after = window, clip, min_std, stop_after
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("pending_count", torch.zeros(()), persistent=False)
        self.register_buffer("pending_mean", torch.zeros(width), persistent=False)
        self.register_buffer("pending_m2", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        std = self.var.sqrt().clamp(min=self.min_std)
        return ((x.float() - self.mean) / std).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def gather(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the rows of x (..., D) where mask (..., 1) bool is True to the pending statistics."""
        rows = rearrange(x.detach().float(), "... d -> (...) d")
        counts = rows.new_ones(len(rows), 1, dtype=torch.bool)
        if mask is not None:
            counts = rearrange(mask, "... 1 -> (...) 1")
        # in shapes that do not depend on the mask
        n = counts.sum().float()
        mean = rows.where(counts, 0.0).sum(0) / n.clamp(min=1.0)
        m2 = (rows - mean).where(counts, 0.0).square().sum(0)
        total = self.pending_count + n
        delta, share = mean - self.pending_mean, n / total.clamp(min=1.0)
        self.pending_m2 += m2 + delta.square() * (self.pending_count * share)
        self.pending_mean += delta * share
        self.pending_count.copy_(total)

    def pending_sums(self) -> Tensor:
        # Float64, as the mean square minus the squared mean would lose the variance of features far from 0.
        n, mean = self.pending_count.double(), self.pending_mean.double()
        return torch.cat([n[None], n * mean, self.pending_m2.double() + n * mean.square()])

    def set_pending_sums(self, sums: Tensor) -> None:
        n, (total, squares) = sums[0], sums[1:].view(2, -1)
        mean = total / n.clamp(min=1.0)
        self.pending_count.copy_(n)
        self.pending_mean.copy_(mean)
        self.pending_m2.copy_((squares - n * mean.square()).clamp(min=0.0))

    @torch.no_grad()
    def commit(self) -> None:
        # no `if`, for which a GPU would be waited for
        n, kept = self.pending_count, self.count.clamp(max=self.window)
        moves = n > 0 if self.stop_after is None else (n > 0) & (self.count < self.stop_after)
        total = (kept + n).clamp(min=1.0)
        delta = self.pending_mean - self.mean
        m2 = self.var * kept + self.pending_m2 + delta.square() * (kept * n / total)
        self.mean += (delta * (n / total)).where(moves, 0.0)
        self.var.copy_(torch.where(moves, m2 / total, self.var))
        self.count.copy_(torch.where(moves, total, self.count))
        for pending in (self.pending_count, self.pending_mean, self.pending_m2):
            pending.zero_()


@gin.configurable(denylist=["window", "enabled"])
class ValueNorm(RunningNorm):
    """Unit scale for a value function of one output, by the running mean and deviation of its targets.

    With `output`, the last layer of the value function, statistics move without changing any value: the layer
    is rescaled to make up for it.

    Shapes: values and normalised values (..., 1) -> (..., 1) float32.
    Source: van Hasselt et al. 2016, arXiv:1602.07714, with means over timesteps as in RunningNorm.

    Args:
        window: see RunningNorm.
        enabled: otherwise all maps are the identity.
        min_std: smallest deviation that counts.
    """

    def __init__(self, *, window: float = 1e6, enabled: bool = True, min_std: float = 1e-4) -> None:
        super().__init__(1, window=window, clip=float("inf"), min_std=min_std, stop_after=None)
        self.enabled = enabled

    @property
    def std(self) -> Tensor:
        """Standard deviation of the targets, (1,)."""
        return self.var.sqrt().clamp(min=self.min_std)

    def forward(self, x: Tensor) -> Tensor:
        """Values -> unit scale."""
        return (x.float() - self.mean) / self.std if self.enabled else x.float()

    def value(self, normalized: Tensor) -> Tensor:
        """Unit scale -> values."""
        return normalized.float() * self.std + self.mean if self.enabled else normalized.float()

    @torch.no_grad()
    def move(self, output: nn.Linear | None = None) -> None:
        """Let the statistics move, and with `output` keep all values, by what all processes gathered."""
        if not self.enabled:
            return
        old_mean, old_std = self.mean.clone(), self.std.clone()
        sum_over_processes([self])
        self.commit()
        if output is not None:
            output.weight.mul_(old_std / self.std)
            output.bias.mul_(old_std).add_(old_mean - self.mean).div_(self.std)


_LEAST_SIGMA = 1e-4
_RARE = 10.0  # see PopArt.per_reward
_LEAST_KEPT = 1e-300  # of averages, whose logarithm is taken


class PopArt(RunningStatistics):
    """Keep value targets at unit scale, and let values of long horizons build on those of short ones.

    One set of statistics per discount factor. A critic's output x_g for discount g is what its value adds to
    that of the discount below it:
        value_g = origin_g + sum over i <= g of unit_i x_i
    So what a short horizon tells of actions is in the values of all longer ones at once. origin and unit are
    mean and deviation of the first targets that vary, 0 until then; they stay, and so do values while
    statistics move.
    Disabled, values are plain sums of outputs.

    If the rewards of the first update have one sign, values begin at that of what all its timesteps pay at
    least: c p / (1 - g p), with c the reward closest to 0 of those after which the episode goes on, and p
    their share, a moving average; c is the mean of what processes that train together have found. Else a
    price for each timestep that passes is in the values of long horizons only when target networks have
    followed for as long as these are, and until then an early end looks worth little.

    Shapes: inputs (..., G, A), statistics (G, 1).

    Args:
        discounts: G of them, in any order.
        beta: rate of the moving averages, higher at first to make up for their start.
        floor: least standard deviation, as a share of the targets' root mean square. 0 is the paper, with
            statistics in float64, which needs a device that has it.
        enabled: see above.
    Source: van Hasselt et al. 2016, arXiv:1602.07714; sums over discounts: Romoff et al. 2019,
        arXiv:1902.01883.
    """

    mu: Tensor
    nu: Tensor
    unit: Tensor
    origin: Tensor
    going_on: Tensor
    reward_sizes: Tensor
    updates: Tensor
    pending: Tensor
    _places: Tensor | None
    _discounts: Tensor
    _rewards: Tensor

    def __init__(
        self, discounts: Sequence[float], *, beta: float, floor: float = 0.1, enabled: bool = True
    ) -> None:
        super().__init__()
        # (2, G): the places of discounts in ascending order, and in that order those of the given ones
        places, given = None, range(len(discounts))
        if (ascending := sorted(given, key=lambda place: discounts[place])) != list(given):
            places = torch.tensor([ascending, sorted(given, key=ascending.__getitem__)])
        self.register_buffer("_places", places, persistent=False)
        self.beta, self.floor, self.enabled = beta, floor, enabled
        shape = (len(discounts), 1)
        # Without a floor, the variance may be a tiny part of the mean square, which float32 would lose.
        self.dtype = torch.float64 if floor == 0.0 else torch.float32
        # A unit of 0 until targets are known: what networks say before would count in the first of these. So
        # the first update moves these statistics alone.
        for name, value in (("mu", 0.0), ("nu", 1.0), ("unit", 0.0), ("origin", 0.0)):
            self.register_buffer(name, torch.full(shape, value, dtype=self.dtype))
        self.register_buffer("going_on", torch.ones((), dtype=self.dtype))
        self.register_buffer("reward_sizes", torch.zeros(2, dtype=self.dtype))  # means of |r| and r^2
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("pending", torch.zeros(3, *shape, dtype=self.dtype), persistent=False)
        self.register_buffer("_discounts", torch.tensor(discounts)[:, None], persistent=False)
        # least and largest reward after which an episode goes on; how many of these; of all; sums of |r|, r^2
        none = torch.tensor([torch.inf, -torch.inf, 0.0, 0.0, 0.0, 0.0])
        self.register_buffer("_rewards", none, persistent=False)

    @property
    def sigma(self) -> Tensor:
        """Standard deviation of the targets, (G, 1), at least `floor` times their root mean square.

        Without a floor, targets that hardly vary (a constant reward under a small discount) would be
        blown up.
        """
        deviation = (self.nu - self.mu.square()).clamp(min=0.0).sqrt()
        return deviation.maximum(self.floor * self.nu.sqrt()).clamp(min=_LEAST_SIGMA)

    @property
    def per_reward(self) -> Tensor:
        """What makes one reward of a return of each discount g, (G, 1): (1 - g) / p, from 0.001 to 1.

        A return adds up 1 / (1 - g) timesteps, of which a share of E[|r|]^2 / E[r^2] pays: those with rewards
        other than 0, if these are equal. p is ten times that, at most 1: a horizon that holds a tenth of a
        reward in the mean has none besides the one it sees in nine of ten cases, and is not divided.
        """
        size, square = self.reward_sizes.unbind()
        share = (size.square() / square).where(square > 0.0, 1.0)
        share = (_RARE * share).clamp(max=1.0)
        per_timestep = (1.0 - self._discounts).clamp(min=1e-3)
        return (per_timestep / share).clamp(max=1.0)

    @property
    def scale(self) -> Tensor:
        """What one at unit scale is in environment units, (G, 1)."""
        return self.sigma.float() if self.enabled else torch.ones_like(self.sigma)

    def normalize(self, value: Tensor) -> Tensor:
        """Values in environment units (times the reward multiplier) -> unit scale."""
        return ((value - self.mu) / self.sigma).float() if self.enabled else value

    def value(self, outputs: Tensor) -> Tensor:
        """Critic outputs -> values in environment units (times the reward multiplier)."""
        outputs = outputs.float()
        added = self.unit * outputs if self.enabled else outputs
        if self._places is None:
            values = added.cumsum(-2)
        else:
            ascending, given = self._places
            values = added.index_select(-2, ascending).cumsum(-2).index_select(-2, given)
        return (values + self.origin).float() if self.enabled else values

    @torch.no_grad()
    def gather_rewards(self, rewards: Tensor, ends: Tensor, mask: Tensor) -> None:
        """Add rewards, and whether episodes end after them, where mask is True; all of one shape."""
        goes_on = mask & ~ends
        least, most, num_going_on, num_all, sizes, squares = self._rewards.unbind()
        least.copy_(torch.minimum(least, rewards.where(goes_on, torch.inf).amin()))
        most.copy_(torch.maximum(most, rewards.where(goes_on, -torch.inf).amax()))
        num_going_on += goes_on.sum()
        num_all += mask.sum()
        kept = rewards.where(mask, 0.0)
        sizes += kept.abs().sum()
        squares += kept.square().sum()

    @torch.no_grad()
    def gather(self, targets: Tensor, mask: Tensor) -> None:
        """Add targets (B, L, G, 1) where mask (B, L, 1) bool is True to the pending sums."""
        if not self.enabled:
            return
        kept = targets.to(self.dtype).where(mask[..., None], 0.0)
        self.pending[0] += mask.sum()
        self.pending[1] += kept.sum((0, 1))
        self.pending[2] += kept.square().sum((0, 1))

    @property
    def _constant(self) -> Tensor:
        """What all gathered timesteps pay at least, (); 0 if some pay and some cost."""
        least, most = self._rewards[0], self._rewards[1]
        return (least.clamp(min=0.0) + most.clamp(max=0.0)).where(least <= most, 0.0)

    def pending_sums(self) -> Tensor:
        constant = self._constant
        of_rewards = torch.stack([constant, constant != 0.0, torch.ones_like(constant), *self._rewards[2:]])
        return torch.cat([self.pending.double().flatten(), of_rewards.double()])

    def set_pending_sums(self, sums: Tensor) -> None:
        targets, (constant, num_with, num_processes, *others) = sums[:-7], sums[-7:]
        self.pending.copy_(targets.view_as(self.pending))
        # a mean of what processes have found, if all have found one
        constant = (constant / num_processes).where(num_with == num_processes, 0.0)
        self._rewards.copy_(torch.stack([constant, constant, *others]))

    @torch.no_grad()
    def commit(self) -> None:
        """Move mu and nu (bias-corrected exponential averages)."""
        # no `if`, for which a GPU would be waited for
        n, total, squares = self.pending
        moves = n > 0  # alike for all discounts
        self.updates += moves[0, 0]
        steps = self.updates.clamp(min=1).to(self.dtype)
        debiasing = -torch.expm1(steps * math.log(max(1.0 - self.beta, _LEAST_KEPT)))  # 1 - (1 - beta)^steps
        rate = (self.beta / debiasing).where(moves, 0.0)
        n = n.clamp(min=1.0)
        self.mu.lerp_(total / n, rate)
        self.nu.lerp_(squares / n, rate)
        num_going_on, num_all, *sizes = self._rewards[2:].to(self.dtype)
        num_all = num_all.clamp(min=1.0)
        self.going_on.lerp_(num_going_on / num_all, rate[0, 0])
        self.reward_sizes.lerp_(torch.stack(sizes) / num_all, rate[0, 0])
        begin = self._constant * self.going_on / (1.0 - self._discounts * self.going_on).clamp(min=1e-3)
        is_first = moves & (self.updates == 1)
        does_begin = is_first & (begin != 0.0)
        variance = (self.nu - self.mu.square()).clamp(min=0.0)
        self.nu.copy_(torch.where(does_begin, begin.square() + variance, self.nu))
        self.mu.copy_(torch.where(does_begin, begin, self.mu))
        # Where targets have not varied yet there is nothing worth preserving.
        is_new = is_first | (moves & (self.unit <= _LEAST_SIGMA))
        self.unit.copy_(torch.where(is_new, self.sigma, self.unit))
        self.origin.copy_(torch.where(is_new, self.mu, self.origin))
        self.pending.zero_()
        self._rewards.zero_()
        self._rewards[0], self._rewards[1] = torch.inf, -torch.inf
