"""The files of a buffer: listed, opened, checked, measured, and taken out when they are gone or broken."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import BrokenTrajectoryError
from .files import TrajectoryReader, open_trajectory
from .folder import BufferListing, Tally, TrajectoryFile
from .layout import Layout
from .quarantine import Quarantine
from .trajectory import StoredTrajectory


class TrajectoryStore:
    """What one process knows about `buffer/{fifo,protected}`.

    Args:
        buffer: folder that contains the two.
        may_move: True if this process may move broken files to `buffer/quarantine`.
        with_lengths: True to open each file once, when it is first listed, for its length.
        on_change: called with the files that are gone whenever `files` has changed.

    Attributes:
        sizes: bytes of the files, as of the last measure_sizes.
        lengths: transitions of the files; empty without `with_lengths`.

    Raises:
        OSError: If the folders cannot be made.
    """

    def __init__(
        self,
        buffer: Path,
        *,
        may_move: bool,
        with_lengths: bool,
        on_change: Callable[[list[TrajectoryFile]], None],
    ) -> None:
        self._listing = BufferListing(buffer)
        self.fifo, self.protected = self._listing.fifo, self._listing.protected
        for folder in (self.fifo, self.protected):
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(
                    f"The dataset folder {folder.path} cannot be made: {error}. "
                    "Fix: set DiskTrajDataset.dset_root to a folder that this process may write to."
                ) from error
        self.quarantine = Quarantine(buffer, may_move=may_move)
        self.sizes, self.lengths = Tally(_size_bytes), Tally(_num_transitions)
        self._with_lengths, self._on_change = with_lengths, on_change
        self._reader = TrajectoryReader()
        self._layout: Layout | None = None
        self._checked: set[str] = set()  # paths of files whose layout is the expected one

    @property
    def files(self) -> list[TrajectoryFile]:
        """All files, the oldest first, as of the last refresh; never changed in place."""
        return self._listing.files

    def expect(self, layout: Layout) -> None:
        """Treat files of another layout as broken from now on."""
        self._layout, self._checked = layout, set()

    def refresh(self) -> None:
        """List the folders again; opened files that are gone are let go of.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """
        added, gone = self._listing.refresh()
        broken: dict[TrajectoryFile, str] = {}
        if self._with_lengths:
            vanished, broken = self._measure_lengths(added)
            self._listing.discard(vanished)  # should one lie there still, the next listing tries again
            self._listing.discard(broken, ignore=True)
            gone += vanished
        if added or gone:
            self._forget([*gone, *broken])
        if broken:
            self._report(broken)

    def measure_sizes(self) -> None:
        """Look up the bytes of files whose size is not known yet."""
        if len(self.sizes.values) < len(self.files):
            self.sizes.add(self.files)

    def open(self, file: TrajectoryFile) -> StoredTrajectory | None:
        """Return an opened file, or None if it is gone or broken; then it is off the list.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """
        try:
            stored = self._reader.load(file.path)
            if file.path not in self._checked:
                self._check_layout(file, stored)
        except BrokenTrajectoryError as error:
            self.report_broken(file, str(error))
            return None
        except OSError as error:
            if not _means_gone(error):
                raise
            self._leave_out_gone(file)
            return None
        return stored

    def report_broken(self, file: TrajectoryFile, reason: str) -> None:
        """Take a file off the list and into the quarantine.

        Raises:
            ValueError: If more than 5 % of the files are broken.
        """
        self._listing.discard([file], ignore=True)
        self._forget([file])
        self._report({file: reason})

    def check_broken_share(self) -> None:
        """Take notice of what other processes found, and raise ValueError if too much is broken."""
        self.quarantine.refresh()
        self.quarantine.check_share(self._listing.num_seen)

    def delete(self, doomed: list[TrajectoryFile]) -> None:
        """Delete files; those that are gone already do no harm."""
        for file in doomed:
            Path(file.path).unlink(missing_ok=True)
        if doomed:
            self._listing.discard(doomed)
            self._forget(doomed)

    def let_go(self) -> None:
        """Close all opened files; they are opened again when they are needed."""
        self._reader = TrajectoryReader()

    def __getstate__(self) -> dict[str, Any]:
        """Leave opened files behind when this goes to another process."""
        return {**self.__dict__, "_reader": TrajectoryReader()}

    def _check_layout(self, file: TrajectoryFile, stored: StoredTrajectory) -> None:
        mismatch = None if self._layout is None else self._layout.describe_mismatch(stored.layout)
        if mismatch is not None:
            raise BrokenTrajectoryError(
                f"{file.path} was not collected with the spaces of this run: {mismatch}. Fix: give each kind "
                "of environment a dataset of its own (DiskTrajDataset.dset_name)."
            )
        self._checked.add(file.path)

    def _measure_lengths(
        self, added: list[TrajectoryFile]
    ) -> tuple[list[TrajectoryFile], dict[TrajectoryFile, str]]:
        """Open new files for their lengths. Returns the vanished ones, and why others are broken."""
        vanished: list[TrajectoryFile] = []
        broken: dict[TrajectoryFile, str] = {}
        for file in added:
            try:
                self.lengths.add([file])
            except BrokenTrajectoryError as error:
                broken[file] = str(error)
            except OSError as error:
                if not _means_gone(error):
                    raise
                vanished.append(file)
        return vanished, broken

    def _leave_out_gone(self, file: TrajectoryFile) -> None:
        """List again after a file was not found: whoever deleted it has mostly deleted others, too."""
        if not self._listing.contains(file):
            return
        self.refresh()
        if self._listing.contains(file):  # a dangling link, for example
            self._listing.discard([file], ignore=True)
            self._forget([file])

    def _report(self, broken: dict[TrajectoryFile, str]) -> None:
        for file, reason in broken.items():
            self.quarantine.put(Path(file.path), reason)
        self.quarantine.check_share(self._listing.num_seen)

    def _forget(self, gone: list[TrajectoryFile]) -> None:
        if gone:
            paths = {file.path for file in gone}
            self._reader.forget(paths)
            self._checked -= paths
            self.sizes.drop(gone)
            self.lengths.drop(gone)
        self._on_change(gone)


def _means_gone(error: OSError) -> bool:
    """True if a file was deleted, here or on the server of a network file system."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE


def _size_bytes(file: TrajectoryFile) -> int:
    try:
        return Path(file.path).stat().st_size
    except FileNotFoundError:
        return 0


def _num_transitions(file: TrajectoryFile) -> int:
    return len(open_trajectory(file.path))
