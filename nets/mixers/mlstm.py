"""The matrix memory of xLSTM: exponential input gates, and reads that are normalised by the sum of writes."""

from __future__ import annotations

from typing import cast

import gin
import torch
from torch import Tensor
from torch.nn import functional as F

from ..init import EXP_GATE_GAIN
from ..mlp import Linear, RMSNorm, require_at_least
from ..timescales import forget_gate_biases
from ..trunk import MixerTrajEncoder
from .parts import MatrixMixer, by_head, key_width, require_heads

GATE_CAP = 15.0  # largest absolute value of a gate before its non-linearity


class MLSTMMixer(MatrixMixer):
    """A matrix of values and a vector of keys per head; the vector is kept as one more column of values.

    Input gates are exponentials of at most exp(15), so that sums over any sequence fit into float32 without a
    running maximum.
    """

    short_conv = 4

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        n_heads: int = 4,
        expand_k: float = 0.5,
        gate_gain: float = EXP_GATE_GAIN,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        require_at_least(0, owner, gate_gain=gate_gain)
        self.n_heads, self.d_k, self.d_v = n_heads, key_width(owner, d_model, expand_k), d_model
        self.d_head_k = require_heads(owner, self.d_k, n_heads)
        self.d_head_v = require_heads(owner, self.d_v, n_heads)
        self.inp = Linear(d_model, 2 * self.d_k + 2 * self.d_v, bias=False)
        self.gates = Linear(d_model, 2 * n_heads)
        self.gates.weight.data *= gate_gain
        self.gates.bias.data = torch.cat(
            [torch.zeros(n_heads), forget_gate_biases(n_heads, max_seq_len, least=8.0)]
        )
        self.norm = RMSNorm(self.d_head_v)
        self.out = Linear(self.d_v, d_model, bias=False)
        self.state_shapes = {"S": (self.n_heads, self.d_head_k, self.d_head_v + 1)}

    def _parts(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        q, k, v, z = self.inp(x).split([self.d_k, self.d_k, self.d_v, self.d_v], dim=-1)
        q, k, v = (by_head(part, self.n_heads) for part in (q, k, v))
        gates = GATE_CAP * torch.tanh(self.gates(x).float() / GATE_CAP)
        write, forget = gates[..., None].chunk(2, dim=-2)
        k = k.float() * (write.exp() * self.d_head_k**-0.5)
        return [q, k, F.pad(v, (0, 1), value=1.0), F.logsigmoid(forget)], z

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        y, written = y[..., :-1], y[..., -1:]
        y = self.norm(y / written.abs().clamp(min=1.0))
        return cast("Tensor", self.out(y.flatten(-2) * z.sigmoid()))


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class MLSTMTrajEncoder(MixerTrajEncoder):
    """A trunk of xLSTM's matrix memories; settings of `MixerTrajEncoder` and these.

    Args:
        n_heads: number of heads, a divisor of d_model and of expand_k * d_model.
        expand_k: width of queries and keys, in d_model.
        gate_gain: factor of the initial weights of gates.
    Source: Beck et al. 2024, arXiv:2405.04517; layout and capped gates: Beck et al. 2025, arXiv:2503.13427.
    """

    mixer_type = MLSTMMixer
