"""Linear attention with decay: gated, with a decay per key feature, or with fixed decays (RetNet)."""

from __future__ import annotations

from typing import cast

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..init import GATE_GAIN
from ..mlp import Linear, RMSNorm, require_at_least, require_positive
from ..recurrence import MIN_LOG_DECAY
from ..timescales import timescales
from ..trunk import MixerTrajEncoder
from .parts import MatrixMixer, by_head, key_width, require_heads

TEMPERATURE = 16.0
"""Gates fade this much slower than a sigmoid of their input would."""


class GLAMixer(MatrixMixer):
    """A fading matrix per head that sums products of keys and values; gated heads choose their writes."""

    short_conv = 4

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        n_heads: int = 4,
        expand_k: float = 0.5,
        decay: str = "gated",
        gate_rank: int = 16,
        gate_gain: float = GATE_GAIN,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if decay not in ("gated", "fixed"):
            raise ValueError(
                f"{owner}.decay is {decay!r}; allowed are 'gated' and 'fixed'. Fix: bind {owner}.decay to "
                "one of these."
            )
        require_positive(owner, n_heads=n_heads, gate_rank=gate_rank)
        require_at_least(0, owner, gate_gain=gate_gain)
        self.n_heads, self.d_k, self.d_v = n_heads, key_width(owner, d_model, expand_k), d_model
        self.d_head_k = require_heads(owner, self.d_k, n_heads)
        self.d_head_v = require_heads(owner, self.d_v, n_heads)
        self.inp = Linear(d_model, 2 * self.d_k + 2 * self.d_v, bias=False)
        self.norm = RMSNorm(self.d_head_v)
        self.out = Linear(self.d_v, d_model, bias=False)
        self.gate: nn.Sequential | None = None
        if decay == "gated":
            self.write = Linear(d_model, n_heads)
            self.write.weight.data *= gate_gain
            self.gate = nn.Sequential(Linear(d_model, gate_rank, bias=False), Linear(gate_rank, self.d_k))
            fades = timescales(self.d_k, max_seq_len, least=TEMPERATURE)[torch.randperm(self.d_k)]
            cast("nn.Linear", self.gate[1]).bias.data = torch.logit(torch.exp(-TEMPERATURE / fades))
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float32))))
        self.register_buffer("fixed", log_decay[:, None], persistent=False)
        self.state_shapes = {"S": (self.n_heads, self.d_head_k, self.d_head_v)}

    def _parts(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        q, k, v, z = self.inp(x).split([self.d_k, self.d_k, self.d_v, self.d_v], dim=-1)
        q, k, v = (by_head(part, self.n_heads) for part in (q, k, v))
        if self.gate is None:
            log_decay = cast("Tensor", self.fixed).expand(*x.shape[:-1], -1, -1)
        else:
            log_decay = F.logsigmoid(by_head(self.gate(x).float(), self.n_heads)) / TEMPERATURE
            log_decay = log_decay.clamp(min=MIN_LOG_DECAY)
            k = k * self.write(x).sigmoid()[..., None]
        return [q * self.d_head_k**-0.5, k, v, log_decay], z

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return cast("Tensor", self.out(self.norm(y).flatten(-2) * F.silu(z)))


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class GLATrajEncoder(MixerTrajEncoder):
    """A trunk of gated linear attention; settings of `MixerTrajEncoder` and these.

    Args:
        n_heads: number of heads, a divisor of d_model and of expand_k * d_model.
        expand_k: width of queries and keys, in d_model.
        decay: with "gated", the input controls how fast each key feature fades and how much each head writes;
            with "fixed", each head fades at a constant rate and writes everything, as in a retentive network
            (without its rotation of queries and keys).
        gate_rank: width of the bottleneck that decays are computed from.
        gate_gain: factor of the initial weights of the write gate.
    Source: Yang et al. 2024, arXiv:2312.06635, except for the write gate; Sun et al. 2023, arXiv:2307.08621
        (RetNet).
    """

    mixer_type = GLAMixer
