"""Follows a file that is replaced now and then, and reads it only when it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")


class WatchedFile(Generic[Content]):
    """Asks for the content of a file again only when its time, inode or size differ.

    Args:
        path: the file.
        read: makes the content of it; None, or FileNotFoundError, if there is none.
    """

    def __init__(self, path: Path, read: Callable[[Path], Content | None]) -> None:
        self.path, self._read = path, read
        self._check: tuple[int, int, int] | None = None
        self._content: Content | None = None
        self.modified_s = 0.0  # unix time, of what was read last

    def poll(self) -> Content | None:
        """The content as it is now; None if there is no file."""
        try:
            stat = self.path.stat()
            check = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if check != self._check:
                self._content = self._read(self.path)
                self._check, self.modified_s = check, stat.st_mtime
        except FileNotFoundError:
            self._check = self._content = None
        return self._content
