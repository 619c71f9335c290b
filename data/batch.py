"""A padded batch of trajectory windows as tensors, and the function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .trajectory import Array, Trajectory


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
        )


def pad_batch(trajs: Sequence[Trajectory]) -> Batch:
    """Copy windows into one zero-padded batch, as long as the longest of them.

    Args:
        trajs: B windows of the same environment interface: equal observation keys, shapes, dtypes and action
            kind.

    Returns:
        A batch that shares no memory with its windows. Action indices become one-hot rows of width
        A = rl2s.shape[-1] - 1; padded rows stay all zeros.

    Raises:
        ValueError: If there is no window, the windows differ in layout, or a discrete action is out of range.
    """
    if not trajs:
        raise ValueError(
            "pad_batch received no trajectories, but a batch needs at least one. Fix: pass one or more "
            "windows."
        )
    lengths = np.array([len(traj) for traj in trajs])
    num_rows, longest = len(trajs), int(lengths.max())
    first = trajs[0]

    def empty(like: Array, length: int) -> Array:
        return np.zeros((num_rows, length, *like.shape[1:]), like.dtype)

    obs = {key: empty(value, longest + 1) for key, value in first.obs.items()}
    rl2s, time_idxs = empty(first.rl2s, longest + 1), empty(first.time_idxs, longest + 1)
    actions = empty(first.actions, longest)
    rews, dones = empty(first.rews, longest), empty(first.dones, longest)
    for row, traj in enumerate(trajs):
        _check_same_layout(first, traj, row)
        stop = len(traj)
        actions[row, :stop], rews[row, :stop], dones[row, :stop] = traj.actions, traj.rews, traj.dones
        stop += 1
        rl2s[row, :stop], time_idxs[row, :stop] = traj.rl2s, traj.time_idxs
        for key, value in traj.obs.items():
            obs[key][row, :stop] = value
    mask = (np.arange(longest) < lengths[:, None])[..., None]
    if actions.dtype.kind in "iu" and actions.dtype != np.uint8:
        actions = _one_hot(actions, mask, num_actions=rl2s.shape[-1] - 1)
    actions = actions.astype(np.float32, copy=False)  # one-hot rows are stored as uint8
    return Batch(
        obs={key: torch.from_numpy(value) for key, value in obs.items()},
        rl2s=torch.from_numpy(rl2s),
        time_idxs=torch.from_numpy(time_idxs),
        actions=torch.from_numpy(actions),
        rews=torch.from_numpy(rews),
        dones=torch.from_numpy(dones),
        mask=torch.from_numpy(mask),
    )


def _check_same_layout(first: Trajectory, traj: Trajectory, row: int) -> None:
    """Raise ValueError if a window could not lie in the same batch as the first one."""
    if (
        traj.rl2s.shape[1:] == first.rl2s.shape[1:]
        and traj.actions.shape[1:] == first.actions.shape[1:]
        and traj.actions.dtype == first.actions.dtype
        and traj.obs.keys() == first.obs.keys()
        and all(
            value.shape[1:] == first.obs[key].shape[1:] and value.dtype == first.obs[key].dtype
            for key, value in traj.obs.items()
        )
    ):
        return

    def layout(of: Trajectory) -> str:
        arrays = {"rl2s": of.rl2s, "actions": of.actions, **of.obs}
        return ", ".join(f"{name} {value.dtype}{list(value.shape[1:])}" for name, value in arrays.items())

    raise ValueError(
        f"Window {row} of the batch (environment {traj.env_name!r}) has the layout [{layout(traj)}], but "
        f"window 0 ({first.env_name!r}) has [{layout(first)}]. All windows of a batch need equal keys, "
        "shapes and dtypes. Fix: keep trajectories of different spaces in different datasets, or give the "
        "environments one space."
    )


def _one_hot(actions: Array, mask: npt.NDArray[np.bool_], num_actions: int) -> npt.NDArray[np.float32]:
    """Turn action indices (B, L, 1) into rows (B, L, num_actions) float32, zeros outside the mask."""
    indices = actions[..., 0].astype(np.int64, copy=False)
    if indices.min() < 0 or indices.max() >= num_actions:
        raise ValueError(
            f"Discrete actions range from {indices.min()} to {indices.max()}, but rl2s has room for "
            f"{num_actions} actions (0 to {num_actions - 1}). Fix: store action indices that start at 0, and "
            "one-hot rl2s of width 1 + number of actions."
        )
    one_hot: npt.NDArray[np.float32] = (indices[..., None] == np.arange(num_actions)).astype(np.float32)
    one_hot *= mask
    return one_hot
