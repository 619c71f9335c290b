"""Search for trajectory files in a run, a dataset or any other folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from ...data.files import TEMPORARY_SUFFIX, TrajectoryName, parse_name

SET_ASIDE = ("quarantine", "superseded")  # folders whose files are counted but do not belong to the data
_NOT_SEARCHED = {*SET_ASIDE, "ckpts", "logs", "wandb_logs", "loxodon-cache"}


class FoundFile(NamedTuple):
    """A trajectory file, known by its name; it was not opened."""

    path: Path
    name: TrajectoryName
    size_bytes: int


@dataclass
class Found:
    """Everything below one folder.

    Attributes:
        root: the folder (or file) that was searched.
        files: trajectory files, the oldest first.
        set_aside: number of files in each folder of SET_ASIDE, by its name.
        num_temporary: number of files that a writer has not finished.
        foreign: names of files that are not trajectories.
    """

    root: Path
    files: list[FoundFile] = field(default_factory=list)
    set_aside: Counter[str] = field(default_factory=Counter)
    num_temporary: int = 0
    foreign: list[str] = field(default_factory=list)

    def by_place(self) -> dict[str, list[FoundFile]]:
        """Group files by their folder, relative to the root."""
        places: dict[str, list[FoundFile]] = {}
        for file in self.files:
            place = os.path.relpath(file.path.parent, self.root)
            places.setdefault(str(self.root) if place == "." else place, []).append(file)
        return dict(sorted(places.items()))


def find_files(root: Path) -> Found:
    """Search a run, dataset, buffer or other folder, or take a single file. No file is opened."""
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
    seen: set[str] = set()  # links are followed, but each folder is searched once
    for folder, folders, names in os.walk(root, onerror=_fail, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for aside in set(SET_ASIDE).intersection(folders):
            notes_too = os.listdir(f"{folder}/{aside}")  # noqa: PTH208 (only names are needed)
            found.set_aside[aside] += sum(not name.endswith(".txt") for name in notes_too)
        folders[:] = [name for name in folders if name not in _NOT_SEARCHED and not name.startswith(".")]
        _take_files(found, folder, names)
    found.files.sort(key=lambda file: (file.name.unix_time, file.name.traj_id))
    return found


def require_files(root: Path) -> Found:
    """Like find_files, for commands that need at least one file: FileNotFoundError if there is none."""
    found = find_files(root)
    if not found.files:
        raise FileNotFoundError(
            f"{root} holds no trajectory files (named <env>_<id>_<unix time>.npz). "
            "Fix: give a folder that does, or collect into this one first."
        )
    return found


def _take_files(found: Found, folder: str, names: list[str]) -> None:
    foreign: list[str] = []
    num_before = len(found.files)
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            found.num_temporary += parse_name(name.removesuffix(TEMPORARY_SUFFIX)) is not None
        elif (parsed := parse_name(name)) is None:
            foreign.append(name)
        else:
            path, size_bytes = Path(folder, name), 0
            try:
                size_bytes = path.stat().st_size
            except OSError:  # reading the file will report the error
                if not os.path.lexists(path):  # a training process has deleted it
                    continue
            found.files.append(FoundFile(path, parsed, size_bytes))
    if len(found.files) > num_before:
        found.foreign += foreign


def _fail(error: OSError) -> NoReturn:
    raise error


def age_text(unix_time: float) -> str:
    """Format the time since then, in a single unit."""
    age_s = max(time.time() - unix_time, 0.0)
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
