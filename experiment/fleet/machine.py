"""Which process this is, and whether another process of this machine still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_FIELDS_BEFORE_START = 19  # in /proc/<pid>/stat, counted from the state, which comes after the name


def machine_id() -> str:
    """Name of the space in which process numbers are unique: one boot of one machine or container.

    Host names do not do: two containers of one name may share a file system.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"  # noqa: PTH115 (the link leads nowhere)
    except OSError:
        return f"host {socket.gethostname()}"


def process_start(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; 0 if the system does not tell.

    None if there is no such process, or it has ended and only waits for its parent to notice.
    """
    if not (_PROC / "self/stat").exists():
        return 0 if _exists(pid) else None
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[_FIELDS_BEFORE_START])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
