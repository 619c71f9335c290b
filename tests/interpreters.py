"""Python processes that are forked from one which has imported the library.

A new interpreter takes 4 seconds of CPU time until it trains, a forked one milliseconds. The forked process
is a child of the process that asked for it, with its own pid, session, output and exit status, and it ends
like any interpreter. It cannot show how the library is imported, or what happens during the import.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_RealPopen = subprocess.Popen
_starting = threading.Lock()
# Forked processes inherit this dictionary, but must not use the connection of another process.
_servers: dict[int, tuple[socket.socket, Any]] = {}  # by the pid of the client


def _server() -> socket.socket:
    """The connection of this process to its server, which ends when the connection is closed."""
    if os.getpid() not in _servers:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, str(Path(__file__)), str(its.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = _RealPopen(command, env=environment, pass_fds=[its.fileno()], cwd="/")
        _servers[os.getpid()] = ours, process
    return _servers[os.getpid()][0]


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks Python processes if the system allows it."""

    def _execute_child(self, *args: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        words = asked["args"]
        if not isinstance(words, list | tuple) or words[0] != sys.executable or sys.platform != "linux":
            super()._execute_child(*args)  # type: ignore[misc]
            return
        request = {
            "words": words[1:],
            "cwd": str(asked["cwd"] or Path.cwd()),
            "environment": dict(asked["env"] or os.environ),
            "parent": os.getpid(),
            "group": os.getpgrp(),
            "has_session": asked["start_new_session"],
        }
        fds = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _fork(request, [fd if fd >= 0 else own for own, fd in enumerate(fds)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _fork(request: dict[str, Any], fds: list[int]) -> int:
    prctl = ctypes.CDLL(None).prctl
    with _starting:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # this process inherits orphaned grandchildren
        try:
            server = _server()
            socket.send_fds(server, [json.dumps(request).encode()], fds)
            return int(server.recv(100))
        except BaseException:  # such as the time limit of a test: the server's reply is no longer wanted
            del _servers[os.getpid()]
            raise
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns the request in the forked process, and None at the end."""
    while True:
        text, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not text:
            return None
        if middle := os.fork():
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)
        elif os.fork():
            os._exit(0)
        else:
            return _become(json.loads(text), fds, connection)


def _become(request: dict[str, Any], fds: list[int], connection: socket.socket) -> dict[str, Any] | None:
    """Take over everything in the request but its program; leaves a server for the new process."""
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    os.setsid() if request["has_session"] else os.setpgid(0, request["group"])
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        os.setpgid(0, 0)
        ours.close()
        connection.close()
        for fd in fds:
            os.close(fd)
        return _serve(its)
    its.close()
    _servers[os.getpid()] = ours, None
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    connection.send(str(os.getpid()).encode())
    connection.close()
    return request


def _run(words: list[str]) -> None:
    """Do what `python <words>` does after its own start."""
    is_unbuffered = words[0] == "-u" or "PYTHONUNBUFFERED" in os.environ
    words = words[words[0] == "-u" :]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout.reconfigure(write_through=is_unbuffered)  # type: ignore[union-attr]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[1], vars(main))
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [""]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")


def _import_the_library() -> None:
    os.setpgid(0, 0)  # signals to all processes of a test must not reach this one
    del sys.path[0]  # the folder of this file, whose modules have the names of packages
    subprocess.Popen = ForkedPopen  # type: ignore[misc]  # for those that are forked, and start others
    import numpy as np
    import torch
    from matplotlib.backends import backend_agg  # noqa: F401

    import loxodon.tools.run  # noqa: F401

    os.fsync = lambda _: None  # not needed without a power cut, as in tests/conftest.py
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports the compiler
    os.register_at_fork(after_in_child=np.random.seed)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        _import_the_library()
        _request = _serve(_connection)
    if _request is None:
        os._exit(0)  # skips the slow shutdown of the interpreter
    _run(_request["words"])
