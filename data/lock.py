"""A lock that one process per folder and purpose can hold, with a note about its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import weakref
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_logger = logging.getLogger("loxodon")


@dataclass(frozen=True)
class LockPurpose:
    """The purpose of a lock on a folder; its files are `<name>.lock` and `<name>.json`.

    The error says "<holder> already <verb> <folder>: <why>. Fix: <fix>".
    """

    name: str
    verb: str
    why: str
    fix: str


MANAGER = LockPurpose(
    "manager",
    "manages",
    "it deletes old trajectories there, which only one process at a time may do",
    "end that process, or set Experiment.has_dset_edit_rights = False in this one.",
)


@dataclass
class _Held:
    """A lock of this process. Forked children inherit this object but not the lock, hence the pid."""

    descriptor: int | None  # None if the file system has no locks
    pid: int
    num_users: int = 0


# By lock file; closing a second descriptor of the same file would release the lock.
_held: dict[Path, _Held] = {}


class FolderLock:
    """A lock on a folder for one purpose, held by one process at a time, for as long as this object lives.

    A process may take it several times. Forked children do not inherit it. The kernel releases it when the
    process ends for any reason.

    Args:
        folder: existing folder; the lock and a note (pid, host, run and time) appear in it.
        run_name: name of this process in the note.
        purpose: gives the names of the two files, and part of the error.

    Raises:
        ValueError: If another process holds the lock; the text names that process.
        OSError: If the lock file cannot be opened.
    """

    def __init__(self, folder: Path, run_name: str, purpose: LockPurpose) -> None:
        path = folder.resolve() / f"{purpose.name}.lock"
        held = _held.get(path)
        if held is None or held.pid != os.getpid():
            held = _held[path] = _Held(_acquire(path, run_name, purpose), os.getpid())
        held.num_users += 1
        self._finalizer = weakref.finalize(self, _release, path, held)

    def release(self) -> None:
        """Release the lock; calling this again has no effect."""
        self._finalizer()


def _acquire(path: Path, run_name: str, purpose: LockPurpose) -> int | None:
    """Lock a file and return the descriptor that holds the lock, or None if the file system has no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = _describe_holder(path.with_suffix(".json"))
            raise ValueError(
                f"{holder} already {purpose.verb} {path.parent}: {purpose.why}. Fix: {purpose.fix}"
            ) from None
        if error.errno not in _NOT_SUPPORTED:
            raise
        _logger.warning(
            "The file system of %s has no locks, so nothing stops a second process that %s this folder. "
            "Fix: start only one such process (Experiment.has_dset_edit_rights, Experiment.mode).",
            path.parent,
            purpose.verb,
        )
        return None
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "run_name": run_name, "since": since}
    with contextlib.suppress(OSError):  # the lock holds without the note, which only names the holder
        path.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return descriptor


def _release(path: Path, held: _Held) -> None:
    """Release the lock if this was its last user. A forked child does not hold it."""
    held.num_users -= 1
    if held.num_users or held.pid != os.getpid():
        return
    if _held.get(path) is held:
        del _held[path]
    if held.descriptor is not None:
        with contextlib.suppress(OSError):  # the folder may have been deleted
            path.with_suffix(".json").unlink()
        os.close(held.descriptor)


def _describe_holder(path: Path) -> str:
    """Describe the holder of the lock, from the note."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return f"Process {note['pid']} on {note['host']} (run {note['run_name']!r}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # the note is being written right now, or was deleted
        return "Another process"
