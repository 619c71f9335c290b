"""A sweep: its trials, their records, and errors that are found before any trial begins."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from loxodon.tools import sweep
from loxodon.tools.seeds import Job
from loxodon.tools.sweep import main, parse_space

from ..experiment.fakes import TINY
from ..experiment.processes import wait_for

optuna = pytest.importorskip("optuna", reason="sweeps are an extra")
# A run of two epochs with a record and a checkpoint each. Trial 5 is bad and never ends by itself. While a
# file "wait" exists, no trial gets beyond its first epoch.
STUB = """
import json, os, pathlib, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
name = sys.argv[sys.argv.index("--run-name") + 1]
run_dir = pathlib.Path(words["Experiment.ckpt_base_dir"].strip("'"), name)
def note_begin():
    with pathlib.Path("begun").open("a") as file:
        file.write(f"{name}\\n")
if words["Experiment.batch_size"] == "3":
    note_begin()
    sys.exit(7)
value = -9.0 if name == "trial-5" else float(words["Experiment.learning_rate"])
for epoch in range(int("--resume" in sys.argv), 2):
    with (run_dir / "logs" / "metrics.jsonl").open("a") as file:
        record = {"epoch": epoch, "env_steps": 100 * epoch, "gradient_steps": epoch}
        file.write(json.dumps({**record, "val/return": value if epoch else -99.0}) + "\\n")
    checkpoint = run_dir / "ckpts" / "training_states" / f"{name}_epoch_{epoch}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "COMPLETE").touch()
    if epoch == int("--resume" in sys.argv):
        note_begin()
    if words["Experiment.batch_size"] == "4" and epoch == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if pathlib.Path("wait").exists():
        time.sleep(600)
if name == "trial-5":
    time.sleep(600)
"""
SEARCHED = ["Experiment.learning_rate=log(1e-5,1e-3)", "Experiment.env_mode=choice(sync)"]
WORDS = ["--config", "tiny.gin", *SEARCHED, "Experiment.batch_size=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_tiny_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "library_program", lambda: [sys.executable, "-c", STUB])
    Path("tiny.gin").write_text(TINY)


@pytest.mark.parametrize("option", ["--check", "--print-config", "--test-run", "--run-name=x"])
def test_options_of_runs_that_are_no_trials_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, "--trials", "2", option])
    assert f"Fix: remove {'--seeds' if 'name' in option else '--check'}" in capsys.readouterr().err


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run before the trials is skipped."""
    monkeypatch.setattr(sweep, "dry_run", lambda config: "")


def begun() -> list[str]:
    return Path("begun").read_text().split() if Path("begun").exists() else []


@pytest.mark.usefixtures("unbuilt")
def test_a_sweep_continues_where_it_was_prunes_and_writes_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("wait").touch()
    thread = threading.Thread(
        target=lambda: [wait_for(lambda: len(begun()) == 2), os.kill(os.getpid(), signal.SIGINT)]
    )
    thread.start()
    assert main([*WORDS, "--trials", "2", "--jobs", "2"]) == 130
    thread.join()
    Path("wait").unlink()
    (study,) = optuna.get_all_study_summaries(f"sqlite:///{Path('sweeps/tiny/study.db')}")
    assert study.n_trials == 2

    assert main([*WORDS, "--trials", "6", "--seed", "0"]) == 2  # another sweep
    assert "holds another sweep" in capsys.readouterr().err
    text = Path("tiny.gin").read_text()
    Path("tiny.gin").write_text(f"{text}\nExperiment.grad_clip = 2\n")
    assert main([*WORDS, "--trials", "6"]) == 2
    assert "tiny.gin" in capsys.readouterr().err
    Path("tiny.gin").write_text(text)
    assert main([*WORDS, "--trials", "6", "--through", "nice -n 1"]) == 0
    numbers = [0, 1, *range(6)]
    assert sorted(begun()) == sorted(f"trial-{number}" for number in numbers)
    for trial in ("trial-0", "trial-1"):  # the interrupted ones
        lines = Path("sweeps/tiny/runs", trial, "logs/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [0, 1]
    printed = capsys.readouterr().out
    assert "trial 5 was ended after 100 env steps: it was worse than the median of the others" in printed
    trials = optuna.load_study(study_name="sweep", storage="sqlite:///sweeps/tiny/study.db").trials
    assert [trial.state.name for trial in trials] == [*["COMPLETE"] * 5, "PRUNED"]
    best = max(trials[:5], key=lambda trial: trial.params["Experiment.learning_rate"])
    text = Path("sweeps/tiny/best.gin").read_text()
    assert text.splitlines() == [
        f"# val/return {best.value:.6g} in trial {best.number} of 6",
        f"Experiment.learning_rate = {best.params['Experiment.learning_rate']}",
        "Experiment.env_mode = 'sync'",
    ]
    assert text in printed

    Path("sweeps/tiny/study.db").unlink()
    assert main([*WORDS, "--trials", "2"]) == 2
    assert "study.db has no trials, but sweeps/tiny/runs/trial-0 exists" in capsys.readouterr().err


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("through", [[], ["--through", """sh -c '"$0" "$@"; exit $?'"""]])
def test_a_killed_trial_continues_with_the_next_call(
    through: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS[:-1], "Experiment.batch_size=4", "--trials", "1", *through]
    assert main(words) == 1
    assert "trial 0 was killed by SIGKILL; run the same command to continue it" in capsys.readouterr().out
    assert main(words) == 0
    assert begun() == ["trial-0", "trial-0"]


@pytest.mark.usefixtures("unbuilt")
def test_a_trial_that_a_signal_stopped_continues_with_the_next_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*WORDS, "--trials", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "stopped_early", lambda self: "by SIGTERM")
        assert main(words) == 1
    assert "trial 0 was stopped by SIGTERM; run the same command to continue it" in capsys.readouterr().out
    assert main(words) == 0
    assert begun() == ["trial-0", "trial-0"]


