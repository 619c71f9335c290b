"""The part of an agent that turns observations and their history into states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import Batch, RolloutBatch
from ..nets import ActionMemory, TrajEncoder, TstepEncoder
from ..nets.mlp import RMSNorm

_ACTION_ROWS = "action_memory"  # key of the action memory in an exported hidden state


class WithActionMemory(NamedTuple):
    """Hidden state of a model with an ActionMemory: the trajectory encoder's state, and sums (N, A, K)."""

    encoder: Any
    actions: Tensor


@dataclass(frozen=True)
class SequenceModel:
    """A timestep encoder, a trajectory encoder on top of it, and the additional inputs of heads.

    This is not a module, so that parameters keep the names that the agent gives its modules.

    Attributes:
        tstep_encoder: embeds one timestep.
        traj_encoder: encodes the history of embedded timesteps.
        timestep_norm: normalises the embedding of each timestep, which is appended to the trajectory
            encoder's output; None leaves it out.
        action_memory: memory of the outcomes of each action, appended to the states; None leaves it out.
    """

    tstep_encoder: TstepEncoder
    traj_encoder: TrajEncoder
    timestep_norm: RMSNorm | None = None
    action_memory: ActionMemory | None = None

    @property
    def dim(self) -> int:
        """Width D of states, without an ActionMemory's part."""
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
        """States (B, L, D) of all timesteps of a batch, padding included; an ActionMemory adds AK to D.

        Args:
            batch: B sequences of L timesteps.
            mask: (B, L, 1) bool, True on timesteps that move input statistics in training mode.
            resets: (B, L) bool, True on the first timestep of an episode.
            start: exported hidden state before the sequences, without an ActionMemory; None if they have no
                history.
        """
        embedded = self.tstep_encoder(batch.obs, batch.rl2s, batch.time_idxs, mask)
        if start is None:
            encoded = self.traj_encoder(embedded, batch.time_idxs, resets=resets)[0]
        else:
            encoded = self.traj_encoder.encode_from(embedded, batch.time_idxs, start, resets)
        remembered = None
        if self.action_memory is not None:
            remembered = self.action_memory(embedded, self._previous_actions(batch.rl2s), resets)
        return self._state(encoded, embedded, remembered)

    def encode_timestep(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any
    ) -> tuple[Tensor, Any]:
        """The states (N, D) of one timestep of N envs, and the hidden state after it."""
        time_idxs = time_idxs[:, None]
        embedded = self.tstep_encoder({key: x[:, None] for key, x in obs.items()}, rl2s[:, None], time_idxs)
        if self.action_memory is None:
            encoded, hidden_state = self.traj_encoder(embedded, time_idxs, hidden_state)
            return self._state(encoded, embedded)[:, 0], hidden_state
        encoded, memory = self.traj_encoder(embedded, time_idxs, hidden_state.encoder)
        previous = self._previous_actions(rl2s)
        remembered, sums = self.action_memory.step(hidden_state.actions, embedded[:, 0], previous)
        return self._state(encoded, embedded, remembered[:, None])[:, 0], WithActionMemory(memory, sums)

    def _state(self, encoded: Tensor, embedded: Tensor, remembered: Tensor | None = None) -> Tensor:
        """Encoded timesteps (..., E), followed by the other inputs of heads."""
        parts = [encoded]
        if self.timestep_norm is not None:
            parts.append(self.timestep_norm(embedded).to(encoded.dtype))
        if remembered is not None:
            parts.append(remembered.to(encoded.dtype))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else encoded

    def _previous_actions(self, rl2s: Tensor) -> Tensor:
        """(..., A) previous actions from rl2s (..., 1+A); zeros if the timestep encoder hides them."""
        return self.tstep_encoder.shown(rl2s)[..., 1:]

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """The exported hidden state after the last timestep of each sequence; see TrajEncoder.remember."""
        embedded = self.tstep_encoder(batch.obs, batch.rl2s, batch.time_idxs)
        return self.traj_encoder.remember(embedded, batch.time_idxs, batch.resets)

    # --- hidden states -------------------------------------------------------------------------------------

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
        """Memory of `num_envs` envs before their first timestep."""
        state = self.traj_encoder.init_hidden_state(num_envs, device)
        if self.action_memory is None:
            return state
        return WithActionMemory(state, self.action_memory.begin(num_envs, device))

    def reset_hidden_state(self, state: Any, ended: Tensor) -> Any:
        """Forget the episodes of rows where ended (N,) bool is True."""
        if self.action_memory is None:
            return self.traj_encoder.reset_hidden_state(state, ended)
        encoder = self.traj_encoder.reset_hidden_state(state.encoder, ended)
        return WithActionMemory(encoder, state.actions.masked_fill(ended[:, None, None], 0.0))

    def export_hidden_state(self, state: Any) -> dict[str, Tensor]:
        """Copies of a hidden state, one row per env, (N, ...); see TrajEncoder.export_hidden_state."""
        if self.action_memory is None:
            return self.traj_encoder.export_hidden_state(state)
        return {**self.traj_encoder.export_hidden_state(state.encoder), _ACTION_ROWS: state.actions.clone()}

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        """The hidden state that continues from exported rows."""
        if self.action_memory is None:
            return self.traj_encoder.import_hidden_state(rows)
        of_encoder = {name: x for name, x in rows.items() if name != _ACTION_ROWS}
        return WithActionMemory(self.traj_encoder.import_hidden_state(of_encoder), rows[_ACTION_ROWS].clone())
