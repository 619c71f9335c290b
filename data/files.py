"""Trajectory files: their names, writing one atomically, reading one, and a bounded cache of opened ones."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import BrokenTrajectoryError, FormatError, check_choice
from .foreign import arrays_of, from_arrays, to_arrays
from .npz import pack_npz, read_npz
from .traj import MAGIC_OF_VERSION_1, is_traj, pack_traj, read_traj
from .trajectory import Array, Trajectory

FILE_FORMATS = ("npz", "npz-compressed", "traj")
TEMPORARY_SUFFIX = ".tmp"
MAP_ABOVE_BYTES = 128 << 10  # larger files are mapped, smaller ones read at once
_JOINED_BYTES = 16 << 20
_OBJECT_BYTES = 4096  # what the Python objects of one opened file take, roughly
_MAX_ENV_NAME_LENGTH = 150  # a file name may have 255 bytes
_MAX_COMMENT_CHARS = 10_000  # of an archive, 65,535 bytes of JSON at most
_NOT_REGULAR = "it is no regular file, but a pipe, a socket or a device"
_NAME = re.compile(r"(?P<env>.+)_(?P<id>[0-9A-Za-z]+)_(?P<time>\d+(\.\d+)?)\.(npz|traj)")


class TrajectoryName(NamedTuple):
    """The parts of a file name, `<env>_<id>_<unix time>.<npz or traj>`; `<env>` may contain underscores."""

    env_name: str
    traj_id: str
    unix_time: float  # seconds


def format_name(env_name: str, traj_id: str, unix_time: float, save_as: str = "npz") -> str:
    """Return the file name of a trajectory.

    Characters of the environment's name that are unsafe in file names become dashes, and so do underscores,
    because AMAGO 3.x splits file names there. The files themselves keep the name as it is.
    """
    suffix = "traj" if save_as == "traj" else "npz"
    return f"{_safe_env_name(env_name)}_{traj_id}_{unix_time:.6f}.{suffix}"


@functools.lru_cache(maxsize=1024)
def _safe_env_name(env_name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.+=,@-]", "-", env_name)[:_MAX_ENV_NAME_LENGTH] or "env"


def parse_name(name: str) -> TrajectoryName | None:
    """Return the parts of a trajectory's file name (without folder), or None if it is not one."""
    match = _NAME.fullmatch(name)
    return TrajectoryName(match["env"], match["id"], float(match["time"])) if match else None


def save_trajectory(folder: Path, traj: Trajectory, *, save_as: str, traj_id: str, unix_time: float) -> Path:
    """Write a trajectory so that readers see the whole file or none.

    The data goes to a name that ends in `.tmp`, which readers ignore, and is renamed when complete. It is not
    forced to the physical disk: a killed process leaves no partial file, a power cut may.

    Both npz formats can be read by AMAGO 3.x. What is not carried over there: the policy version and extras
    (members that it does not look for), the difference between discrete and continuous actions, and
    characters of the environment's name that became dashes in the file name.

    Args:
        folder: existing folder.
        traj: what to write; observations keep their dtypes.
        save_as: "npz", "npz-compressed" or "traj".
        traj_id: 8 hexadecimal digits.
        unix_time: seconds; orders the files of a folder.

    Returns: the path of the finished file.

    Raises:
        ValueError: If the format is unknown or cannot hold an array, or discrete actions are not one-hot.
        OSError: If it could not be written; then nothing is left behind.
    """
    check_choice("Experiment.save_trajs_as", save_as, FILE_FORMATS)
    path = f"{folder}/{format_name(traj.env_name, traj_id, unix_time, save_as)}"  # costs less than a Path
    temporary = path + TEMPORARY_SUFFIX
    arrays = to_arrays(traj)
    if save_as == "traj":
        parts = pack_traj(arrays, traj.env_name)
    else:
        comment = b""
        if _safe_env_name(traj.env_name) != traj.env_name:
            comment = json.dumps({"env_name": traj.env_name[:_MAX_COMMENT_CHARS]}).encode()
        parts = pack_npz(arrays, comment, save_as == "npz-compressed")
    if sum(map(len, parts)) <= _JOINED_BYTES:
        parts = [b"".join(parts)]  # few system calls: on a background thread, each waits for the interpreter
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
    is_mapped: bool


def load_trajectory(path: str | Path) -> Trajectory:
    """Read one file of any format; the arrays are read-only.

    Large files are mapped, so that only what is looked at is read, small ones are read at once, and
    compressed ones decoded. Files by AMAGO 3.x, older ones of ours and others that have the arrays of a
    trajectory are brought to our dtypes and shapes.

    Raises:
        FileNotFoundError: If it does not exist.
        BrokenTrajectoryError: If it is not a complete trajectory. Nothing is ever unpickled.
    """
    return _open(str(path)).traj


