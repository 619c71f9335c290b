"""Running statistics of network inputs and of value targets, and their base class.

All modules only *gather* while batches pass through them; `commit()` updates their statistics once per
optimizer step or rollout. So every micro-batch of an accumulated update is normalised in the same way, and k
micro-batches together give the gradients of one large batch (except with PopArt, whose losses already use
what was gathered). Between the two, `sum_over_processes` sums the gathered data of all processes that train
together, so that all of them have the same statistics, as if one process had seen all the data.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import gin
import torch
from einops import rearrange
from torch import Tensor, distributed, nn


class RunningStatistics(nn.Module, ABC):
    """Base class of statistics that are gathered from batches and change once per update."""

    @abstractmethod
    def pending_sums(self) -> Tensor:
        """Sums gathered since the last commit, (S,) float64; they can be added over processes."""

    @abstractmethod
    def set_pending_sums(self, sums: Tensor) -> None:
        """Replace the gathered data by `sums`, (S,) float64."""

    @abstractmethod
    def commit(self) -> None:
        """Merge the data gathered since the last commit into the statistics."""


@torch.no_grad()
def summed_over_processes(sums: Tensor) -> Tensor:
    """Add up `sums`, of any shape, over all processes that train together; all have to call this."""
    if not _several_processes():
        return sums
    # NCCL cannot send tensors in main memory.
    total = sums.to("cuda") if distributed.get_backend() == "nccl" else sums.clone()
    distributed.all_reduce(total)
    return total.to(sums.device)


@torch.no_grad()
def sum_over_processes(modules: Sequence[RunningStatistics]) -> None:
    """Replace the gathered data of each process by the sum over all processes, in a single message.

    All processes that train together have to call this at the same update. Without torch.distributed it does
    nothing.
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
        width: number of features D.
        window: largest weight of the past, in timesteps; beyond it the mean is an exponential average.
        clip: largest normalised value.
        min_std: lower bound of the standard deviation.
        stop_after: number of timesteps after which the statistics are frozen; None disables it.
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
                f"stop_after={stop_after}; all must be above 0, and stop_after must be None or at most "
                "window. Fix: bind values in these ranges."
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
        # Shapes must not depend on the mask.
        n = counts.sum().float()
        mean = rows.where(counts, 0.0).sum(0) / n.clamp(min=1.0)
        m2 = (rows - mean).where(counts, 0.0).square().sum(0)
        total = self.pending_count + n
        delta, share = mean - self.pending_mean, n / total.clamp(min=1.0)
        self.pending_m2 += m2 + delta.square() * (self.pending_count * share)
        self.pending_mean += delta * share
        self.pending_count.copy_(total)

    def pending_sums(self) -> Tensor:
        # In float32, the mean square minus the squared mean would lose the variance of features far from 0.
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
        # An `if` would wait for the GPU.
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

    If `move` gets the last layer of the value function, it rescales that layer, so that statistics move
    without changing any value.

    Shapes: values and normalised values (..., 1) -> (..., 1) float32.
    Source: van Hasselt et al. 2016, arXiv:1602.07714, with means over timesteps as in RunningNorm.

    Args:
        window: see RunningNorm.
        enabled: if False, all maps are the identity.
        min_std: lower bound of the standard deviation.
    """

    def __init__(self, *, window: float = 1e6, enabled: bool = True, min_std: float = 1e-4) -> None:
        super().__init__(1, window=window, clip=float("inf"), min_std=min_std, stop_after=None)
        self.enabled = enabled

    @property
    def std(self) -> Tensor:
        """Standard deviation of the targets, (1,)."""
        return self.var.sqrt().clamp(min=self.min_std)

    def forward(self, x: Tensor) -> Tensor:
        """Convert values to unit scale."""
        return (x.float() - self.mean) / self.std if self.enabled else x.float()

    def value(self, normalized: Tensor) -> Tensor:
        """Convert unit scale to values."""
        return normalized.float() * self.std + self.mean if self.enabled else normalized.float()

    @torch.no_grad()
    def move(self, output: nn.Linear | None = None) -> None:
        """Update the statistics with the data of all processes; with `output`, all values are preserved."""
        if not self.enabled:
            return
        old_mean, old_std = self.mean.clone(), self.std.clone()
        sum_over_processes([self])
        self.commit()
        if output is not None:
            output.weight.mul_(old_std / self.std)
            output.bias.mul_(old_std).add_(old_mean - self.mean).div_(self.std)


def debiased_rate(beta: float, updates: Tensor) -> Tensor:
    """Rate () float32 of step number `updates` (from 1) of a moving average without bias from its start.

    The rate is beta / (1 - (1 - beta)^updates): 1 at the first step, and beta in the long run.
    """
    steps = updates.clamp(min=1).float()
    rate = beta / -torch.expm1(steps * math.log(max(1.0 - beta, sys.float_info.min)))
    return torch.where(steps > 1, rate, 1.0)  # rounding must not keep a part of the initial values
