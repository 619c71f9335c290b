"""`--seeds`: runs one after the other or in parallel, independent of each other's failures."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.process import signals
from loxodon.tools.arguments import parse_run
from loxodon.tools.run import main
from loxodon.tools.seeds import run_seeds

from ..experiment.fakes import TINY, metrics
from ..experiment.processes import wait_for
from ..experiment.test_heartbeat import write_beat

# Writes its arguments to a file named after its seed. Seed 1 fails; with `wait`, runs must be ended.
STUB = """
import sys, time, json, pathlib
words = sys.argv[1:]
seed = words[words.index("--seed") + 1]
pathlib.Path(f"began{seed}").write_text(json.dumps(words))
if "wait" in words:
    time.sleep(600)
sys.exit(7 if seed == "1" else 0)
"""


def started(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("began*"))}


def seeds_of_stubs(words: list[str], *, parallel: int = 1) -> int:
    return run_seeds(Path("runs/x"), {}, [0, 1, 2], words, [sys.executable, "-c", STUB], parallel)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_failing_seed_does_not_stop_the_others_and_is_reported_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parallel: int
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", "x", "--seeds", "0:3", "--jobs=3", "--run-name", "x", "A.b=1"]
    assert seeds_of_stubs(words, parallel=parallel) == 1
    kept = ["--config", "x", "A.b=1"]
    assert started(tmp_path) == {
        f"began{seed}": [*kept, "--seed", str(seed), "--run-name", f"x-seed{seed}"] for seed in range(3)
    }
    printed = capsys.readouterr().out
    assert "x-seed1 failed with exit status 7" in printed
    assert "loxodon report runs/x-seed0 runs/x-seed1 runs/x-seed2\n" in printed
    assert "error: 1 of 3 runs failed: x-seed1\n" in printed


def test_a_seed_that_a_signal_stopped_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_beat(Path("runs/x-seed2"), role="learner", state="stopped", note="by SIGTERM")
    seeds_of_stubs([], parallel=3)
    printed = capsys.readouterr().out
    assert "x-seed0 finished\n" in printed
    assert "x-seed2 stopped early (by SIGTERM); --resume continues it\n" in printed


def test_a_folder_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(OSError, match=r"runs/x-seed0/logs/console.log cannot be written .* Fix: choose"):
        seeds_of_stubs([], parallel=3)


@pytest.mark.parametrize(("parallel", "begun"), [(1, {"began0"}), (2, {"began0", "began1"})])
def test_ctrl_c_ends_running_seeds_and_starts_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int, begun: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.glob("began*"))) == parallel)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert seeds_of_stubs(["wait"], parallel=parallel) == 130
    finally:
        thread.join()
    assert started(tmp_path).keys() == begun


def test_runs_can_be_started_through_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine, the process that asked for a run is not its parent, so runs must not watch it."""
    monkeypatch.chdir(tmp_path)
    stub = "import os; print('BY' in os.environ, 'LOXODON_PARENT' in os.environ)"
    through = parse_run(["--config", "tmaze", "--through", "env BY=srun"]).through
    words = ["--config", "x", "--seeds", "0:2", "--through", "env BY=srun"]
    assert run_seeds(Path("runs/x"), {}, [0, 1], words, [sys.executable, "-c", stub], 2, through) == 0
    logs = [tmp_path / "runs" / f"x-seed{seed}" / "logs" / "console.log" for seed in (0, 1)]
    assert [log.read_text() for log in logs] == ["True False\n"] * 2
    with pytest.raises(SystemExit):
        parse_run(["--config", "tmaze", "--through", "srunn -c 2"])
    assert (
        "--through begins with srunn, but there is no such program on this machine. Fix:"
        in capsys.readouterr().err
    )
    assert main(["--config", "tmaze", "--through", "env BY=srun"]) == 2


# Like Slurm's srun: SIGTERM kills its job, and SIGUSR1 is forwarded.
SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
job = subprocess.Popen(sys.argv[2:])
signal.signal(signal.SIGTERM, lambda *_: job.kill())
signal.signal(signal.SIGUSR1, lambda signum, frame: job.send_signal(signum))
sys.exit(job.wait())
"""
SAVES = f"""
import pathlib, runpy
with runpy.run_path({signals.__file__!r})["StopRequest"]() as stop:  # without the whole library
    pathlib.Path("began").touch()
    while not stop.requested():
        pass
pathlib.Path("saved").touch()
"""


def test_runs_of_slurm_save_before_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)

    def interrupt() -> None:
        wait_for(Path("began").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        program = [sys.executable, "-c", SAVES]
        assert run_seeds(Path("runs/x"), {}, [0], [], program, 1, [str(srun), "--mem=2G"]) == 130
    finally:
        thread.join()
    assert Path("saved").exists()


@pytest.mark.slow
@pytest.mark.forked
def test_only_unfinished_runs_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gin").write_text(TINY)
    words = ["--config", "tiny.gin", "--seeds", "3", "--jobs", "2"]
    assert main(words) == 0
    run_dir = Path("runs/tiny-seed3")
    assert "final success rate" in (run_dir / "logs" / "console.log").read_text()
    assert (run_dir / "logs" / "curves.png").is_file()
    before = metrics(run_dir)
    assert main([*words, "--resume"]) == 0
    assert "tiny-seed3 has already finished\n" in capsys.readouterr().out
    assert main([*words, "--resume", "Experiment.learning_rate=0.5"]) == 0
    assert "finished with Experiment.learning_rate = 0.0001, not 0.5. Fix:" in capsys.readouterr().out
    assert main([*words, "--resume", "Experiment.epochs=2"]) == 0  # more epochs than before
    assert metrics(run_dir)[: len(before)] == before
    assert metrics(run_dir)[-1]["epoch"] == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seeds", "3:3"], "'3:3' is not a list of seeds. Fix: write --seeds 0:5"),
        (["--seeds", "0:2", "--seed", "1"], "set by both --seeds 0:2 and --seed 1. Fix:"),
        (["--seeds", "0:2", "--jobs", "0"], "--jobs: '0' is not a whole number of at least 1. Fix:"),
        (["--jobs", "2"], "--jobs needs --seeds. Fix:"),
        (
            ["--seeds", "0:2", "--seeds=4"],
            "the seed is set by both --seeds 0:2 and --seeds=4. Fix: remove one",
        ),
        (["--seeds", "0:2", "Experiment.seed=4"], "set by both --seeds 0:2 and Experiment.seed=4. Fix:"),
        (["--seed", "1", "Experiment.seed = 4"], "set by both --seed 1 and Experiment.seed = 4. Fix:"),
    ],
)
def test_impossible_seeds_are_refused(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_run(["--config", "tmaze", *words])
    assert part in capsys.readouterr().err
