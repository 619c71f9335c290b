"""Trajectory files below a folder, wherever in a run or a dataset that folder lies."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .files import TEMPORARY_SUFFIX, TrajectoryName, parse_name

SET_ASIDE = ("quarantine", "superseded")  # folders whose files are counted, but are not part of the data
_NO_DATA = {"ckpts", "logs", "wandb_logs", "loxodon-cache"}


class FoundFile(NamedTuple):
    """One trajectory file, by its name; it was not opened."""

    path: Path
    name: TrajectoryName
    size_bytes: int


@dataclass
class Found:
    """Everything below one folder.

    Attributes:
        root: the folder (or file) that was searched.
        files: trajectory files, the oldest first.
        set_aside: number of files by name of the folder they were set aside in.
        num_temporary: files that a writer has not finished.
        foreign: names of other files beside trajectories.
    """

    root: Path
    files: list[FoundFile] = field(default_factory=list)
    set_aside: Counter[str] = field(default_factory=Counter)
    num_temporary: int = 0
    foreign: list[str] = field(default_factory=list)

    def by_place(self) -> dict[str, list[FoundFile]]:
        """Files by their folder, relative to the root."""
        places: dict[str, list[FoundFile]] = {}
        for file in self.files:
            place = os.path.relpath(file.path.parent, self.root)
            places.setdefault(str(self.root) if place == "." else place, []).append(file)
        return dict(sorted(places.items()))


def find_files(root: Path) -> Found:
    """Search a run, dataset, buffer or other folder, or take a single file. Nothing is opened."""
    if not root.exists():
        raise FileNotFoundError(
            f"{root} does not exist. Fix: give the folder of a run (such as runs/tmaze), a dataset, a "
            "buffer, or a trajectory file."
        )
    found = Found(root)
    if root.is_file():
        name = parse_name(root.name) or TrajectoryName("env", root.stem, root.stat().st_mtime)
        found.files.append(FoundFile(root, name, root.stat().st_size))
        return found
    _search(found, str(root), set())
    found.files.sort(key=lambda file: (file.name.unix_time, file.name.traj_id))
    return found


def require_files(root: Path) -> Found:
    """Like find_files, for commands that need at least one file: FileNotFoundError if there is none."""
    found = find_files(root)
    if not found.files:
        raise FileNotFoundError(
            f"{root} holds no trajectory files (named <env>_<id>_<unix time>.npz or .traj). "
            "Fix: give a folder that does, or collect into this one first."
        )
    return found


def _search(found: Found, folder: str, seen: set[str]) -> None:
    """Search one folder and those in it, links included, each once."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for subfolder in _take_files(found, folder):
        path = f"{folder}/{subfolder}"
        if subfolder in SET_ASIDE:
            names = os.listdir(path)  # noqa: PTH208 (only names are needed)
            found.set_aside[subfolder] += sum(not name.endswith(".txt") for name in names)
        elif subfolder not in _NO_DATA and not subfolder.startswith("."):
            _search(found, path, seen)


def _take_files(found: Found, folder: str) -> list[str]:
    """Note the files of one folder. Returns the names of the folders in it."""
    folders: list[str] = []
    foreign: list[str] = []
    num_before = len(found.files)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.name.endswith(TEMPORARY_SUFFIX):
                found.num_temporary += parse_name(entry.name.removesuffix(TEMPORARY_SUFFIX)) is not None
            elif (name := parse_name(entry.name)) is None:
                foreign.append(entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, by a process that trains
                    found.files.append(FoundFile(Path(entry.path), name, entry.stat().st_size))
    if len(found.files) > num_before:
        found.foreign += foreign
    return folders


def age_text(unix_time: float) -> str:
    """How long ago that was, in one unit."""
    age_s = max(time.time() - unix_time, 0.0)
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def size_text(size_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:  # noqa: PLR2004 (decimal units)
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
