"""Gated delta networks: each write replaces the value of its key in the memory, and the memory fades."""

from __future__ import annotations

from typing import cast

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mlp import Linear, RMSNorm, require_positive
from ..recurrence import delta_recurrence, delta_step
from ..short_conv import ShortConv
from ..timescales import timescales
from ..trunk import Mixer, MixerTrajEncoder, State
from .parts import by_head, inverse_softplus, require_heads


class GatedDeltaNetMixer(Mixer):
    """One matrix per head, written with the delta rule."""

    def __init__(self, d_model: int, max_seq_len: int, *, n_heads: int = 4, d_conv: int = 4) -> None:
        super().__init__()
        require_positive(type(self).__name__, n_heads=n_heads, d_conv=d_conv)
        self.n_heads, self.d_model = n_heads, d_model
        self.d_head = require_heads(type(self).__name__, d_model, n_heads)
        self.inp = Linear(d_model, 4 * d_model + 2 * n_heads, bias=False)
        self.conv = ShortConv(3 * d_model, d_conv)
        self.log_rate = nn.Parameter(torch.zeros(n_heads))
        self.step_bias = nn.Parameter(inverse_softplus(1 / timescales(n_heads, max_seq_len, least=8.0)))
        self.norm = RMSNorm(self.d_head)
        self.out = Linear(d_model, d_model, bias=False)
        kept = (self.conv.num_kept, 3 * self.d_model)
        self.state_shapes = {"conv": kept, "S": (self.n_heads, self.d_head, self.d_head)}

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input of the convolution, output gate, and write rate and log decay (..., H, 1)."""
        widths = [3 * self.d_model, self.d_model, self.n_heads, self.n_heads]
        qkv, z, rate, step_size = self.inp(x).split(widths, dim=-1)
        log_decay = -self.log_rate.exp() * F.softplus(step_size.float() + self.step_bias)
        return qkv, z, rate.float().sigmoid()[..., None], log_decay[..., None]

    def _queries_keys_values(self, convolved: Tensor) -> list[Tensor]:
        q, k, v = (by_head(part, self.n_heads) for part in F.silu(convolved).float().chunk(3, dim=-1))
        return [F.normalize(q, dim=-1) * self.d_head**-0.5, F.normalize(k, dim=-1), v]

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return cast("Tensor", self.out(self.norm(y).flatten(-2) * F.silu(z)))

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        qkv, z, rate, log_decay = self._split(x)
        convolved, conv = self.conv(qkv, resets, state["conv"])
        q, k, v = self._queries_keys_values(convolved)
        y, last = delta_recurrence(q, k, v, rate, log_decay, state["S"], resets)
        return self._finish(y, z), {"conv": conv, "S": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        qkv, z, rate, log_decay = self._split(x)
        convolved, conv = self.conv.step(qkv, state["conv"])
        q, k, v = self._queries_keys_values(convolved)
        y, last = delta_step(q, k, v, rate, log_decay, state["S"])
        return self._finish(y, z), {"conv": conv, "S": last}


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class GatedDeltaNetTrajEncoder(MixerTrajEncoder):
    """A trunk of gated delta networks; settings of `MixerTrajEncoder` and these.

    Args:
        n_heads: number of heads, a divisor of d_model.
        d_conv: width in timesteps of the convolution of queries, keys and values.
    Source: Yang et al. 2024, arXiv:2412.06464.
    """

    mixer_type = GatedDeltaNetMixer
