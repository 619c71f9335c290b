"""Trajectory files: their names, writing one atomically, reading one, and a bounded cache of opened ones."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import BrokenTrajectoryError
from .npz import NpzContent, read_npz
from .npz_writing import pack_npz
from .trajectory import Array, StoredTrajectory, Trajectory

FILE_FORMATS = ("npz", "npz-compressed", "traj")
TEMPORARY_SUFFIX = ".tmp"
_OBS_PREFIX = "_OBS_KEY_"
_BUFFERED_BYTES = 16 << 20
_MAX_ENV_NAME_LENGTH = 150  # a file name may have 255 bytes
_NAME = re.compile(r"(?P<env>.+)_(?P<id>[0-9A-Za-z]+)_(?P<time>\d+(\.\d+)?)\.(npz|traj)")
_DTYPES: dict[str, npt.DTypeLike] = {
    "rl2s": np.float32,
    "time_idxs": np.int64,
    "rews": np.float32,
    "dones": np.bool_,
}


class TrajectoryName(NamedTuple):
    """The parts of a file name, `<env>_<id>_<unix time>.<npz or traj>`; `<env>` may contain underscores."""

    env_name: str
    traj_id: str
    unix_time: float  # seconds


def format_name(env_name: str, traj_id: str, unix_time: float, save_as: str = "npz") -> str:
    """Return the file name of a trajectory; characters that are unsafe in file names become dashes."""
    suffix = "traj" if save_as == "traj" else "npz"
    safe = re.sub(r"[^\w.+=,@-]", "-", env_name, flags=re.ASCII)[:_MAX_ENV_NAME_LENGTH] or "env"
    return f"{safe}_{traj_id}_{unix_time:.6f}.{suffix}"


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

    Args:
        folder: existing folder.
        traj: what to write, in its own dtypes.
        save_as: "npz" or "npz-compressed".
        traj_id: 8 hexadecimal digits.
        unix_time: seconds; orders the files of a folder.

    Returns: the path of the finished file.

    Raises:
        ValueError: If the format is unknown or an array holds Python objects.
        OSError: If it could not be written; then nothing is left behind.
    """
    check_file_format(save_as)
    payload: dict[str, Any] = {f"{_OBS_PREFIX}{key}": value for key, value in traj.obs.items()}
    for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
        payload[name] = getattr(traj, name)
    for name, array in payload.items():
        if array.dtype.hasobject:
            raise ValueError(
                f"{name} of a trajectory of {traj.env_name!r} holds Python objects (dtype {array.dtype}), "
                "but only plain arrays are written, since reading objects means unpickling. Fix: encode it "
                "as numbers in the environment."
            )
    path = folder / format_name(traj.env_name, traj_id, unix_time, save_as)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        if save_as == "npz" and sum(array.nbytes for array in payload.values()) <= _BUFFERED_BYTES:
            _write_at_once(temporary, pack_npz(payload))
        else:
            save = np.savez if save_as == "npz" else np.savez_compressed
            with temporary.open("wb") as file:
                save(file, **payload)
        os.replace(temporary, path)  # noqa: PTH105 (one name for the rename, so that a test can make it fail)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _write_at_once(path: Path, data: bytes) -> None:
    """Write a new file in few system calls: on a background thread, each waits for the interpreter lock."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def open_trajectory(path: str | Path) -> StoredTrajectory:
    """Open one file without reading more than is needed now.

    Raises:
        FileNotFoundError: If it does not exist.
        BrokenTrajectoryError: If it is not a complete trajectory. Nothing is ever unpickled.
    """
    return load_trajectory(Path(path))


def load_trajectory(path: Path) -> Trajectory:
    """Read one file; its arrays are read-only, and those of a large uncompressed file are mapped, not read.

    Raises:
        FileNotFoundError: If it does not exist.
        BrokenTrajectoryError: If it is not a complete trajectory. Nothing is ever unpickled.
    """
    return _to_trajectory(path, read_npz(path))


def check_file(path: str | Path) -> None:
    """Read all of a file and compare its checksums.

    Raises: Like open_trajectory.
    """
    load_trajectory(Path(path))


def _to_trajectory(path: str | Path, content: NpzContent) -> Trajectory:
    arrays = content.arrays
    obs = {
        name.removeprefix(_OBS_PREFIX): value
        for name, value in arrays.items()
        if name.startswith(_OBS_PREFIX)
    }
    missing = [name for name in (*_DTYPES, "actions") if name not in arrays]
    if not obs:
        missing.append(f"{_OBS_PREFIX}*")
    if missing:
        raise BrokenTrajectoryError(
            f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(arrays)) or 'nothing'}. "
            "Fix: move files that are not trajectories out of the folder."
        )
    fixed = {name: np.asarray(arrays[name], dtype) for name, dtype in _DTYPES.items()}
    parsed = parse_name(Path(path).name)
    try:
        return Trajectory(
            obs=obs,
            rl2s=fixed["rl2s"],
            time_idxs=fixed["time_idxs"],
            actions=_fix_actions(arrays["actions"]),
            rews=fixed["rews"],
            dones=fixed["dones"],
            env_name=parsed.env_name if parsed else "env",
        )
    except (ValueError, TypeError) as error:
        raise BrokenTrajectoryError(
            f"{path} is broken: {error} Fix: move the file out of the folder."
        ) from error


def _fix_actions(actions: Array) -> Array:
    """Return discrete actions as int64, all others (also stored one-hot rows) as float32."""
    return np.asarray(actions, np.int64 if actions.dtype.kind in "iu" else np.float32)


class TrajectoryReader:
    """Reads trajectory files and keeps the recently used ones open.

    Files never change once they have their final name, so a path identifies its content. Small and compressed
    files are kept in memory, large uncompressed ones as memory maps; both are bounded, least recently used
    goes first.

    Args:
        max_ram_bytes: memory for files that are held in memory.
        max_open_maps: number of memory maps; each one keeps a file descriptor.
    """

    def __init__(self, *, max_ram_bytes: int = 256 << 20, max_open_maps: int = 256) -> None:
        self._max_ram_bytes, self._max_open_maps = max_ram_bytes, max_open_maps
        self._opened: OrderedDict[str, tuple[Trajectory, int, bool]] = OrderedDict()
        self.ram_bytes = 0
        self.num_maps = 0

    def load(self, path: str) -> StoredTrajectory:
        """Return the trajectory of a file. Raises like load_trajectory."""
        found = self._opened.get(path)
        if found is not None:
            self._opened.move_to_end(path)
            return found[0]
        content = read_npz(path)
        traj = _to_trajectory(path, content)
        self._opened[path] = traj, content.ram_bytes, content.is_mapped
        self.ram_bytes += content.ram_bytes
        self.num_maps += content.is_mapped
        while self.ram_bytes > self._max_ram_bytes or self.num_maps > self._max_open_maps:
            self._forget(next(iter(self._opened)))
        return traj

    def forget(self, paths: Iterable[str]) -> None:
        """Let go of files, for example because they were deleted."""
        for path in paths:
            if path in self._opened:
                self._forget(path)

    def _forget(self, path: str) -> None:
        _, ram_bytes, is_mapped = self._opened.pop(path)
        self.ram_bytes -= ram_bytes
        self.num_maps -= is_mapped