open_trajectory = load_trajectory  # both names are public


def check_file(path: str | Path) -> None:
    """Read all of a file and compare it with its checksums, which every format has.

    Opening a file does not do this, since it would read what is not needed. Raises like load_trajectory.
    """
    _open(str(path), is_checked=True)


def _open(path: str, *, is_checked: bool = False) -> _Opened:
    try:
        buffer = _read_or_map(path)
        env_name: str | None
        if buffer[:2] == b"PK":
            arrays, env_name = read_npz(buffer, is_checked=is_checked)
        elif is_traj(buffer):
            arrays, env_name = read_traj(buffer, is_checked=is_checked)
        elif buffer[: len(MAGIC_OF_VERSION_1)] == MAGIC_OF_VERSION_1:
            mend = "with that Loxodon, python -m loxodon.data convert FOLDER NEW_FOLDER --to npz"
            raise FormatError("it is a .traj file of version 1, which an earlier Loxodon wrote", mend)
        else:
            raise FormatError(f"it begins with {buffer[:8]!r}, like neither an .npz nor a .traj file")
        if env_name is None:
            parsed = parse_name(os.path.basename(path))  # noqa: PTH119 (a fifth of the time)
            env_name = parsed.env_name if parsed else "env"
        traj = from_arrays(arrays, env_name)
    except FormatError as error:
        raise BrokenTrajectoryError(
            f"{path} ({Path(path).stat().st_size} bytes) is not a readable trajectory file: {error}. Allowed "
            f"is a complete file in one of the formats {', '.join(FILE_FORMATS)}, of plain (never pickled) "
            f"arrays. Fix: {error.mend}"
        ) from error
    in_memory = [array for array in arrays_of(traj) if not _is_mapped(array)]
    ram_bytes = _OBJECT_BYTES + sum(array.nbytes for array in in_memory)
    return _Opened(traj, ram_bytes, is_mapped=len(in_memory) < len(arrays_of(traj)))


def _is_mapped(array: Array) -> bool:
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _read_or_map(path: str) -> bytes | mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to would block
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FormatError(_NOT_REGULAR) from error
        raise
    try:
        status = os.fstat(descriptor)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("it is a folder" if stat.S_ISDIR(status.st_mode) else _NOT_REGULAR)
        if size > MAP_ABOVE_BYTES:
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        data = os.read(descriptor, size)
    finally:
        os.close(descriptor)
    if not data:
        raise FormatError("it is empty")
    return data


class TrajectoryReader:
    """Reads trajectory files and keeps the recently used ones open.

    Files never change once they have their final name, so a path identifies its content. Small and compressed
    files are kept in memory, large ones as memory maps; both are bounded, least recently used goes first.

    Args:
        max_ram_bytes: memory for files that are held in memory.
        max_open_maps: number of memory maps; each one keeps a file descriptor.
    """

    def __init__(self, *, max_ram_bytes: int = 256 << 20, max_open_maps: int = 256) -> None:
        self._max_ram_bytes, self._max_open_maps = max_ram_bytes, max_open_maps
        self._opened: OrderedDict[str, _Opened] = OrderedDict()  # least recently used first
        self._mapped: OrderedDict[str, None] = OrderedDict()  # those of them that are maps, in the same order
        self.ram_bytes = 0

    @property
    def num_maps(self) -> int:
        """Number of files that are mapped now."""
        return len(self._mapped)

    def __len__(self) -> int:
        """Return the number of files that are kept open."""
        return len(self._opened)

    def load(self, path: str) -> Trajectory:
        """Return the trajectory of a file. Raises like load_trajectory."""
        found = self._opened.get(path)
        if found is not None:
            self._opened.move_to_end(path)
            if found.is_mapped:
                self._mapped.move_to_end(path)
            return found.traj
        opened = self._opened[path] = _open(path)
        self.ram_bytes += opened.ram_bytes
        if opened.is_mapped:
            self._mapped[path] = None
        while self.ram_bytes > self._max_ram_bytes:
            self._forget(next(iter(self._opened)))
        while len(self._mapped) > self._max_open_maps:
            self._forget(next(iter(self._mapped)))
        return opened.traj

    def forget(self, paths: Iterable[str]) -> None:
        """Let go of files, for example because they were deleted."""
        for path in paths:
            if path in self._opened:
                self._forget(path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the opened files behind when this goes to another process."""
        return {**vars(self), "_opened": OrderedDict(), "_mapped": OrderedDict(), "ram_bytes": 0}

    def _forget(self, path: str) -> None:
        self.ram_bytes -= self._opened.pop(path).ram_bytes
        self._mapped.pop(path, None)
