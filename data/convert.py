"""The same trajectories in another file format; and the only reader of the first `.traj` format."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import BrokenTrajectoryError, FormatError
from .files import format_name, load_trajectory, parse_name, save_trajectory
from .find import Found, FoundFile
from .foreign import POLICY_VERSION, from_arrays, to_arrays
from .traj import MAGIC_OF_VERSION_1
from .trajectory import Trajectory

_SUFFIXES = (".npz", ".traj")
_START_1 = struct.Struct("<6sHII")  # magic, version, length of the text, CRC of text and CRCs
_ALIGNMENT_1 = 64


def convert(
    found: Found, target: Path, save_as: str, *, force: bool, track: Callable[[Any], Any] = iter
) -> tuple[int, dict[Path, str]]:
    """Write all files anew and read every one back, each in the same subfolder as before.

    Args:
        found: what to convert.
        target: a folder; made if it is missing.
        save_as: format to write.
        force: overwrite what is there; without it, that is a FileExistsError.
        track: given all there is to do, gives it one after the other, and may show progress.

    Returns: bytes written, and why some files were left out.
    """
    targets = _targets(found, target, save_as)
    if not force:
        _refuse_to_overwrite(targets)
    broken: dict[Path, str] = {}
    num_bytes = 0
    for file, folder in track(targets):
        try:
            num_bytes += convert_file(file, folder, save_as).stat().st_size
        except BrokenTrajectoryError as error:
            broken[file.path] = str(error)
    return num_bytes, broken


def convert_file(file: FoundFile, folder: Path, save_as: str) -> Path:
    """Write one trajectory in another format, under the same env name, id and time, and read it back."""
    traj = _load_any(file.path)
    folder.mkdir(parents=True, exist_ok=True)
    name = file.name
    path = save_trajectory(folder, traj, save_as=save_as, traj_id=name.traj_id, unix_time=name.unix_time)
    if difference := describe_difference(traj, load_trajectory(path)):
        path.unlink()
        raise OSError(
            f"{path}, written from {file.path}, came back with a different {difference}, and was deleted. "
            "Fix: check the disk; if it is sound, this is a bug."
        )
    for suffix in _SUFFIXES:  # with --force, the same trajectory may be there in another format
        if suffix != path.suffix:
            path.with_suffix(suffix).unlink(missing_ok=True)
    return path


def describe_difference(one: Trajectory, other: Trajectory) -> str | None:
    """The first array in which two trajectories differ, or None."""
    arrays, others = to_arrays(one), to_arrays(other)
    if arrays.keys() != others.keys():
        return f"set of arrays ({', '.join(sorted(arrays.keys() ^ others.keys()))})"
    for name, array in arrays.items():
        value = others[name]
        if (value.dtype, value.shape) != (array.dtype, array.shape) or value.tobytes() != array.tobytes():
            return name
    return None


def _load_any(path: Path) -> Trajectory:
    """A trajectory of any format, the first `.traj` included. Raises like load_trajectory."""
    with path.open("rb") as file:
        if file.read(len(MAGIC_OF_VERSION_1)) != MAGIC_OF_VERSION_1:
            return load_trajectory(path)
    try:
        return _read_version_1(path.read_bytes())
    except (FormatError, ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise BrokenTrajectoryError(
            f"{path} is not a complete .traj file of the first format: {error}. Fix: leave it out."
        ) from error


def _read_version_1(data: bytes) -> Trajectory:
    """What Loxodon wrote as `.traj` before it took the layout of safetensors."""
    _, _, text_bytes, crc = _START_1.unpack_from(data)
    text_end = _START_1.size + text_bytes
    header = json.loads(data[_START_1.size : text_end])
    begin = text_end + 4 * len(header["arrays"])
    if zlib.crc32(data[_START_1.size : begin]) != crc:
        raise FormatError("the checksum of its header is wrong")
    crcs = struct.unpack_from(f"<{len(header['arrays'])}I", data, text_end)
    begin += -begin % _ALIGNMENT_1
    arrays = {}
    for entry, expected in zip(header["arrays"], crcs, strict=True):
        count = math.prod(entry["shape"])
        array = np.frombuffer(data, np.dtype(entry["dtype"]), count, begin + entry["offset"])
        if zlib.crc32(array.tobytes()) != expected:
            raise FormatError(f"the checksum of {entry['name']} is wrong")
        arrays[entry["name"]] = array.reshape(entry["shape"])
    if header["policy_version"] is not None:
        arrays[POLICY_VERSION] = np.array([header["policy_version"]])
    return from_arrays(arrays, header["env_name"])


def _targets(found: Found, target: Path, save_as: str) -> list[tuple[FoundFile, Path]]:
    """Each file and the folder it goes to, in the same subfolder as before."""
    if target.suffix in _SUFFIXES or target.is_file():
        raise ValueError(
            f"{target} looks like a file, but convert writes into a folder, where every file keeps its name. "
            f"Fix: give {target.parent / 'converted'}, for example."
        )
    root = found.root if found.root.is_dir() else found.root.parent
    if os.path.realpath(root) == os.path.realpath(target):
        raise ValueError(
            f"{target} is where the files are: it would hold every trajectory twice. Fix: give another "
            "folder, and delete or move the old one afterwards."
        )
    for file in found.files:
        if parse_name(file.path.name) is None:
            raise ValueError(
                f"{file.path} is not named <env>_<id>_<unix time>.npz or .traj, so it has no id and time to "
                "keep. Fix: rename it, for example to "
                f"{format_name('env', '00000001', file.name.unix_time, save_as)}."
            )
    return [(file, target / os.path.relpath(file.path.parent, root)) for file in found.files]


def _refuse_to_overwrite(targets: Sequence[tuple[FoundFile, Path]]) -> None:
    """Raise FileExistsError if a trajectory (whatever its format) is in its target folder already."""
    present: dict[Path, set[str]] = {}
    for file, folder in targets:
        if folder not in present:
            names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 (only names are needed)
            present[folder] = {_identity(name) for name in names}
        if _identity(file.path.name) in present[folder]:
            raise FileExistsError(
                f"{folder} holds {file.path.stem} already. Fix: give an empty folder, or overwrite with "
                "--force."
            )


def _identity(name: str) -> str:
    """What two files of one trajectory have in common, whatever their format."""
    parsed = parse_name(name)
    return f"{parsed.traj_id} {parsed.unix_time:.6f}" if parsed else name
