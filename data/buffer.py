"""The folder that actors and learners share: its listing, and quarantine for broken files.

The cost of a listing depends on the number of new files, not on the number of all files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from .errors import READ_ONLY, BrokenTrajectoryError, FormatError, visible
from .files import TEMPORARY_SUFFIX, TrajectoryReader, bad_value_error, format_error, parse_name
from .trajectory import Layout, Trajectory
from .values import find_bad_value

_STALE_TEMPORARY_S = 3600.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors with other causes than the file
MAX_BROKEN_SHARE = 0.05  # fraction of all files that this process has listed
_REASON_SUFFIX = ".txt"
_logger = logging.getLogger("loxodon")


class TrajectoryFile(NamedTuple):
    """One finished file. Files sort by age, the oldest first."""

    unix_time: float  # seconds
    traj_id: str
    path: str
    is_protected: bool = False  # True in the folder whose files are never deleted

    @property
    def name(self) -> str:
        """The path without its folder."""
        return self.path.rpartition("/")[2]


class Quarantine:
    """The folder `buffer/quarantine` and the number of broken files.

    Several processes may find the same broken file at once. One of them moves it, and each counts it once,
    because they count the files that arrive in the folder.

    Args:
        buffer: folder that contains `fifo` and `protected`.
        may_move: False in processes without edit rights, which leave broken files where they are.
    """

    def __init__(self, buffer: Path, *, may_move: bool) -> None:
        self.folder = buffer / "quarantine"
        self._may_move = may_move
        self._left_in_place: set[str] = set()  # names
        self._before = self._now = self._list()
        self._last_reason = ""

    @property
    def num_quarantined(self) -> int:
        """Number of files in the folder, including those of earlier runs, as of the last refresh."""
        return len(self._now)

    @property
    def num_broken(self) -> int:
        """Number of different broken files that any process has found since this one started."""
        return len((self._now - self._before) | self._left_in_place)

    def refresh(self) -> None:
        """Look for files that other processes moved here."""
        self._now = self._list()

    def put(self, path: Path, reason: str, *, is_broken: bool = True) -> None:
        """Count a file that cannot be used, and move it here if it is broken and this process may."""
        self._last_reason = reason
        done = "left in place"
        try:
            if is_broken and self._may_move:
                done = f"moved to {visible(str(self.move(path, reason)))}"
        except FileNotFoundError:  # another process moved or deleted it first
            self.refresh()
            return
        except OSError as error:
            _logger.warning("%s is broken, but could not be moved to %s: %s", path, self.folder, error)
        if done == "left in place":
            self._left_in_place.add(path.name)
        self.refresh()
        _logger.warning("A trajectory file that cannot be used was %s: %s", done, reason)

    def move(self, path: Path, reason: str) -> Path:
        """Move a file here, with a text file that gives the reason. Returns its new path."""
        target = move_into(self.folder, path)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = f"{reason}\nmoved from {path.parent} at {now} by process {os.getpid()}\n"
        with contextlib.suppress(OSError):  # the disk may be full
            target.with_name(target.name + _REASON_SUFFIX).write_text(text, encoding="utf-8")
        return target

    def check_share(self, num_seen: int) -> None:
        """Raise ValueError, which stops the run, if more than one file and more than 5 % are broken.

        Args:
            num_seen: files that this process has listed since it started.
        """
        if self.num_broken > max(1, MAX_BROKEN_SHARE * num_seen):
            now = f"They are in {self.folder}, each with its reason"
            if not self._may_move:
                check = f"loxodon data check {self.folder.parent}"
                now = f"This process leaves them in place; `{check}` finds damaged ones"
            elif self._left_in_place:
                now = "Those that cannot be read were left in place"
            raise ValueError(
                f"{self.num_broken} of {num_seen} trajectory files in {self.folder.parent} cannot be "
                f"used, more than {MAX_BROKEN_SHARE:.0%}. The last reason: "
                f"{self._find_reason().partition(' Fix:')[0]} {now}. Fix: "
                "give each kind of environment its own dataset (DiskTrajDataset.dset_name); if the files are "
                "damaged, correct the program that writes them."
            )

    def describe(self) -> str:
        """Return a sentence about the broken files for an error text; empty if there are none."""
        if not self.num_broken:
            return ""
        place = f" (see {self.folder})" if self._now - self._before else ""
        return f" Files that cannot be used: {self.num_broken}{place}; the last reason: {self._find_reason()}"

    def _list(self) -> frozenset[str]:
        names = _names_in(self.folder) or []
        return frozenset(name for name in names if not name.endswith(_REASON_SUFFIX))

    def _find_reason(self) -> str:
        """The last reason of this process, or the first line that another process left with a file here."""
        notes = (self.folder / (name + _REASON_SUFFIX) for name in sorted(self._now - self._before))
        lines = (note.read_text("utf-8", "replace").splitlines() for note in notes if note.is_file())
        return self._last_reason or next((found[0] for found in lines if found), "unknown.")


def move_into(folder: Path, path: Path) -> Path:
    """Move a file into a folder, which is made if needed, under a free name."""
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(2)))
    target = next(place for name in names if not os.path.lexists(place := folder / name))
    path.rename(target)
    return target


def _names_in(folder: Path) -> list[str] | None:
    """Names in a folder: empty if it does not exist; None, with a warning, if it cannot be listed."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (only names are needed)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        _logger.warning(
            "%s cannot be listed at the moment (%s), so new files in it are not noticed. Fix: check its "
            "permissions and the file system.",
            folder,
            error,
        )
        return None


