"""Files that others may be reading: complete or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to; it takes the place of `path` at once when all of it is on the disk.

    The folder is made. After an error the file that was there is as before.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temp
        fsync(temp)
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # of the two errors the first says more
            temp.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old text or the new one."""
    with atomic_write(path) as temp:
        temp.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Force a file or folder to the physical disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
