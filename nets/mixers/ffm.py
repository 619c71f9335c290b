"""Fast and forgetful memory: sums of the past that fade and rotate at many fixed rates."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from ..mlp import Linear, require_positive
from ..timescales import timescales
from ..trunk import MixerTrajEncoder
from .parts import RotatingMixer


class FFMMixer(RotatingMixer):
    """A memory of `d_trace` gated features, each with its own rate of decay and `d_context` frequencies."""

    def __init__(self, d_model: int, max_seq_len: int, *, d_trace: int = 32, d_context: int = 4) -> None:
        super().__init__()
        require_positive(type(self).__name__, d_trace=d_trace, d_context=d_context)
        self.d_trace, self.d_context = d_trace, d_context
        self.rate = nn.Parameter(1 / timescales(d_trace, max_seq_len))
        self.angle = nn.Parameter(2 * math.pi / timescales(d_context, max_seq_len, least=4.0))
        self.inp = Linear(d_model, 2 * d_trace + 2 * d_model)
        self.out = Linear(2 * d_trace * d_context, d_model)
        self.norm = nn.LayerNorm(d_model, elementwise_affine=False)
        self.state_shapes = {"h": (2, self.d_trace * self.d_context)}

    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Inputs of the recurrence; output gate and skip."""
        width = x.shape[-1]
        trace, trace_gate, gate, skip = self.inp(x).split([self.d_trace] * 2 + [width] * 2, dim=-1)
        real = (trace * trace_gate.sigmoid()).float().repeat_interleave(self.d_context, dim=-1)
        decay = (-self.rate.abs()).exp().repeat_interleave(self.d_context)
        angle = self.angle.repeat(self.d_trace)
        return (decay, angle, torch.stack([real, torch.zeros_like(real)], dim=-2)), (gate.sigmoid(), skip)

    def _finish(self, h: Tensor, beside: tuple[Tensor, Tensor]) -> Tensor:
        gate, skip = beside
        read: Tensor = self.norm(self.out(h.flatten(-2)))
        return skip + gate * (read - skip)


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class FFMTrajEncoder(MixerTrajEncoder):
    """A trunk of fast and forgetful memories; settings of `MixerTrajEncoder` and these.

    Args:
        d_trace: number of features that are remembered.
        d_context: number of frequencies, which encode when something was seen.
    Source: Morad et al. 2023, arXiv:2310.04128.
    """

    mixer_type = FFMMixer
