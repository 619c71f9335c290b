"""The contract of trajectory encoders, and the memory-free controls that obey it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import gin
import torch
from torch import Tensor, nn

from .mlp import activation_fn, initialize, norm_layer, require_positive


class TrajEncoder(nn.Module, ABC):
    """Base class of causal sequence models over encoded timesteps.

    Step-by-step use with a hidden state equals the forward pass over the full sequence. The hidden state is
    opaque to everything but the encoder that made it, and is updated in place where that is faster: use only
    the state returned last.

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
        """Make the rows where ended (N,) bool is True forget everything; other rows are untouched."""

    @abstractmethod
    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Encode a sequence.

        Args:
            seq: (B, L, tstep_dim) float.
            time_idxs: (B, L, 1) int64, timestep within the episode.
            hidden_state: continue from here; None starts fresh.
            resets: (B, L) bool, True on the first timestep of an episode; neither state nor attention
                crosses one.
        Returns: (B, L, emb_dim) float and the state after the last timestep (None where none was asked for).
        """

    # What on-policy training needs beyond this; an encoder without it still trains off-policy.

    @property
    def context_len(self) -> int | None:
        """Earlier timesteps that an output can depend on; None without a bound.

        Raises: NotImplementedError if the encoder does not say (so does each method below).
        """
        raise NotImplementedError(_on_policy_needs(self, "context_len"))

    def export_hidden_state(self, hidden_state: Any) -> dict[str, Tensor]:
        """What the state holds of each env, in copies (N, ...) without gradient of one shape at any time."""
        raise NotImplementedError(_on_policy_needs(self, "export_hidden_state"))

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        """A state to act on from copies of exported rows, on their device; `rows` may mix exports."""
        raise NotImplementedError(_on_policy_needs(self, "import_hidden_state"))

    def encode_from(
        self, seq: Tensor, time_idxs: Tensor, rows: dict[str, Tensor], resets: Tensor | None = None
    ) -> Tensor:
        """Encode a sequence whose history is what was exported, the same as acting on from there.

        Args:
            seq: (B, L, tstep_dim) float.
            time_idxs: (B, L, 1) int64, timestep within the episode.
            rows: exported state before the first timestep, each (B, ...); no gradient flows into it.
            resets: (B, L) bool, True on the first timestep of an episode.
        Returns: (B, L, emb_dim) float.
        """
        encoded, _ = self(seq, time_idxs, self.import_hidden_state(rows), resets)
        return cast("Tensor", encoded)

    def remember(self, seq: Tensor, time_idxs: Tensor, resets: Tensor) -> dict[str, Tensor]:
        """The state after living through a sequence, as exported; arguments as those of `encode_from`.

        What stands before a row's last reset has no effect, so that sequences of different lengths can share
        their last place.
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
    """Base class of encoders in which every timestep stands alone; their hidden state is None."""

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
    """Hands encoded timesteps on as they are: heads act on the timestep encoder alone."""

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
        d_ff: width of the feed-forward part of each block; None takes 4 times d_model.
        n_layers: blocks.
        activation: name of the non-linearity.
        norm: normalisation before each part and of the result, "layer", "rmsnorm" or None.
        init: how linear layers start, "default" or "orthogonal".
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
        self.inp = nn.Linear(tstep_dim, d_model)
        self.norms = nn.ModuleList(norm_layer(norm, d_model) for _ in range(n_layers))
        self.ups = nn.ModuleList(nn.Linear(d_model, d_ff) for _ in range(n_layers))
        self.downs = nn.ModuleList(nn.Linear(d_ff, d_model) for _ in range(n_layers))
        self.out_norm = norm_layer(norm, d_model)
        self._emb_dim = d_model
        initialize(self, init)

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, None]:
        x = self.inp(seq)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(self.activation(up(norm(x))))
        return self.out_norm(x), None
