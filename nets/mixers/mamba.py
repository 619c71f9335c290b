"""Selective state spaces, in which the input controls the memory: Mamba and Mamba-2."""

from __future__ import annotations

import math
from typing import cast

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..init import GATE_GAIN, SELECT_GAIN, STEP_BIAS
from ..mlp import Linear, RMSNorm, require_at_least, require_positive
from ..precision import in_full_precision
from ..recurrence import linear_recurrence, matrix_recurrence, matrix_step
from ..short_conv import ShortConv
from ..timescales import timescales
from ..trunk import Mixer, MixerTrajEncoder, State
from .parts import by_head, require_heads

SCAN_BYTES = {"cpu": 2**23, "else": 2**27}
"""Size of the states in memory at once, which are d_state times as wide as sequences; fits a CPU's cache."""


def _initial_log_rates(num: int, max_seq_len: int) -> Tensor:
    """(num,) initial log rates, for timescales spread up to the training window."""
    return -(timescales(num, max_seq_len) * math.log(2.0)).log()


class MambaMixer(Mixer):
    """A diagonal state per feature, with step sizes, input and output weights that depend on the input."""

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        select_gain: float = SELECT_GAIN,
        gate_gain: float = GATE_GAIN,
        step_bias: float = STEP_BIAS,
    ) -> None:
        super().__init__()
        require_positive(type(self).__name__, d_state=d_state, d_conv=d_conv, expand=expand)
        require_at_least(0, type(self).__name__, select_gain=select_gain, gate_gain=gate_gain)
        self.d_state, self.width = d_state, expand * d_model
        self.rank = math.ceil(d_model / 16)
        self.inp = Linear(d_model, 2 * self.width, bias=False)
        self.conv = ShortConv(self.width, d_conv)
        self.select = Linear(self.width, self.rank + 2 * d_state, bias=False)
        self.select.weight.data *= select_gain
        self.step_size = Linear(self.rank, self.width)
        self.step_size.weight.data *= gate_gain
        self.step_size.bias.data.fill_(step_bias)
        self.log_rate = nn.Parameter(_initial_log_rates(d_state, max_seq_len).repeat(self.width, 1))
        self.skip = nn.Parameter(torch.ones(self.width))
        self.out = Linear(self.width, d_model, bias=False)
        self.state_shapes = {"conv": (self.conv.num_kept, self.width), "h": (self.width, self.d_state)}

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step sizes (..., width), input and output weights (..., d_state)."""
        low, writes, reads = self.select(x).split([self.rank, self.d_state, self.d_state], dim=-1)
        return F.softplus(self.step_size(low).float()), writes, reads

    def _finish(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.out(torch.addcmul(y, self.skip, x) * F.silu(z))
        return out

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        x, z = self.inp(x).chunk(2, dim=-1)
        x, conv = self.conv(x, resets, state["conv"])
        x = F.silu(x)
        step_sizes, writes, reads = self._selected(x)
        rate, h, outputs = -self.log_rate.exp(), state["h"], []
        most = SCAN_BYTES["cpu" if x.device.type == "cpu" else "else"] // h.nbytes
        size = min(max(most, 8), 256)
        chunks = [torch.split(part, size, dim=1) for part in (step_sizes, x, writes, reads)]
        for i, chunk in enumerate(zip(*chunks, strict=True)):
            begins = None if resets is None else resets[:, i * size : (i + 1) * size]
            y, h = checkpoint(
                selective_scan, *chunk, rate, h, begins, use_reentrant=False, preserve_rng_state=False
            )
            outputs.append(y)
        return self._finish(torch.cat(outputs, dim=1), x, z), {"conv": conv, "h": h}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, z = self.inp(x).chunk(2, dim=-1)
        x, conv = self.conv.step(x, state["conv"])
        x = F.silu(x)
        step_sizes, writes, reads = self._selected(x)
        written = (step_sizes * x)[..., None] * writes[:, None]
        h = torch.addcmul(written, (step_sizes[..., None] * -self.log_rate.exp()).exp(), state["h"])
        y = (h @ reads.to(h.dtype)[..., None]).squeeze(-1)
        return self._finish(y, x, z), {"conv": conv, "h": h}


@in_full_precision
def selective_scan(
    step_sizes: Tensor,
    x: Tensor,
    writes: Tensor,
    reads: Tensor,
    rate: Tensor,
    initial: Tensor,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(step_t rate) h_{t-1} + step_t x_t writes_t^T, read as y_t = h_t reads_t.

    Shapes: step_sizes, x (B, L, D); writes, reads (B, L, S); rate (D, S); initial (B, D, S); resets (B, L).
    Returns: y (B, L, D) and the state after the last timestep (B, D, S).
    Source: Gu & Dao 2023, arXiv:2312.00752, algorithm 2.
    """
    decay = (step_sizes[..., None] * rate).exp()
    states = linear_recurrence(decay, (step_sizes * x)[..., None] * writes[:, :, None], initial, resets)
    return (states @ reads[..., None]).squeeze(-1), states[:, -1]


