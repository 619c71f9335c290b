"""Sequences of an on-policy rollout as tensors: what crosses from rollout buffer to agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """B sequences of at most L timesteps of a rollout, padded on the right with zeros.

    Unlike in `Batch`, place i holds a timestep and the action taken *at* it. Some places are no steps of the
    rollout: context that is only read, the final observation of a truncated episode, the timestep after the
    last action, and padding. No loss counts there (`mask`).

    Attributes:
        obs: each (B, L, ...), in the environment's own dtype.
        rl2s: (B, L, 1+A) float32, previous reward and previous action.
        time_idxs: (B, L, 1) int64, index within the episode.
        resets: (B, L) bool, True on the first timestep of an episode.
        actions: (B, L, A) float32: one-hot if discrete, else the policy's own sample, before it is clipped.
        mask: (B, L, 1) bool, True where the policy acted: here losses and statistics count.
        start: the hidden state before place 0, as exported by the agent, each (B, ...); None to begin afresh.
        log_probs: (B, L, 1) float32 of the policy that collected. This and all below: None before the
            evaluation pass has found them.
        values: (B, L, 1) float32, in units of the rewards.
        params: (B, L, P) float32, parameters of the policy's distribution when it acted.
        advantages: (B, L, 1) float32, normalised.
        returns: (B, L, 1) float32, targets of the values, in units of the rewards.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    time_idxs: Tensor
    resets: Tensor
    actions: Tensor
    mask: Tensor
    start: dict[str, Tensor] | None = None
    log_probs: Tensor | None = None
    values: Tensor | None = None
    params: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RolloutBatch:
        """Return this batch on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def rows(self, index: Tensor) -> RolloutBatch:
        """Return the sequences that `index` (B',) int64 names, as copies."""
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """Return this batch with `function` applied to every tensor."""
        changed: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changed[field.name] = {key: function(part) for key, part in value.items()}
            else:
                changed[field.name] = None if value is None else function(value)
        return RolloutBatch(**changed)  # type: ignore[arg-type]
