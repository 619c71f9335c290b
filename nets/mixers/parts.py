"""Parts that several mixers share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..recurrence import matrix_recurrence, matrix_step, rotating_recurrence, rotating_step
from ..trunk import Mixer, State


class MatrixMixer(Mixer):
    """Base class of mixers with a fading matrix "S" per head as their only state."""

    @abstractmethod
    def _parts(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Queries, keys, values (..., H, E) and log decay of the recurrence; output gate (..., D)."""

    @abstractmethod
    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Output (..., D) from reads (..., H, E) and the output gate (..., D)."""

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        (q, k, v, log_decay), z = self._parts(x)
        y, last = matrix_recurrence(q, k, v, log_decay, state["S"], resets)
        return self._finish(y, z), {"S": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (q, k, v, log_decay), z = self._parts(x)
        y, last = matrix_step(q, k, v, log_decay, state["S"])
        return self._finish(y, z), {"S": last}


class RotatingMixer(Mixer):
    """Base class of mixers with a state "h" of complex numbers that rotate and fade at fixed rates."""

    @abstractmethod
    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """Decay, angle and inputs of the recurrence; other inputs of `_finish`."""

    @abstractmethod
    def _finish(self, h: Tensor, beside: Any) -> Tensor:
        """Output (..., D) from states (..., 2, E)."""

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        parts, beside = self._parts(x)
        h = rotating_recurrence(*parts, state["h"], resets)
        return self._finish(h, beside), {"h": h[:, -1]}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        parts, beside = self._parts(x)
        h = rotating_step(*parts, state["h"])
        return self._finish(h, beside), {"h": h}


def inverse_softplus(y: Tensor) -> Tensor:
    """Solve softplus(x) = y for x, with y > 0."""
    return y + torch.log(-torch.expm1(-y))


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """View x (..., H * E) as (..., H, E)."""
    return x.view(*x.shape[:-1], n_heads, -1)


def key_width(owner: str, d_model: int, expand_k: float) -> int:
    """The width expand_k * d_model of queries and keys. Raises: ValueError if it is below 1."""
    if not expand_k * d_model >= 1:  # also refuses NaN
        raise ValueError(
            f"{owner}.expand_k is {expand_k}, but expand_k * d_model, the width of queries and keys, must be "
            f"at least 1, and d_model is {d_model}. Fix: bind {owner}.expand_k = 0.5, for example."
        )
    return int(expand_k * d_model)


def require_heads(owner: str, width: int, n_heads: int) -> int:
    """The width of each head. Raises: ValueError if n_heads does not divide `width`."""
    if n_heads < 1 or width % n_heads:
        raise ValueError(
            f"{owner}.n_heads is {n_heads}, which does not divide the width {width}. "
            f"Fix: bind {owner}.n_heads to a divisor of it."
        )
    return width // n_heads
