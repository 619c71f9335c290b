"""A writer that collects the steps of many environments and saves finished pieces in the background."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import READ_ONLY, check_choice
from .files import FILE_FORMATS, parse_name, save_trajectory
from .sink import Sink
from .trajectory import Array, Trajectory

_NO_LIMIT = 2**62  # transitions
_FIRST_CAPACITY = 128  # timesteps
_OBS, _EXTRA = "obs/", "extra/"  # prefixes of column names
# These and observations have one row per timestep; other columns have one row less.
_PER_TIMESTEP = ("rl2s", "time_idxs")
_DTYPES: dict[str, Any] = {"rl2s": np.float32, "time_idxs": np.int64}
_GATHER_S = 0.05  # the thread waits this long for more pieces to arrive
_logger = logging.getLogger("loxodon")


class WritingClock:
    """Unix time for file names. It strictly increases, so sorting by it gives the order of writing.

    Several writers of one process share a clock; otherwise, pieces cut in the same microsecond would have no
    order. The system's clock may jump back. This one never does, and `follow` moves it past the files of
    earlier processes, so that deletion by age never removes the newest files.
    """

    def __init__(self) -> None:
        self.last_time_us = 0

    def now_us(self) -> int:
        """Microseconds since 1970, greater than any returned before."""
        self.last_time_us = max(time.time_ns() // 1000, self.last_time_us + 1)
        return self.last_time_us

    def follow(self, folder: Path) -> None:
        """Move the clock past every trajectory file that is in a folder now."""
        names = os.listdir(folder)  # noqa: PTH208 (only names are needed)
        newest_s = max((parsed.unix_time for name in names if (parsed := parse_name(name))), default=0.0)
        self.last_time_us = max(self.last_time_us, round(newest_s * 1e6))


class _Piece(NamedTuple):
    """A finished piece on its way to the thread: rows of the columns, and the parts of its file name."""

    arrays: dict[str, Array]
    env_name: str
    policy_version: int | None
    number: int
    unix_time: float


class _Background:
    """Saves pieces in order on one thread.

    A piece leaves the queue only after `save` returned. If that raises, the piece stays first, and the next
    call raises `explain(error, number of pieces)`; the call after that tries again.

    The thread waits a moment for more pieces to arrive. Each time it runs, it takes the interpreter from the
    collecting thread, which for small pieces costs more than saving them.
    """

    def __init__(
        self,
        save: Callable[[_Piece], object],
        explain: Callable[[BaseException, int], BaseException],
        max_pending: int,
    ) -> None:
        self._save, self._explain, self._max_pending = save, explain, max_pending
        self.pieces: deque[_Piece] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._owner_pid = os.getpid()
        self._saving: Future[None] | None = None
        self._is_awaited = threading.Event()

    @property
    def is_stuck(self) -> bool:
        """True if pieces are waiting and nobody is saving them; the next call will raise or try again."""
        return bool(self.pieces) and (self._saving is None or self._saving.done())

    def add(self, pieces: Sequence[_Piece]) -> None:
        """Queue pieces, even if this raises, and wait if there are more than max_pending."""
        self.pieces.extend(pieces)
        if len(self.pieces) > self._max_pending // 2:
            self._is_awaited.set()
        self.wait(self._max_pending)

    def wait(self, num_left: int = 0) -> None:
        """Wait for the thread if more than `num_left` pieces are queued."""
        while self.pieces or self._saving is not None:
            if self._saving is None:
                self._begin()
            elif self._saving.done() or len(self.pieces) > num_left:
                self._is_awaited.set()
                error = self._saving.exception()  # blocks until the thread is done
                self._saving = None
                if error is not None:
                    explained = self._explain(error, len(self.pieces))
                    raise explained from (None if explained is error else error)
            else:
                return

    def close(self) -> None:
        """Save all pieces and end the thread. If saving fails, this raises and may be called again."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
            atexit.unregister(self._finish_at_exit)

    def _begin(self) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "trajectory-writer")
            atexit.register(self._finish_at_exit)
        self._is_awaited.clear()
        self._saving = self._executor.submit(self._save_all)

    def _save_all(self) -> None:
        self._is_awaited.wait(_GATHER_S)
        while self.pieces:
            self._save(self.pieces[0])
            self.pieces.popleft()

    def _finish_at_exit(self) -> None:
        """If the program ends without close(), try failed pieces once more. The thread has ended by then."""
        try:
            while self.pieces and os.getpid() == self._owner_pid:
                self._save(self.pieces[0])
                self.pieces.popleft()
        except Exception as error:  # no caller is left to raise it to
            if self._saving is not None:  # otherwise the error was raised before
                _logger.error("%s", self._explain(error, len(self.pieces)))


