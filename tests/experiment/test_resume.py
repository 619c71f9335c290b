"""Going on: of a finished run, after a signal. And what other tests use: runs as processes, records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .fakes import make_experiment, run

SCRIPT = """
import sys, time
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("fakes", {fakes!r})
fakes = module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
exp = fakes.make_experiment({folder!r}, **{changes!r})
step = exp.train_step
exp.start()
if "--resume" in sys.argv:
    print("resumes at", exp.load_checkpoint(), flush=True)
if "--slow" in sys.argv:
    update = exp.learner.update
    exp.learner.update = lambda *args: (time.sleep(0.02), update(*args))[1]
print("ready", flush=True)
exp.learn()
print("done", flush=True)
exp.close()
"""


def launch(folder: Path, *arguments: str, **changes: Any) -> subprocess.Popen[str]:
    fakes = str(Path(__file__).with_name("fakes.py"))
    code = SCRIPT.format(fakes=fakes, folder=str(folder), changes=changes)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )


def finish(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=300)
    return text


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


class KilledError(BaseException):
    """Stands for the end of the process, which saves nothing."""


def test_a_finished_run_goes_on_when_epochs_is_raised(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=2))
    longer = make_experiment(tmp_path, epochs=4)
    run(longer, lambda exp: exp.load_checkpoint())
    assert longer.checkpoints.complete_epochs() == [1, 3]
    assert longer.learner.gradient_steps == 16
    again = make_experiment(tmp_path, epochs=4)
    run(again, lambda exp: exp.load_checkpoint())  # nothing left to do
    assert again.learner.gradient_steps == 16


@pytest.mark.slow
def test_an_interrupt_saves_a_checkpoint_says_how_to_go_on_and_exits(tmp_path: Path) -> None:
    process = launch(tmp_path, "--slow", epochs=10_000, ckpt_interval=None)
    wait_for((tmp_path / "tiny" / "ckpts" / "latest" / "policy.safetensors").exists, process)
    process.send_signal(signal.SIGINT)
    text = finish(process)
    assert process.returncode == 130, text
    assert "Stopped by SIGINT in epoch" in text
    assert "--resume" in text
    assert "done" not in text
    exp = make_experiment(tmp_path, epochs=10_000)
    exp.start()
    epoch = exp.load_checkpoint()
    assert epoch == exp.checkpoints.newest_epoch()
    assert exp.learner.gradient_steps > 0
    steps = sum(r.get("train/updates", 0) for r in metrics(exp.run_dir))
    assert steps == exp.learner.gradient_steps
