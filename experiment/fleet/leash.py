"""A leash: processes that end when the one that started them is gone, however it ended.

The starting process keeps the writing end of a pipe whose reading end is its children's standard input. The
kernel closes it with the process, also after kill -9, and the children read an end of file. This works on
every POSIX system; Linux's parent-death signal would also fire when merely the starting *thread* ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref

ENV_NAME = "LOXODON_LEASH"  # set for children that hold a leash
GRACE_S = 10.0  # from being asked to end to being killed


class Leash:
    """The starting process's side. Children get `read_end` as standard input and ENV_NAME as a variable.

    Forked workers of this process (which would otherwise keep the pipe open after its death) let go of it.
    """

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        self._is_open = True
        own = weakref.ref(self)

        def let_go() -> None:
            if (leash := own()) is not None:
                leash.close()

        os.register_at_fork(after_in_child=let_go)

    def close(self) -> None:
        """Let go; children that are still there end. Calling this again does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._write_end)
            os.close(self.read_end)


def attach() -> None:
    """The child's side: from now on it ends when the leash is let go. Nothing in a process without one."""
    if os.environ.pop(ENV_NAME, None) is not None:
        threading.Thread(target=_watch, name="leash", daemon=True).start()


def kill_group(pid: int) -> None:
    """Kill a process that leads a process group, and whatever it has started; gone ones are ignored."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _watch() -> None:
    """Wait for the end of file; then ask this process to end, and after GRACE_S make it."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid())
    os._exit(1)
