"""The interface of trajectory encoders, and the encoders without memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import gin
import torch
from torch import Tensor, nn

from .mlp import Linear, activation_fn, as_rows, initialize, norm_layer, require_positive


class TrajEncoder(nn.Module, ABC):
    """Base class of causal sequence models over encoded timesteps.

    Stepping with a hidden state gives the same result as the forward pass over the full sequence. The hidden
    state is opaque to all but its own encoder, and may be updated in place: use only the state that was
    returned last.

    Args:
        tstep_dim: width of the encoded timesteps.
        max_seq_len: longest training sequence in transitions; attention never looks back further than
            this many timesteps.
    """

    def __init__(self, tstep_dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.tstep_dim, self.max_seq_len = tstep_dim, max_seq_len

    @property
    @abstractmethod
    def emb_dim(self) -> int:
        """Width of the output."""

    @abstractmethod
    def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
        """The state before the first timestep of `num_envs` episodes."""

    @abstractmethod
    def reset_hidden_state(self, hidden_state: Any, ended: Tensor) -> Any:
        """Clear the memory of rows where ended (N,) bool is True; other rows do not change."""

    @abstractmethod
    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Encode a sequence.

        Args:
            seq: (B, L, tstep_dim) float.
            time_idxs: (B, L, 1) int64, timestep within the episode.
            hidden_state: the state to continue from; None without history.
            resets: (B, L) bool, True on the first timestep of an episode; neither state nor attention
                crosses one.
        Returns: (B, L, emb_dim) float and the state after the last timestep (may be None without a
            hidden_state).
        """

    # Only on-policy training needs the methods below; an encoder without them still trains off-policy.

    @property
    def context_len(self) -> int | None:
        """Number of earlier timesteps that an output can depend on; None without a bound.

        Raises: NotImplementedError if the encoder does not define it (like each method below).
        """
        raise NotImplementedError(_on_policy_needs(self, "context_len"))

    def export_hidden_state(self, hidden_state: Any) -> dict[str, Tensor]:
        """Copies of the state, one row per env, (N, ...), without gradient; shapes never change."""
        raise NotImplementedError(_on_policy_needs(self, "export_hidden_state"))

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        """A state made of copies of exported rows, on their device; `rows` may combine several exports."""
        raise NotImplementedError(_on_policy_needs(self, "import_hidden_state"))

    def encode_from(
        self, seq: Tensor, time_idxs: Tensor, rows: dict[str, Tensor], resets: Tensor | None = None
    ) -> Tensor:
        """Encode a sequence that continues from an exported state, with the same result as acting.

        Args:
            seq: (B, L, tstep_dim) float.
            time_idxs: (B, L, 1) int64, timestep within the episode.
            rows: exported state before the first timestep, each (B, ...); no gradient flows into it.
            resets: (B, L) bool, True on the first timestep of an episode.
        Returns: (B, L, emb_dim) float.
        """
        encoded, _ = self(seq, time_idxs, self.import_hidden_state(rows), resets)
        return cast("Tensor", encoded)

    def remember(self, seq: Tensor, time_idxs: Tensor, resets: Tensor | None) -> dict[str, Tensor]:
        """The exported state after a sequence; see `encode_from` for the arguments.

        Timesteps before the last reset of a row have no effect, so sequences of different lengths can be
        aligned at their end.
        """
        fresh = self.init_hidden_state(seq.shape[0], seq.device)
        return self.export_hidden_state(self(seq, time_idxs, fresh, resets)[1])


def _on_policy_needs(encoder: TrajEncoder, name: str) -> str:
    owner = type(encoder).__name__
    return (
        f"{owner} has no {name}, without which it cannot be trained on-policy. "
        f"Fix: implement {owner}.{name} (see TrajEncoder.{name}), or train it off-policy."
    )


class MemorylessTrajEncoder(TrajEncoder):
    """Base class of encoders that treat each timestep separately; their hidden state is None."""

    @property
    def context_len(self) -> int:
        return 0

    def init_hidden_state(self, num_envs: int, device: torch.device) -> None:
        return None

    def reset_hidden_state(self, hidden_state: None, ended: Tensor) -> None:
        return None

    def export_hidden_state(self, hidden_state: None) -> dict[str, Tensor]:
        return {}

    def import_hidden_state(self, rows: dict[str, Tensor]) -> None:
        return None


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class IdentityTrajEncoder(MemorylessTrajEncoder):
    """Returns encoded timesteps unchanged: heads see only the timestep encoder."""

    @property
    def emb_dim(self) -> int:
        return self.tstep_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return seq, None


@gin.configurable(denylist=["tstep_dim", "max_seq_len"])
class FFTrajEncoder(MemorylessTrajEncoder):
    """Residual feed-forward blocks at each timestep: the control without memory.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        d_model: width.
        d_ff: width of the feed-forward part of each block; None means 4 times d_model.
        n_layers: number of blocks.
        activation: relu, leaky_relu, gelu, silu, mish or tanh.
        norm: normalisation before each part and of the result, "layer", "rmsnorm" or None.
        init: initialisation of linear layers, "default" or "orthogonal".
    Raises: ValueError for a size below 1 or an unknown name.
    """

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_model: int = 128,
        d_ff: int | None = None,
        n_layers: int = 1,
        activation: str = "leaky_relu",
        norm: str | None = "layer",
        init: str = "default",
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        d_ff = d_ff if d_ff is not None else 4 * d_model
        require_positive("FFTrajEncoder", d_model=d_model, d_ff=d_ff, n_layers=n_layers)
        self.activation = activation_fn(activation, overwrites=True)
        self.inp = Linear(tstep_dim, d_model)
        self.norms = nn.ModuleList(norm_layer(norm, d_model) for _ in range(n_layers))
        self.ups = nn.ModuleList(Linear(d_model, d_ff) for _ in range(n_layers))
        self.downs = nn.ModuleList(Linear(d_ff, d_model) for _ in range(n_layers))
        self.out_norm = norm_layer(norm, d_model)
        self._emb_dim = d_model
        initialize(self, init)

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, None]:
        x = self.inp(as_rows(seq))
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(self.activation(up(norm(x))))
        return self.out_norm(x).view(*seq.shape[:-1], self.emb_dim), None
