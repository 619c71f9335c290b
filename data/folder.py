"""Folders of trajectory files as a listing that costs what is new, not what is there."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .files import TEMPORARY_SUFFIX, parse_name

_STALE_TEMPORARY_S = 3600.0
_LIST_AT_LEAST_EVERY_S = 30.0
_COARSEST_CLOCK_NS = 3_000_000_000  # FAT counts in steps of 2 s
_logger = logging.getLogger("loxodon")


class TrajectoryFile(NamedTuple):
    """One finished file. Sorts by age, the oldest first."""

    unix_time: float  # seconds
    traj_id: str
    path: str
    is_protected: bool = False  # True in the folder that nothing is deleted from

    @property
    def name(self) -> str:
        """The path without its folder."""
        return self.path.rpartition("/")[2]


class TrajectoryFolder:
    """What lies in one folder. Temporary files are ignored; other foreign files too, with one warning."""

    def __init__(self, path: Path, *, is_protected: bool = False) -> None:
        self.path, self.is_protected = path, is_protected
        self.files: dict[str, TrajectoryFile] = {}
        self._ignored: set[str] = set()
        self._temporaries: set[str] = set()
        self._has_warned = False
        self._quiet_mtime_ns = -1  # of the folder, if nothing can have changed since without changing this
        self._listed_s = -math.inf  # clock of time.monotonic

    def refresh(self) -> tuple[list[TrajectoryFile], list[TrajectoryFile]]:
        """List the folder again. Returns the files that are new and those that are gone.

        A folder that does not exist is empty.
        """
        names = self._list_if_changed()
        if names is None:
            return [], []
        files = self.files
        unlisted = [name for name in names if name not in files]
        gone: list[TrajectoryFile] = []
        if len(names) - len(unlisted) < len(files):
            gone = [files.pop(name) for name in files.keys() - set(names)]
        self._ignored &= set(unlisted)
        self._temporaries.clear()
        added: list[TrajectoryFile] = []
        for name in unlisted:
            if name in self._ignored:
                continue
            if name.endswith(TEMPORARY_SUFFIX):
                self._temporaries.add(name)
            elif (parsed := parse_name(name)) is None:
                self._warn_of(name)
                self._ignored.add(name)
            else:
                path = f"{self.path}/{name}"
                file = TrajectoryFile(parsed.unix_time, parsed.traj_id, path, self.is_protected)
                files[name] = file
                added.append(file)
        return added, gone

    def discard(self, file: TrajectoryFile, *, ignore: bool = False) -> None:
        """Take a file off the listing; with `ignore` it does not come back while it lies in the folder."""
        name = file.name
        self.files.pop(name, None)
        if ignore:
            self._ignored.add(name)

    def remove_stale_temporaries(self) -> None:
        """Delete temporary files, as of the last listing, that a killed writer left over an hour ago."""
        now_s = time.time()
        for name in self._temporaries:
            path = self.path / name
            try:
                if now_s - path.stat().st_mtime > _STALE_TEMPORARY_S:
                    path.unlink()
            except FileNotFoundError:  # its writer has just finished it
                continue

    def _list_if_changed(self) -> list[str] | None:
        """Return the names in the folder, or None if its time of change shows that they are the known ones.

        A time of change may be too coarse to tell two changes apart, so one is trusted only if it was old
        when the folder was listed; and not for long, because some network file systems do not keep it.
        """
        now_s = time.monotonic()
        try:
            mtime_ns = self.path.stat().st_mtime_ns
            if mtime_ns == self._quiet_mtime_ns and now_s - self._listed_s < _LIST_AT_LEAST_EVERY_S:
                return None
            is_quiet = time.time_ns() - mtime_ns > _COARSEST_CLOCK_NS
            names = os.listdir(self.path)  # noqa: PTH208 (only names are needed)
        except FileNotFoundError:
            self._quiet_mtime_ns = -1
            return []
        self._quiet_mtime_ns = mtime_ns if is_quiet else -1
        self._listed_s = now_s
        return names

    def _warn_of(self, name: str) -> None:
        if not self._has_warned:
            _logger.warning(
                "%s contains %r, which is not named <env>_<id>_<unix time>.npz or .traj, so it is ignored. "
                "Fix: rename it or move it away.",
                self.path,
                name,
            )
        self._has_warned = True


class BufferListing:
    """The files of `fifo` and `protected`, the two folders that are sampled from.

    Attributes:
        files: of both, the oldest first. A new list after every change, so that old positions stay valid in
            the list they came from.
        num_seen: how many different files there have been in all.
    """

    def __init__(self, buffer: Path) -> None:
        self.fifo = TrajectoryFolder(buffer / "fifo")
        self.protected = TrajectoryFolder(buffer / "protected", is_protected=True)
        self.files: list[TrajectoryFile] = []
        self.num_seen = 0

    def refresh(self) -> tuple[list[TrajectoryFile], list[TrajectoryFile]]:
        """List both folders again. Returns the files that are new and those that are gone."""
        added, gone = self.fifo.refresh()
        more_added, more_gone = self.protected.refresh()
        added += more_added
        gone += more_gone
        self._leave_out(gone)
        if added:
            self.num_seen += len(added)
            self.files = self.files + added
            self.files.sort()  # takes advantage of the part that is sorted already
        return added, gone

    def discard(self, files: Iterable[TrajectoryFile], *, ignore: bool = False) -> None:
        """Take files off the listing; with `ignore` they do not come back while they lie there."""
        files = list(files)
        for file in files:
            (self.protected if file.is_protected else self.fifo).discard(file, ignore=ignore)
        self._leave_out(files)

    def contains(self, file: TrajectoryFile) -> bool:
        """True if the file is listed, as of the last refresh."""
        folder = self.protected if file.is_protected else self.fifo
        return file.name in folder.files

    def _leave_out(self, gone: list[TrajectoryFile]) -> None:
        if gone:
            missing = {file.path for file in gone}
            self.files = [file for file in self.files if file.path not in missing]


class Tally:
    """A number for each file, measured once, and the sums over all files and over those of `fifo`."""

    def __init__(self, measure: Callable[[TrajectoryFile], int]) -> None:
        self._measure = measure
        self.values: dict[str, int] = {}  # by path
        self.total = 0
        self.fifo_total = 0

    def add(self, files: Iterable[TrajectoryFile]) -> None:
        """Measure files that are not known yet."""
        for file in files:
            if file.path not in self.values:
                value = self.values[file.path] = self._measure(file)
                self.total += value
                self.fifo_total += 0 if file.is_protected else value

    def drop(self, files: Iterable[TrajectoryFile]) -> None:
        """Forget files."""
        for file in files:
            value = self.values.pop(file.path, 0)
            self.total -= value
            self.fifo_total -= 0 if file.is_protected else value
