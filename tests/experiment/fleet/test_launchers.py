"""Launchers for several machines, tested on one: submitit's local executor and a local Ray cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from loxodon.experiment.fleet.actors import SeparateActors
from loxodon.experiment.fleet.launchers import SlurmJob, connect_ray, finished_learners
from loxodon.experiment.fleet.shared_folder import TOKEN_VARIABLE, write_token
from loxodon.experiment.process.versions import import_extra
from loxodon.tools import launch
from loxodon.tools.run import main

from ..fakes import make_experiment, run
from ..processes import wait_for
from ..test_heartbeat import write_beat

WORDS = ["--actors", "1", "--config", "tiny.gin", "--seed", "3"]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(("backend", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_error_without_the_package_says_how_to_install_it(
    tiny: Any, backend: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert launch.main(["--backend", backend, *WORDS]) == 2
    error = capsys.readouterr().err
    assert f"needs {package}, which is not installed. Fix: pip install 'loxodon[" in error
    assert not tiny.run_dir.exists()


@pytest.mark.usefixtures("tiny")
def test_a_wrong_config_is_refused_before_anything_is_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--backend", "slurm", *WORDS, "Experiment.epoch=3"]) == 2
    assert "Did you mean 'epochs'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch.main(["--backend", "slurm", *WORDS, "--slurm-set", "account"])
    assert "'account' has no value. Fix: write --slurm-set" in capsys.readouterr().err
    assert launch.main(["--backend", "slurm", *WORDS, "Experiment.epochs=-1"]) == 2
    assert "config error: Experiment.epochs is -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch.main(["--backend", "slurm", *WORDS, "--actors", "0"])
    assert "'0' is not a whole number of at least 1. Fix:" in capsys.readouterr().err


# ---- Slurm ----


def test_slurm_is_asked_for_the_documented_resources(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, executor = mock.Mock(), mock.MagicMock()
    make.return_value, executor.submit.side_effect = executor, [SimpleNamespace(job_id=i) for i in (1, 2, 3)]
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=make))
    options = shlex.split(
        "--slurm-partition fast --slurm-minutes 30 --slurm-set slurm_account=lab "
        "--slurm-set slurm_array_parallelism=2 --slurm-set slurm_use_srun=false --actors 2"
    )
    resources = shlex.split("--slurm-learner-gpus 2 --slurm-actor-cpus 3")
    assert launch.main(["--backend", "slurm", *options, *resources, "--config", "tiny.gin"]) == 0
    assert "learner  job 3\nactors   jobs 1 2\n" in capsys.readouterr().out
    settings, jobs = make.call_args.kwargs, []
    for method, args, changes in executor.method_calls:
        settings = {**settings, **changes}
        jobs += [(*args, settings)] if method == "submit" else []
    _, (actor, for_actor), (learner, for_learner) = (
        jobs  # a failure never leaves a learner alone in the queue
    )
    assert learner.words == ["--config", "tiny.gin", "--actors", "2"]
    assert actor.words[:4] == ["--config", "tiny.gin", "--mode", "collect"]
    assert learner.run_dir == actor.run_dir == tiny.run_dir
    both = {"slurm_partition": "fast", "timeout_min": 30, "slurm_account": "lab", "cluster": "slurm"}
    both |= {"slurm_array_parallelism": 2, "slurm_use_srun": False}
    assert both.items() <= for_learner.items()
    assert both.items() <= for_actor.items()
    assert (for_learner["gpus_per_node"], for_actor["gpus_per_node"]) == (2, 0)
    assert (for_learner["cpus_per_task"], for_actor["cpus_per_task"]) == (8, 3)
    executor.batch.assert_called_once()  # one array job
    assert actor.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in learner.environment
    assert (
        actor.environment[TOKEN_VARIABLE] == learner.environment[TOKEN_VARIABLE] == write_token(tiny.run_dir)
    )


def test_data_of_an_earlier_run_are_set_aside_when_jobs_are_submitted_not_when_they_begin(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = mock.MagicMock()
    executor.submit.side_effect = [SimpleNamespace(job_id=i) for i in range(6)]
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=lambda **_: executor))
    fifo = tiny.run_dir / "buffer" / "fifo"
    fifo.mkdir(parents=True)
    (fifo / "CartPole_0000000a_1000000.0.npz").touch()
    assert launch.main(["--backend", "slurm", *WORDS, "--resume"]) == 0
    assert len(list(fifo.iterdir())) == 1
    assert launch.main(["--backend", "slurm", *WORDS]) == 0
    assert not list(fifo.iterdir())
    beat = write_beat(tiny.run_dir, role="learner", state="learning")
    assert launch.main(["--backend", "slurm", *WORDS]) == 2
    assert "is in use by a learner on far" in capsys.readouterr().err
    beat.unlink()
    num_jobs = executor.submit.call_count
    assert launch.main(["--backend", "slurm", *WORDS, "--print-config"]) == 0
    assert "Experiment.epochs = " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        launch.main(["--backend", "slurm", *WORDS[:-2], "--seeds", "0:2"])
    assert executor.submit.call_count == num_jobs
    exp = make_experiment(tiny.run_dir.parent, run_name="other", mode="learn", train_batches_per_epoch=0)
    (other := exp.run_dir / "buffer" / "fifo").mkdir(parents=True)
    (other / "CartPole_0000000a_1000000.0.npz").touch()
    exp.actors = SeparateActors()
    run(exp)
    assert len(list(other.iterdir())) == 1


@pytest.mark.skipif(not has("submitit"), reason="needs submitit")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], r"Slurm cannot be used here \(.*srun.*\)\. Fix: .*--slurm-cluster local"),
        (["--slurm-cluster", "local", "--slurm-set", "nonsense=1"], "--slurm-set is wrong: .*nonsense.*Fix:"),
    ],
)
def test_jobs_that_cannot_be_submitted_are_refused_with_a_fix(
    tiny: Any,
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tiny.run_dir))  # without srun
    assert launch.main(["--backend", "slurm", *words, *WORDS]) == 2
    assert re.search(told, capsys.readouterr().err, flags=re.DOTALL)


@pytest.mark.skipif(not has("submitit"), reason="needs submitit")
def test_a_requeued_job_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    learner = SlurmJob(main, ["--actors", "1"], run_dir, tmp_path)
    assert learner.checkpoint().function.words == ["--actors", "1"]
    folder = run_dir / "ckpts" / "training_states" / "run_epoch_3"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()
    again = learner.checkpoint().function
    assert again.words == again.checkpoint().function.words == ["--actors", "1", "--resume"]
    actor = SlurmJob(main, ["--mode", "collect"], run_dir, tmp_path)
    assert actor.checkpoint().function.words == ["--mode", "collect"]


@pytest.mark.slow
@pytest.mark.forked
@pytest.mark.timeout(300)
@pytest.mark.skipif(not has("submitit"), reason="needs submitit")
def test_slurm_jobs_train(tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "slurm", "--slurm-cluster", "local", "--slurm-learner-gpus", "0", *WORDS]
    assert launch.main(words) == 0
    printed = capfd.readouterr().out
    found = re.fullmatch(
        r"learner  job (\d+)\nactors   jobs (\d+)\nlogs     runs/tiny/logs/slurm/<job>/\n"
        r"watch    loxodon status runs/tiny\nstop     kill \1 \2\n",
        printed,
    )
    assert found, printed
    results = [tiny.run_dir / "logs" / "slurm" / job / f"{job}_0_result.pkl" for job in found.groups()]
    wait_for(lambda: all(path.exists() for path in results), limit_s=150.0)  # this is a whole run
    tiny.assert_it_has_trained(updates=8, num_actors=1)
    log = (results[0].parent / f"{found[1]}_0_log.out").read_text()
    assert "python -m loxodon.tools.launch --backend slurm --config tiny.gin" in log
    # An actor that starts only now has nothing left to do.
    late = SlurmJob(lambda *_, **__: pytest.fail("was run"), ["--mode", "collect"], tiny.run_dir, Path.cwd())
    assert late() == 0
    for_another_run = SlurmJob(
        lambda *_, **__: 7, late.words, late.run_dir, late.folder, finished_learners(late.run_dir)
    )
    assert for_another_run() == 7


# ---- Ray ----


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not has("ray"), reason="needs ray")
def test_ray_actors_train(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--backend", "ray", "--ray-address", "local", "--ray-cpus", "0.1", *WORDS, "Experiment.epochs=4"]
    assert launch.main(words) == 0
    assert max(record["gradient_steps"] for record in tiny.records()) == 16
    assert tiny.actors()
    log = (tiny.run_dir / "logs/actors/ray_pool_0.log").read_text()
    assert "actor 0 started: process" in log
    assert "usage stats" not in log.lower()  # Ray sends no usage statistics
    assert "--backend ray --ray-address local --ray-cpus 0.1 --config tiny.gin" in capsys.readouterr().out


@pytest.mark.skipif(not has("ray"), reason="needs ray")
def test_a_malformed_address_of_a_cluster_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_NUM_REDIS_GET_RETRIES"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 'nonsense'.*Fix: start one"):
        connect_ray("nonsense")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not has("ray"), reason="needs ray")
def test_a_command_runs_on_ray_and_is_asked_to_end(tmp_path: Path) -> None:
    stub = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), sys.exit(7)))\n"
        "pathlib.Path('begun').write_text(os.environ['LOXODON_PARENT'])\n"
        "time.sleep(300)"
    )
    words = ["--address", "local", "--cpus", "0.1", "--", sys.executable, "-c", stub]
    process = subprocess.Popen(
        [sys.executable, "-m", "loxodon.tools.on_ray", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    try:
        while process.poll() is None and not (tmp_path / "begun").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 7, errors
    assert (tmp_path / "saved").exists()


def test_a_broken_optional_package_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_package.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        import_extra("half_a_package", "slurm")
