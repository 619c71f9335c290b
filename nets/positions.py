"""Where in its episode a timestep stands, told to a Transformer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_LONGEST = 10_000.0  # timesteps in which the slowest wave, or rotation, turns by about one radian


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

    def __init__(self, d_model: int, base: float = _LONGEST) -> None:
        super().__init__()
        exponent = torch.arange(0, d_model, 2).float() / d_model
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def forward(self, time_idxs: Tensor) -> Tensor:
        angles = time_idxs * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Places(NamedTuple):
    """What attention is told of the timesteps it looks at: see `HeadPositions`."""

    cos: Tensor
    sin: Tensor
    waves: Tensor | None


class HeadPositions(nn.Module):
    """Positions for queries and keys: by head places in the episode, nothing, or distances.

    The `fixed_heads` first ones are not turned; a layer adds a learned mixture of waves to their queries and
    keys. The `content_heads` last ones know no positions; a layer lets their queries and keys begin alike, so
    that they find what is like the present, and shows them earlier timesteps alone, as nothing is more like
    the present than itself. The second half of these counts what it finds. All others are rotary: they turn
    pairs of query and key features by an angle proportional to the timestep index, so that their products
    depend on distances. Nothing is added to what the layers read and write.

    The slowest wave turns once in about three times the `window` of attention. Slower ones would be nearly
    the same at all timesteps, and all queries and keys alike at the start of training: nothing to learn from
    where only places tell timesteps apart (recall of a shuffled deck in reverse was not learned then).

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with the two halves of the features as pairs.
    """

    frequencies: Tensor

    def __init__(
        self, d_model: int, n_heads: int, window: int, *, fixed_heads: int = 0, content_heads: int = 0
    ) -> None:
        super().__init__()
        head_dim = d_model // n_heads
        frequencies = _LONGEST ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        frequencies = torch.cat([-frequencies, frequencies])[None]
        if fixed_heads + content_heads:
            head = torch.arange(n_heads)
            is_rotary = (head >= fixed_heads) & (head < n_heads - content_heads)
            frequencies = frequencies * is_rotary[:, None]
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.waves = SinusoidalPositions(d_model, max(window / 2, 2.0)) if fixed_heads else None

    def forward(self, time_idxs: Tensor, dtype: torch.dtype) -> Places:
        """time_idxs (..., 1) -> cosines and sines (..., 1 or H, E), waves (..., D) or None."""
        angles = time_idxs[..., None, :] * self.frequencies
        waves = None if self.waves is None else self.waves(time_idxs).to(dtype)
        return Places(angles.cos().to(dtype), angles.sin().to(dtype), waves)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X (..., H, E) turned by angles of cosines and sines (..., 1 or H, E), contiguous."""
    return (x.roll(x.shape[-1] // 2, dims=-1) * sin).addcmul_(x, cos)
