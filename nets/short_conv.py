"""A causal convolution over recent timesteps of an episode, for sequences and for single steps."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Convolution(torch.autograd.Function):
    """The convolution of `ShortConv`; autograd would allocate a whole sequence for the slice of each lag."""

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
            grad_inputs = grad if age is None or lag == 0 else grad * (age >= lag)
            of_padded[:, seen].addcmul_(grad_inputs, weight[-1 - lag])
            of_weight[-1 - lag] = (grad_inputs * padded[:, seen]).sum((0, 1))
        return of_padded, of_weight, grad.sum((0, 1)), None


class ShortConv(nn.Module):
    """A causal depthwise convolution over the `width` newest timesteps of an episode.

    Its state is the input of the last width - 1 timesteps of the running episode, padded by zeros.
    """

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.num_kept = width - 1
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(width, d_model).uniform_(-bound, bound))  # newest last
        self.bias = nn.Parameter(torch.empty(d_model).uniform_(-bound, bound))

    def forward(self, x: Tensor, resets: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x (B, L, D), with resets (B, L) bool and state kept (B, width - 1, D).

        Returns: (B, L, D) and the new state.
        """
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
        """Convolve one timestep x (N, D); returns (N, D) and the new state."""
        padded = torch.cat([kept, x[:, None].to(kept.dtype)], dim=1)
        return (padded * self.weight).sum(1) + self.bias, padded[:, 1:]


def _ages(resets: Tensor, reach: int) -> Tensor:
    """(B, L, 1) int64, timesteps since the newest reset; at least `reach` before the first reset."""
    t = torch.arange(resets.shape[1], device=resets.device)
    newest = torch.where(resets, t, -reach).cummax(dim=1).values
    return (t - newest)[..., None]
