"""Where in its episode a timestep stands, told to a Transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """A learned vector per timestep index: time_idxs (B, L, 1) int64 -> (B, L, D) float.

    Raises: ValueError when an episode outgrows the table.
    """

    def __init__(self, d_model: int, max_time_idx: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_time_idx + 1, d_model)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, time_idxs: Tensor) -> Tensor:
        limit = self.table.num_embeddings - 1
        if time_idxs.device.type == "cpu" and time_idxs.numel() and int(time_idxs.max()) > limit:
            raise ValueError(
                f"An episode reached timestep {int(time_idxs.max())}, but learned positions end at {limit}. "
                "Fix: raise TransformerTrajEncoder.max_time_idx, or use pos_emb='rope'."
            )
        y: Tensor = self.table(time_idxs.squeeze(-1))
        return y


class RotaryPositions(nn.Module):
    """Rotate pairs of query and key features by an angle proportional to the timestep index.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with the two halves of the features as pairs.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2).float() / head_dim
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def forward(self, time_idxs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """time_idxs (B, L, 1) -> cosines and sines, each (B, 1, L, E)."""
        angles = (time_idxs.float() * self.frequencies)[:, None]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """X (B, H, L, E) -> the same, rotated."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin
