"""Conversion of trajectories to the other file format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...data.errors import BrokenTrajectoryError
from ...data.files import format_name, load_trajectory, parse_name, save_trajectory
from .find import Found, FoundFile


def convert(
    found: Found, target: Path, save_as: str, *, force: bool, track: Callable[[Any], Any] = iter
) -> tuple[int, dict[Path, str]]:
    """Write all files in another format, each in the same subfolder as before.

    Args:
        found: files to convert.
        target: a folder; made if it is missing.
        save_as: format to write.
        force: overwrite existing files; without it, they cause a FileExistsError.
        track: wrapper that yields the items of an iterable and may show progress, such as tqdm.

    Returns: number of bytes written, and the reasons why some files were omitted.
    """
    root = found.root if found.root.is_dir() else found.root.parent
    _check_target(target, root)
    files = [(file, target / os.path.relpath(file.path.parent, root)) for file in found.files]
    _check_names(files, force)
    broken: dict[Path, str] = {}
    num_bytes = 0
    for file, folder in track(files):
        try:
            traj = load_trajectory(file.path)
        except (BrokenTrajectoryError, OSError) as error:
            broken[file.path] = str(error)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        _, traj_id, unix_time = file.name
        path = save_trajectory(folder, traj, save_as=save_as, traj_id=traj_id, unix_time=unix_time)
        num_bytes += path.stat().st_size
    return num_bytes, broken


def _check_target(target: Path, root: Path) -> None:
    if target.suffix == ".npz" or target.is_file():
        raise ValueError(
            f"{target} looks like a file, but convert writes to a folder, in which every file keeps its "
            f"name. Fix: give a folder such as {target.parent / 'converted'}."
        )
    if root.resolve() == target.resolve():
        raise ValueError(
            f"{target} is the folder of the source files, so it would hold every trajectory twice. "
            "Fix: give another folder, and delete or move the old one afterwards."
        )


def _check_names(files: Sequence[tuple[FoundFile, Path]], force: bool) -> None:
    for file, folder in files:
        if parse_name(file.path.name) is None:
            raise ValueError(
                f"{file.path} is not named <env>_<id>_<unix time>.npz, so its id and time cannot be kept. "
                f"Fix: rename it, for example to {format_name('env', '00000001', file.name.unix_time)}."
            )
        if not force and (folder / format_name(*file.name)).exists():
            raise FileExistsError(
                f"{folder} already holds {file.path.stem}. Fix: give an empty folder, or overwrite with "
                "--force."
            )
