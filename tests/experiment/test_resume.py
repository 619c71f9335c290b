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
import torch

from loxodon.experiment import Experiment

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


def run_until(exp: Experiment, epoch: int) -> None:
    """Run and die in the middle of the training of `epoch`, leaving everything as it is."""
    update = exp.learner.update

    def dying(*args: Any) -> Any:
        if exp.epoch == epoch and exp.learner.gradient_steps % 4 == 2:
            raise KilledError
        return update(*args)

    exp.learner.update = dying  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        exp.learn()


@pytest.mark.parametrize("truncates", [False, True])
def test_a_resumed_run_writes_the_metrics_of_the_uninterrupted_one(tmp_path: Path, truncates: bool) -> None:
    changes: dict[str, Any] = {"epochs": 6, "ckpt_interval": 2, "val_interval": 2, "log_interval": 3}
    changes |= {"train_timesteps_per_epoch": 13, "traj_save_len": 9 if truncates else 1e10}
    changes["exact_resume"] = True
    whole = run(make_experiment(tmp_path / "whole", **changes))
    first = make_experiment(tmp_path / "parts", **changes)
    first.start()
    run_until(first, epoch=5)
    second = make_experiment(tmp_path / "parts", **changes)
    second.start()
    assert second.load_checkpoint() == 4
    second.learn()
    assert metrics(second.run_dir) == metrics(whole.run_dir)
    assert len(list((second.run_dir / "buffer" / "superseded").iterdir())) > 0
    for a, b in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_whose_seed_was_drawn_resumes_exactly(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 4, "seed": None, "exact_resume": True}
    first = make_experiment(tmp_path / "parts", **changes)
    first.start()
    run_until(first, epoch=3)
    second = make_experiment(tmp_path / "parts", **changes)
    second.start()
    second.load_checkpoint()
    second.learn()
    whole = run(make_experiment(tmp_path / "whole", **{**changes, "seed": first.run_seed}))
    assert metrics(second.run_dir) == metrics(whole.run_dir)


def test_a_finished_run_goes_on_when_epochs_is_raised(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=2))
    longer = make_experiment(tmp_path, epochs=4)
    run(longer, lambda exp: exp.load_checkpoint())
    assert longer.checkpoints.complete_epochs() == [1, 3]
    assert longer.learner.gradient_steps == 16
    again = make_experiment(tmp_path, epochs=4)
    run(again, lambda exp: exp.load_checkpoint())  # nothing left to do
    assert again.learner.gradient_steps == 16


def test_a_flush_at_a_checkpoint_loses_no_transition(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, epochs=4, ckpt_interval=1, train_timesteps_per_epoch=7))
    from loxodon.data import load_trajectory

    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps == 4 * 7 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_a_checkpoint_says_how_to_go_on_and_exits(
    tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    process = launch(tmp_path, "--slow", epochs=10_000, ckpt_interval=None)
    wait_for((tmp_path / "tiny" / "ckpts" / "latest" / "policy.safetensors").exists, process)
    process.send_signal(signum)
    text = finish(process)
    assert process.returncode == status, text
    assert f"Stopped by {signum.name} in epoch" in text
    assert "--resume" in text
    assert "done" not in text
    exp = make_experiment(tmp_path, epochs=10_000)
    exp.start()
    epoch = exp.load_checkpoint()
    assert epoch == exp.checkpoints.newest_epoch()
    assert exp.learner.gradient_steps > 0
    steps = sum(r.get("train/updates", 0) for r in metrics(exp.run_dir))
    assert steps == exp.learner.gradient_steps


@pytest.mark.slow
def test_learner_and_collector_work_as_two_processes(tmp_path: Path) -> None:
    learner = launch(tmp_path, mode="learn", epochs=5, val_timesteps_per_epoch=0)
    time.sleep(0.5)  # the learner may start first: it waits for data
    collector = launch(tmp_path, mode="collect", seed=7, val_timesteps_per_epoch=0)
    text = finish(learner)
    assert learner.returncode == 0, text
    assert "done" in text
    text = finish(collector)  # ends by itself: the learner published its final policy
    assert collector.returncode == 0, text
    records = metrics(tmp_path / "tiny")
    assert sum(r.get("train/updates", 0) for r in records) == 20
    assert not any("collect/return" in r for r in records)
    assert len(list((tmp_path / "tiny" / "logs").glob("metrics_collect_*.jsonl"))) == 1