def make_folders(buffer: Path) -> None:
    """Make `fifo` and `protected`. A folder that is missing in a read-only buffer stays missing.

    Raises:
        OSError: If they cannot be made.
    """
    for folder in (buffer / "fifo", buffer / "protected"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in READ_ONLY and buffer.is_dir():
                continue
            raise OSError(
                f"The dataset folder {folder} cannot be created: {error}. Fix: set "
                "DiskTrajDataset.dset_root to a folder that this process may write to, or "
                "DiskTrajDataset.takes_new_trajs = False to only read existing files."
            ) from error


class Buffer:
    """One process's view of `buffer/{fifo,protected}`, the two folders that are sampled from.

    Temporary files are ignored. Other foreign files are ignored with one warning.

    Args:
        path: folder that contains the two.
        may_move: True if this process may move broken files to `quarantine`.
        value: called once with each file's trajectory, when the file is first listed; None opens no file.

    The folders need not exist.

    Attributes:
        files: the files of both folders, oldest first, as of the last refresh. Every change makes a new list,
            so that old positions stay valid in the list that they came from.
        sizes: bytes of each file, by path, as of the last measure_sizes.
        lengths: transitions of each file, by path; empty without `value`.
        values: results of `value`, by path.
    """

    def __init__(
        self,
        path: Path,
        *,
        may_move: bool,
        value: Callable[[Trajectory], float] | None,
    ) -> None:
        self.path, self.fifo = path, path / "fifo"
        self._folders = {False: self.fifo, True: path / "protected"}  # keys: is_protected
        self.quarantine = Quarantine(path, may_move=may_move)
        self.files: list[TrajectoryFile] = []
        self.sizes: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self._value = value
        # Everything in the folders, by is_protected and name; None marks entries that are not sampled from.
        self._known: dict[bool, dict[str, TrajectoryFile | None]] = {False: {}, True: {}}
        self._temporaries: list[Path] = []
        self._has_warned = False
        self._num_seen = 0  # number of different files seen in all
        self._reader = TrajectoryReader()
        self._layout: Layout | None = None
        self._checked: set[str] = set()  # paths of files that have the expected layout
        self._sound: set[str] = set()  # paths of files whose values have all been checked

    @property
    def fifo_files(self) -> list[TrajectoryFile]:
        """The files that may be deleted, oldest first."""
        return [file for file in self.files if not file.is_protected]

    def expect(self, layout: Layout) -> None:
        """Treat files of another layout as broken from now on."""
        self._layout, self._checked, self._sound = layout, set(), set()

    def refresh(self) -> None:
        """List the folders again, and close opened files that are gone. Raises like cut."""
        added: list[TrajectoryFile] = []
        gone: list[TrajectoryFile] = []
        self._temporaries = []
        for is_protected, known in self._known.items():
            names = _names_in(self._folders[is_protected])
            if names is None:
                continue
            new = [name for name in names if name not in known]
            if len(names) - len(new) < len(known):
                gone += [file for name in known.keys() - set(names) if (file := known.pop(name))]
            added += [file for name in new if (file := self._add_file(name, is_protected))]
        self._num_seen += len(added)
        if added:
            self.files = sorted(self.files + added)  # fast, since most of the list is sorted already
        self._drop_from_lists(gone)
        if self._value is not None and len(self.values) < len(self.files):
            for file in [file for file in self.files if file.path not in self.values]:
                self._measure(file, self._value)

    def measure_sizes(self) -> None:
        """Look up the sizes of files whose size is not known yet."""
        if len(self.sizes) < len(self.files):
            self.sizes |= {file.path: _size_bytes(file) for file in self.files if file.path not in self.sizes}

    def cut(self, file: TrajectoryFile, window_of: Callable[[Trajectory], Trajectory]) -> Trajectory | None:
        """Return the window that `window_of` slices out of the trajectory of a file.

        All values of the file are checked the first time. Returns None if the file is gone or cannot be used;
        such a file is removed from the list.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """

        def check_and_cut(traj: Trajectory) -> Trajectory:
            if file.path not in self._sound:
                if problem := find_bad_value(traj, self._layout):
                    raise bad_value_error(file.path, problem)
                self._sound.add(file.path)
            return window_of(traj)

        return self._use(file, check_and_cut)

    def _measure(self, file: TrajectoryFile, find_value: Callable[[Trajectory], float]) -> None:
        """Record length and value of a file. If this finds a NaN, the file is broken."""

        def note(traj: Trajectory) -> Trajectory:
            value = find_value(traj)
            if not math.isfinite(value) and (problem := find_bad_value(traj, self._layout)):
                raise bad_value_error(file.path, problem)
            self.lengths[file.path], self.values[file.path] = len(traj), value
            return traj

        self._use(file, note)

    def _use(self, file: TrajectoryFile, use: Callable[[Trajectory], Trajectory]) -> Trajectory | None:
        """Apply a function to the trajectory of a file; large observations may be StoredRows. See cut."""
        try:
            traj = self._reader.load(file.path)
            if file.path not in self._checked:
                self._check_layout(file, traj)
            return use(traj)
        except FormatError as error:  # the file was truncated after it was opened
            self._quarantine_file(file, str(format_error(file.path, error)))
        except BrokenTrajectoryError as error:
            self._quarantine_file(file, str(error))
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise
            self._drop_unreadable(file, error)
        return None

    def _quarantine_file(self, file: TrajectoryFile, reason: str, is_broken: bool = True) -> None:
        self._unlist(file)
        self.quarantine.put(Path(file.path), reason, is_broken=is_broken)
        self.quarantine.check_share(self._num_seen)

    def _drop_unreadable(self, file: TrajectoryFile, error: OSError) -> None:
        """Stop using a file that is gone or cannot be read."""
        if self._is_listed(file) and not os.path.lexists(file.path):
            self.refresh()  # other files were probably deleted with it
        if self._is_listed(file):
            reason = (
                f"{file.path} cannot be read ({error.strerror}). Fix: check the file and its file system."
            )
            self._quarantine_file(file, reason, is_broken=False)

    def check_broken_share(self) -> None:
        """Check the quarantine again, and raise ValueError if too many files are broken."""
        self.quarantine.refresh()
        self.quarantine.check_share(self._num_seen)

    def delete(self, doomed: list[TrajectoryFile]) -> int:
        """Delete files; files that are gone already cause no error. Returns how many are gone.

        Files that cannot be deleted stay on disk, but are removed from the list.
        """
        failed: list[tuple[str, OSError]] = []
        for file in doomed:
            known: TrajectoryFile | None = self._known[file.is_protected].pop(file.name, None)
            try:
                Path(file.path).unlink(missing_ok=True)
            except OSError as error:
                failed.append((file.path, error))
                if known is not None:
                    self._known[file.is_protected][file.name] = None
        if failed:
            _logger.warning(
                "%d of %d old trajectory files cannot be deleted, such as %s (%s). They are no longer "
                "sampled, but still take up space. Fix: delete them by hand.",
                len(failed),
                len(doomed),
                failed[0][0],
                failed[0][1].strerror,
            )
        self._drop_from_lists(doomed)
        return len(doomed) - len(failed)

    def remove_stale_temporaries(self) -> None:
        """Delete temporary files, as of the last listing, that a killed writer left more than an hour ago."""
        for path in self._temporaries:
            with contextlib.suppress(OSError):  # its writer has usually just renamed it
                if time.time() - path.stat().st_mtime > _STALE_TEMPORARY_S:
                    path.unlink()

    def close_files(self) -> None:
        """Close all open files; they are opened again when they are needed."""
        self._reader = TrajectoryReader()

    def _add_file(self, name: str, is_protected: bool) -> TrajectoryFile | None:
        """Add a name that is new in a folder. Returns the file if it is a finished trajectory."""
        folder = self._folders[is_protected]
        if name.endswith(TEMPORARY_SUFFIX):
            if not is_protected and parse_name(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
                self._temporaries.append(folder / name)
            return None
        file, parsed = None, parse_name(name)
        if parsed is not None:
            file = TrajectoryFile(parsed.unix_time, parsed.traj_id, f"{folder}/{name}", is_protected)
        elif not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s contains %r, which is not named <env>_<id>_<unix time>.npz, so it is ignored. "
                "Fix: rename it or move it away.",
                folder,
                name,
            )
        self._known[is_protected][name] = file
        return file

    def _check_layout(self, file: TrajectoryFile, traj: Trajectory) -> None:
        mismatch = None if self._layout is None else self._layout.describe_mismatch(traj.layout)
        if mismatch is not None:
            raise BrokenTrajectoryError(
                f"{file.path} was not collected with the spaces of this run: {mismatch}. Fix: give each "
                "kind of environment its own dataset (DiskTrajDataset.dset_name)."
            )
        self._checked.add(file.path)

    def _is_listed(self, file: TrajectoryFile) -> bool:
        return self._known[file.is_protected].get(file.name) is not None

    def _unlist(self, file: TrajectoryFile) -> None:
        """Remove a file from the list; it does not return while it stays in the folder."""
        self._known[file.is_protected][file.name] = None
        self._drop_from_lists([file])

    def _drop_from_lists(self, gone: list[TrajectoryFile]) -> None:
        if not gone:
            return
        paths = {file.path for file in gone}
        self.files = [file for file in self.files if file.path not in paths]
        self._reader.forget(paths)
        self._checked -= paths
        self._sound -= paths
        for path in paths:
            for known in (self.sizes, self.lengths, self.values):
                known.pop(path, None)


def _size_bytes(file: TrajectoryFile) -> int:
    try:
        return Path(file.path).stat().st_size
    except OSError:
        return 0
