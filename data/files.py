"""Trajectory files: their names, writing one atomically, reading one, and a bounded cache of opened ones."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import re
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .action_forms import factor_indices, factor_rows
from .compressed import BlockTrajectory
from .container import MAGIC, pack_container, read_container, verify_container
from .content import NVEC, OBS_PREFIX, build_trajectory, to_indices, to_one_hot
from .errors import BrokenTrajectoryError, FormatError
from .extras import EXTRA_PREFIX
from .npz import POLICY_VERSION, read_npz, verify_npz
from .npz_writing import MAX_BYTES, pack_compressed_npz, pack_npz
from .trajectory import Array, StoredTrajectory, Trajectory

FILE_FORMATS = ("npz", "npz-compressed", "traj")
TEMPORARY_SUFFIX = ".tmp"
MAP_ABOVE_BYTES = 128 << 10  # larger files are mapped, smaller ones read at once
_JOINED_BYTES = 16 << 20
_MAX_OVERHEAD_BYTES = 64 << 20  # of an archive: its headers, and blocks that compression makes longer
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


def check_file_format(save_as: str) -> None:
    """Raise ValueError unless `save_as` is one of the formats that can be written."""
    if save_as in FILE_FORMATS:
        return
    raise ValueError(
        f"Trajectories cannot be saved as {save_as!r}; allowed are {', '.join(map(repr, FILE_FORMATS))}. "
        "Fix: set Experiment.save_trajs_as = 'npz'."
    )


def save_trajectory(folder: Path, traj: Trajectory, *, save_as: str, traj_id: str, unix_time: float) -> Path:
    """Write a trajectory so that readers see the whole file or none.

    The data goes to a name that ends in `.tmp`, which readers ignore, and is renamed when complete. It is not
    forced to the physical disk: a killed process leaves no partial file, a power cut may.

    Both npz formats can be read by AMAGO 3.x: discrete actions are stored as one-hot rows of bytes. What is
    not carried over there: the policy version and extras (members that it does not look for), the difference
    between discrete and continuous actions, and characters of the environment's name that became dashes in
    the file name. `traj` stores discrete actions as indices, and all of the above.

    Args:
        folder: existing folder.
        traj: what to write; observations keep their dtypes.
        save_as: "npz", "npz-compressed" or "traj".
        traj_id: 8 hexadecimal digits.
        unix_time: seconds; orders the files of a folder.

    Returns: the path of the finished file.

    Raises:
        ValueError: If the format is unknown, an array holds Python objects, or a discrete action is out of
            range.
        OSError: If it could not be written; then nothing is left behind.
    """
    check_file_format(save_as)
    path = f"{folder}/{format_name(traj.env_name, traj_id, unix_time, save_as)}"  # costs less than a Path
    temporary = path + TEMPORARY_SUFFIX
    payload = _list_arrays(traj, as_indices=save_as == "traj")
    num_bytes = sum([array.nbytes for array in payload.values()])
    try:
        if save_as == "traj":
            parts = pack_container(
                payload,
                env_name=traj.env_name,
                policy_version=traj.policy_version,
                num_transitions=len(traj),
            )
            _write_at_once(temporary, parts, num_bytes)
        else:
            _write_npz(temporary, payload, traj, num_bytes, is_compressed=save_as == "npz-compressed")
        os.replace(temporary, path)  # noqa: PTH105 (one name for the rename, so that a test can make it fail)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(path)


def _list_arrays(traj: Trajectory, *, as_indices: bool) -> dict[str, Array]:
    """Return what is written, by name in the file."""
    arrays: dict[str, Array] = {f"{OBS_PREFIX}{key}": value for key, value in traj.obs.items()}
    arrays.update(rl2s=traj.rl2s, time_idxs=traj.time_idxs, rews=traj.rews, dones=traj.dones)
    arrays["actions"] = traj.actions
    if traj.extras:
        arrays.update({f"{EXTRA_PREFIX}{name}": value for name, value in traj.extras.items()})
    for name, array in arrays.items():
        if array.dtype.kind in "OV":
            raise ValueError(
                f"{name} of a trajectory of {traj.env_name!r} holds Python objects or records (dtype "
                f"{array.dtype}), but only plain arrays are written, since reading objects means unpickling. "
                "Fix: encode it as numbers in the environment."
            )
    if traj.nvec is not None:
        indices = factor_indices(traj.actions, traj.nvec)
        smallest = np.min_scalar_type(-max(traj.nvec))  # signed: uint8 means rows
        arrays["actions"] = indices.astype(smallest) if as_indices else factor_rows(indices, traj.nvec)
        arrays[NVEC] = np.array([traj.nvec], np.int64)
    elif traj.actions.dtype.kind in "iub":
        encode = to_indices if as_indices else to_one_hot
        arrays["actions"] = encode(traj.actions, traj.rl2s.shape[1] - 1)
    return arrays


def _write_npz(
    path: str, arrays: dict[str, Array], traj: Trajectory, num_bytes: int, *, is_compressed: bool
) -> None:
    if traj.policy_version is not None:
        arrays[POLICY_VERSION] = np.array([traj.policy_version], np.int64)
    comment = b""
    if _safe_env_name(traj.env_name) != traj.env_name:
        comment = json.dumps({"env_name": traj.env_name[:_MAX_COMMENT_CHARS]}).encode()
    if num_bytes > MAX_BYTES - _MAX_OVERHEAD_BYTES:
        save: Any = np.savez_compressed if is_compressed else np.savez
        with Path(path).open("wb") as file:
            save(file, **arrays)
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = comment
    elif is_compressed:
        _write_at_once(path, pack_compressed_npz(arrays, len(traj) + 1, comment), num_bytes)
    else:
        _write_at_once(path, pack_npz(arrays, comment), num_bytes)


def _write_at_once(path: str, parts: list[Any], num_bytes: int) -> None:
    """Write a new file in few system calls: on a background thread, each waits for the interpreter lock."""
    if num_bytes <= _JOINED_BYTES:
        parts = [b"".join(parts)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            written = os.write(descriptor, part)
            while written < len(part):
                written += os.write(descriptor, memoryview(part)[written:])
    finally:
        os.close(descriptor)


class _Opened(NamedTuple):
    traj: StoredTrajectory
    ram_bytes: int
    is_mapped: bool


def open_trajectory(path: str | Path) -> StoredTrajectory:
    """Open one file of any format without reading more than is needed now.

    Large files are mapped, small ones are read at once. A compressed file that Loxodon wrote decodes what its
    slices need; those of numpy.savez_compressed are decoded here. Files by AMAGO 3.x, older ones of ours and
    others that have the arrays of a trajectory are brought to our dtypes and shapes.

    Raises:
        FileNotFoundError: If it does not exist.
        BrokenTrajectoryError: If it is not a complete trajectory. Nothing is ever unpickled.
    """
    return _open(str(path)).traj


def load_trajectory(path: str | Path) -> Trajectory:
    """Return the whole of one file; its arrays are read-only. Raises like open_trajectory."""
    stored = _open(str(path)).traj
    return stored if isinstance(stored, Trajectory) else stored.slice(0, len(stored))


def check_file(path: str | Path) -> None:
    """Read all of a file and compare it with its checksums, which every format has.

    Opening a file does not do this, since it would read what is not needed. Raises like open_trajectory.
    """
    dict(load_trajectory(path).extras)  # reads them
    try:
        buffer, _ = _read_or_map(str(path))
        if buffer[: len(MAGIC)] == MAGIC:
            verify_container(buffer)
        else:
            verify_npz(buffer, str(path))
    except FormatError as error:
        raise _name_file(str(path), error) from error


def _open(path: str) -> _Opened:
    try:
        buffer, is_mapped = _read_or_map(path)
        if buffer[: len(MAGIC)] == MAGIC:
            content = read_container(buffer)
        elif buffer[:2] == b"PK":
            content = read_npz(buffer, path)
        else:
            raise FormatError(f"it begins with {buffer[:8]!r}, like neither an .npz nor a .traj file")
        env_name = content.env_name
        if env_name is None:
            parsed = parse_name(os.path.basename(path))  # noqa: PTH119 (a fifth of the time)
            env_name = parsed.env_name if parsed else "env"
        traj = build_trajectory(content, env_name)
    except FormatError as error:
        raise _name_file(path, error) from error
    ram_bytes = content.ram_bytes + _OBJECT_BYTES
    if content.is_buffer_used and not is_mapped:
        ram_bytes += len(buffer)
    blocks = content.blocks
    stored = traj if blocks is None else BlockTrajectory(traj, blocks)
    return _Opened(stored, ram_bytes, is_mapped and content.is_buffer_used)


def _read_or_map(path: str) -> tuple[bytes | mmap.mmap, bool]:
    """Return the bytes of a file, and whether they are mapped."""
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
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), True
        data = os.read(descriptor, size)
    finally:
        os.close(descriptor)
    if not data:
        raise FormatError("it is empty")
    return data, False


def _name_file(path: str, error: FormatError) -> BrokenTrajectoryError:
    return BrokenTrajectoryError(
        f"{path} ({os.stat(path).st_size} bytes) is not a readable trajectory file: {error}. Allowed is a "  # noqa: PTH116
        f"complete file in one of the formats {', '.join(FILE_FORMATS)}, of plain (never pickled) arrays. "
        "Fix: move the file out of the folder or delete it."
    )


class TrajectoryReader:
    """Reads trajectory files and keeps the recently used ones open.

    Files never change once they have their final name, so a path identifies its content. Small files are kept
    in memory, large ones as memory maps, and what was decoded of compressed ones in memory; both are bounded,
    least recently used goes first.

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

    def load(self, path: str) -> StoredTrajectory:
        """Return the trajectory of a file. Raises like open_trajectory."""
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

    def _forget(self, path: str) -> None:
        self.ram_bytes -= self._opened.pop(path).ram_bytes
        self._mapped.pop(path, None)
