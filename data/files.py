"""Trajectory files: their names, atomic writing, reading, and a bounded cache of opened files."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import BrokenTrajectoryError, FormatError, check_choice
from .foreign import OBS_PREFIX, arrays_of, from_arrays, to_arrays
from .npz import pack_npz, read_npz
from .rows import Bytes, OpenFile, StoredRows, whole
from .trajectory import Trajectory
from .values import find_bad_value

FILE_FORMATS = ("npz", "npz-compressed")
TEMPORARY_SUFFIX = ".tmp"
KEEP_OPEN_ABOVE_BYTES = 128 << 10  # windows of larger files are read one by one, smaller files as a whole
_JOINED_BYTES = 16 << 20
_OBJECT_BYTES = 4096  # approximate size of the Python objects of one opened file
_MAX_ENV_NAME_LENGTH = 150  # a file name may have 255 bytes
_MAX_COMMENT_CHARS = 10_000  # maximum for an archive's comment: 65,535 bytes of JSON
_LATEST_S = 1e11  # the year 5138; a later time is not in seconds
_NOT_REGULAR = "it is not a regular file, but a pipe, a socket or a device"
_NAME = re.compile(r"(?P<env>.+)_(?P<id>[0-9A-Za-z]+)_(?P<time>\d+(\.\d+)?)\.npz")


class TrajectoryName(NamedTuple):
    """The parts of a file name, `<env>_<id>_<unix time>.npz`; `<env>` may contain underscores."""

    env_name: str
    traj_id: str
    unix_time: float  # seconds


def format_name(env_name: str, traj_id: str, unix_time: float) -> str:
    """Return the file name of a trajectory.

    Characters of the environment's name that are unsafe in file names become dashes. So do underscores,
    because AMAGO 3.x splits file names there. The name inside the file is unchanged.
    """
    return f"{_safe_env_name(env_name)}_{traj_id}_{unix_time:.6f}.npz"


@functools.lru_cache(maxsize=1024)
def _safe_env_name(env_name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.+=,@-]", "-", env_name)[:_MAX_ENV_NAME_LENGTH] or "env"


def parse_name(name: str) -> TrajectoryName | None:
    """Return the parts of a trajectory's file name (without folder), or None for any other name.

    A time that is not in seconds would make all later files look older, so it is not a name of a trajectory.
    """
    match = _NAME.fullmatch(name)
    if match is None or (unix_time := float(match["time"])) >= _LATEST_S:
        return None
    return TrajectoryName(match["env"], match["id"], unix_time)


def save_trajectory(folder: Path, traj: Trajectory, *, save_as: str, traj_id: str, unix_time: float) -> Path:
    """Write a trajectory atomically: readers see the whole file or none.

    The data goes to a name that ends in `.tmp`, which readers ignore, and is renamed when complete. It is not
    forced to the physical disk: a killed process leaves no partial file, but a power cut may.

    AMAGO 3.x can read both formats. Some information is lost there: the policy version and extras (members
    that it does not look for), the distinction between discrete and continuous actions, and characters of the
    environment's name that became dashes in the file name.

    Args:
        folder: existing folder.
        traj: what to write; observations keep their dtypes.
        save_as: "npz" or "npz-compressed".
        traj_id: 8 hexadecimal digits.
        unix_time: seconds; orders the files of a folder.

    Returns: the path of the finished file.

    Raises:
        ValueError: If the format is unknown or cannot hold an array, or discrete actions are not one-hot.
        OSError: If the file could not be written; nothing is left behind.
    """
    check_choice("Experiment.save_trajs_as", save_as, FILE_FORMATS)
    path = f"{folder}/{format_name(traj.env_name, traj_id, unix_time)}"  # cheaper than a Path
    temporary = path + TEMPORARY_SUFFIX
    comment = b""
    if _safe_env_name(traj.env_name) != traj.env_name:
        comment = json.dumps({"env_name": traj.env_name[:_MAX_COMMENT_CHARS]}).encode()
    parts = pack_npz(to_arrays(traj), comment, save_as == "npz-compressed")
    if sum(map(len, parts)) <= _JOINED_BYTES:
        # A system call on a background thread waits for the interpreter, so make few of them.
        parts = [b"".join(parts)]
    try:
        with open(temporary, "wb") as file:  # noqa: PTH123 (as above)
            file.writelines(parts)
        os.replace(temporary, path)  # noqa: PTH105 (one name for the rename, so that a test can make it fail)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(path)


class _Opened(NamedTuple):
    traj: Trajectory
    ram_bytes: int
    file: OpenFile | None  # the open file that some of its rows are read from


def load_trajectory(path: str | Path) -> Trajectory:
    """Read one file; the arrays are read-only.

    Files by AMAGO 3.x, files of our older formats, and other files with the arrays of a trajectory are
    converted to our dtypes and shapes.

    Raises:
        FileNotFoundError: If it does not exist.
        OSError: If it cannot be read.
        BrokenTrajectoryError: If it is not a complete trajectory. Nothing is ever unpickled.
    """
    return _open(str(path)).traj


def check_file(path: str | Path) -> Trajectory:
    """Read a file, compare it with its checksums, and check all its values.

    Loading a file does not do this. Returns and raises like load_trajectory; a file with values that cannot
    be trained on counts as broken.
    """
    traj = _open(str(path), is_checked=True).traj
    if problem := find_bad_value(traj):
        raise bad_value_error(path, problem)
    return traj


def bad_value_error(path: str | Path, problem: str) -> BrokenTrajectoryError:
    """The error for a complete file with a value that find_bad_value describes."""
    return BrokenTrajectoryError(
        f"{path} cannot be trained on: {problem}. Fix: move the file out of the folder, and correct the "
        "environment, wrapper or conversion that writes such values."
    )


def format_error(path: str | Path, error: FormatError) -> BrokenTrajectoryError:
    """The error for a file in which a reader found `error`."""
    size = ""
    with contextlib.suppress(OSError):
        size = f" ({os.stat(path).st_size} bytes)"  # noqa: PTH116 (a str is as good as a Path)
    return BrokenTrajectoryError(
        f"{path}{size} is not a readable trajectory file: {error}. Expected is a complete .npz archive of "
        "plain (never pickled) arrays. Fix: move the file out of the folder or delete it."
    )


def _open(path: str, *, is_checked: bool = False, keeps_open: bool = False) -> _Opened:
    """Read a file; with keeps_open, large observations are StoredRows."""
    try:
        file = _open_file(path)
        source: Bytes = file
        if not keeps_open or len(file) <= KEEP_OPEN_ABOVE_BYTES:
            source = file[:]
        if source[:2] != b"PK":
            raise FormatError(f"it begins with {source[:8]!r}, unlike an .npz file")
        arrays, env_name = read_npz(source, is_checked=is_checked)
        if env_name is None:
            parsed = parse_name(os.path.basename(path))  # noqa: PTH119 (a fifth of the time)
            env_name = parsed.env_name if parsed else "env"
        stored = {name for name, array in arrays.items() if _stays_in_file(name, array)}
        arrays = {name: array if name in stored else whole(array) for name, array in arrays.items()}
        traj = from_arrays(arrays, env_name)
    except FormatError as error:
        raise format_error(path, error) from error
    in_memory = (array.nbytes for array in arrays_of(traj) if isinstance(array, np.ndarray))
    return _Opened(traj, _OBJECT_BYTES + sum(in_memory), file if stored else None)


def _stays_in_file(name: str, array: Any) -> bool:
    """Return True for large observations. Small arrays are kept in memory: each read is a system call."""
    is_large = isinstance(array, StoredRows) and array.nbytes > KEEP_OPEN_ABOVE_BYTES // 2
    return is_large and name.startswith(OBS_PREFIX) and array.dtype.isnative


def _open_file(path: str) -> OpenFile:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would block
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FormatError(_NOT_REGULAR) from error
        if error.errno == errno.ELOOP:
            raise FormatError("it is a link to itself") from error
        raise
    file = OpenFile(descriptor)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise FormatError("it is a folder" if stat.S_ISDIR(mode) else _NOT_REGULAR)
    if not len(file):
        raise FormatError("it is empty")
    return file


class TrajectoryReader:
    """Reads trajectory files and caches recently used ones.

    Files never change once they have their final name, so a path identifies its content. Small files,
    compressed files and the small arrays of other files are kept in memory. Large observations are
    StoredRows: a slice of the trajectory reads only the rows that it needs. Memory and the number of open
    files are bounded; the least recently used file is closed first.

    Args:
        max_ram_bytes: memory for cached data.
        max_open_files: number of files that stay open.
    """

    def __init__(self, *, max_ram_bytes: int = 256 << 20, max_open_files: int = 256) -> None:
        self._max_ram_bytes, self._max_open_files = max_ram_bytes, max_open_files
        self._opened: OrderedDict[str, _Opened] = OrderedDict()  # least recently used first
        self._in_files: OrderedDict[str, None] = OrderedDict()  # files that are open, in the same order
        self.ram_bytes = 0

    def load(self, path: str) -> Trajectory:
        """Return the trajectory of a file; slices of it are arrays. Raises like load_trajectory."""
        if (found := self._opened.get(path)) is not None:
            self._opened.move_to_end(path)
            if found.file is not None:
                self._in_files.move_to_end(path)
            return found.traj
        opened = self._opened[path] = _open(path, keeps_open=True)
        self.ram_bytes += opened.ram_bytes
        if opened.file is not None:
            self._in_files[path] = None
        while self.ram_bytes > self._max_ram_bytes:
            self._forget(next(iter(self._opened)))
        while len(self._in_files) > self._max_open_files:
            self._forget(next(iter(self._in_files)))
        return opened.traj

    def forget(self, paths: Iterable[str]) -> None:
        """Drop files from the cache, for example because they were deleted."""
        for path in paths:
            if path in self._opened:
                self._forget(path)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the opened files, for pickling."""
        return {**vars(self), "_opened": OrderedDict(), "_in_files": OrderedDict(), "ram_bytes": 0}

    def _forget(self, path: str) -> None:
        self.ram_bytes -= self._opened.pop(path).ram_bytes
        self._in_files.pop(path, None)
