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


class SinusoidalPositions(nn.Module):
    """A fixed vector of waves per timestep index: time_idxs (B, L, 1) int64 -> (B, L, D) float.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5, with all sines before all cosines.
    """

    frequencies: Tensor

    def __init__(self, d_model: int, base: float = 10_000.0) -> None:
        super().__init__()
        exponent = torch.arange(0, d_model, 2).float() / d_model
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def forward(self, time_idxs: Tensor) -> Tensor:
        angles = time_idxs * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RotaryPositions(nn.Module):
    """Rotate pairs of query and key features by an angle proportional to the timestep index.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with the two halves of the features as pairs.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2).float() / head_dim
        frequencies = base**-exponent
        self.register_buffer("frequencies", torch.cat([-frequencies, frequencies]), persistent=False)

    def forward(self, time_idxs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """time_idxs (B, ..., 1) -> cosines and sines for `rotate`, each (B, 1, ..., E)."""
        angles = (time_idxs * self.frequencies)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """X (B, H, ..., E) -> the same, rotated, contiguous."""
        return (x.roll(x.shape[-1] // 2, dims=-1) * sin).addcmul_(x, cos)
