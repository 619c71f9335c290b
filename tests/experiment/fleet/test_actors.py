"""`--actors N`: a learner and its actors, as a user starts and kills them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gin
import psutil
import pytest

from loxodon.experiment import Experiment
from loxodon.experiment.config import load_config
from loxodon.experiment.config.registry import cleared_config
from loxodon.experiment.fleet.actors import ActorSpec, actor_environment, local_pool
from loxodon.experiment.fleet.launchers import ray_pool
from loxodon.tools.run import main

from ..processes import wait_for

pytestmark = pytest.mark.forked
SCRIPT = Path(__file__).parents[3] / "examples" / "run.py"
LONG = ["Experiment.epochs=100000", "Experiment.val_interval=None", "Experiment.ckpt_interval=None"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--actors", "0"], "--actors: '0' is not a whole number of at least 1. Fix: "),
        (
            ["--actors", "2", "--mode", "collect"],
            "cannot be combined with --mode collect. Fix: remove one of the two",
        ),
        (
            ["--actors", "2", "--mode", "both"],
            "cannot be combined with --mode both. Fix: remove one of the two",
        ),
        (
            ["--actors", "2", "--test-run"],
            "--test-run uses one process, so it cannot be combined with --actors. Fix",
        ),
    ],
)
def test_impossible_command_lines_are_refused(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--config", "tmaze", *words])
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err


def test_the_config_shows_the_source_of_the_mode_and_is_checked_as_usual(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "tiny.gin", "--actors", "2", "--print-config", "--check"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "Experiment.mode" in line]
    assert line.split("#")[0].strip() == "Experiment.mode = 'learn'"
    assert "`--actors 2`" in line
    assert "check passed" in out
    assert not tiny.run_dir.exists()


def test_an_actor_gets_the_command_line_of_its_learner() -> None:
    words = shlex.split("--config a.gin A.b=1 --actors=4 --resume --seed 3 --mode learn --run-name x")
    words += ["Experiment.val_interval=5", "Experiment.mode=learn"]
    made = ActorSpec(words, 2).words()
    assert made == [
        *shlex.split("--config a.gin A.b=1 --seed 3 --run-name x --mode collect"),
        "Experiment.val_interval=None",
        "Experiment.evaluate_at_end=False",
        "Experiment.start_collecting_at_epoch=0",
        "WallClockLimit.seconds=None",
        "Experiment.replay_ratio=None",
        "ReplayRatio.actor_processes=2",
        "Experiment.torch_threads=1",
    ]


@pytest.mark.parametrize(
    ("preset", "typed", "ratio", "updates"),
    [
        ("tmaze", [], 50 / 612, 50),  # the preset sets None, which is meant for one process
        ("tmaze", ["Experiment.replay_ratio=None"], None, 50),
        ("tmaze", ["Experiment.replay_ratio=0.2"], 0.2, 122),
        ("recall", [], 0.04, 48),  # 1,200 env steps per epoch
        ("recall", ["Experiment.train_batches_per_epoch=100"], 0.04, 100),
        ("recall", ["Experiment.start_collecting_at_epoch=2"], 0.04, 1000),
    ],
)
def test_a_preset_has_the_same_pace_and_epochs_with_actors(
    preset: str, typed: list[str], ratio: float | None, updates: int
) -> None:
    with cleared_config():
        config = load_config([preset], typed)
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
        exp.keep_pace_of_preset(config.is_set_by_user)
        assert (exp.replay_ratio, exp.train_batches_per_epoch) == (ratio, updates)


def test_threads_and_workers_of_actors_can_be_chosen() -> None:
    for chosen in ("Experiment.torch_threads=3", "Experiment.torch_threads = 3"):
        assert "Experiment.torch_threads=1" not in ActorSpec([chosen], 1).words()
    assert "AsyncVectorEnv.num_workers=1" in ActorSpec([], 10_000).words(num_per_machine=10_000)
    assert not any("num_workers" in word for word in ActorSpec([], 10_000).words())
    with cleared_config():
        gin.bind_parameter("Experiment.env_mode", "sync")
        assert not any("num_workers" in word for word in ActorSpec([], 10_000).words(num_per_machine=10_000))
        gin.bind_parameter("Experiment.env_mode", "async")
        gin.bind_parameter("AsyncVectorEnv.num_workers", 4)
        assert not any("num_workers" in word for word in ActorSpec([], 10_000).words(num_per_machine=10_000))


def test_actors_do_not_mistake_themselves_for_ranks_of_the_learner() -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", "ACCELERATE_USE_FSDP": "1"}
    kept = {"ACCELERATE_USE_CPU": "1", "PATH": "p", "OMP_NUM_THREADS": "2"}
    made = actor_environment({**launched, **kept})
    assert kept.items() <= made.items()
    assert not launched.keys() & made.keys()
    assert actor_environment({})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_actors_see_no_gpu_unless_asked_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    ctx: Any = SimpleNamespace(run_dir=tmp_path, console=mock.Mock(), stop=mock.Mock(), progress=mock.Mock())
    spec = ActorSpec(["--device", "cuda", "--actor-device", device], 1, device=device)
    by_ray = ray_pool(ctx, spec, address="local", num_cpus=1.0, num_gpus=float(device == "cuda"))
    (*_, settings) = by_ray.command
    on_ray = json.loads(settings)["environment"]
    here = local_pool(ctx, spec, program=["loxodon"])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if device == "cpu":
        assert hidden.items() <= here.environment.items()
        assert hidden.items() <= on_ray.items()
        assert "--device" not in here.command
    else:
        assert here.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert not hidden.keys() & on_ray.keys()
        assert " ".join(here.command).count("--device cuda") == 1
    assert "--actor-device" not in here.command


def test_actors_on_the_cpu_do_not_use_fp16() -> None:
    with cleared_config():
        gin.bind_parameter("Experiment.mixed_precision", "fp16")
        assert (
            "Experiment.mixed_precision='no'" in ActorSpec(["Experiment.mixed_precision='fp16'"], 1).words()
        )
        assert "Experiment.mixed_precision='no'" not in ActorSpec([], 1, device="cuda").words()
        gin.bind_parameter("Experiment.mixed_precision", "bf16")
        assert "Experiment.mixed_precision='no'" not in ActorSpec([], 1).words()


# ---- real processes ----


def some_live(output: str) -> bool:
    """True if an actor of this learner is still running; the pid of a dead one may have been reused."""
    own = {int(pid) for pid in actor_pids(output)}
    return any(p.pid in own and p.info["status"] != "zombie" for p in psutil.process_iter(["status"]))


def run_script(*words: str) -> subprocess.Popen[bytes]:
    """Run examples/run.py with these arguments; its output goes to output.txt."""
    with Path("output.txt").open("wb") as file:
        command = [sys.executable, str(SCRIPT), "--config", "tiny.gin", *words]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def actor_pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"started.*: process (\d+)", text)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_actor_is_restarted_and_all_end_when_the_learner_is_killed(tiny: Any) -> None:
    learner, output = run_script("--actors", "1", "--seed", "1", *LONG), Path("output.txt").read_text
    wait_for(lambda: len(tiny.actors()) == 1, learner)
    os.kill(actor_pids(output())[0], signal.SIGKILL)
    wait_for(lambda: len(tiny.actors()) == 2, learner)  # the new one collects
    assert "actor 0 was killed by SIGKILL" in output()
    wait_for(lambda: any("train/loss" in record for record in tiny.records()), learner)
    assert len(actor_pids(output())) == 2
    learner.kill()
    learner.wait()
    wait_for(lambda: not some_live(output()))
    assert "all finished trajectories are stored" in (tiny.run_dir / "logs/actors/actor_0.log").read_text()
    told = [str(tiny.records(name)[:5]) for name in tiny.actors()]
    assert len(set(told)) == 2  # the random numbers of the actors differ


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_actors_end_with_their_run_and_a_new_run_begins_with_its_own_data(
    tiny: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--config", "tiny.gin", "--actors", "1"]) == 0
    output = capsys.readouterr().out
    assert "run folder" in output
    assert not some_live(output)

    def stop() -> None:
        wait_for(lambda: len(tiny.actors()) == 2 and any("train/loss" in one for one in tiny.records()))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        main(["--config", "tiny.gin", "--actors", "1", *LONG])
    thread.join()
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert "Stopped by SIGTERM in epoch" in output
    assert not some_live(output)
    assert "all finished trajectories are stored" in (tiny.run_dir / "logs/actors/actor_0.log").read_text()
    assert "trajectories of an earlier run named 'tiny' were moved to buffer/superseded/" in caplog.text
    assert list((tiny.run_dir / "buffer/superseded").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_actors_that_cannot_work_end_the_run_with_their_error(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner does not collect, so only actors build the wrapper that fails."""
    Path("broken_noise.py").write_text(
        "import gin\nfrom loxodon.envs import EpsilonGreedy\n"
        "@gin.configurable\nclass BrokenNoise(EpsilonGreedy):\n"
        "    def __init__(self, *args):\n        raise ValueError('no luck today. Fix: none')\n"
    )
    with Path("tiny.gin").open("a") as config:
        config.write("\nimport broken_noise\nExperiment.exploration_wrapper_type = @BrokenNoise\n")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=os.pathsep)
    assert main(["--config", "tiny.gin", "--actors", "1", *LONG]) == 1
    printed = capsys.readouterr()
    assert "error: No actor is left: actor 0 ended with exit status 2" in printed.err
    assert "no luck today" in printed.err
    assert "Fix: correct the error in this log, then run the same command with --resume" in printed.err
    assert "saved" in printed.out
    assert tiny.actors() == []
