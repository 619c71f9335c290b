"""Memory of the outcomes of each action: sums that heads read, one row per action."""

from __future__ import annotations

import math

import gin
import torch
from torch import Tensor, nn

from .mlp import require_positive


@gin.configurable(denylist=["d_embedded", "num_actions", "horizon"])
class ActionMemory(nn.Module):
    """A memory in addition to the sequence model: a fading sum of outcomes for each discrete action.

        memory_t[a] = asinh(sum over i <= t with a_(i-1) = a of exp(-(t - i) / horizon) W x_i)
    Here x_i is the embedded timestep after action a_(i-1): its observation, its reward and the action itself.
    This is attention with actions as keys, which need not be learned. Heads read the row of each action (see
    ActionReader), with the same weights for all actions.

    Reason: recalling from states alone which of 64 places were tried before takes over a million timesteps,
    since each place has to be learned separately. Source: ours. Off: `action_memory_type = None` (the
    default).

    Do not use it to compare memories: heads then remember without the sequence model, so a shorter context of
    the sequence model has no visible effect. Sums fade, so their range does not depend on the length of an
    episode. They also identify an episode, and critics could use them to memorise episodes before the
    sequence model recalls anything. Gradients therefore stop at x, and heads begin without the memory.

    Args:
        d_embedded: given by the agent, width E of embedded timesteps.
        num_actions: given by the agent, A.
        horizon: given by the agent, number of timesteps within which a summand fades to 1 / e.
        width: width K of a row.
    Raises: ValueError for a width below 1.
    """

    def __init__(
        self,
        d_embedded: int,
        num_actions: int,
        horizon: int,
        *,
        width: int = 8,
    ) -> None:
        super().__init__()
        require_positive("ActionMemory", width=width)
        self.num_actions, self.width, self.rate = num_actions, width, 1.0 / horizon
        self.value = nn.Linear(d_embedded, width)

    def _added(self, embedded: Tensor, previous: Tensor) -> Tensor:
        added: Tensor = previous[..., None] * self.value(embedded.detach()).float()[..., None, :]
        return added

    def forward(self, embedded: Tensor, previous: Tensor, resets: Tensor | None = None) -> Tensor:
        """Memories (B, L, A K) float32 at all timesteps of B sequences.

        Args:
            embedded: (B, L, E).
            previous: (B, L, A), one-hot of the action before; zeros at the first timestep of an episode.
            resets: (B, L) bool, True where another window begins; None if each row is a single window.
        """
        added = self._added(embedded, previous)
        ages = torch.arange(added.shape[1], device=added.device, dtype=added.dtype) * self.rate
        # Rows are about as long as the horizon, so exp(ages) stays small.
        added = added * ages.exp()[:, None, None]
        sums = added.cumsum(1)
        if resets is not None:
            indices = torch.arange(added.shape[1], device=added.device).expand(resets.shape)
            begins = indices.where(resets, 0).cummax(1).values[..., None, None]
            sums = sums - (sums - added).gather(1, begins.expand_as(sums))
        return self._read(sums * (-ages).exp()[:, None, None])

    @staticmethod
    def _read(sums: Tensor) -> Tensor:
        return torch.asinh(sums).flatten(-2)

    def step(self, sums: Tensor, embedded: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The memory (N, A K), and sums (N, A, K), after one more timestep: (N, E) and (N, A)."""
        sums = sums * math.exp(-self.rate) + self._added(embedded, previous)
        return self._read(sums), sums

    def begin(self, num_envs: int, device: torch.device) -> Tensor:
        """Sums (N, A, K) before the first timestep."""
        return torch.zeros(num_envs, self.num_actions, self.width, device=device)
