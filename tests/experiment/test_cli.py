"""The front door: options, exit statuses, what is printed and what is left on disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gin
import pytest

from loxodon.envs import TMazePassive
from loxodon.experiment import Experiment
from loxodon.experiment.cli import closing_words, main

TINY = """
Experiment.run_name = 'tiny'
Experiment.ckpt_base_dir = 'runs'
Experiment.max_seq_len = 8
Experiment.dataset = @DiskTrajDataset()
Experiment.tstep_encoder_type = @FFTstepEncoder
Experiment.traj_encoder_type = @FFTrajEncoder
Experiment.agent_type = @Agent
Experiment.val_timesteps_per_epoch = 4
Experiment.make_train_env = @TMazePassive
Experiment.make_val_env = @TMazePassive
Experiment.parallel_actors = 2
Experiment.env_mode = 'sync'
Experiment.dloader_workers = 0
Experiment.epochs = 1
Experiment.train_timesteps_per_epoch = 8
Experiment.train_batches_per_epoch = 1
Experiment.batch_size = 2
MetricLogger.tensorboard = False
TMazePassive.horizon = 3
FFTstepEncoder.d_hidden = 8
FFTstepEncoder.d_output = 8
FFTrajEncoder.d_model = 8
Agent.num_critics = 2
Actor.d_hidden = 8
CriticEnsemble.d_hidden = 8
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_tiny_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gin").write_text(TINY)
    yield
    gin.clear_config()


def test_a_config_error_is_one_message_without_traceback_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", "tiny.gin", "Experiment.epoch=3"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "config error: command line, `Experiment.epoch=3`: Experiment has no parameter 'epoch'. "
        "Did you mean 'epochs'? Fix: correct it.\n"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--config", "tiny"], None),  # the suffix may be left out
        (["--config", "tini.gin"], "no such file or preset"),
        ([], "no --config is given"),
        (["--config", "tiny.gin", "--epochs=3"], "unrecognized arguments: --epochs=3"),
        (["--config", "tiny.gin", "--sead", "3"], "Did you mean --seed?"),
        (["--config", "tiny.gin", "--mode", "colect"], "invalid choice: 'colect'"),
        (["--config", "tiny.gin", "tmaze"], "must look like Name.param=value"),
    ],
)
def test_wrong_command_lines(words: list[str], part: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*words, "--print-config"])
    except SystemExit as error:
        status = int(str(error.code))
    printed = capsys.readouterr().err
    assert (status, printed) == (0, "") if part is None else status == 2
    if part is not None:
        assert part in printed
        assert "Fix:" in printed
        assert "Traceback" not in printed


def test_settings_that_only_the_experiment_can_judge_are_placed_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", "tiny.gin", "Experiment.env_mode=asink"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("config error: command line, `Experiment.env_mode=asink`: ")
    assert "'async'" in error


def test_print_config_shows_values_origins_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny.gin", "--print-config", "--run-name", "5", "--seed", "3", "--mode", "learn"]
    assert main(words) == 0
    lines = [line.split("  # ") for line in capsys.readouterr().out.splitlines() if line]
    found = {line[0].rstrip(): line[1].strip() for line in lines if len(line) == 2}
    assert found["Experiment.run_name = '5'"] == "command line, `--run-name 5`"
    assert found["Experiment.seed = 3"] == "command line, `--seed 3`"
    assert found["Experiment.mode = 'learn'"] == "command line, `--mode learn`"
    assert found["Experiment.batch_size = 2"] == "tiny.gin:18"
    assert found["EpsilonGreedy.eps_start = 1.0"] == "default"
    assert not Path("runs").exists()


