"""Recurrent trajectory encoders."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, TypeAlias

import gin
import torch
from einops import rearrange
from torch import Tensor, nn

from .cpu.gru import is_faster_for, run_gru
from .init import GATE_GAIN, LASTING_SHARE
from .mlp import Linear, by_input, norm_layer, require_at_least, require_positive
from .precision import in_full_precision
from .timescales import forget_gate_biases
from .traj_encoders import TrajEncoder

State: TypeAlias = Tensor | tuple[Tensor, ...]


class RecurrentTrajEncoder(TrajEncoder):
    """Base class of stacked recurrent layers; a subclass defines its state, its torch module and its cell.

    Some features begin with memories that last between two timesteps and max_seq_len (Tallec & Ollivier 2018,
    arXiv:1804.11188): a layer that forgets within ten timesteps cannot learn about a delay of a hundred. The
    others forget quickly, as control tasks need: velocities depend on the most recent timesteps.

    Hidden state: one (n_layers, N, d_hidden) float per name in `state_names`, a tuple if there are several.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        d_hidden: width of each layer.
        n_layers: number of layers.
        d_output: width of the result.
        norm: normalisation of the result, "layer", "rmsnorm" or None.
        gate_gain: factor of the initial weights from the input to the gates of lasting features.
        lasting_share: share of the features that begin with long memories; 0 keeps torch's gates.
    Raises: ValueError for a size below 1, or a share outside [0, 1].
    """

    state_names: ClassVar[tuple[str, ...]]
    num_gates: ClassVar[int]
    gates: ClassVar[tuple[tuple[int, float], ...]]
    """Indices of gates among the `num_gates` blocks of weights, with sign 1 (keep) or -1 (write)."""
    rnn: nn.GRU | nn.LSTM

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_hidden: int = 128,
        n_layers: int = 2,
        d_output: int = 128,
        norm: str | None = "layer",
        gate_gain: float = GATE_GAIN,
        lasting_share: float = LASTING_SHARE,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        owner = type(self).__name__
        require_positive(owner, d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        require_at_least(0, owner, gate_gain=gate_gain)
        if not 0.0 <= lasting_share <= 1.0:
            raise ValueError(
                f"{owner}.lasting_share is {lasting_share}, but must lie in [0, 1]. "
                f"Fix: bind {owner}.lasting_share, e.g. to 0.5."
            )
        self.rnn = self._make_rnn(tstep_dim, d_hidden, n_layers)
        num_lasting = math.ceil(lasting_share * d_hidden)
        biases = forget_gate_biases(num_lasting, max_seq_len)
        for name, weights in self.rnn.named_parameters():
            blocks = weights.data.chunk(self.num_gates)
            if "weight_hh" in name:  # orthogonal recurrence keeps gradients alive over long sequences
                for block in blocks:
                    nn.init.orthogonal_(block)
            for gate, sign in self.gates:
                lasting = blocks[gate][:num_lasting]
                if "weight_ih" in name:
                    lasting.mul_(gate_gain)
                elif "bias_ih" in name:
                    lasting.copy_(sign * biases)
                elif "bias_hh" in name:  # torch adds both biases
                    lasting.zero_()
        self.out = Linear(d_hidden, d_output)
        self.out_norm = norm_layer(norm, d_output)
        self._emb_dim = d_output

    @abstractmethod
    def _make_rnn(self, d_in: int, d_hidden: int, n_layers: int) -> nn.GRU | nn.LSTM:
        """The torch module, batch first."""

    @abstractmethod
    def _cell(self, x: Tensor, parts: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Step one layer on x (N, d_in); its state before and after is a tuple of (N, d_hidden)."""

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    @property
    def context_len(self) -> None:
        return None

    def init_hidden_state(self, num_envs: int, device: torch.device) -> State:
        shape = (self.rnn.num_layers, num_envs, self.rnn.hidden_size)
        return _whole([torch.zeros(shape, device=device) for _ in self.state_names])

    def reset_hidden_state(self, hidden_state: State, ended: Tensor) -> State:
        parts = _parts(hidden_state)
        forgets = ended.to(parts[0].device)[None, :, None]
        return _whole([part.masked_fill(forgets, 0.0) for part in parts])

    def export_hidden_state(self, hidden_state: State) -> dict[str, Tensor]:
        return dict(
            zip(self.state_names, (_env_and_layer_swapped(p) for p in _parts(hidden_state)), strict=True)
        )

    def import_hidden_state(self, rows: dict[str, Tensor]) -> State:
        return _whole([_env_and_layer_swapped(rows[name]) for name in self.state_names])

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: State | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        state = hidden_state
        if state is None:
            fresh = _parts(self.init_hidden_state(seq.shape[0], seq.device))
            state = _whole([part.to(seq.dtype) for part in fresh])
        if seq.shape[1] == 1:
            y, state = self._forward_timestep(
                seq, state if resets is None else self.reset_hidden_state(state, resets[:, 0])
            )
        elif resets is None:
            y, state = self._run(seq, state)
        else:
            y, state = self._forward_with_resets(seq, state, resets)
        return self.out_norm(self.out(y)), state

    def _run(self, seq: Tensor, state: State) -> tuple[Tensor, State]:
        """Run all layers over (B, L, tstep_dim); return (B, L, d_hidden) and the state after it."""
        found: tuple[Tensor, State] = self.rnn(seq, state)
        return found

    def _forward_timestep(self, seq: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one timestep, without the torch module's overhead for sequences."""
        x, layers = seq[:, 0], []
        per_layer = zip(*(part.unbind(0) for part in _parts(state)), strict=True)
        for weights, parts in zip(self.rnn.all_weights, per_layer, strict=True):
            layers.append(self._cell(x, parts, weights))
            x = layers[-1][0]
        return x[:, None], _whole([torch.stack(parts) for parts in zip(*layers, strict=True)])

    def _forward_with_resets(self, seq: Tensor, state: State, resets: Tensor) -> tuple[Tensor, State]:
        """Run the spans between timesteps at which any row begins an episode."""
        cuts = torch.nonzero(resets.any(0)).flatten().tolist()
        borders = sorted({0, *cuts, seq.shape[1]})
        pieces = []
        for start, stop in pairwise(borders):
            state = self.reset_hidden_state(state, resets[:, start])
            y, state = self._run(seq[:, start:stop], state)
            pieces.append(y)
        return torch.cat(pieces, dim=1), state


def _parts(state: State) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _whole(parts: Sequence[Tensor]) -> State:
    return tuple(parts) if len(parts) > 1 else parts[0]


def _env_and_layer_swapped(x: Tensor) -> Tensor:
    """Copy x (a, b, d) to (b, a, d) without gradient."""
    return rearrange(x.detach(), "a b d -> b a d").clone(memory_format=torch.contiguous_format)


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class GRUTrajEncoder(RecurrentTrajEncoder):
    """A stack of gated recurrent units.

    Hidden state: (n_layers, N, d_hidden) float.

    Settings and errors are those of `RecurrentTrajEncoder`.

    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    state_names, num_gates, gates = ("h",), 3, ((1, 1.0),)

    def _make_rnn(self, d_in: int, d_hidden: int, n_layers: int) -> nn.GRU:
        gru = nn.GRU(d_in, d_hidden, n_layers, batch_first=True)
        for weights in gru.parameters():
            if weights.ndim > 1:
                weights.data = by_input(weights.data)
        return gru

    def _run(self, seq: Tensor, state: State) -> tuple[Tensor, State]:
        if is_faster_for(seq, self.rnn.hidden_size) and isinstance(state, Tensor):
            return run_gru(seq, state, self.rnn.all_weights)
        return super()._run(seq, state)

    def _forward_with_resets(self, seq: Tensor, state: State, resets: Tensor) -> tuple[Tensor, State]:
        if is_faster_for(seq, self.rnn.hidden_size, has_resets=True) and isinstance(state, Tensor):
            return run_gru(seq, state, self.rnn.all_weights, resets)
        return super()._forward_with_resets(seq, state, resets)

    def _cell(self, x: Tensor, parts: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.gru_cell(x, *parts, *weights),)


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class LSTMTrajEncoder(RecurrentTrajEncoder):
    """A stack of long short-term memory layers.

    Hidden state: output and cell (h, c), each (n_layers, N, d_hidden) float.

    Settings and errors are those of `RecurrentTrajEncoder`.

    Source: Hochreiter & Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735.
    """

    state_names, num_gates, gates = ("h", "c"), 4, ((0, -1.0), (1, 1.0))

    def _make_rnn(self, d_in: int, d_hidden: int, n_layers: int) -> nn.LSTM:
        return nn.LSTM(d_in, d_hidden, n_layers, batch_first=True)

    def _run(self, seq: Tensor, state: State) -> tuple[Tensor, State]:
        under_autocast = seq.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if under_autocast and not _cpu_has_lstm(torch.get_autocast_dtype("cpu")):
            return self._run_in_full_precision(seq, *state)
        return super()._run(seq, state)

    @in_full_precision
    def _run_in_full_precision(self, seq: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
        return super()._run(seq, (h, c))

    def _cell(self, x: Tensor, parts: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.lstm_cell(x, parts, *weights)


def _cpu_has_lstm(dtype: torch.dtype) -> bool:
    """True if torch can train an LSTM under autocast to `dtype` on this processor.

    oneDNN has no bfloat16 LSTM for processors without AVX-512, and no float16 LSTM for training on most
    others. It then raises an error, although torch has another kernel.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
