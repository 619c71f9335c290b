"""Collects steps of many environments in growing columns and writes finished pieces in the background."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .background import BackgroundQueue
from .files import check_file_format, save_trajectory
from .trajectory import Array, Trajectory

_NO_LIMIT = np.iinfo(np.int64).max
_FIRST_CAPACITY = 128  # timesteps


class _Piece(NamedTuple):
    traj: Trajectory
    traj_id: str
    unix_time: float


class TrajectoryWriter:
    """Off-policy sink: cuts the steps of N environments into trajectory files.

    Steps go into preallocated columns, one array per field for all environments; a piece is copied out once,
    when it is finished, and a background thread writes it. A piece that ends because of the length limit and
    its successor share one timestep, so no transition is lost between them.

    An error while writing is raised by the next call from outside (after it has recorded what it was given).
    The piece stays queued and the call after that tries again; nothing that is finished is dropped.

    Args:
        folder: where the files go; made if it is missing.
        num_envs: N.
        save_every: (low, high); a piece is closed after a random whole number of transitions, uniform from
            low to high inclusive. None closes pieces only at the end of an episode.
        save_as: "npz" or "npz-compressed".
        seed: decides the lengths and, with actor_id, the ids in the file names.
        actor_id: tells apart several writers with one seed.
        max_pending: calls wait while more pieces than this are not on disk; None for a number that suits N.

    Raises:
        ValueError: If save_every or save_as is not allowed.
        OSError: If the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        num_envs: int,
        *,
        save_every: tuple[int, int] | None = None,
        save_as: str = "npz",
        seed: int = 0,
        actor_id: int = 0,
        max_pending: int | None = None,
    ) -> None:
        check_file_format(save_as)
        if save_every is not None and not 1 <= save_every[0] <= save_every[1]:
            raise ValueError(
                f"save_every is {save_every}, but must be (low, high) with 1 <= low <= high, in transitions. "
                "Fix: set Experiment.traj_save_len to at least 1."
            )
        self.folder, self.num_envs = Path(folder), num_envs
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save_every = (int(save_every[0]), int(save_every[1])) if save_every else None
        self._save_as, self._seed, self._actor_id = save_as, seed, actor_id
        self._rng = np.random.default_rng([seed, actor_id])
        self._num_pieces, self._last_time_us = 0, 0
        self._columns: dict[str, Array] = {}
        self._obs_keys: list[str] = []
        self._capacity = _FIRST_CAPACITY
        self._rows = np.arange(num_envs)
        self._num_transitions = np.zeros(num_envs, np.int64)
        self._limits = np.full(num_envs, _NO_LIMIT)
        self._is_running = np.zeros(num_envs, np.bool_)
        self._env_names = ["env"] * num_envs
        self._queue = BackgroundQueue(
            self._save,
            self._explain,
            max_pending=max_pending or max(64, 2 * num_envs),
            name="trajectory-writer",
        )

    @property
    def num_pending(self) -> int:
        """Number of finished pieces that are not on disk yet."""
        return self._queue.num_pending

    def begin(
        self,
        rows: npt.ArrayLike,
        obs: Mapping[str, Array],
        rl2s: Array,
        time_idxs: Array,
        env_names: Sequence[str],
    ) -> None:
        """Start new trajectories; a piece that is still running in one of the rows is finished first.

        Args:
            rows: (k,) integer, the environments that were reset.
            obs: each (N, ...), their first observations; only `rows` are used, here and below.
            rl2s: (N, 1+A) float32.
            time_idxs: (N,) or (N, 1) integer.
            env_names: N names.
        """
        rows = np.atleast_1d(np.asarray(rows, np.int64))
        running = rows[self._is_running[rows] & (self._num_transitions[rows] > 0)]
        pieces = [self._cut(row) for row in running.tolist()]
        if not self._columns:
            self._allocate(obs, rl2s)
        self._num_transitions[rows] = 0
        self._store_timestep(rows, np.zeros_like(rows), obs, rl2s, time_idxs)
        for row in rows:
            self._env_names[row] = env_names[row]
        self._is_running[rows] = True
        self._draw_limits(rows)
        self._queue.submit(pieces)

    def add(
        self,
        actions: Array,
        rewards: npt.NDArray[np.float32],
        terminated: npt.NDArray[np.bool_],
        ended: npt.NDArray[np.bool_],
        obs: Mapping[str, Array],
        rl2s: Array,
        time_idxs: Array,
    ) -> None:
        """Record one step of every environment.

        Args:
            actions: (N,) integer if discrete, else (N, A) float32.
            rewards: (N,) float32.
            terminated: (N,) bool, True where the environment terminated.
            ended: (N,) bool, True where the episode is over (terminated or truncated); `begin` must follow
                there.
            obs: each (N, ...), the true next observation; the final one where the episode ended.
            rl2s: (N, 1+A) float32, reward and action of this step.
            time_idxs: (N,) or (N, 1) integer, time index of `obs`.

        Raises:
            ValueError: If an environment has no running trajectory.
            OSError: If an earlier piece could not be written; this step is recorded all the same.
        """
        if not self._is_running.all():
            raise ValueError(
                f"Environments {np.flatnonzero(~self._is_running).tolist()} have no running trajectory, but "
                "add() needs one in every environment. Fix: call begin() for them after each reset."
            )
        rows, cursor, num_envs = self._rows, self._num_transitions, self.num_envs
        if "actions" not in self._columns:
            self._allocate_actions(actions)
        self._reserve(int(cursor.max()) + 2)
        self._columns["actions"][rows, cursor] = actions.reshape(num_envs, -1)
        self._columns["rews"][rows, cursor] = rewards.reshape(num_envs, 1)
        self._columns["dones"][rows, cursor] = terminated.reshape(num_envs, 1)
        cursor += 1
        self._store_timestep(rows, cursor, obs, rl2s, time_idxs)
        is_full = cursor >= self._limits
        pieces: list[_Piece] = []
        if ended.any() or is_full.any():
            pieces = [self._cut(row) for row in np.flatnonzero(ended | is_full).tolist()]
            self._is_running[ended] = False
            self._carry_over(np.flatnonzero(is_full & ~ended))
        self._queue.submit(pieces)

    def flush_partial(self) -> None:
        """Finish every running piece that has a transition; each goes on from its last timestep."""
        rows = np.flatnonzero(self._is_running & (self._num_transitions > 0))
        pieces = [self._cut(row) for row in rows.tolist()]
        self._carry_over(rows)
        self._queue.submit(pieces)

    def wait(self) -> None:
        """Block until all finished pieces are on disk. Raises OSError if one cannot be written."""
        self._queue.wait()

    def close(self) -> None:
        """Write all finished pieces and end the thread. Call flush_partial first to keep running ones."""
        self._queue.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what exact resumption needs, JSON-able. Running pieces are not part of it."""
        return {
            "num_pieces": self._num_pieces,
            "last_time_us": self._last_time_us,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue ids, times and random lengths from a saved state."""
        self._num_pieces, self._last_time_us = int(state["num_pieces"]), int(state["last_time_us"])
        self._rng.bit_generator.state = state["rng"]

    def _allocate(self, obs: Mapping[str, Array], rl2s: Array) -> None:
        shape = (self.num_envs, self._capacity)
        self._obs_keys = list(obs)
        columns: dict[str, Array] = {
            "rl2s": np.empty((*shape, rl2s.shape[1]), np.float32),
            "time_idxs": np.empty((*shape, 1), np.int64),
            "rews": np.empty((*shape, 1), np.float32),
            "dones": np.empty((*shape, 1), np.bool_),
        }
        for key, value in obs.items():
            columns[f"obs/{key}"] = np.empty((*shape, *value.shape[1:]), value.dtype)
        self._columns = columns

    def _allocate_actions(self, actions: Array) -> None:
        width = actions.reshape(self.num_envs, -1).shape[1]
        dtype = np.int64 if actions.dtype.kind in "iu" else np.float32
        self._columns["actions"] = np.empty((self.num_envs, self._capacity, width), dtype)

    def _reserve(self, num_timesteps: int) -> None:
        """Double the columns until they hold num_timesteps."""
        if num_timesteps <= self._capacity:
            return
        used = self._capacity
        while self._capacity < num_timesteps:
            self._capacity *= 2
        for name, column in self._columns.items():
            grown = np.empty((self.num_envs, self._capacity, *column.shape[2:]), column.dtype)
            grown[:, :used] = column
            self._columns[name] = grown

    def _store_timestep(
        self,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        obs: Mapping[str, Array],
        rl2s: Array,
        time_idxs: Array,
    ) -> None:
        for key in self._obs_keys:
            self._columns[f"obs/{key}"][rows, positions] = obs[key][rows]
        self._columns["rl2s"][rows, positions] = rl2s[rows]
        self._columns["time_idxs"][rows, positions] = time_idxs.reshape(self.num_envs, 1)[rows]

    def _carry_over(self, rows: npt.NDArray[np.int64]) -> None:
        """Make the last timestep of the finished pieces of `rows` the first of their next pieces."""
        last = self._num_transitions[rows]
        for name in ("rl2s", "time_idxs", *(f"obs/{key}" for key in self._obs_keys)):
            column = self._columns[name]
            column[rows, 0] = column[rows, last]
        self._num_transitions[rows] = 0
        self._draw_limits(rows)

    def _draw_limits(self, rows: npt.NDArray[np.int64]) -> None:
        if self._save_every is not None:
            self._limits[rows] = self._rng.integers(*self._save_every, size=len(rows), endpoint=True)

    def _cut(self, row: int) -> _Piece:
        """Copy the running piece of one environment out of the columns and give it an id and a time."""
        stop = int(self._num_transitions[row])
        columns = self._columns
        traj = Trajectory(
            obs={key: columns[f"obs/{key}"][row, : stop + 1].copy() for key in self._obs_keys},
            rl2s=columns["rl2s"][row, : stop + 1].copy(),
            time_idxs=columns["time_idxs"][row, : stop + 1].copy(),
            actions=columns["actions"][row, :stop].copy(),
            rews=columns["rews"][row, :stop].copy(),
            dones=columns["dones"][row, :stop].copy(),
            env_name=self._env_names[row],
        )
        # Strictly increasing, so that sorting by time gives back the order of writing.
        self._last_time_us = max(time.time_ns() // 1000, self._last_time_us + 1)
        label = f"{self._seed} {self._actor_id} {self._num_pieces}".encode()
        self._num_pieces += 1
        return _Piece(traj, hashlib.blake2b(label, digest_size=4).hexdigest(), self._last_time_us / 1e6)

    def _save(self, piece: _Piece) -> None:
        save_trajectory(
            self.folder, piece.traj, save_as=self._save_as, traj_id=piece.traj_id, unix_time=piece.unix_time
        )

    def _explain(self, error: Exception, num_pending: int) -> Exception:
        if not isinstance(error, OSError):
            return error
        return OSError(
            f"A finished trajectory could not be written to {self.folder}: {error}. {num_pending} finished "
            "trajectories are kept in memory and are written as soon as the folder takes them. "
            "Fix: make space on that disk, or restore the folder and its permissions."
        )
