"""Two runs of one config: one that nothing disturbs, and one that is killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run_and_kill(folders: Sequence[Path], *, after_epoch: int, last_epoch: int) -> None:
    """Run `exact.gin` in both folders; `kill -9` the second after that checkpoint, and resume it.

    last_epoch: of the run, before which it has to be dead.
    folders: each with an `exact.gin` whose run is called "exact" and lies beside it.
    """
    whole, victim = (_launch(folder) for folder in folders)
    marker = folders[1] / f"exact/ckpts/training_states/exact_epoch_{after_epoch}/COMPLETE"
    deadline = time.monotonic() + 300
    while not marker.exists():
        assert victim.poll() is None, victim.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()  # type: ignore[union-attr]  # an orphaned loader worker keeps the other end for a while
    last = max(int(path.name.rpartition("_")[2]) for path in marker.parents[1].glob("exact_epoch_*[0-9]"))
    assert last < last_epoch  # else it was not killed in time
    for process in (_launch(folders[1], "--resume"), whole):
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text


def _launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    code = "import sys; from loxodon.experiment.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--config", "exact.gin", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
