"""Starts processes that train together on this machine's CPU, and finds them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BOOTSTRAP = """
import sys, types
package = types.ModuleType("tests")
package.__path__ = [{tests!r}]
sys.modules["tests"] = package  # whatever else on this machine is called so
from tests.distributed import scenarios
scenarios.main({name!r}, {folder!r})
"""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_scenario(name: str, folder: Path, num_processes: int = 2, timeout_s: float = 60.0) -> None:
    """Run a function of scenarios.py in several processes; it fails if one of them does."""
    code = _BOOTSTRAP.format(tests=str(ROOT / "tests"), name=name, folder=str(folder))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    shared |= {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        texts = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * num_processes, "\n".join(texts)
