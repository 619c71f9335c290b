"""A padded batch of trajectory windows as tensors, and the function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .collate import Name, pad_windows
from .trajectory import Trajectory

if TYPE_CHECKING:
    from .layout import Layout


@dataclass(frozen=True)
class Batch:
    """B windows of at most L transitions, padded on the right with zeros.

    Attributes:
        obs: each (B, L+1, ...), in the environment's own dtype.
        rl2s: (B, L+1, 1+A) float32, previous reward and previous action.
        time_idxs: (B, L+1, 1) int64, index within the episode.
        actions: (B, L, A) float32, one-hot if the actions are discrete.
        rews: (B, L, 1) float32, environment units.
        dones: (B, L, 1) bool, True where the environment terminated (not where it was truncated).
        mask: (B, L, 1) bool, True on real transitions, False on padding.
        sources: (B,) int64, where each window was drawn from, for `update_priorities` of the dataset; -1 if
            it keeps no priorities. None in a batch made by hand.
        policy_versions: (B,) int64, number of the policy that acted last in the trajectory, -1 if unknown.
            None in a batch made by hand.

    Raises:
        ValueError: If a field does not begin with the shape that the mask implies.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    time_idxs: Tensor
    actions: Tensor
    rews: Tensor
    dones: Tensor
    mask: Tensor
    sources: Tensor | None = None
    policy_versions: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the two leading axes of every field."""
        num_rows, num_transitions = self.mask.shape[:2]
        per_transition = {"actions": self.actions, "rews": self.rews, "dones": self.dones}
        per_timestep = {"rl2s": self.rl2s, "time_idxs": self.time_idxs, **self.obs}
        for fields, length in ((per_transition, num_transitions), (per_timestep, num_transitions + 1)):
            for name, value in fields.items():
                if value.shape[:2] != (num_rows, length):
                    raise ValueError(
                        f"Batch field {name!r} begins with {tuple(value.shape[:2])}, but the mask "
                        f"{tuple(self.mask.shape)} asks for {(num_rows, length)}. "
                        "Fix: build batches with loxodon.data.pad_batch."
                    )

    @property
    def timestep_mask(self) -> Tensor:
        """(B, L+1, 1) bool, True on real timesteps: the first, and t if transition t-1 is real."""
        return torch.cat([torch.ones_like(self.mask[:, :1]), self.mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, the number of real transitions of each row."""
        return self.mask.sum(dim=(1, 2))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return this batch on another device; non_blocking copies pinned memory in the background."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return this batch in page-locked memory, from which copies to a GPU can run in the background."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            obs={key: function(value) for key, value in self.obs.items()},
            rl2s=function(self.rl2s),
            time_idxs=function(self.time_idxs),
            actions=function(self.actions),
            rews=function(self.rews),
            dones=function(self.dones),
            mask=function(self.mask),
            sources=None if self.sources is None else function(self.sources),
            policy_versions=None if self.policy_versions is None else function(self.policy_versions),
        )


def pad_batch(trajs: Sequence[Trajectory], layout: Layout | None = None) -> Batch:
    """Copy windows into one zero-padded batch, as long as the longest of them.

    Args:
        trajs: B windows of the same environment interface: equal observation keys, shapes and action width A
            = rl2s.shape[-1] - 1. Their actions may be indices (T, 1) of any integer type, one-hot rows (T, A)
            of uint8, or rows of floats, mixed at will.
        layout: observations (and their dtypes) and A that the batch has to have; None takes those of the
            first window. Dtypes of other windows are converted if that keeps the kind of number (float64 to
            float32, uint8 to int64 or float32).

    Returns:
        A batch that shares no memory with its windows. Action indices become one-hot rows; padded rows stay
        all zeros.

    Raises:
        ValueError: If there is no window, one does not fit the layout, or a discrete action is out of range.
    """
    arrays = pad_windows(trajs, layout)
    return as_batch({name: torch.from_numpy(value) for name, value in arrays.items()})


def as_batch(tensors: dict[Name, Tensor]) -> Batch:
    """Sort the tensors of a batch into its fields."""
    obs = {key: value for (field, key), value in tensors.items() if field == "obs"}
    return Batch(obs=obs, **{field: value for (field, _), value in tensors.items() if field != "obs"})
