"""The same trajectories in another file format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...data.errors import BrokenTrajectoryError
from ...data.files import TrajectoryName, format_name, load_trajectory, parse_name, save_trajectory
from ...data.foreign import to_arrays
from ...data.trajectory import Trajectory
from .find import Found, FoundFile


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
    targets = _targets(found, target)
    if not force:
        _refuse_to_overwrite(targets)
    broken: dict[Path, str] = {}
    num_bytes = 0
    for file, folder in track(targets):
        try:
            traj = load_trajectory(file.path)
        except (BrokenTrajectoryError, OSError) as error:
            broken[file.path] = str(error)
        else:
            num_bytes += _save_converted(file, traj, folder, save_as).stat().st_size
    return num_bytes, broken


def _save_converted(file: FoundFile, traj: Trajectory, folder: Path, save_as: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = file.name
    path = save_trajectory(folder, traj, save_as=save_as, traj_id=name.traj_id, unix_time=name.unix_time)
    if difference := describe_difference(traj, load_trajectory(path)):
        path.unlink()
        raise OSError(
            f"{path}, written from {file.path}, came back with a different {difference}, and was deleted. "
            "Fix: check the disk; if it is sound, this is a bug."
        )
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


def _targets(found: Found, target: Path) -> list[tuple[FoundFile, Path]]:
    """Each file and the folder it goes to."""
    if target.suffix == ".npz" or target.is_file():
        raise ValueError(
            f"{target} looks like a file, but convert writes into a folder, where every file keeps its name. "
            f"Fix: give {target.parent / 'converted'}, for example."
        )
    root = found.root if found.root.is_dir() else found.root.parent
    if root.resolve() == target.resolve():
        raise ValueError(
            f"{target} is where the files are: it would hold every trajectory twice. Fix: give another "
            "folder, and delete or move the old one afterwards."
        )
    for file in found.files:
        if parse_name(file.path.name) is None:
            raise ValueError(
                f"{file.path} is not named <env>_<id>_<unix time>.npz, so it has no id and time to keep. "
                f"Fix: rename it, for example to {format_name('env', '00000001', file.name.unix_time)}."
            )
    return [(file, target / os.path.relpath(file.path.parent, root)) for file in found.files]


def _refuse_to_overwrite(targets: Sequence[tuple[FoundFile, Path]]) -> None:
    """Raise FileExistsError if a trajectory, whatever its format, is in its target folder already."""
    folders = {folder for _, folder in targets if folder.is_dir()}
    present = {
        (folder, *_identity(name))
        for folder in folders
        for path in folder.iterdir()
        if (name := parse_name(path.name))
    }
    for file, folder in targets:
        if (folder, *_identity(file.name)) in present:
            raise FileExistsError(
                f"{folder} holds {file.path.stem} already. Fix: give an empty folder, or overwrite with "
                "--force."
            )


def _identity(name: TrajectoryName) -> tuple[str, str]:
    return name.traj_id, f"{name.unix_time:.6f}"
