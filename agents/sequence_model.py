"""The part of an agent that turns observations and their history into states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch, RolloutBatch
from ..nets import TrajEncoder, TstepEncoder
from ..nets.mlp import RMSNorm


def build_encoders(
    tstep_encoder_type: Callable[..., TstepEncoder],
    traj_encoder_type: Callable[..., TrajEncoder],
    obs_space: spaces.Dict,
    rl2_dim: int,
    max_seq_len: int,
) -> tuple[TstepEncoder, TrajEncoder]:
    """Build a timestep encoder, and a trajectory encoder for its output.

    Raises: TypeError for a type that does not build such an encoder.
    """
    _check_type("tstep_encoder_type", tstep_encoder_type, TstepEncoder)
    _check_type("traj_encoder_type", traj_encoder_type, TrajEncoder)
    tstep_encoder = tstep_encoder_type(obs_space, rl2_dim)
    return tstep_encoder, traj_encoder_type(tstep_encoder.emb_dim, max_seq_len)


def _check_type(setting: str, given: Any, base: type) -> None:
    kind = given
    while isinstance(kind, partial):
        kind = kind.func
    if not callable(kind) or isinstance(kind, nn.Module):
        found = repr(given) if isinstance(given, str) else f"an object of class {type(given).__name__}"
    elif isinstance(kind, type) and not issubclass(kind, base):
        found = f"{kind.__name__}, which does not derive from {base.__name__}"
    else:
        return
    raise TypeError(
        f"Experiment.{setting} is {found}, but must be a class that derives from "
        f"loxodon.nets.{base.__name__}, or a functools.partial of one. Fix: pass the class itself; in gin, "
        "write @ and its name."
    )


@dataclass(frozen=True)
class SequenceModel:
    """A timestep encoder, a trajectory encoder on top of it, and the additional input of heads.

    This is not a module, so that parameters keep the names that the agent gives its modules.

    Attributes:
        tstep_encoder: embeds one timestep.
        traj_encoder: encodes the history of embedded timesteps.
        timestep_norm: normalises the embedding of each timestep, which is appended to the trajectory
            encoder's output; None leaves it out.
    """

    tstep_encoder: TstepEncoder
    traj_encoder: TrajEncoder
    timestep_norm: RMSNorm | None = None

    @property
    def dim(self) -> int:
        """Width D of states."""
        added = 0 if self.timestep_norm is None else self.tstep_encoder.emb_dim
        return self.traj_encoder.emb_dim + added

    def encode(
        self,
        batch: Batch | RolloutBatch,
        *,
        mask: Tensor | None = None,
        resets: Tensor | None = None,
        start: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """States (B, L, D) of all timesteps of a batch, padding included.

        Args:
            batch: B sequences of L timesteps.
            mask: (B, L, 1) bool, True on timesteps that move input statistics in training mode.
            resets: (B, L) bool, True on the first timestep of an episode.
            start: exported hidden state before the sequences; None if they have no history.
        """
        embedded = self.tstep_encoder(batch.obs, batch.rl2s, batch.time_idxs, mask)
        if start is None:
            encoded = self.traj_encoder(embedded, batch.time_idxs, resets=resets)[0]
        else:
            encoded = self.traj_encoder.encode_from(embedded, batch.time_idxs, start, resets)
        return self._state(encoded, embedded)

    def encode_timestep(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any
    ) -> tuple[Tensor, Any]:
        """The states (N, D) of one timestep of N envs, and the hidden state after it."""
        time_idxs = time_idxs[:, None]
        embedded = self.tstep_encoder({key: x[:, None] for key, x in obs.items()}, rl2s[:, None], time_idxs)
        encoded, hidden_state = self.traj_encoder(embedded, time_idxs, hidden_state)
        return self._state(encoded, embedded)[:, 0], hidden_state

    def _state(self, encoded: Tensor, embedded: Tensor) -> Tensor:
        """Encoded timesteps (..., E), followed by the other inputs of heads."""
        if self.timestep_norm is None:
            return encoded
        return torch.cat([encoded, self.timestep_norm(embedded).to(encoded.dtype)], dim=-1)

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """The exported hidden state after the last timestep of each sequence; see TrajEncoder.remember."""
        embedded = self.tstep_encoder(batch.obs, batch.rl2s, batch.time_idxs)
        return self.traj_encoder.remember(embedded, batch.time_idxs, batch.resets)
