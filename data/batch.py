"""Data passed to agents: batches of trajectory windows, and sequences of a rollout."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .trajectory import Array, Layout, Trajectory

Name: TypeAlias = tuple[str, str]  # field of a Batch, and the observation's key ("" for other fields)
Specs: TypeAlias = dict[Name, tuple[tuple[int, ...], np.dtype[Any]]]  # shape and dtype by name
Arrays: TypeAlias = dict[Name, Array]
Rows: TypeAlias = Sequence[Sequence[Trajectory]]  # the windows of each row

# Fields other than observations: dtype, and whether the field also describes the timestep after the last
# transition. Widths are 1 except those of rl2s and actions.
_FIELDS: dict[str, tuple[np.dtype[Any], bool]] = {
    "rl2s": (np.dtype(np.float32), True),
    "time_idxs": (np.dtype(np.int64), True),
    "actions": (np.dtype(np.float32), False),
    "rews": (np.dtype(np.float32), False),
    "dones": (np.dtype(np.bool_), False),
    "mask": (np.dtype(np.bool_), False),
}
_LOG_PROBS = "log_probs"  # key in Trajectory.extras
_PER_WINDOW = ("priority_slots", "policy_versions")  # (W,) int64
_UNKNOWN = -1  # priority slot or policy version
_STEP_COST = 2  # fixed cost of one timestep of a recurrence, as a number of rows


@dataclass(frozen=True)
class Batch:
    """W windows in B rows of at most L transitions, padded on the right with zeros.

    In a padded batch, each window has a row of its own. In a packed batch, several may share a row, one
    behind the other. A window of n transitions takes n + 1 places there, because it has n + 1 timesteps. No
    transition begins at the last of them, so the mask is False between any two windows.

    Attributes:
        obs: each (B, L+1, ...), in the environment's own dtype.
        rl2s: (B, L+1, 1+A) float32, previous reward and previous action.
        time_idxs: (B, L+1, 1) int64, index within the episode.
        actions: (B, L, A) float32, one-hot if the actions are discrete.
        rews: (B, L, 1) float32, environment units.
        dones: (B, L, 1) bool, True where the environment terminated (not where it was truncated).
        mask: (B, L, 1) bool, True on real transitions, False on padding.
        resets: (B, L+1) bool, True on the first timestep of each window. None if every row is one window.
        priority_slots: (W,) int64 in the order of rows: the trajectory each window was drawn from, for
            `update_priorities` of the dataset; -1 if the dataset keeps no priorities. None in a batch made by
            hand.
        policy_versions: (W,) int64, number of the policy that acted last in the trajectory, -1 if unknown.
            None in a batch made by hand.
        log_probs: (B, L, 1) float32, log-probability of each action when it was taken; NaN in windows without
            it. None if no window has it.

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
    resets: Tensor | None = None
    priority_slots: Tensor | None = None
    policy_versions: Tensor | None = None
    log_probs: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the two leading axes of every field."""
        num_rows, num_transitions = self.mask.shape[:2]
        per_transition = {"actions": self.actions, "rews": self.rews, "dones": self.dones}
        if self.log_probs is not None:
            per_transition[_LOG_PROBS] = self.log_probs
        per_timestep = {"rl2s": self.rl2s, "time_idxs": self.time_idxs, **self.obs}
        if self.resets is not None:
            per_timestep["resets"] = self.resets
        for group, length in ((per_transition, num_transitions), (per_timestep, num_transitions + 1)):
            for name, value in group.items():
                if value.shape[:2] != (num_rows, length):
                    raise ValueError(
                        f"Batch field {name!r} begins with {tuple(value.shape[:2])}, but the mask "
                        f"{tuple(self.mask.shape)} requires {(num_rows, length)}. Fix: build batches with "
                        "loxodon.data.pad_batch."
                    )

    @property
    def timestep_mask(self) -> Tensor:
        """(B, L+1, 1) bool, True on real timesteps: the first of windows, and t if transition t-1 is real."""
        real = torch.cat([torch.ones_like(self.mask[:, :1]), self.mask], dim=1)
        return real if self.resets is None else real | self.resets[..., None]

    @property
    def window_idxs(self) -> Tensor:
        """(B, L+1) int64, index of each timestep's window (0 to W-1); padding has the one before it."""
        if self.resets is None:
            rows = torch.arange(len(self.mask), device=self.mask.device)
            return rows[:, None].expand(self.time_idxs.shape[:2])
        return self.resets.flatten().cumsum(0).view_as(self.resets) - 1

    @property
    def lengths(self) -> Tensor:
        """(W,) int64, the number of real transitions of each window."""
        real = self.window_idxs[:, :-1][self.mask[..., 0]]
        return torch.bincount(real, minlength=len(self.mask))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return this batch on another device; non_blocking copies pinned memory in the background."""
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def padded(self, num_transitions: int) -> Batch:
        """Return this batch with rows of at least `num_transitions` transitions; zeros fill them up."""
        missing = num_transitions - self.mask.shape[1]

        def longer(x: Tensor) -> Tensor:  # fields of windows have a single axis
            return x if x.dim() == 1 else F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])

        return self if missing <= 0 else _mapped(self, longer)


_AnyBatch = TypeVar("_AnyBatch", bound="Batch | RolloutBatch")


def _mapped(batch: _AnyBatch, function: Callable[[Tensor], Tensor]) -> _AnyBatch:
    """Return the batch with a function applied to each of its tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: function(part) for key, part in value.items()}
        return None if value is None else function(value)

    return type(batch)(**{name: changed(value) for name, value in vars(batch).items()})


