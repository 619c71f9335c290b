"""What several mixers are made of."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..recurrence import matrix_recurrence, matrix_step, rotating_recurrence, rotating_step
from ..trunk import Mixer, State


class MatrixMixer(Mixer):
    """Base class of mixers whose whole state is one matrix "S" per head, which fades."""

    @abstractmethod
    def _parts(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Queries, keys, values (..., H, E) and log decay of the recurrence; output gate (..., D)."""

    @abstractmethod
    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        """What was read (..., H, E) and the output gate (..., D) -> (..., D)."""

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        (q, k, v, log_decay), z = self._parts(x)
        y, last = matrix_recurrence(q, k, v, log_decay, state["S"], resets)
        return self._finish(y, z), {"S": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (q, k, v, log_decay), z = self._parts(x)
        y, last = matrix_step(q, k, v, log_decay, state["S"])
        return self._finish(y, z), {"S": last}


class RotatingMixer(Mixer):
    """Base class of mixers whose whole state is complex numbers "h" that turn and fade at fixed rates."""

    @abstractmethod
    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Decay, angle and inputs of the recurrence; what `_finish` needs beside its states."""

    @abstractmethod
    def _finish(self, h: Tensor, beside: Any) -> Tensor:
        """States (..., 2, E) -> (..., D)."""

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        parts, beside = self._parts(x)
        h = rotating_recurrence(*parts, state["h"], resets)
        return self._finish(h, beside), {"h": h[:, -1]}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        parts, beside = self._parts(x)
        h = rotating_step(*parts, state["h"])
        return self._finish(h, beside), {"h": h}


class _Convolution(torch.autograd.Function):
    """See `ShortConv`; with a gradient of its own, as that of slices would fill one sequence for each lag."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor, age: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight, age)
        reach = len(weight) - 1
        y = torch.addcmul(bias, padded[:, reach:], weight[-1])
        for lag in range(1, reach + 1):
            past = padded[:, reach - lag : -lag]
            y.addcmul_(past if age is None else past * (age >= lag), weight[-1 - lag])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, age = ctx.saved_tensors
        of_padded, of_weight, reach = torch.zeros_like(padded), torch.empty_like(weight), len(weight) - 1
        for lag in range(reach + 1):
            seen = slice(reach - lag, padded.shape[1] - lag)
            felt = grad if age is None or lag == 0 else grad * (age >= lag)
            of_padded[:, seen].addcmul_(felt, weight[-1 - lag])
            of_weight[-1 - lag] = (felt * padded[:, seen]).sum((0, 1))
        return of_padded, of_weight, grad.sum((0, 1)), None


class ShortConv(nn.Module):
    """A causal convolution over the `width` newest timesteps of an episode, for each feature on its own.

    Its state is the input of the last width - 1 timesteps of the running episode, zeros before it began.
    """

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.num_kept = width - 1
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(width, d_model).uniform_(-bound, bound))  # newest last
        self.bias = nn.Parameter(torch.empty(d_model).uniform_(-bound, bound))

    def forward(self, x: Tensor, resets: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor]:
        """X (B, L, D), resets (B, L) bool, kept (B, width - 1, D) -> (B, L, D) and what is kept after it."""
        length, reach = x.shape[1], self.num_kept
        padded = torch.cat([kept.to(x.dtype), x], dim=1)
        age = None if resets is None else _ages(resets, reach)
        y = cast("Tensor", _Convolution.apply(padded, self.weight, self.bias, age))  # type: ignore[no-untyped-call]
        kept = padded[:, length:]
        if age is not None:
            lags = torch.arange(reach - 1, -1, -1, device=x.device)[None, :, None]
            kept = kept * (age[:, -1:] >= lags)
        return y, kept.float()

    def step(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """One timestep: x (N, D)."""
        padded = torch.cat([kept, x[:, None].to(kept.dtype)], dim=1)
        return (padded * self.weight).sum(1) + self.bias, padded[:, 1:]


def _ages(resets: Tensor, reach: int) -> Tensor:
    """(B, L, 1) int64, timesteps since the newest reset; at least `reach` where the sequence has none yet."""
    t = torch.arange(resets.shape[1], device=resets.device)
    newest = torch.where(resets, t, -reach).cummax(dim=1).values
    return (t - newest)[..., None]


def timescales(num: int, max_seq_len: int, least: float = 2.0) -> Tensor:
    """(num,) float, timesteps over which memories fade at the start of training, up to the training window.

    Spread over all orders of magnitude, as gradients of what fades at once teach nothing about long delays.
    Source: Tallec & Ollivier 2018, arXiv:1804.11188.
    """
    most = max(float(max_seq_len), 2 * least)
    return torch.logspace(math.log10(least), math.log10(most), num)


def inverse_softplus(y: Tensor) -> Tensor:
    """X with softplus(x) = y > 0."""
    return y + torch.log(-torch.expm1(-y))


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """(..., H * E) -> (..., H, E)."""
    return x.view(*x.shape[:-1], n_heads, -1)


def require_heads(owner: str, width: int, n_heads: int) -> int:
    """The width of each head. Raises: ValueError if they do not divide `width`."""
    if n_heads < 1 or width % n_heads:
        raise ValueError(
            f"{owner}.n_heads is {n_heads}, which does not divide the width {width}. "
            f"Fix: bind {owner}.n_heads to a divisor of it."
        )
    return width // n_heads
