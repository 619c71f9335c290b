"""Processes that train together on this machine's CPU: starting, observing and ending them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..interpreters import ForkedPopen

ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]
_BOOTSTRAP = """
import sys, types
package = types.ModuleType("tests")
package.__path__ = [{tests!r}]
sys.modules["tests"] = package  # whatever else on this machine is called so
from tests.distributed.scenarios import main
main({folder!r})
"""


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process in a session of its own; its output goes to this file."""
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **ON_CPU, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def start_pair(words: Sequence[str], logs: Sequence[Path]) -> list[subprocess.Popen[str]]:
    """Start two processes that train together, as a launcher would."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    return [
        start(words, log, RANK=rank, LOCAL_RANK=rank, **shared) for rank, log in zip("01", logs, strict=True)
    ]


def run_scenarios(folder: Path) -> None:
    """Run all scenarios in two processes; fails if one of them does."""
    code = _BOOTSTRAP.format(tests=str(ROOT / "tests"), folder=str(folder))
    logs = [folder / f"out_{rank}.txt" for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedPopen)  # like tests that are marked `forked`
        processes = start_pair(["-c", code], logs)
    deadline_s = time.monotonic() + 200
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
            if any(process.poll() for process in processes):  # the others would wait for it
                deadline_s = min(deadline_s, time.monotonic() + 5)
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert [process.wait() for process in processes] == [0, 0], "\n".join(texts)


class Run:
    """The processes of one run, started through the command line."""

    def __init__(self, folder: Path, config: str = "tmaze", settings: Sequence[str] = ()) -> None:
        self.folder, self._logs = folder, dict[subprocess.Popen[str], Path]()
        self._config, self._settings = config, settings or SETTINGS

    def learn(self, *words: str, mode: str = "learn") -> list[subprocess.Popen[str]]:
        """Start the processes that train; returns them by rank."""
        logs = [self._new_log(), self._new_log("_1")]
        pair = start_pair([*self._command(mode), *words], logs)
        self._logs |= zip(pair, logs, strict=True)
        return pair

    def launch(self, *words: str, mode: str = "learn") -> subprocess.Popen[str]:
        """Start the same processes with `accelerate launch`."""
        launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        port = ["--main_process_port", str(free_port())]
        return self._start([*launcher, *quiet, *port, *self._command(mode), *words])

    def collect(self) -> subprocess.Popen[str]:
        """Start a collecting process."""
        return self._start(self._command("collect"))

    def _command(self, mode: str) -> list[str]:
        settings = [
            f"Experiment.ckpt_base_dir='{self.folder}'",
            "Experiment.run_name='pair'",
            *self._settings,
        ]
        return [str(ROOT / "examples" / "run.py"), "--config", self._config, "--mode", mode, *settings]

    def _new_log(self, ending: str = "") -> Path:
        return self.folder / f"out_{len(self._logs)}{ending}.txt"

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        log = self._new_log()
        process = start(words, log)
        self._logs[process] = log
        return process

    def text(self, process: subprocess.Popen[str]) -> str:
        """The output so far of a process and its children."""
        return self._logs[process].read_text()

    def wait_for(self, condition: Callable[[], object], *alive: subprocess.Popen[str]) -> None:
        """Return once the condition holds; fails after a minute or when one of `alive` has ended."""
        deadline = time.monotonic() + 60
        while not condition():
            for process in alive:
                assert process.poll() is None, self.text(process)
            assert time.monotonic() < deadline, "\n".join(map(self.text, self._logs))
            time.sleep(0.05)

    def end_of(self, process: subprocess.Popen[str]) -> int:
        """The exit status of a process that ends within the limit."""
        self.wait_for(lambda: process.poll() is not None)
        return int(process.returncode)


SETTINGS = (
    "HORIZON=5",
    "Experiment.max_seq_len=6",
    "Experiment.env_mode='sync'",
    "Experiment.parallel_actors=2",
    "Experiment.torch_threads=1",
    "Experiment.val_timesteps_per_epoch=0",
    "Experiment.train_timesteps_per_epoch=12",
    "Experiment.train_batches_per_epoch=10",
    "Experiment.start_learning_at_epoch=0",
    "MetricLogger.tensorboard=False",
    "Experiment.verbose=False",
    "Experiment.dloader_workers=0",
    "Experiment.ckpt_interval=None",
    "Experiment.epochs=100_000",
    "Experiment.seed=3",
)
