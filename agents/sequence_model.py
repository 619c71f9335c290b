"""A timestep encoder and the trajectory encoder on top of it, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data import Batch, RolloutBatch
from ..nets import TrajEncoder, TstepEncoder


@dataclass(frozen=True)
class SequenceModel:
    """What makes states of observations and their history.

    Not a module itself, so that parameters keep the names that the agent gives its encoders.

    Attributes:
        tstep_encoder: embeds one timestep.
        traj_encoder: looks back over embedded timesteps.
        obs_keys: the observations that it sees.
    """

    tstep_encoder: TstepEncoder
    traj_encoder: TrajEncoder
    obs_keys: Sequence[str]

    def seen(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The observations under `obs_keys`."""
        return {key: obs[key] for key in self.obs_keys}

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
            start: exported hidden state from before the sequences; None: they begin without history.
        """
        embedded = self.tstep_encoder(self.seen(batch.obs), batch.rl2s, batch.time_idxs, mask)
        if start is not None:
            return self.traj_encoder.encode_from(embedded, batch.time_idxs, start, resets)
        state: Tensor = self.traj_encoder(embedded, batch.time_idxs, resets=resets)[0]
        return state

    def encode_timestep(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any
    ) -> tuple[Tensor, Any]:
        """The states (N, D) of one timestep of N envs, and the hidden state after it."""
        rl2s, time_idxs = rl2s[:, None], time_idxs[:, None]
        embedded = self.tstep_encoder({key: obs[key][:, None] for key in self.obs_keys}, rl2s, time_idxs)
        state, hidden_state = self.traj_encoder(embedded, time_idxs, hidden_state)
        return state[:, 0], hidden_state

    def remember(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """The exported hidden state after the last place of all sequences; see TrajEncoder.remember."""
        embedded = self.tstep_encoder(self.seen(batch.obs), batch.rl2s, batch.time_idxs)
        return self.traj_encoder.remember(embedded, batch.time_idxs, batch.resets)
