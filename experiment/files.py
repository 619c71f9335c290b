"""Files that others may be reading: complete or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")


@contextlib.contextmanager
def atomic_write(path: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Gives a temporary path to write to; it takes the place of `path` at once when all of it is on the disk.

    The folder is made. After an error the file that was there is as before. is_durable: False does not wait
    for the disk, for what is written again soon.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temp
        if is_durable:
            fsync(temp)
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # of the two errors the first says more
            temp.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which becomes `path` at once at the end; an error leaves nothing of it."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        yield temp
        temp.rename(path)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def remove_left_over(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder. Nobody may be writing in it."""
    for temp in folder.glob("*.tmp"):
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        else:
            temp.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Write a text file so that a reader sees the old text or the new one; is_durable: see atomic_write."""
    with atomic_write(path, is_durable=is_durable) as temp:
        temp.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Force a file or folder to the physical disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
