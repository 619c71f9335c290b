"""Cutting a rollout into sequences: their starts, the context before them, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...data import RolloutBatch
from ...data.sink import Arrays
from ...data.spaces import ActionCode, PolicyActionSpace
from ..process.transfer import to_device
from .buffer import CollectedRollout

_FRESH = np.iinfo(np.int64).min  # start of a sequence that needs no state
PADDING, STEP, CONTEXT, TAIL = range(4)
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Pieces:
    """P sequences of consecutive steps of single episodes; all arrays are (P,) int64.

    envs: number of the env. firsts: number of the first step. lengths: in steps.
    prefixes: number of timesteps that are read before the first step, without loss.
    starts: the step that the hidden state precedes (below 0: a step of the previous rollout); the smallest
        integer to begin without a state.
    """

    envs: np.ndarray
    firsts: np.ndarray
    lengths: np.ndarray
    prefixes: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """The number of pieces, P."""
        return len(self.envs)

    def take(self, index: np.ndarray) -> Pieces:
        """The pieces selected by `index`."""
        return Pieces(*(column[index] for column in vars(self).values()))


def cut(rollout: CollectedRollout, chunk_len: int, *, context: int | None, burn_in: int = 0) -> Pieces:
    """Cut every env's steps at multiples of chunk_len, at episode borders and at invalid steps.

    Args:
        rollout: the collected rollout.
        chunk_len: in steps.
        context: largest number of timesteps of the running episode to read again before a piece; None
            continues from the kept hidden states instead.
        burn_in: number of timesteps before each chunk that are read without loss, from the state kept there.
    """
    valid = rollout.steps["valid"].T  # (N, T)
    num_steps = valid.shape[1]
    resets = rollout.resets[rollout.history : rollout.history + num_steps].T
    chunk_start = np.zeros(num_steps, np.bool_)
    chunk_start[::chunk_len] = True
    begins = valid.copy()
    begins[:, 1:] &= chunk_start[1:] | resets[:, 1:] | ~valid[:, :-1]
    envs, firsts = np.nonzero(begins)
    # A piece ends where the next one of its env begins, or before the next invalid step.
    stops = np.full(len(envs), num_steps)
    same_env = envs[1:] == envs[:-1]
    stops[:-1][same_env] = firsts[1:][same_env]
    next_invalid = _next_true(~valid)
    lengths = np.minimum(stops, next_invalid[envs, firsts]) - firsts
    rows = rollout.history + firsts
    ages = rollout.time_idxs[rows, envs, 0]
    is_fresh = rollout.resets[rows, envs]
    reach = burn_in if context is None else context
    known = rows - rollout.known_from[envs]
    prefixes = np.where(is_fresh, 0, np.minimum(np.minimum(ages, reach), known))
    starts = np.full(len(envs), _FRESH)
    if context is None:
        continues = ~is_fresh & (prefixes < ages)
        starts = np.where(continues, firsts - prefixes, _FRESH)
        assert np.isin(starts[continues], list(rollout.states)).all()
    return Pieces(envs, firsts, lengths, prefixes, starts)


def single_steps(rollout: CollectedRollout) -> Pieces:
    """Every step as a separate piece, for agents without memory."""
    firsts, envs = np.nonzero(rollout.steps["valid"])
    zeros = np.zeros(len(envs), np.int64)
    return Pieces(envs, firsts, zeros + 1, zeros, zeros + _FRESH)


@dataclass(frozen=True)
class GatherIndices:
    """P sequences of length L as indices into the flat tensors of `RolloutTensors`.

    timesteps, steps: (P, L) int64; steps are 0 at entries that are not a step.
    kinds: (P, L) int8, PADDING, STEP, CONTEXT (only read) or TAIL (after the last step).
    is_fresh: (P,) bool, True where a sequence begins without a state.
    states: (P,) int64, row of the kept hidden states; None if all begin without one.
    is_dense: True if every entry is a step.
    """

    timesteps: Tensor
    steps: Tensor
    kinds: Tensor
    is_fresh: Tensor
    states: Tensor | None
    is_dense: bool

    def split(self, count: int) -> list[GatherIndices]:
        """Split the sequences into `count` groups of about equal number."""
        if count == 1:
            return [self]
        parts = [x.tensor_split(count) for x in (self.timesteps, self.steps, self.kinds, self.is_fresh)]
        states = [None] * count if self.states is None else self.states.tensor_split(count)
        dense = [self.is_dense] * count
        return [GatherIndices(*part) for part in zip(*parts, states, dense, strict=True)]


class RolloutTensors:
    """A rollout as flat tensors on the agent's device, from which batches of pieces are gathered.

    Timesteps are numbered row by row, followed by the last ones of truncated episodes. Steps are numbered in
    the same way.

    obs, rl2s, time_idxs: each (R, ...) for R timesteps. actions: (T * N, A) float32.
    steps: by key, each (T, N, ...), as in `CollectedRollout`.
    successors: (T, N) int64 (numpy), the timestep that followed each step.

    Args:
        rollout: the collected rollout.
        actions: (T, N, A) float32, as in RolloutBatch.
        device: device of the agent.
    """

    def __init__(self, rollout: CollectedRollout, actions: np.ndarray, device: torch.device) -> None:
        self.rollout, self.device = rollout, device
        self.num_steps, self.num_envs = rollout.steps["valid"].shape
        self._some_timestep = rollout.history * self.num_envs  # an existing timestep for padding
        finals = rollout.finals

        def flat(rows: np.ndarray, ends: Sequence[np.ndarray] = ()) -> np.ndarray:
            num_rows = (
                rows.shape[0] * rows.shape[1]
            )  # -1 would be ambiguous for observations without elements
            return np.concatenate([rows.reshape(num_rows, *rows.shape[2:]), *ends])

        obs = {key: flat(value, [f.obs[key] for f in finals]) for key, value in rollout.obs.items()}
        per_timestep = {
            "rl2s": flat(rollout.rl2s, [f.rl2s for f in finals]),
            "time_idxs": flat(rollout.time_idxs, [f.time_idxs for f in finals]),
            "actions": flat(actions),
        }
        self.obs, self.steps = to_device(obs, device), to_device(rollout.steps, device)
        others = to_device(per_timestep, device)
        self.rl2s, self.time_idxs, self.actions = others["rl2s"], others["time_idxs"], others["actions"]
        self.successors = self._find_successors()
        self._valid = self.steps["valid"].view(-1, 1)
        steps, states = sorted(rollout.states), rollout.states
        self._state_rows = {step: i * self.num_envs for i, step in enumerate(steps)}
        self._states = {
            # States from a checkpoint are on the CPU.
            key: torch.cat([states[step][key].to(device) for step in steps])
            for key in (states[steps[0]] if steps else ())
        }

    def _find_successors(self) -> np.ndarray:
        history, shape = self.rollout.history, (self.num_steps, self.num_envs)
        first = (history + 1) * self.num_envs
        following: np.ndarray = first + np.arange(self.num_steps * self.num_envs).reshape(shape)
        number = self.rollout.resets.size
        for part in self.rollout.finals:
            following[part.steps, part.envs] = number + np.arange(len(part.envs))
            number += len(part.envs)
        return following

    def indices(self, pieces: Pieces, *, tails: bool = False) -> GatherIndices:
        """The indices of these pieces.

        tails: add the timestep after a piece's last step, unless that step terminated the episode.
        """
        lengths = pieces.prefixes + pieces.lengths
        longest = int(lengths.max())
        place = np.arange(longest + int(tails))
        steps = pieces.firsts[:, None] - pieces.prefixes[:, None] + place
        timesteps = (self.rollout.history + steps) * self.num_envs + pieces.envs[:, None]
        steps = steps * self.num_envs + pieces.envs[:, None]
        inside = np.where(place < lengths[:, None], STEP, PADDING)
        kinds = np.where(place < pieces.prefixes[:, None], CONTEXT, inside).astype(np.int8)
        if tails:
            lasts = pieces.firsts + pieces.lengths - 1
            rows = np.flatnonzero(~self.rollout.steps["terminated"][lasts, pieces.envs])
            timesteps[rows, lengths[rows]] = self.successors[lasts[rows], pieces.envs[rows]]
            kinds[rows, lengths[rows]] = TAIL
        timesteps[kinds == PADDING] = self._some_timestep
        steps[kinds != STEP] = 0
        is_fresh, states = pieces.starts == _FRESH, None
        if self._states and not is_fresh.all():
            states = (
                np.array([self._state_rows.get(start, 0) for start in pieces.starts.tolist()]) + pieces.envs
            )
        return self._indices(timesteps, steps, kinds, is_fresh, states)

    def all_timesteps(self) -> GatherIndices:
        """Every timestep of this rollout as a separate sequence, for agents without memory."""
        timesteps = np.arange(self.rollout.history * self.num_envs, len(self.rl2s))[:, None]
        steps = np.arange(len(timesteps))[:, None]
        is_step = steps < self.num_steps * self.num_envs
        kinds = np.where(is_step, STEP, TAIL).astype(np.int8)
        return self._indices(
            timesteps, np.where(is_step, steps, 0), kinds, np.ones(len(steps), np.bool_), None
        )

    def running_episodes(self, context: int) -> tuple[GatherIndices, Tensor, Tensor]:
        """The timesteps of every env's running episode before the newest one.

        Returns: indices (N, L) that all end with the last step; (N, L) bool, True at the start of each; and
            (N,) bool, True if the episode begins only now.
        """
        newest = self.rollout.history + self.num_steps
        known = newest - self.rollout.known_from
        lengths = np.minimum(np.minimum(self.rollout.time_idxs[newest, :, 0], context), known)
        is_fresh = self.rollout.resets[newest] | (lengths == 0)
        lengths = np.where(is_fresh, 1, lengths)
        width, envs = int(lengths.max()), np.arange(self.num_envs)
        rows = newest - width + np.arange(width)
        begins = np.arange(width) == width - lengths[:, None]
        kinds = np.where(np.arange(width) >= width - lengths[:, None], CONTEXT, PADDING).astype(np.int8)
        timesteps = rows * self.num_envs + envs[:, None]
        timesteps[kinds == PADDING] = self._some_timestep
        none = np.zeros(self.num_envs, np.bool_)
        indices = self._indices(timesteps, np.zeros_like(timesteps), kinds, none, None)
        found = to_device({"resets": begins, "fresh": is_fresh}, self.device)
        return indices, found["resets"], found["fresh"]

    def _indices(
        self,
        timesteps: np.ndarray,
        steps: np.ndarray,
        kinds: np.ndarray,
        is_fresh: np.ndarray,
        states: np.ndarray | None,
    ) -> GatherIndices:
        arrays = {"timesteps": timesteps, "steps": steps, "kinds": kinds, "is_fresh": is_fresh}
        if states is not None:
            arrays["states"] = states
        found = to_device(arrays, self.device)
        return GatherIndices(
            **{"states": None, **found},  # type: ignore[arg-type]
            is_dense=bool((kinds == STEP).all()),
        )

    def gather(self, indices: GatherIndices, results: Results) -> RolloutBatch:
        """The batch at these indices; `results` (T * N, ...), by field name, are filled in at its steps."""
        timesteps, steps = indices.timesteps.reshape(-1), indices.steps.reshape(-1)
        exists, is_step = (indices.kinds != PADDING)[..., None], (indices.kinds == STEP)[..., None]

        def chosen(values: Tensor, index: Tensor, counts: Tensor | None = None) -> Tensor:
            rows = values.index_select(0, index).view(*indices.kinds.shape, *values.shape[1:])
            return rows if counts is None or indices.is_dense else rows * counts

        start = resets = None
        if indices.states is not None:
            # A piece lies within one episode, so an episode can begin only at its first place.
            resets = torch.zeros(indices.kinds.shape, dtype=torch.bool, device=self.device)
            resets[:, 0] = indices.is_fresh
            start = {key: value.index_select(0, indices.states) for key, value in self._states.items()}
        return RolloutBatch(
            obs={key: chosen(value, timesteps) for key, value in self.obs.items()},
            rl2s=chosen(self.rl2s, timesteps, exists),
            time_idxs=chosen(self.time_idxs, timesteps, exists),
            resets=resets,
            actions=chosen(self.actions, steps, is_step),
            mask=is_step & chosen(self._valid, steps),
            start=start,
            **{name: chosen(values, steps, is_step) for name, values in results.items()},
        )


def _next_true(flags: np.ndarray) -> np.ndarray:
    """The first True of flags (N, T) bool from each place on, as (N, T) int64; T if there is none."""
    num_steps = flags.shape[1]
    place = np.where(flags, np.arange(num_steps), num_steps)
    nearest: np.ndarray = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1]
    return nearest


def shuffled_minibatches(pieces: Pieces, count: int, rng: np.random.Generator) -> list[Pieces]:
    """Divide all pieces into `count` random groups of about equally many steps.

    All processes take the same number of updates, even if one of them has few pieces: a group without a piece
    of its own holds one that is only read.

    Raises: ValueError if there are no pieces.
    """
    if not len(pieces):
        raise ValueError(
            "The rollout has no step: all environments were being reset. Fix: raise "
            "Experiment.train_timesteps_per_epoch, or use environments that reset within the step that "
            "ends an episode."
        )
    order = rng.permutation(len(pieces))
    idle, count = max(count - len(pieces), 0), min(count, len(pieces))
    ends = np.cumsum(pieces.lengths[order])
    goals = ends[-1] * np.arange(1, count) / count
    borders = np.searchsorted(ends, goals, side="left") + 1
    for i in range(count - 1):  # every group keeps at least one piece
        least = (borders[i - 1] if i else 0) + 1
        borders[i] = min(max(borders[i], least), len(pieces) - (count - 1 - i))
    groups = [pieces.take(part) for part in np.split(order, borders)]
    return groups + [_only_read(pieces.take(order[:1]))] * idle


def _only_read(pieces: Pieces) -> Pieces:
    """The same timesteps, all of them before the first step that has a loss."""
    read = pieces.prefixes + pieces.lengths
    return Pieces(pieces.envs, pieces.firsts + pieces.lengths, np.zeros_like(read), read, pieces.starts)


def policy_actions(steps: Arrays, space: PolicyActionSpace) -> np.ndarray:
    """Actions of the policy, (T, N, A) float32: one-hot if discrete, else the sample before clipping."""
    code = ActionCode(space)
    if not code.has_integers:
        chosen: np.ndarray = steps.get("samples", steps["actions"])
        return chosen.astype(np.float32, copy=False)
    num_steps, num_envs = steps["actions"].shape[:2]
    rows = steps["actions"].reshape(num_steps * num_envs, *([] if code.nvec is None else [-1]))
    one_hot = np.zeros((len(rows), code.width), np.float32)
    # Invalid steps may hold any action.
    code.write(np.clip(rows, 0, np.subtract(code.nvec or code.width, 1)), one_hot)
    return one_hot.reshape(num_steps, num_envs, -1)