class TrajectoryWriter(Sink):
    """Off-policy sink: cuts the steps of N environments into trajectory files.

    Steps go into preallocated columns, one array [T, N, ...] per field, so that a step of all environments is
    one row. A finished piece is copied out once, and a background thread writes it. A piece that ends because
    of the length limit shares one timestep with its successor, so that no transition is lost between them.

    An error while writing is raised by the next call, after it has recorded its arguments. The piece stays
    queued and the call after that tries again; finished pieces are never dropped.

    Args:
        folder: destination of the files; made if it is missing.
        num_envs: N.
        save_every: (low, high); a piece is closed after a random whole number of transitions, uniform from
            low to high inclusive. None closes pieces only at the end of an episode.
        save_as: "npz" or "npz-compressed".
        seed: decides the lengths and, with actor_id, the ids in the file names.
        actor_id: distinguishes several writers with one seed.
        max_pending: calls wait while more pieces than this are not on disk; None for a number that suits N.
        clock: shared by writers whose pieces must be ordered relative to each other; None makes a new one.
        nvec: number of actions of each factor of MultiDiscrete actions; None for other actions.
        terminates_within: episodes that end after at most this many steps, and are stored in one piece, count
            as terminated, even if a time limit ended them.

    Attributes:
        policy_version: number of the policy that acts now, set by the code that changes the policy. It is
            stored with the pieces that are finished from then on. None if unknown.

    Raises:
        ValueError: If save_every or save_as is not allowed.
        OSError: If the folder cannot be made or written to.
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
        clock: WritingClock | None = None,
        nvec: tuple[int, ...] | None = None,
        terminates_within: int = 0,
    ) -> None:
        check_choice("Experiment.save_trajs_as", save_as, FILE_FORMATS)
        if save_every is not None and not 1 <= save_every[0] <= save_every[1]:
            raise ValueError(
                f"save_every is {save_every}, but must be (low, high) with 1 <= low <= high, in transitions. "
                "Fix: set Experiment.traj_save_len to at least 1."
            )
        self.folder, self.num_envs = Path(folder), num_envs
        self.policy_version: int | None = None
        self.nvec, self.terminates_within = nvec, terminates_within
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            is_writable = False
        if not is_writable:
            raise PermissionError(
                f"New trajectories cannot be written to {self.folder}: it is read-only for this process. "
                "Fix: set DiskTrajDataset.takes_new_trajs = False to only read existing files, or "
                "DiskTrajDataset.dset_root to a folder that this process may write to."
            )
        self._save_every = (int(save_every[0]), int(save_every[1])) if save_every else None
        self._save_as, self._seed, self._actor_id = save_as, seed, actor_id
        self._rng = np.random.default_rng([seed, actor_id])
        self._num_pieces, self._clock = 0, clock or WritingClock()
        self._clock.follow(self.folder)
        self._columns: dict[str, Array] = {}  # keys: field names; one step is one row
        self._capacity = _FIRST_CAPACITY
        self._now = 0  # index of the row that holds the newest timestep
        self._starts = np.zeros(num_envs, np.int64)  # index of the first row of each running piece
        self._limits = np.full(num_envs, _NO_LIMIT)
        self._is_running = np.zeros(num_envs, np.bool_)
        self._left_over: list[_Piece] = []  # pieces of another process, to be written with the next flush
        self._env_names = ["env"] * num_envs
        self._background = _Background(self._save, self._explain, max_pending or max(64, 2 * num_envs))

    @property
    def num_pending(self) -> int:
        """Number of finished pieces that are not on disk yet."""
        return len(self._background.pieces)

    def begin(
        self,
        rows: npt.ArrayLike,
        obs: Mapping[str, Array],
        rl2s: Array,
        time_idxs: Array,
        env_names: Sequence[str],
    ) -> None:
        """See Sink. A piece that is still running in one of the rows is finished first."""
        rows = np.atleast_1d(np.asarray(rows, np.int64))
        pieces = self._cut(rows[self._is_running[rows]])
        timestep = self._timestep(obs, rl2s, time_idxs)
        if not self._columns:
            no = np.zeros((self.num_envs, 1), np.bool_)
            self._allocate({**timestep, "rews": no.astype(np.float32), "dones": no})
        for name, values in timestep.items():
            self._columns[name][self._now, rows] = values[rows]
        for row in rows:
            self._env_names[row] = env_names[row]
        self._is_running[rows] = True
        self._continue_from_now(rows)
        self._submit(pieces)

    def add(
        self,
        actions: Array,
        rewards: npt.NDArray[np.float32],
        terminated: npt.NDArray[np.bool_],
        ended: npt.NDArray[np.bool_],
        obs: Mapping[str, Array],
        rl2s: Array,
        time_idxs: Array,
        ignored: npt.NDArray[np.bool_] | None = None,
        extras: Mapping[str, Array] | None = None,
    ) -> None:
        """See Sink.

        When extras appear for the first time, running pieces are finished first. From then on, extras are
        required.

        Raises:
            ValueError: If an environment has no running trajectory, or extras change their names, shapes or
                kinds of numbers.
            OSError: If an earlier piece could not be written; this step is recorded all the same.
        """
        if np.count_nonzero(self._is_running) < self.num_envs:
            raise ValueError(
                f"Environments {np.flatnonzero(~self._is_running).tolist()} have no running trajectory, but "
                "add() needs one in every environment. Fix: call begin() for them after each reset."
            )
        if "actions" not in self._columns:
            dtype = np.int64 if actions.dtype.kind in "iu" else np.float32
            self._allocate({"actions": actions.reshape(self.num_envs, -1).astype(dtype)})
        if self._now + 2 > self._capacity:
            self._make_room()
        pieces = self._take_extras(extras or {})
        step = {
            "actions": actions.reshape(self.num_envs, -1),
            "rews": rewards.reshape(self.num_envs, 1),
            "dones": (terminated | (ended & self._is_whole(time_idxs.reshape(-1)))).reshape(self.num_envs, 1),
        }
        for name, values in step.items():
            self._columns[name][self._now] = values
        if ignored is not None:
            pieces += self._cut(np.flatnonzero(ignored))
            self._is_running[ignored] = False
        self._now += 1
        for name, values in self._timestep(obs, rl2s, time_idxs).items():
            self._columns[name][self._now] = values
        is_full = self._now - self._starts >= self._limits
        if np.count_nonzero(ended | is_full):
            pieces += self._cut(np.flatnonzero(self._is_running & (ended | is_full)))
            self._is_running[ended] = False
            self._continue_from_now(np.flatnonzero(self._is_running & is_full))
        self._submit(pieces)

    def _is_whole(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(N,) bool: the episodes with these lengths are short enough, and their pieces begin with them."""
        is_whole: npt.NDArray[np.bool_] = self._now + 1 - self._starts == lengths
        return is_whole & (lengths <= self.terminates_within)

    def flush_partial(self) -> None:
        """Finish every running piece that has a transition; each continues from its last timestep."""
        left_over, self._left_over = self._left_over, []
        self._submit([*left_over, *self._cut_running()])

    def wait(self) -> None:
        """Block until all finished pieces are on disk. Raises OSError if one cannot be written."""
        self._background.wait()

    def close(self) -> None:
        """Write all finished pieces and end the thread. Call flush_partial first to keep running ones."""
        self._background.close()

    def state_dict(self) -> dict[str, Any]:
        """See Sink. The arrays of the running pieces are views, which the next step may change."""
        return {
            "num_pieces": self._num_pieces,
            "last_time_us": self._clock.last_time_us,
            "rng": self._rng.bit_generator.state,
            "policy_version": self.policy_version,
            "pieces": [
                {
                    "env_name": self._env_names[row],
                    "limit": int(self._limits[row]),
                    "arrays": self._running_arrays(row),
                }
                for row in np.flatnonzero(self._is_running).tolist()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue ids, times, random lengths and running pieces from a saved state.

        The pieces continue in environments where `begin` was called, from the timestep that is their last
        one. If `begin` was not called, they are over, and the next `flush_partial` writes them.
        """
        self._num_pieces = int(state["num_pieces"])
        self._clock.last_time_us = max(self._clock.last_time_us, int(state["last_time_us"]))
        self._rng.bit_generator.state = state["rng"]
        self.policy_version = state["policy_version"]
        pieces = state["pieces"]
        if self._is_running.all() and len(pieces) == self.num_envs:
            self._go_on(pieces)
        else:
            self._keep(pieces)

    def take_over(self, state: dict[str, Any], *, stores_pieces: bool) -> None:
        """See Sink. The next `flush_partial` writes the pieces; numbering continues to keep ids unique."""
        self._num_pieces = max(self._num_pieces, int(state["num_pieces"]))
        self._clock.last_time_us = max(self._clock.last_time_us, int(state["last_time_us"]))
        self.policy_version = state["policy_version"]
        if stores_pieces:
            self._keep(state["pieces"])

    def _keep(self, pieces: Sequence[dict[str, Any]]) -> None:
        """Write these saved pieces with the next flush, except those without a transition."""
        unwritten = [piece for piece in pieces if len(piece["arrays"]["rews"])]
        self._left_over += [self._piece(piece["arrays"], piece["env_name"]) for piece in unwritten]

    def _go_on(self, pieces: Sequence[dict[str, Any]]) -> None:
        """Make these the running pieces, one per environment; each ends with the newest timestep."""
        num_rows = max(len(piece["arrays"]["rl2s"]) for piece in pieces)
        self._capacity, self._now = max(_FIRST_CAPACITY, 2 * num_rows), num_rows - 1
        columns = self._columns = {}
        for row, piece in enumerate(pieces):
            self._env_names[row], self._limits[row] = piece["env_name"], piece["limit"]
            self._starts[row] = start = self._now - len(piece["arrays"]["rews"])
            for name, array in piece["arrays"].items():
                if name not in columns:
                    columns[name] = np.empty((self._capacity, self.num_envs, *array.shape[1:]), array.dtype)
                columns[name][start : start + len(array), row] = array

    def _timestep(self, obs: Mapping[str, Array], rl2s: Array, time_idxs: Array) -> dict[str, Array]:
        named = {_OBS + key: value for key, value in obs.items()}
        return {**named, "rl2s": rl2s, "time_idxs": time_idxs.reshape(self.num_envs, 1)}

    def _allocate(self, like: Mapping[str, Array]) -> None:
        for name, values in like.items():
            dtype = _DTYPES.get(name, values.dtype)
            self._columns[name] = np.empty((self._capacity, *values.shape), dtype)

    def _take_extras(self, extras: Mapping[str, Array]) -> list[_Piece]:
        """Write the extras of this step. Returns the finished pieces that were begun without extras."""
        names = [name for name in self._columns if name.startswith(_EXTRA)]
        if not extras and not names:
            return []
        found = {key: (value.shape, value.dtype.name) for key, value in extras.items()}
        expected = {key: ((self.num_envs, *shape[1:]), dtype) for key, (shape, dtype) in found.items()}
        if names:
            columns = {name.removeprefix(_EXTRA): self._columns[name] for name in names}
            expected = {key: (column.shape[1:], column.dtype.name) for key, column in columns.items()}
        if found != expected:
            raise ValueError(
                f"This step has the extras {found}, but {expected} are expected: all steps of a file have "
                "the same extras. Fix: let the agent return the same extras, with the same shapes (N, "
                "...) and dtypes, whenever it acts."
            )
        pieces: list[_Piece] = []
        if not names:
            pieces = self._cut_running()
            self._allocate({_EXTRA + key: value for key, value in extras.items()})
        for key, value in extras.items():
            self._columns[_EXTRA + key][self._now] = value
        return pieces

    def _cut_running(self) -> list[_Piece]:
        """Finish every running piece that has a transition; each continues from its last timestep."""
        rows = np.flatnonzero(self._is_running & (self._starts < self._now))
        pieces = self._cut(rows)
        self._continue_from_now(rows)
        return pieces

    def _make_room(self) -> None:
        """Drop the rows before every running piece, and double the columns if that frees less than half."""
        shift = int(self._starts[self._is_running].min())
        used = self._now + 1 - shift
        if shift < self._capacity // 2:
            self._capacity *= 2
            for name, column in self._columns.items():
                grown = np.empty((self._capacity, *column.shape[1:]), column.dtype)
                grown[:used] = column[shift : shift + used]
                self._columns[name] = grown
        else:
            for column in self._columns.values():
                column[:used] = column[shift : shift + used]
        self._now -= shift
        self._starts -= shift

    def _continue_from_now(self, rows: npt.NDArray[np.int64]) -> None:
        """Begin pieces of `rows` with the newest timestep, which they share with their predecessors."""
        self._starts[rows] = self._now
        if self._save_every is not None:
            self._limits[rows] = self._rng.integers(*self._save_every, size=len(rows), endpoint=True)

    def _cut(self, rows: npt.NDArray[np.int64]) -> list[_Piece]:
        """Copy running pieces that have a transition out of the columns; the thread does the rest."""
        pieces = []
        for row in rows[self._starts[rows] < self._now].tolist():
            arrays = {name: array.copy() for name, array in self._running_arrays(row).items()}
            pieces.append(self._piece(arrays, self._env_names[row]))
        return pieces

    def _running_arrays(self, row: int) -> dict[str, Array]:
        """Views of the running piece of one environment."""
        start, stop = int(self._starts[row]), self._now
        return {
            name: column[start : stop + 1 if name in _PER_TIMESTEP or name.startswith(_OBS) else stop, row]
            for name, column in self._columns.items()
        }

    def _piece(self, arrays: dict[str, Array], env_name: str) -> _Piece:
        self._num_pieces += 1
        number, time_us = self._num_pieces - 1, self._clock.now_us()
        return _Piece(arrays, env_name, self.policy_version, number, time_us / 1e6)

    def _submit(self, pieces: list[_Piece]) -> None:
        if pieces or self._background.is_stuck:
            self._background.add(pieces)

    def _save(self, piece: _Piece) -> None:
        arrays = piece.arrays
        fields: dict[str, Any] = {name: array for name, array in arrays.items() if "/" not in name}
        traj = Trajectory(
            **fields,
            obs=_under(_OBS, arrays),
            env_name=piece.env_name,
            policy_version=piece.policy_version,
            nvec=self.nvec,
            extras=_under(_EXTRA, arrays),
        )
        label = f"{self._seed} {self._actor_id} {piece.number}".encode()
        traj_id = hashlib.blake2b(label, digest_size=4).hexdigest()
        save_trajectory(self.folder, traj, save_as=self._save_as, traj_id=traj_id, unix_time=piece.unix_time)

    def _explain(self, error: BaseException, num_pending: int) -> BaseException:
        if not isinstance(error, OSError):
            return error
        return OSError(
            f"A finished trajectory could not be written to {self.folder}: {error}. {num_pending} finished "
            "trajectories are in memory only. Each further call tries to write them again; they are lost "
            "if the process ends before that succeeds. Fix: free space on that disk, or restore the folder "
            "and its permissions."
        )


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays whose names begin with `prefix`; the prefix is removed."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
