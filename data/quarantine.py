"""Broken trajectory files are moved out of the way, not deleted, each with the reason in a text file."""

from __future__ import annotations

import itertools
import logging
import os
from datetime import datetime, timezone
from pathlib import Path

from .errors import visible

MAX_BROKEN_SHARE = 0.05  # of all files that this process has listed
_REASON_SUFFIX = ".txt"
_logger = logging.getLogger("loxodon")


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
                moved_to = self._move(path, reason)
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

    def _move(self, path: Path, reason: str) -> Path:
        """Move the file to a name of its own; whoever creates the text file of a name owns that name."""
        self.folder.mkdir(exist_ok=True)
        for number in itertools.count(1):
            target = self.folder / (path.name if number == 1 else f"{path.name}.{number}")
            note = target.with_name(target.name + _REASON_SUFFIX)
            try:
                with note.open("x", encoding="utf-8") as file:
                    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    file.write(f"{reason}\nmoved from {path.parent} at {now} by process {os.getpid()}\n")
            except FileExistsError:
                continue
            if target.exists():  # somebody removed its text file
                note.unlink()
                continue
            try:
                path.rename(target)
            except OSError:
                note.unlink(missing_ok=True)
                raise
            return target
        raise AssertionError("the loop above has no end")

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
