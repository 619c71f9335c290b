"""Recurrent cells with gates that see only the input, so that a sequence is a single linear recurrence."""

from __future__ import annotations

from abc import abstractmethod

import gin
import torch
from torch import Tensor
from torch.nn import functional as F

from ..init import MIN_RNN_GATE_GAIN, MIN_RNN_OUT_GAIN
from ..mlp import Linear, require_at_least, require_positive
from ..recurrence import linear_recurrence
from ..timescales import forget_gate_biases
from ..trunk import Mixer, MixerTrajEncoder, State


class MinRNNMixer(Mixer):
    """Base class of h_t = a_t * h_{t-1} + (1 - a_t) * candidate_t, with both computed from the input at t."""

    num_gates: int
    short_conv = 4

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        *,
        expand: int = 2,
        gate_gain: float = MIN_RNN_GATE_GAIN,
        out_gain: float = MIN_RNN_OUT_GAIN,
    ) -> None:
        super().__init__()
        require_positive(type(self).__name__, expand=expand)
        require_at_least(0, type(self).__name__, gate_gain=gate_gain, out_gain=out_gain)
        self.width = expand * d_model
        self.inp = Linear(d_model, (1 + self.num_gates) * self.width)
        self.out = Linear(self.width, d_model)
        with torch.no_grad():
            biases, gates = forget_gate_biases(self.width, max_seq_len), self.num_gates * self.width
            self.inp.bias[:gates] = torch.cat([biases, -biases][-self.num_gates :])
            self.inp.weight[:gates] *= gate_gain
            self.out.weight *= out_gain
        self.state_shapes = {"h": (self.width,)}

    @abstractmethod
    def _log_odds(self, gates: Tensor) -> Tensor:
        """Log of a / (1 - a), computed from gates (..., num_gates * width)."""

    def _decay_and_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, candidate = self.inp(x).float().split([self.num_gates * self.width, self.width], dim=-1)
        log_odds = self._log_odds(gates)  # float32: bfloat16 rounds a decay close to 1 to 1
        return log_odds.sigmoid(), (-log_odds).sigmoid() * candidate

    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        h = linear_recurrence(*self._decay_and_input(x), state["h"], resets)
        return self.out(h), {"h": h[:, -1]}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        decay, written = self._decay_and_input(x)
        h = torch.addcmul(written, decay, state["h"])
        return self.out(h), {"h": h}


class MinGRUMixer(MinRNNMixer):
    """A minimal GRU: a single gate for keeping and writing."""

    num_gates = 1

    def _log_odds(self, gates: Tensor) -> Tensor:
        return -gates


class MinLSTMMixer(MinRNNMixer):
    """A minimal LSTM: a forget and an input gate, scaled to a sum of 1."""

    num_gates = 2

    def _log_odds(self, gates: Tensor) -> Tensor:
        forget, write = gates.chunk(2, dim=-1)
        return F.logsigmoid(forget) - F.logsigmoid(write)


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class MinGRUTrajEncoder(MixerTrajEncoder):
    """A trunk of minGRU layers, the cheapest memory here; settings of `MixerTrajEncoder` and these.

    Args:
        expand: width of the state, in d_model.
        gate_gain: factor of the initial weights of gates.
        out_gain: factor of the initial weights that read the state.
    Source: Feng et al. 2024, arXiv:2410.01201.
    """

    mixer_type = MinGRUMixer


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class MinLSTMTrajEncoder(MixerTrajEncoder):
    """A trunk of minLSTM layers; settings of `MixerTrajEncoder` and these.

    Args:
        expand: width of the state, in d_model.
        gate_gain: factor of the initial weights of gates.
        out_gain: factor of the initial weights that read the state.
    Source: Feng et al. 2024, arXiv:2410.01201.
    """

    mixer_type = MinLSTMMixer
