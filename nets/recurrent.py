"""Recurrent trajectory encoders."""

from __future__ import annotations

from itertools import pairwise

import gin
import torch
from torch import Tensor, nn

from .mlp import norm_layer, require_positive
from .traj_encoders import TrajEncoder


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class GRUTrajEncoder(TrajEncoder):
    """A stack of gated recurrent units.

    Hidden state: (n_layers, N, d_hidden) float.
    Raises: ValueError for a size below 1.
    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_hidden: int = 256,
        n_layers: int = 2,
        d_output: int = 256,
        norm: str | None = "layer",
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        require_positive("GRUTrajEncoder", d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        self.gru = nn.GRU(tstep_dim, d_hidden, n_layers, batch_first=True)
        for name, weight in self.gru.named_parameters():
            if "weight_hh" in name:  # orthogonal recurrence keeps gradients alive over long sequences
                for block in weight.data.chunk(3):
                    nn.init.orthogonal_(block)
        self.out = nn.Linear(d_hidden, d_output)
        self.out_norm = norm_layer(norm, d_output)
        self._emb_dim = d_output

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Tensor:
        return torch.zeros(self.gru.num_layers, num_envs, self.gru.hidden_size, device=device)

    def reset_hidden_state(self, hidden_state: Tensor, ended: Tensor) -> Tensor:
        return hidden_state.masked_fill(ended.to(hidden_state.device)[None, :, None], 0.0)

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        state = hidden_state
        if state is None:
            state = self.init_hidden_state(seq.shape[0], seq.device).to(seq.dtype)
        if seq.shape[1] == 1:
            y, state = self._forward_timestep(
                seq, state if resets is None else self.reset_hidden_state(state, resets[:, 0])
            )
        elif resets is None:
            y, state = self.gru(seq, state)
        else:
            y, state = self._forward_with_resets(seq, state, resets)
        return self.out_norm(self.out(y)), state

    def _forward_timestep(self, seq: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One timestep, without what nn.GRU spends on preparing a sequence."""
        x, states = seq[:, 0], []
        for weights, h in zip(self.gru.all_weights, state.unbind(0), strict=True):
            x = torch.gru_cell(x, h, *weights)
            states.append(x)
        return x[:, None], torch.stack(states)

    def _forward_with_resets(self, seq: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """Run whole stretches at once, cut only at timesteps where some row begins an episode."""
        cuts = torch.nonzero(resets.any(0)).flatten().tolist()
        borders = sorted({0, *cuts, seq.shape[1]})
        pieces = []
        for start, stop in pairwise(borders):
            state = self.reset_hidden_state(state, resets[:, start])
            y, state = self.gru(seq[:, start:stop], state)
            pieces.append(y)
        return torch.cat(pieces, dim=1), state