@pytest.mark.usefixtures("unbuilt")
def test_a_sweep_stops_if_every_trial_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS[:-1], "Experiment.batch_size=3", "-o", "here"]
    assert main([*words, "--trials", "9"]) == 1
    assert begun() == ["trial-0", "trial-1", "trial-2"]
    printed = capsys.readouterr().out
    assert "trial 0 failed (exit status 7), log here/runs/trial-0/logs/console.log" in printed
    assert "error: no trial has finished. Fix:" in printed


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["Experiment.learning_rat=log(1e-5,1e-3)"],
            "`Experiment.learning_rat=log(1e-5,1e-3)`: Experiment has no",
        ),
        (["Experiment.epochs=uniform(1,2)"], "`Experiment.epochs=uniform(1,2)`: "),
        (["Experiment.env_mode=choice(asink,sync)"], "'asink'"),
        (["Experiment.learning_rate=log(1,0.1)"], "Fix: write log(1e-5,1e-3), "),
        (
            ["Experiment.learning_rate=log(0,0.1)"],
            "but got (low=0.0, high=0.1). Fix: ",
        ),
        (
            ["Experiment.learning_rate=loog(1e-5,1e-2)"],
            "loog(1e-5,1e-2) is not a search space. Did you mean 'log'? Fix: write log(1e-5,1e-3), ",
        ),
        (["Experiment.learning_rate=log(0.1"], "`Experiment.learning_rate=log(0.1`: log(0.1 is not a search"),
        ([*SEARCHED, "Experiment.learning_rate=uniform(0,1)"], " search the same setting. Fix: remove one"),
        # no class uses this setting
        ([SEARCHED[0], "KShotWrapper.num_attempts=2"], "`KShotWrapper.num_attempts=2`"),
        (["Experiment.learning_rate=0.1"], "A sweep needs a setting to search"),
    ],
)
def test_impossible_settings_are_reported_before_any_trial(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "tiny.gin", "--trials", "1", *words]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Fix:" in error
    assert [path.name for path in Path().iterdir()] == ["tiny.gin"]


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("what", ["text", "damaged", "folder"])
def test_an_unreadable_database_is_one_clear_error(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("sweep/study.db")
    place.parent.mkdir()
    if what == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"no database" if what == "text" else b"SQLite format 3\0" + b"\xff" * 5000)
    assert main([*WORDS, "--trials", "1", "-o", "sweep"]) == 1
    assert "error: sweep/study.db cannot be used as the database of a sweep (" in capsys.readouterr().err
    assert begun() == []


def test_search_spaces_are_parsed() -> None:
    choices = parse_space("A.b=choice(8, (1, 2), @Name)")
    assert choices == ("A.b", optuna.distributions.CategoricalDistribution(["8", "(1, 2)", "@Name"]))
    assert parse_space("A.b=int(1,8)") == ("A.b", optuna.distributions.IntDistribution(1, 8))
    assert parse_space("A.b='log'") is None
