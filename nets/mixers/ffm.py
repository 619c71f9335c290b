"""Fast and forgetful memory: sums of the past that fade and turn at many fixed rates."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from ..mlp import require_positive
from ..recurrence import rotating_recurrence, rotating_step
from ..trunk import Mixer, MixerTrajEncoder, State
from .parts import timescales


class FFMMixer(Mixer):
    """Each of `d_trace` gated features fades at its own rate and is kept at `d_context` speeds of turning."""

    def __init__(self, d_model: int, max_seq_len: int, *, d_trace: int = 32, d_context: int = 4) -> None:
        super().__init__()
        require_positive("FFMTrajEncoder", d_trace=d_trace, d_context=d_context)
        self.d_trace, self.d_context = d_trace, d_context
        self.rate = nn.Parameter(1 / timescales(d_trace, max_seq_len))
        self.angle = nn.Parameter(2 * math.pi / timescales(d_context, max_seq_len, least=4.0))
        self.inp = nn.Linear(d_model, 2 * d_trace + 2 * d_model)
        self.out = nn.Linear(2 * d_trace * d_context, d_model)
        self.norm = nn.LayerNorm(d_model, elementwise_affine=False)
        self.state_shapes = {"h": (2, self.d_trace * self.d_context)}

    def _parts(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        """Decay, angle and inputs of the recurrence; output gate and skip."""
        width = x.shape[-1]
        trace, trace_gate, gate, skip = self.inp(x).split([self.d_trace] * 2 + [width] * 2, dim=-1)
        real = (trace * trace_gate.sigmoid()).float().repeat_interleave(self.d_context, dim=-1)
        decay = (-self.rate.abs()).exp().repeat_interleave(self.d_context)
        angle = self.angle.repeat(self.d_trace)
        return (decay, angle, torch.stack([real, torch.zeros_like(real)], dim=-2)), gate.sigmoid(), skip

    def _read(self, h: Tensor, gate: Tensor, skip: Tensor) -> Tensor:
        read: Tensor = self.norm(self.out(h.flatten(-2)))
        return skip + gate * (read - skip)

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        parts, gate, skip = self._parts(x)
        h = rotating_recurrence(*parts, state["h"], resets)
        return self._read(h, gate, skip), {"h": h[:, -1]}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        parts, gate, skip = self._parts(x)
        h = rotating_step(*parts, state["h"])
        return self._read(h, gate, skip), {"h": h}


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class FFMTrajEncoder(MixerTrajEncoder):
    """A trunk of fast and forgetful memories; settings of `MixerTrajEncoder` and these.

    Args:
        d_trace: features that are remembered.
        d_context: speeds of turning, which tell when something was seen.
    Source: Morad et al. 2023, arXiv:2310.04128.
    """

    mixer_type = FFMMixer