def test_check_builds_everything_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "temp")
    words = ["--config", "tiny.gin", "--check", "DiskTrajDataset.dset_root=buffers", "--mode", "collect"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for part in ("Experiment.mode = 'collect'", "dset_root = 'buffers'", "mask (2, ", "loss", "check passed"):
        assert part in printed
    assert sorted(path.name for path in Path().iterdir()) == ["temp", "tiny.gin"]
    assert list(Path("temp").glob("loxodon*")) == []


def test_a_test_run_through_the_front_door(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tiny.gin", "--test-run"]) == 0
    assert "test run passed: " in (said := capsys.readouterr().out)
    assert "updates, one checkpoint, all in runs/tiny-test" in said
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-test"]


def test_a_test_run_has_no_actors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", "tiny.gin", "--test-run", "--actors", "2"])
    assert "--test-run is one process, without --actors. Fix" in capsys.readouterr().err


def test_the_way_on_after_a_stop_keeps_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny.gin", "Experiment.epochs=50", "WallClockLimit.seconds=1e-9"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Training stops after epoch 0" in said
    assert said.rstrip().endswith(f"{' '.join(words)} --resume")


def test_check_finds_a_value_that_the_code_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tiny.gin", "--check", "CriticEnsemble.num_critics=3"]) == 2
    assert "CriticEnsemble.num_critics = 3 has no effect" in capsys.readouterr().err


def test_run_then_resume(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny.gin", "--seed", "1", "Experiment.verbose=False"]
    assert main([*words, "--resume"]) == 2
    assert "has no complete checkpoint" in capsys.readouterr().err
    assert not Path("runs").exists()

    assert main(words) == 0
    printed = capsys.readouterr()
    assert "final success rate" in printed.out
    assert f"run folder          {Path('runs/tiny')}" in printed.out
    assert "--resume Experiment.epochs=2" in printed.out
    assert "warning" not in printed.err
    assert (Path("runs/tiny/logs/metrics.jsonl")).exists()

    assert main([*words, "--resume", "Experiment.epochs=2"]) == 0
    assert "warning" not in capsys.readouterr().err
    epochs = {path.name for path in Path("runs/tiny/ckpts/training_states").iterdir()}
    assert epochs == {"tiny_epoch_0", "tiny_epoch_1"}

    assert main(words) == 0
    assert "holds checkpoints up to epoch 1" in capsys.readouterr().err


def test_resume_without_a_seed_takes_that_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    words = ["--config", "tiny.gin", "Experiment.verbose=False"]
    assert main([*words, "--seed", "5"]) == 0
    caplog.clear()
    assert main([*words, "--resume", "Experiment.epochs=2"]) == 0
    (text,) = (r.getMessage() for r in caplog.records if "seed" in r.getMessage())
    assert text.endswith("this run uses seed 5")


def test_a_failed_resume_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny.gin", "Experiment.verbose=False"]
    assert main(words) == 0

    def files() -> dict[Path, bytes]:
        folders = [Path("runs/tiny") / name for name in ("ckpts", "logs", "buffer")]
        found = {p: p.read_bytes() for one in folders for p in one.rglob("*") if p.is_file()}
        return {path: data for path, data in found.items() if not path.name.startswith("manager.")}

    fifo = Path("runs/tiny/buffer/fifo")  # what is newer than the checkpoint is moved by a resume that works
    shutil.copy(next(fifo.iterdir()), fifo / "TMaze_00000000_9999999999.0.npz")
    before = files()
    for wrong in ("FFTrajEncoder.d_model=4", "Experiment.env_mode='async'"):
        assert main([*words, "--resume", "Experiment.epochs=2", wrong]) in (1, 2)
        assert "Fix:" in capsys.readouterr().err
        assert files() == before


def test_a_run_without_any_update_fails_and_says_why(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["Experiment.verbose=False", "TMazePassive.horizon=1000", "Experiment.epochs=3"]
    assert main(["--config", "tiny.gin", *words, "Experiment.ckpt_interval=None"]) == 1
    assert "error: This run made no update. No episode has ended" in (text := capsys.readouterr().err)
    assert "Experiment.traj_save_len, e.g. to 500" in text
    (text,) = (r.getMessage() for r in caplog.records if "there was no update" in r.getMessage())
    assert text.startswith("After 2 epochs there was no update. No episode has ended: 32 env steps")
    assert main(["--config", "tiny.gin", *words, "Experiment.traj_save_len=8"]) == 0


def test_closing_words_name_commands_that_differ_from_this_one() -> None:
    exp = SimpleNamespace(
        run_dir=Path("runs/a-seed3"),
        run_name="a-seed3",
        mode="both",
        seed=3,
        run_seed=3,
        epochs=10,
        stop_at_val_return=0.9,
        is_finished=True,
    )
    words = [
        "--config",
        "a",
        "--seed",
        "3",
        "--run-name=a-seed3",
        "--resume",
        "Experiment.epochs=10",
        "B.c=d e",
    ]
    lines = closing_words(exp, {"val/success": 1.0, "val/return": 0.5}, words, "a.py").splitlines()
    assert lines[:3] == [
        "final success rate  1.000",
        "final mean return   0.500",
        "run folder          runs/a-seed3",
    ]
    assert lines[3].endswith("--config a Experiment.epochs=10 'B.c=d e' --seed 4 --run-name a-seed4")
    further = "--resume Experiment.epochs=20 Experiment.stop_at_val_return=None"
    assert lines[4].endswith(f"--config a --seed 3 --run-name=a-seed3 'B.c=d e' {further}")


@pytest.mark.slow
def test_the_script_runs_from_anywhere() -> None:
    script = Path(__file__).parents[2] / "examples" / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "--config", "tiny.gin", "Agnt.gamma=0.9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'Agent'" in done.stderr
    assert "Traceback" not in done.stderr


@gin.configurable
class ShortMaze(TMazePassive):
    """Gives the length itself, so that a binding of it has no effect."""

    def __init__(self) -> None:
        super().__init__(horizon=3)


@pytest.mark.parametrize(("mode", "status", "kind"), [("collect", 0, "warning"), ("both", 2, "config error")])
def test_an_actor_may_have_settings_that_only_the_learner_uses(
    mode: str, status: int, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experiment, "learn", lambda self: {})
    unevaluated = ["Experiment.val_interval=None", "Experiment.evaluate_at_end=False"]
    words = ["--config", "tiny.gin", "--mode", mode, "Experiment.make_train_env=@ShortMaze", *unevaluated]
    assert main(words) == status
    assert f"{kind}: tiny.gin:" in (errors := capsys.readouterr().err)
    assert "TMazePassive.horizon = 3 has no effect" in errors
