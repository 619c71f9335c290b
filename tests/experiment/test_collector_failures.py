"""A worker that breaks or dies, a disk that is full: what is finished is stored, and it is told once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loxodon.data import load_trajectory

from .fakes import CountingEnv


class FailingEnv(CountingEnv):
    """Breaks in its 23rd step, in the way that it is told."""

    def __init__(self, way: str) -> None:
        super().__init__(length=5)
        self.way, self.count = way, 0

    def step(self, action: int) -> Any:
        self.count += 1
        if self.count == 23:
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the bearings are worn out")
        return super().step(action)


SCRIPT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
import types
package = types.ModuleType("fakery"); package.__path__ = [{here!r}]; sys.modules["fakery"] = package
from fakery import fakes, test_collector_failures
from loxodon.envs import EnvSpec
way = sys.argv[1]
make = EnvSpec(fakes.CountingEnv, {{}}) if way == "disk" else EnvSpec(
    test_collector_failures.FailingEnv, {{"way": way}})
exp = fakes.make_experiment({folder!r}, env_mode="async", make_train_env=make, val_timesteps_per_epoch=0,
                            train_timesteps_per_epoch=100, async_env_mp_context="fork")
exp.start()
if way == "disk":
    from loxodon.data import files
    import threading
    pack, lock, packed = files.pack_npz, threading.Lock(), []
    def full(*args):
        with lock:  # both halves write at the same time
            if len(packed) >= 12:
                raise OSError(28, "No space left on device")
            packed.append(args)
        return pack(*args)
    files.pack_npz = full
exp.learn()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raises", "the bearings are worn out"),
        ("killed", "was killed by signal 9"),
        ("disk", "could not be written to"),
    ],
)
def test_a_failure_stores_what_is_finished_and_is_told_once(tmp_path: Path, way: str, words: str) -> None:
    code = SCRIPT.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code, way],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "done" not in done.stdout
    told = [line for line in done.stderr.splitlines() if words in line and "raise " not in line]
    # From a worker, an env's error comes as a summary and in the env's own traceback; a full disk is told by
    # the writer of each half.
    assert len(told) == 1 or (len(told) == 2 and way != "killed"), done.stderr
    assert "During handling" not in done.stderr
    lengths = [len(load_trajectory(path)) for path in (tmp_path / "tiny/buffer/fifo").glob("*.npz")]
    assert lengths.count(5) == 12  # four episodes of each of three envs ended before
    assert max(lengths) == 5  # and what was collected of the next ones is kept, too
