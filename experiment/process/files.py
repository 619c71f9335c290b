"""Files that others may be reading (complete or absent), and files with unchecked content by others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

logger = logging.getLogger("loxodon")
Content = TypeVar("Content")
_LONGEST_NAME = 120  # characters of a name that is made from a text
_MOST_BYTES = 1 << 28  # largest text that is read at once, in bytes


@contextlib.contextmanager
def atomic_write(path: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Gives a temporary path to write to; it replaces `path` at once when all of it is on the disk.

    The folder is created if necessary. After an error an existing file stays as it was. is_durable: False
    does not wait for the disk, for files that are written again soon.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temp
        if is_durable:
            fsync(temp)
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first of two errors is more useful
            temp.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which becomes `path` at once at the end; an error removes it."""
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
    """Remove the files of killed writers from a folder. There must be no active writers."""
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


# ---- files by others ----


def check_inside(path: Path, folder: Path) -> None:
    """Raise ValueError if `path` leads out of `folder` by a symbolic link; links within it are allowed.

    This protects uploads: the author of a folder cannot use a link to include files that only its reader can
    open.
    """
    target = os.path.realpath(path)  # unlike Path.resolve, it does not raise for a link to itself
    if not Path(target).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{path} is a link out of {folder} to {target} and is not followed, because that file may not "
            "be meant to be shared. Fix: replace the link with a copy of the file, or remove it."
        )


def check_tree(source: Path, limit: Path | None = None) -> None:
    """Raise ValueError unless a file, or everything in a folder, is a plain file or folder within `limit`.

    limit: None for `source` itself, or for the folder that a file is in. Pipes and devices are refused:
    copying one may never end.
    """
    is_folder = source.is_dir()
    limit = limit or (source if is_folder else source.parent)
    for path in (source, *(source.rglob("*") if is_folder else ())):
        check_inside(path, limit)
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a plain file. Fix: remove it.")


def read_text(path: Path, within: Path) -> str:
    """The text of a file in the folder `within`, such as that of a run.

    Raises: OSError if it cannot be read; ValueError if it is not text, not a plain file, larger than 256 MiB
    or outside the folder.
    """
    check_inside(path, within)
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise ValueError(f"{path} is not a plain file. Fix: remove it.")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES:,} bytes. Fix: remove it.")
    return content.decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises: ValueError if it is not JSON, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("its brackets are nested too deeply", "", 0) from error


def short_name(plain: str, of: str) -> str:
    """`plain`, or if it is too long for the name of a file, its beginning with a digest of the text `of`."""
    if len(plain) <= _LONGEST_NAME:
        return plain
    digest = hashlib.blake2b(of.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{plain[:_LONGEST_NAME]}_{digest}"


def digest_of(path: Path) -> str:
    """16 hexadecimal digits that stand for the contents of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is missing or damaged, with a warning if damaged."""
    try:
        found = parse_json(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object. Fix: restore it from a copy, or remove it")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is treated as empty: %s.", path, error)
        return {}
    return found


class WatchedFile(Generic[Content]):
    """Reads the content of a file again only when its time, inode or size differ.

    Args:
        path: the file.
        read: returns its content; None, or raises FileNotFoundError, if there is none.
    """

    def __init__(self, path: Path, read: Callable[[Path], Content | None]) -> None:
        self.path, self._read = path, read
        self._check: tuple[int, int, int] | None = None
        self._content: Content | None = None
        self.modified_s = 0.0  # unix time of the file that was read last

    def poll(self) -> Content | None:
        """The current content; None if there is no file."""
        try:
            stat = self.path.stat()
            check = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if check != self._check:
                self._content = self._read(self.path)
                self._check, self.modified_s = check, stat.st_mtime
        except FileNotFoundError:
            self._check = self._content = None
        return self._content
