"""Positions of timesteps within their episode, for Transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .head_kinds import Heads
from .init import EMBEDDING_STD

BASE = 10_000.0
"""Number of timesteps per radian of the slowest wave or rotation, roughly (Vaswani et al. 2017)."""


class LearnedPositions(nn.Module):
    """A learned vector per timestep index: time_idxs (B, L, 1) int64 -> (B, L, D) float.

    Timesteps after the end of the table share its last vector. (To refuse them, each step would have to wait
    for the GPU.)
    """

    def __init__(self, d_model: int, max_time_idx: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_time_idx + 1, d_model)
        nn.init.normal_(self.table.weight, std=EMBEDDING_STD)

    def forward(self, time_idxs: Tensor) -> Tensor:
        y: Tensor = self.table(time_idxs.squeeze(-1).clamp(max=self.table.num_embeddings - 1))
        return y


class SinusoidalPositions(nn.Module):
    """A fixed vector of waves per timestep index: time_idxs (B, L, 1) int64 -> (B, L, D) float.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5, with all sines before all cosines.
    """

    frequencies: Tensor

    def __init__(self, d_model: int, base: float = BASE) -> None:
        super().__init__()
        exponent = torch.arange(0, d_model, 2).float() / d_model
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def forward(self, time_idxs: Tensor) -> Tensor:
        angles = time_idxs * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PositionFeatures(NamedTuple):
    """Positions for the queries and keys of attention; see `HeadPositions`."""

    cos: Tensor
    sin: Tensor
    waves: Tensor | None


class HeadPositions(nn.Module):
    """Positions for queries and keys of each head, by its kind (see `head_kinds`).

    Pairs of query and key features of rotary heads rotate by an angle proportional to the timestep index, so
    that their products depend on distances. Other heads are not rotated. Layers add a learned mixture of
    waves to the queries and keys of fixed heads. Inputs and outputs of layers contain no positions.

    The period of the slowest wave is about three times the `window` of attention. Slower waves would be
    nearly constant, and all queries and keys equal at the start of training. Tasks in which only places
    distinguish timesteps are then not learned (such as recalling a shuffled deck in reverse).

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with the two halves of the features as pairs.
    """

    frequencies: Tensor

    def __init__(self, d_model: int, heads: Heads, window: int) -> None:
        super().__init__()
        head_dim = d_model // len(heads)
        frequencies = BASE ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        frequencies = torch.cat([-frequencies, frequencies])[None]
        if heads.num("is_rotated") < len(heads):
            is_rotated = torch.tensor([kind.is_rotated for kind in heads.kinds])
            frequencies = frequencies * is_rotated[:, None]
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.waves = SinusoidalPositions(d_model, max(window / 2, 2.0)) if heads.num("has_waves") else None

    def forward(self, time_idxs: Tensor, dtype: torch.dtype) -> PositionFeatures:
        """Cosines and sines (..., 1, 1 or H, E), and waves (..., D) or None, of time_idxs (..., 1)."""
        angles = time_idxs[..., None, None, :] * self.frequencies
        waves = None if self.waves is None else self.waves(time_idxs).to(dtype)
        return PositionFeatures(angles.cos().to(dtype), angles.sin().to(dtype), waves)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., 2, H, E) by angles with cosines and sines (..., 1, 1 or H, E); contiguous."""
    return x.roll(x.shape[-1] // 2, dims=-1).mul_(sin).addcmul_(x, cos)