def pad_batch(trajs: Sequence[Trajectory], layout: Layout | None = None) -> Batch:
    """Copy windows into one zero-padded batch, as long as the longest of them.

    Args:
        trajs: B windows of the same environment interface: equal observation keys, shapes and action width A.
            Discrete and float actions may be mixed.
        layout: observations (with dtypes) and A that the batch must have; None for those of the first window.
            Dtypes of other windows are converted if that keeps the kind of number (float64 to float32, uint8
            to int64 or float32).

    Returns: a batch that shares no memory with its windows.

    Raises:
        ValueError: If `trajs` is empty, or a window does not fit the layout.
    """
    return batch_of([[traj] for traj in trajs], layout)


def pack_batch(trajs: Sequence[Trajectory], max_seq_len: int, layout: Layout | None = None) -> Batch:
    """Copy windows into shared rows of at most max_seq_len transitions; see pad_batch.

    The windows of the batch are in another order than `trajs`.
    """
    return batch_of(packed_rows(trajs, max_seq_len), layout)


def packed_rows(trajs: Sequence[Trajectory], max_seq_len: int) -> Rows:
    """Pack windows into few, short rows of at most max_seq_len + 1 timesteps.

    For every possible number of rows, the windows, longest first, go to the emptiest row. Rows of about equal
    length leave few places empty (first fit fills all rows but the last), and short rows make attention and
    recurrences cheaper. If all windows have the same length, each therefore keeps its own row.
    """
    by_length = sorted(trajs, key=len, reverse=True)
    longest = max(map(len, trajs), default=0)
    room = max(max_seq_len, longest) + 1
    best, lowest_cost = list[list[Trajectory]](), math.inf
    fewest = max(1, -(-(sum(map(len, trajs)) + len(trajs)) // room))
    for num_rows in range(fewest, len(trajs) + 1):
        rows: list[list[Trajectory]] = [[] for _ in range(num_rows)]
        taken = [(0, row) for row in range(num_rows)]  # heap: number of used places and index of each row
        for traj in by_length:
            places, row = taken[0]
            rows[row].append(traj)
            heapq.heapreplace(taken, (places + len(traj) + 1, row))
        widest = max(taken)[0]
        cost = (num_rows + _STEP_COST) * widest
        if widest <= room and cost < lowest_cost:
            best, lowest_cost = rows, cost
        if widest == longest + 1:  # more rows would not be shorter
            break
    return best


BlockReader = Callable[[Tensor], Batch]
"""Reads a batch from a block, or from a copy of it."""


def in_one_block(batch: Batch, *, pin_memory: bool = False) -> tuple[Tensor, BlockReader]:
    """Copy all tensors of a batch into one block of bytes, which takes one transfer to a device.

    Tensors read from a block are parts of it. They are views of torch, not of NumPy: torch frees page-locked
    memory only after pending copies, which it finds by the first byte of the block.

    Args:
        batch: a batch on the CPU.
        pin_memory: whether the block is in page-locked memory, which can be copied in the background.
    """
    tensors: list[Tensor] = []
    _mapped(batch, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    rooms = (-(-x.nbytes // 64) * 64 for x in tensors)  # every tensor begins at a cache line
    starts = list(accumulate(rooms, initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin_memory)

    def read(block: Tensor) -> Batch:
        places = iter(starts)

        def part(x: Tensor) -> Tensor:
            start = next(places)
            return block[start : start + x.nbytes].view(x.dtype).view(x.shape)

        return _mapped(batch, part)

    own: list[Tensor] = []
    _mapped(read(block), lambda x: own.append(x) or x)  # type: ignore[func-returns-value]
    torch._foreach_copy_(own, tensors)
    return block, read


def batch_of(rows: Rows, layout: Layout | None = None) -> Batch:
    """Return the batch of these rows; see pad_batch."""
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in specs_of(rows, layout).items()}
    fill_batch(arrays, rows, layout)
    return as_batch({name: torch.from_numpy(value) for name, value in arrays.items()})


def as_batch(tensors: dict[Name, Tensor]) -> Batch:
    """Make a batch of its tensors, given by name."""
    obs = {key: value for (field, key), value in tensors.items() if field == "obs"}
    return Batch(obs=obs, **{field: value for (field, _), value in tensors.items() if field != "obs"})


def specs_of(rows: Rows, layout: Layout | None = None) -> Specs:
    """Shapes and dtypes of the arrays of the batch of these rows; see pad_batch."""
    if not rows:
        raise ValueError(
            "pad_batch received no trajectories, but a batch needs at least one. Fix: pass one or more "
            "windows."
        )
    layout = layout or rows[0][0].layout
    num_rows, widest = len(rows), max(sum(map(len, row)) + len(row) for row in rows)
    specs: Specs = {
        ("obs", key): ((num_rows, widest, *shape), dtype) for key, (shape, dtype) in layout.obs.items()
    }
    widths = {"rl2s": 1 + layout.action_width, "actions": layout.action_width}
    for field, (dtype, has_last) in _FIELDS.items():
        specs[field, ""] = ((num_rows, widest - (not has_last), widths.get(field, 1)), dtype)
    if any(_log_probs_of(traj) is not None for row in rows for traj in row):
        specs[_LOG_PROBS, ""] = ((num_rows, widest - 1, 1), np.dtype(np.float32))
    num_windows = sum(map(len, rows))
    if num_windows > num_rows:
        specs["resets", ""] = ((num_rows, widest), np.dtype(np.bool_))
    for field in _PER_WINDOW:
        specs[field, ""] = ((num_windows,), np.dtype(np.int64))
    return specs


def fill_batch(arrays: Arrays, rows: Rows, layout: Layout | None = None) -> None:
    """Copy windows into the arrays of a batch, which need not be initialised; see pad_batch."""
    wanted = layout or rows[0][0].layout
    try:
        _fill(arrays, rows, wanted)
    except (KeyError, TypeError, ValueError) as error:
        # Copying compares keys, shapes and dtypes anyway, so they are examined here only if it failed.
        trajs = [traj for row in rows for traj in row]
        whose = f"window 0 (environment {trajs[0].env_name!r}) has" if layout is None else "the run expects"
        mismatch = _describe_mismatch(trajs, wanted, whose)
        if mismatch is None:
            raise
        raise ValueError(mismatch) from error


def _fill(arrays: Arrays, rows: Rows, layout: Layout) -> None:
    width = arrays["time_idxs", ""].shape[1]
    trajs: list[Trajectory] = []
    pads: list[int] = []  # number of zeros behind each window: for fields of timesteps, and of transitions
    holes: list[int] = []
    for row in rows:
        rest, between = width - sum(map(len, row)) - len(row), len(row) - 1
        trajs += row
        pads += [0] * between + [rest]
        holes += [1] * between + [rest]
    for (field, key), out in arrays.items():
        if field == "obs":
            _copy(out, [traj.obs[key] for traj in trajs], pads)
        elif field == "mask":
            true = np.ones((width, 1), np.bool_)
            _copy(out, [true[: len(traj)] for traj in trajs], holes)
        elif field == "resets":
            spans = [len(traj) + 1 + pad for traj, pad in zip(trajs, pads, strict=True)]
            out[:] = False
            out.reshape(-1)[np.cumsum([0, *spans[:-1]])] = True
        elif field == _LOG_PROBS:
            unknown, found = np.full((width, 1), np.nan, np.float32), map(_log_probs_of, trajs)
            known = [unknown[: len(t)] if x is None else x for t, x in zip(trajs, found, strict=True)]
            _copy(out, known, holes)
        elif field == "priority_slots":
            out[:] = [traj.priority_slot for traj in trajs]
        elif field == "policy_versions":
            versions = (traj.policy_version for traj in trajs)
            out[:] = [_UNKNOWN if version is None else version for version in versions]
        else:
            _copy(out, [getattr(traj, field) for traj in trajs], pads if _FIELDS[field][1] else holes)
    num_keys = sum(field == "obs" for field, _ in arrays)
    if any(len(traj.obs) != num_keys or traj.nvec != layout.nvec for traj in trajs):
        raise KeyError("a window has observations or factors of actions that the batch lacks")


def _log_probs_of(traj: Trajectory) -> Array | None:
    """The log-probabilities of a trajectory's actions; None if the extra has another shape or dtype."""
    found = traj.extras.get(_LOG_PROBS)
    return found if found is not None and found.dtype.kind == "f" and found.shape[1:] == (1,) else None


def _copy(out: Array, windows: list[Array], pads: list[int]) -> None:
    """Write windows to out (B, L, ...), row by row, each followed by its number of zeros."""
    if any(pads):
        zeros = np.zeros((max(pads), *out.shape[2:]), out.dtype)
        windows = [part for window, pad in zip(windows, pads, strict=True) for part in (window, zeros[:pad])]
    # A single call copies the whole field; it refuses other shapes and casts that change the kind of number.
    np.concatenate(windows, out=out.reshape(out.shape[0] * out.shape[1], *out.shape[2:]), casting="same_kind")


def _describe_mismatch(trajs: Sequence[Trajectory], wanted: Layout, whose: str) -> str | None:
    """Describe which window does not fit; None if all do."""
    for row, traj in enumerate(trajs):
        problem = wanted.describe_mismatch(traj.layout)
        if problem is not None:
            return (
                f"Window {row} of the batch (environment {traj.env_name!r}) has the layout [{traj.layout}], "
                f"but {whose} [{wanted}]: {problem}. Fix: keep trajectories of different spaces in "
                "different datasets, or give the environments the same spaces."
            )
    return None


@dataclass(frozen=True)
class RolloutBatch:
    """B sequences of at most L timesteps of a rollout, padded on the right with zeros.

    Unlike in `Batch`, place i holds a timestep and the action taken *at* it. Some places are not steps of the
    rollout: context that is only read, the final observation of a truncated episode, the timestep after the
    last action, and padding. They do not count in any loss (`mask`).

    Attributes:
        obs: each (B, L, ...), in the environment's own dtype.
        rl2s: (B, L, 1+A) float32, previous reward and previous action.
        time_idxs: (B, L, 1) int64, index within the episode.
        resets: (B, L) bool, True on the first timestep of an episode; None if no episode begins within a
            sequence, and no `start` belongs to an earlier one.
        actions: (B, L, A) float32: one-hot if discrete, otherwise the policy's sample before clipping.
        mask: (B, L, 1) bool, True where the policy acted; only these places count in losses and statistics.
        start: the hidden state before place 0, as exported by the agent, each (B, ...); None to begin anew.
        log_probs: (B, L, 1) float32 of the policy that collected. This and all fields below are None until
            the evaluation pass fills them.
        values: (B, L, 1) float32, in units of the rewards.
        params: (B, L, P) float32, parameters of the policy's distribution when it acted.
        advantages: (B, L, 1) float32, normalised.
        returns: (B, L, 1) float32, targets of the values, in units of the rewards.
    """

    obs: dict[str, Tensor]
    rl2s: Tensor
    time_idxs: Tensor
    resets: Tensor | None
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
        """Return copies of the sequences at `index` (B',) int64."""
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """Return this batch with `function` applied to every tensor."""
        return _mapped(self, function)
