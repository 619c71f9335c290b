"""Runs as separate processes: starting, waiting, killing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """
import sys
sys.path.append({root!r})
from tests.experiment import fakes
exp = fakes.make_experiment({folder!r}, **{changes!r})
exp.start()
if "--resume" in sys.argv:
    exp.load_checkpoint()
exp.learn()
exp.close()
"""
CONFIG_SCRIPT = "import sys; from loxodon.tools.run import main; sys.exit(main(sys.argv[1:]))"

KILLED = """
import os, signal
from loxodon.experiment.learn import learner
update = learner.Learner.update
def dying(self, *args):
    if self.gradient_steps == {updates}:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *args)
learner.Learner.update = dying
"""


def launch(folder: Path, *words: str, **changes: Any) -> subprocess.Popen[str]:
    """Start a run of `make_experiment` in a process group of its own."""
    root = str(Path(__file__).parents[2])
    return start(SCRIPT.format(root=root, folder=str(folder), changes=changes), *words)


def start(code: str, *words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start a Python process; `finish` reads its output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[Any]) -> Any:
    """Wait for the end; returns the output of the process if it has a pipe."""
    return process.communicate(timeout=100)[0]


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[Any] | None = None, limit_s: float = 60.0
) -> None:
    """Wait until the condition holds; fails after a minute, or when the process ends first."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, finish(process)
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.05)


def is_anybody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_and_resume(folder: Path, *, after_updates: int) -> None:
    """Run `exact.gin`, `kill -9` it after this number of updates, and resume it."""
    words = ["--config", "exact.gin", "Experiment.verbose=False"]
    victim = start(KILLED.format(updates=after_updates) + CONFIG_SCRIPT, *words, cwd=folder)
    status = victim.wait(timeout=100)
    victim.stdout.close()  # type: ignore[union-attr]  # an orphaned loader worker keeps the other end for a while
    assert status == -signal.SIGKILL
    resumed = start(CONFIG_SCRIPT, *words, "--resume", cwd=folder)
    text = finish(resumed)
    assert resumed.returncode == 0, text