class Mamba2Mixer(Mixer):
    """A state per head with a single decay, so that a chunk of a sequence takes a few matrix products."""

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        d_state: int = 64,
        d_conv: int = 4,
        expand: int = 2,
        n_heads: int = 8,
        gate_gain: float = GATE_GAIN,
        step_bias: float = STEP_BIAS,
    ) -> None:
        super().__init__()
        require_positive(type(self).__name__, d_state=d_state, d_conv=d_conv, expand=expand)
        require_at_least(0, type(self).__name__, gate_gain=gate_gain)
        self.d_state, self.width, self.n_heads = d_state, expand * d_model, n_heads
        self.d_head = require_heads(type(self).__name__, self.width, n_heads)
        self.inp = Linear(d_model, 2 * self.width + 2 * d_state + n_heads, bias=False)
        self.inp.weight.data[-n_heads:] *= gate_gain
        self.conv = ShortConv(self.width + 2 * d_state, d_conv)
        self.step_bias = nn.Parameter(torch.full((n_heads,), float(step_bias)))
        self.log_rate = nn.Parameter(_initial_log_rates(n_heads, max_seq_len))
        self.skip = nn.Parameter(torch.ones(n_heads, 1))
        self.norm = RMSNorm(self.width)
        self.out = Linear(self.width, d_model, bias=False)
        kept = (self.conv.num_kept, self.width + 2 * self.d_state)
        self.state_shapes = {"conv": kept, "S": (self.n_heads, self.d_state, self.d_head)}

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, input of the convolution, and step sizes (..., H, 1)."""
        z, x, low = self.inp(x).split([self.width, self.width + 2 * self.d_state, self.n_heads], dim=-1)
        return z, x, F.softplus(low.float() + self.step_bias)[..., None]

    def _selected(self, convolved: Tensor, step_sizes: Tensor) -> tuple[Tensor, ...]:
        """Heads x (..., H, V); queries, keys, values and log decay of the recurrence."""
        x, k, q = torch.split(F.silu(convolved), [self.width, self.d_state, self.d_state], dim=-1)
        x = by_head(x, self.n_heads)
        log_decay = -self.log_rate.exp()[:, None] * step_sizes
        return x, q[..., None, :], k[..., None, :], step_sizes * x, log_decay

    def _finish(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = torch.addcmul(y, self.skip, x).flatten(-2)
        return cast("Tensor", self.out(self.norm(y * F.silu(z))))

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        z, x, step_sizes = self._split(x)
        convolved, conv = self.conv(x, resets, state["conv"])
        x, q, k, v, log_decay = self._selected(convolved, step_sizes)
        y, last = matrix_recurrence(q, k, v, log_decay, state["S"], resets)
        return self._finish(y, x, z), {"conv": conv, "S": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        z, x, step_sizes = self._split(x)
        convolved, conv = self.conv.step(x, state["conv"])
        x, q, k, v, log_decay = self._selected(convolved, step_sizes)
        y, last = matrix_step(q, k, v, log_decay, state["S"])
        return self._finish(y, x, z), {"conv": conv, "S": last}


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class MambaTrajEncoder(MixerTrajEncoder):
    """A trunk of Mamba layers, by default without feed-forward parts.

    Settings are those of `MixerTrajEncoder` and these.

    Args:
        d_state: size of the state of each feature.
        d_conv: width in timesteps of the convolution before the state.
        expand: width inside a layer, in d_model.
        select_gain: factor of the initial weights that compute step sizes, writes and reads.
        gate_gain: factor of the initial weights of step sizes.
        step_bias: first bias of step sizes, before softplus.
    Source: Gu & Dao 2023, arXiv:2312.00752.
    """

    mixer_type, ff_ratio = MambaMixer, 0


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class Mamba2TrajEncoder(MixerTrajEncoder):
    """A trunk of Mamba-2 layers, by default without feed-forward parts.

    Settings are those of `MixerTrajEncoder` and these.

    Args:
        d_state: size of the state of each feature.
        d_conv: width in timesteps of the convolution before the state.
        expand: width inside a layer, in d_model.
        n_heads: number of groups of features that fade together, a divisor of expand * d_model.
        gate_gain: factor of the initial weights of step sizes.
        step_bias: first bias of step sizes, before softplus.
    Source: Dao & Gu 2024, arXiv:2405.21060.
    """

    mixer_type, ff_ratio = Mamba2Mixer, 0
