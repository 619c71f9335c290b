"""The folder that actors and learners share: what lies in it, and where broken files go.

A listing costs what is new in the folder, not what is there.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from .errors import BrokenTrajectoryError, visible
from .files import TEMPORARY_SUFFIX, TrajectoryReader, load_trajectory, parse_name
from .trajectory import Layout, Trajectory

_STALE_TEMPORARY_S = 3600.0
_LIST_AT_LEAST_EVERY_S = 30.0
_COARSEST_CLOCK_NS = 3_000_000_000  # FAT counts in steps of 2 s
MAX_BROKEN_SHARE = 0.05  # of all files that this process has listed
_REASON_SUFFIX = ".txt"
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


class Quarantine:
    """The folder `buffer/quarantine` and the count of what is broken.

    Several processes may find the same broken file at once: one of them moves it, and all count it once,
    since they count what arrives in the folder.

    Args:
        buffer: folder that contains `fifo` and `protected`.
        may_move: False in processes without edit rights, which leave broken files where they are.
    """

    def __init__(self, buffer: Path, *, may_move: bool) -> None:
        self.folder = buffer / "quarantine"
        self._may_move = may_move
        self._left_in_place: set[str] = set()  # names
        self._before = self._list()
        self._now = self._before
        self._last_reason = ""

    @property
    def num_quarantined(self) -> int:
        """Files in the folder, also those of earlier runs, as of the last refresh."""
        return len(self._now)

    @property
    def num_broken(self) -> int:
        """Different broken files that this process or others have found since this one started."""
        return len((self._now - self._before) | self._left_in_place)

    def refresh(self) -> None:
        """Take notice of what other processes moved here."""
        self._now = self._list()

    def put(self, path: Path, reason: str) -> None:
        """Move a broken file here, if this process may, and count it."""
        self._last_reason = reason
        moved_to = None
        if self._may_move:
            try:
                moved_to = self.move(path, reason)
            except FileNotFoundError:  # another process was faster, or has deleted it
                self.refresh()
                return
            except OSError as error:
                _logger.warning("%s is broken, but cannot be moved to %s: %s", path, self.folder, error)
        if moved_to is None:
            self._left_in_place.add(path.name)
        self.refresh()
        _logger.warning("A broken trajectory file was %s: %s", _what_was_done(moved_to), reason)

    def check_share(self, num_seen: int) -> None:
        """Stop the run if too much is broken.

        Args:
            num_seen: files that this process has listed since it started.

        Raises:
            ValueError: If more than one file and more than 5 % of all are broken.
        """
        if self.num_broken <= max(1, MAX_BROKEN_SHARE * num_seen):
            return
        raise ValueError(
            f"{self.num_broken} of {num_seen} trajectory files in {self.folder.parent} are broken, more than "
            f"{MAX_BROKEN_SHARE:.0%}. The last reason: {self._last_reason or self._read_a_reason()} "
            f"Fix: read the reasons in {self.folder} (the files were moved there, if this process had edit "
            "rights), repair what writes such files, and give each kind of environment a dataset of its own "
            "(DiskTrajDataset.dset_name)."
        )

    def describe(self) -> str:
        """Return a sentence on the broken files for an error text; nothing if there are none."""
        if not self.num_broken:
            return ""
        reason = self._last_reason or self._read_a_reason()
        return f" {self.num_broken} files were broken (see {self.folder}); the last reason: {reason}"

    def _list(self) -> frozenset[str]:
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 (only names are needed)
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        return frozenset(name for name in names if not name.endswith(_REASON_SUFFIX))

    def move(self, path: Path, reason: str) -> Path:
        """Move a file here, under a name that is free, and write the reason beside it. Returns where to."""
        self.folder.mkdir(exist_ok=True)
        names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(2)))
        target = next(place for name in names if not (place := self.folder / name).exists())
        path.rename(target)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        note = target.with_name(target.name + _REASON_SUFFIX)
        note.write_text(
            f"{reason}\nmoved from {path.parent} at {now} by process {os.getpid()}\n", encoding="utf-8"
        )
        return target

    def _read_a_reason(self) -> str:
        """Return the first line beside some file that another process has moved here."""
        for name in sorted(self._now - self._before):
            note = self.folder / (name + _REASON_SUFFIX)
            try:
                if note.is_file():
                    return note.read_text(encoding="utf-8").splitlines()[0]
            except (OSError, IndexError):
                continue
        return "unknown."


def _what_was_done(moved_to: Path | None) -> str:
    return "left in place" if moved_to is None else f"moved to {visible(str(moved_to))}"


class Buffer:
    """What one process knows about `buffer/{fifo,protected}`, the two folders that are sampled from.

    Args:
        path: folder that contains the two.
        may_move: True if this process may move broken files to `quarantine`.
        with_lengths: True to open each file once, when it is first listed, for its length.
        on_change: called with the files that are gone whenever `files` has changed.

    Attributes:
        files: of both, the oldest first, as of the last refresh. A new list after every change, so that old
            positions stay valid in the list they came from.
        sizes: bytes of the files by path, as of the last measure_sizes.
        lengths: transitions of the files by path; empty without `with_lengths`.

    Raises:
        OSError: If the folders cannot be made.
    """

    def __init__(
        self,
        path: Path,
        *,
        may_move: bool,
        with_lengths: bool,
        on_change: Callable[[list[TrajectoryFile]], None],
    ) -> None:
        self.path = path
        self.fifo = TrajectoryFolder(path / "fifo")
        self.protected = TrajectoryFolder(path / "protected", is_protected=True)
        for folder in (self.fifo, self.protected):
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(
                    f"The dataset folder {folder.path} cannot be made: {error}. "
                    "Fix: set DiskTrajDataset.dset_root to a folder that this process may write to."
                ) from error
        self.quarantine = Quarantine(path, may_move=may_move)
        self.files: list[TrajectoryFile] = []
        self.sizes: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self._with_lengths, self._on_change = with_lengths, on_change
        self._num_seen = 0  # different files there have been in all
        self._reader = TrajectoryReader()
        self._layout: Layout | None = None
        self._checked: set[str] = set()  # paths of files whose layout is the expected one

    def expect(self, layout: Layout) -> None:
        """Treat files of another layout as broken from now on."""
        self._layout, self._checked = layout, set()

    def refresh(self) -> None:
        """List the folders again; opened files that are gone are let go of.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """
        added, gone = self.fifo.refresh()
        more_added, more_gone = self.protected.refresh()
        added += more_added
        gone += more_gone
        self._num_seen += len(added)
        broken: dict[TrajectoryFile, str] = {}
        if self._with_lengths:
            broken = self._measure_lengths(added)
        if added:
            self.files = self.files + [file for file in added if self._is_listed(file)]
            self.files.sort()  # takes advantage of the part that is sorted already
        if added or gone:
            self._forget([*gone, *broken])
        if broken:
            self._report(broken)

    def measure_sizes(self) -> None:
        """Look up the bytes of files whose size is not known yet."""
        if len(self.sizes) < len(self.files):
            for file in self.files:
                if file.path not in self.sizes:
                    self.sizes[file.path] = _size_bytes(file)

    def open(self, file: TrajectoryFile) -> Trajectory | None:
        """Return the trajectory of a file, or None if it is gone or broken; then it is off the list.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """
        try:
            traj = self._reader.load(file.path)
            if file.path not in self._checked:
                self._check_layout(file, traj)
        except BrokenTrajectoryError as error:
            self._discard([file], ignore=True)
            self._report({file: str(error)})
            return None
        except OSError as error:
            if not _means_gone(error):
                raise
            self._leave_out_gone(file)
            return None
        return traj

    def check_broken_share(self) -> None:
        """Take notice of what other processes found, and raise ValueError if too much is broken."""
        self.quarantine.refresh()
        self.quarantine.check_share(self._num_seen)

    def delete(self, doomed: list[TrajectoryFile]) -> None:
        """Delete files; those that are gone already do no harm."""
        for file in doomed:
            Path(file.path).unlink(missing_ok=True)
        if doomed:
            self._discard(doomed)

    def let_go(self) -> None:
        """Close all opened files; they are opened again when they are needed."""
        self._reader = TrajectoryReader()

    def __getstate__(self) -> dict[str, Any]:
        """Leave opened files behind when this goes to another process."""
        return {**self.__dict__, "_reader": TrajectoryReader()}

    def _check_layout(self, file: TrajectoryFile, traj: Trajectory) -> None:
        mismatch = None if self._layout is None else self._layout.describe_mismatch(traj.layout)
        if mismatch is not None:
            raise BrokenTrajectoryError(
                f"{file.path} was not collected with the spaces of this run: {mismatch}. Fix: give each kind "
                "of environment a dataset of its own (DiskTrajDataset.dset_name)."
            )
        self._checked.add(file.path)

    def _measure_lengths(self, added: list[TrajectoryFile]) -> dict[TrajectoryFile, str]:
        """Open new files for their lengths. Returns why some are broken; those and vanished ones are off."""
        broken: dict[TrajectoryFile, str] = {}
        for file in added:
            try:
                self.lengths[file.path] = len(load_trajectory(file.path))
            except BrokenTrajectoryError as error:
                broken[file] = str(error)
                self._folder_of(file).discard(file, ignore=True)
            except OSError as error:
                if not _means_gone(error):
                    raise
                self._folder_of(file).discard(file)  # should it lie there still, the next listing tries again
        return broken

    def _leave_out_gone(self, file: TrajectoryFile) -> None:
        """List again after a file was not found: whoever deleted it has mostly deleted others, too."""
        if self._is_listed(file):
            self.refresh()
        if self._is_listed(file):  # a dangling link, for example
            self._discard([file], ignore=True)

    def _report(self, broken: dict[TrajectoryFile, str]) -> None:
        for file, reason in broken.items():
            self.quarantine.put(Path(file.path), reason)
        self.quarantine.check_share(self._num_seen)

    def _folder_of(self, file: TrajectoryFile) -> TrajectoryFolder:
        return self.protected if file.is_protected else self.fifo

    def _is_listed(self, file: TrajectoryFile) -> bool:
        return file.name in self._folder_of(file).files

    def _discard(self, files: list[TrajectoryFile], *, ignore: bool = False) -> None:
        """Take files off the listing; with `ignore` they do not come back while they lie there."""
        for file in files:
            self._folder_of(file).discard(file, ignore=ignore)
        self._forget(files)

    def _forget(self, gone: list[TrajectoryFile]) -> None:
        if gone:
            paths = {file.path for file in gone}
            self.files = [file for file in self.files if file.path not in paths]
            self._reader.forget(paths)
            self._checked -= paths
            for path in paths:
                self.sizes.pop(path, None)
                self.lengths.pop(path, None)
        self._on_change(gone)


def _means_gone(error: OSError) -> bool:
    """True if a file was deleted, here or on the server of a network file system."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE


def _size_bytes(file: TrajectoryFile) -> int:
    try:
        return Path(file.path).stat().st_size
    except FileNotFoundError:
        return 0
