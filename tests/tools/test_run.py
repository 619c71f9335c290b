"""The command line of runs: options, exit statuses, output and files; test runs, final tests, times."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import pytest
from gymnasium import spaces

from loxodon.data import DiskTrajDataset, MixtureOfDatasets
from loxodon.envs import EnvSpec, TMazePassive
from loxodon.experiment import Experiment
from loxodon.experiment.collect import StageTimer
from loxodon.tools.arguments import program_name
from loxodon.tools.dry_run import work_of
from loxodon.tools.run import closing_summary, exit_status, main

from ..experiment.fakes import TINY, CountingEnv, make_experiment, metrics, run


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_tiny_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gin").write_text(TINY)


def test_a_config_error_is_one_message_without_traceback_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", "tiny.gin", "Experiment.epoch=3"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "config error: command line, `Experiment.epoch=3`: Experiment has no parameter 'epoch'. "
        "Did you mean 'epochs'? Fix: correct the name.\n"
    )
    # only the experiment can check this
    assert main(["--config", "tiny.gin", "Experiment.env_mode=asink"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("config error: Experiment.env_mode is 'asink'")
    assert "'async'" in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--config", "tiny"], None),  # the suffix may be left out
        (["--config", "tini.gin"], "no such file or preset"),
        ([], "no preset, .gin file or --env is given"),
        (["--config", "tiny.gin", "--epochs=3"], "unrecognized arguments: --epochs=3"),
        (["--config", "tiny.gin", "--sead", "3"], "Did you mean '--seed' or '--seeds'?"),
        (["--config", "tiny.gin", "--mode", "colect"], "invalid choice: 'colect'"),
        (["tiny.gin", "Experiment.epochs=1"], None),
        (["tiny.gin", "=1"], "must look like Name.param=value"),
    ],
)
def test_impossible_command_lines_are_refused(
    words: list[str], part: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_configs_are_applied_in_the_order_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.gin").write_text("Experiment.epochs = 7\n")
    for words in (["tiny.gin", "--config", "more.gin"], ["--config=tiny.gin", "more.gin"], ["tiny", "more"]):
        assert main([*words, "--print-config"]) == 0
        assert "Experiment.epochs = 7 " in capsys.readouterr().out
    assert main(["more.gin", "--config", "tiny.gin", "--print-config"]) == 0
    assert "Experiment.epochs = 1 " in capsys.readouterr().out


def test_a_saved_config_is_equivalent(capsys: pytest.CaptureFixture[str]) -> None:
    def bound(*words: str) -> set[str]:
        assert main([*words, "--print-config"]) == 0
        lines = [line.partition("  # ") for line in capsys.readouterr().out.splitlines()]
        return {left.rstrip() for left, _, where in lines if where.strip() != "default"} - {""}

    for start in (["--env", "CartPole-v1", "--agent", "ppo"], ["tiny.gin"]):
        words = [*start, "--seed", "3", "Experiment.run_name=mine", "Experiment.epochs=2"]
        before = bound(*words)
        saved = bound(*words, "--save-config", "mine.gin")
        assert {line for line in saved if "saved mine.gin" not in line} == before == bound("mine.gin")
        assert main(["mine.gin", "Experiment.epochs=3", "--save-config", "mine.gin", "--print-config"]) == 2
        assert "a different file of this name exists. Fix: " in capsys.readouterr().err
        Path("mine.gin").unlink()


def test_paths_with_signs_of_gin_and_the_shell_are_written_for_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("Bob's lr=0.1")
    folder.mkdir()
    Path("tiny.gin").rename(own := folder / "own.gin")
    assert main([str(own), "--save-config", "out.gin", "--print-config"]) == 0
    assert main(["out.gin", "--print-config"]) == 0
    monkeypatch.setattr(sys, "argv", ["a b/run.py"])
    assert program_name() == "python 'a b/run.py'"


def test_a_saved_config_names_presets_as_users_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Not by the path of an installation, so that the file works on another machine."""
    assert main(["tmaze", "--config", "encoders/gru", "--save-config", "mine.gin", "--print-config"]) == 0
    assert Path("mine.gin").read_text().splitlines() == ["include 'tmaze.gin'", "include 'encoders/gru.gin'"]
    assert ".types" not in capsys.readouterr().out  # the link of development installs (setup.py)


def test_an_environment_can_be_tried_without_a_gin_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_own_env.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as OwnEnv\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["--env", "cli_own_env:OwnEnv", "--encoder", "ff", "Experiment.parallel_actors=1", "--test-run"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("# loxodon run --env cli_own_env:OwnEnv --encoder ff\nimport cli_own_env\n")
    assert "test run passed" in said
    assert main([*words[:1], "cli_own_env:OwnEnvv", *words[2:]]) == 2
    assert "Did you mean 'cli_own_env:OwnEnv'" in capsys.readouterr().err


def test_check_builds_everything_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "temp")
    words = ["--config", "tiny.gin", "--check", "DiskTrajDataset.dset_root=buffers", "--mode", "collect"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for part in ("Experiment.mode = 'collect'", "dset_root = 'buffers'", "1 updates", "check passed: "):
        assert part in printed
    assert sorted(path.name for path in Path().iterdir()) == ["temp", "tiny.gin"]
    assert list(Path("temp").glob("loxodon*")) == []


def test_the_command_to_continue_after_a_stop_keeps_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny.gin", "Experiment.epochs=50", "WallClockLimit.seconds=1e-9"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Training stops after epoch 0" in said
    assert said.rstrip().endswith(f"{' '.join(words)} --resume")


def test_a_run_can_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_resumed_run_without_a_seed_uses_the_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
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

    fifo = Path("runs/tiny/buffer/fifo")  # a resume that works moves files that are newer than the checkpoint
    shutil.copy(next(fifo.iterdir()), fifo / "TMaze_00000000_9999999999.0.npz")
    before = files()
    other_envs = ["Experiment.env_mode='async'", "Collector.save_env_state=True"]
    for wrong in (["FFTrajEncoder.d_model=4"], other_envs):
        assert main([*words, "--resume", "Experiment.epochs=2", *wrong]) in (1, 2)
        assert "Fix:" in capsys.readouterr().err
        assert files() == before


def test_a_run_without_any_update_fails_and_says_why(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["Experiment.verbose=False", "TMazePassive.horizon=100", "Experiment.epochs=3"]
    assert main(["--config", "tiny.gin", *words, "Experiment.ckpt_interval=None"]) == 1
    assert "error: This run made no update. No episode has ended" in (text := capsys.readouterr().err)
    assert "Experiment.traj_save_len, e.g. to 500" in text
    (text,) = (r.getMessage() for r in caplog.records if "there has been no update" in r.getMessage())
    assert text.startswith("After 2 epochs there has been no update. No episode has ended: 32 env steps")
    assert main(["--config", "tiny.gin", *words, "Experiment.traj_save_len=8"]) == 0


def test_the_closing_summary_names_commands_that_differ_from_this_one() -> None:
    names: dict[str, Any] = {"run_dir": Path("runs/a-seed3"), "run_name": "a-seed3", "mode": "both"}
    ends: dict[str, Any] = {"epochs": 10, "stop_at_val_return": 0.9, "max_env_steps": None}
    alone = SimpleNamespace(num_processes=1)
    exp = SimpleNamespace(**names, **ends, seed=3, run_seed=3, epoch=10, is_finished=True, accelerator=alone)
    words = shlex.split("--config a --seed 3 --run-name=a-seed3 --resume 'Experiment.epochs = 10' 'B.c=d e'")
    lines = closing_summary(exp, {"val/success": 1.0, "val/return": 0.5}, words, "a.py").splitlines()
    assert lines[:3] == [
        "final success rate  1.000",
        "final mean return   0.500",
        "run folder          runs/a-seed3",
    ]
    assert lines[3].endswith("--config a 'Experiment.epochs = 10' 'B.c=d e' --seed 4 --run-name a-seed4")
    further = "--resume Experiment.epochs=20 Experiment.stop_at_val_return=None"
    assert lines[4].endswith(f"--config a --seed 3 --run-name=a-seed3 'B.c=d e' {further}")
    exp.epoch = 78  # resumed with an end that it has passed
    assert "Experiment.epochs=156" in closing_summary(exp, {}, words, "a.py")
    for drawn, other in ((1_106_457_778, "--seed 1 "), (1, "--seed 2 ")):  # resumed without its seed
        exp.seed, exp.run_seed = None, drawn
        assert other in closing_summary(exp, {}, words, "a.py")
    exp.accelerator = SimpleNamespace(num_processes=2)
    assert "further    (with the launcher of this run, for 2 processes) a.py" in closing_summary(
        exp, {}, words, "a.py"
    )


@pytest.mark.parametrize(
    "ends",
    [
        ["Experiment.stop_at_val_return=None"],
        ["Experiment.stop_at_val_return=-1e8"],
        ["Experiment.stop_at_val_return = None", "Experiment.max_env_steps = 16"],
        [],
    ],
)
def test_the_printed_command_to_train_further_works(
    ends: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("tiny.gin").open("a") as file:
        file.write("\nExperiment.stop_at_val_return = -1e9\nExperiment.val_interval = 1\n")  # reached at once
    words = ["--config", "tiny.gin", "Experiment.verbose=False", *ends]
    assert main(words) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("train it further"))
    _, program, further = line.partition(f"{program_name()} ")
    assert program
    before = len(metrics(Path("runs/tiny")))
    assert main(shlex.split(further)) == 0
    assert any("train/loss" in one and one["epoch"] >= 1 for one in metrics(Path("runs/tiny"))[before:])


@gin.configurable
class ShortMaze(TMazePassive):
    """Sets the horizon itself, so a binding of it has no effect."""

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


# ---- test runs ----


def named(exp: Experiment, *names: str) -> list[dict[str, float]]:
    return [record for record in metrics(exp.run_dir, with_time=True) if set(names) <= record.keys()]


def test_a_test_run_does_one_of_everything_without_touching_the_real_run(tmp_path: Path) -> None:
    real = run(make_experiment(tmp_path, val_timesteps_per_epoch=0))
    before = {path: path.stat().st_mtime_ns for path in real.run_dir.rglob("*")}
    data = DiskTrajDataset(dset_root=str(tmp_path), dset_name="tiny")  # the data of the real run
    exp = make_experiment(
        tmp_path,
        dataset=data,
        test_run=True,
        epochs=10**6,
        train_timesteps_per_epoch=10**6,
        val_timesteps_per_epoch=10**6,
        train_batches_per_epoch=10**6,
        **{"FinalTest.timesteps": 10**6},
        val_interval=None,
        ckpt_interval=None,
        log_to_wandb=True,
        mode="learn",
        make_train_env=EnvSpec(CountingEnv, {"length": 10**6}),
        make_val_env=EnvSpec(CountingEnv, {"length": 3}),
    )
    run(exp)
    assert {path: path.stat().st_mtime_ns for path in real.run_dir.rglob("*")} == before
    assert exp.run_dir == tmp_path / "tiny-test"
    assert (exp.env_steps, exp.learner.gradient_steps, exp.epoch) == (3 * 8, 2, 1)
    assert exp.checkpoints.newest_intact_epoch() == (0, [])
    assert named(exp, "val/return")
    assert named(exp, "test/return")
    assert work_of(exp) == "24 env steps, 2 updates, one checkpoint"


def test_a_dataset_that_is_not_ready_is_reported(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, test_run=True, dataset=DiskTrajDataset(dset_min_size=100)))
    assert "no update (the dataset was not ready for training)" in work_of(exp)


def test_the_parts_of_a_mixture_are_redirected(tmp_path: Path) -> None:
    parts = [DiskTrajDataset(str(tmp_path), name, takes_new_trajs=name == "new") for name in ("new", "old")]
    make_experiment(tmp_path, dataset=MixtureOfDatasets(parts, [1.0, 1.0]), test_run=True)
    assert [(part.dset_root, part.dset_name) for part in parts] == [(None, None), (str(tmp_path), "old")]


def test_a_test_run_begins_with_an_empty_buffer() -> None:
    for num_bits in (1, 2):  # trajectories of the first do not fit the second
        assert main(["tiny.gin", f"TMazePassive.num_bits={num_bits}", "--test-run"]) == 0
    assert list(Path("runs/tiny-test/buffer/fifo").iterdir())
    assert list(Path("runs/tiny-test/buffer/superseded").iterdir())


@pytest.mark.parametrize("option", ["--check", "--test-run"])
def test_a_test_run_without_collection_needs_the_named_data(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny.gin", "--run-name", "data"]) == 0
    before = sorted(Path("runs").rglob("*"))
    words = ["tiny.gin", "Experiment.train_timesteps_per_epoch=0", option]
    assert main([*words, "DiskTrajDataset.dset_name=data"]) == 0
    assert "passed: 0 env steps, 1 updates" in capsys.readouterr().out
    assert main([*words, "DiskTrajDataset.dset_name=typo"]) == (2 if option == "--check" else 1)
    assert "typo/buffer has no trajectories, because the folder" in capsys.readouterr().err
    made = sorted(path for path in Path("runs").rglob("*") if path.parts[1] != "tiny-test")
    assert made == before


@pytest.mark.slow
def test_a_test_run_of_an_on_policy_agent_includes_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", "ppo/cartpole", "--test-run", "FinalTest.timesteps=8"]
    words += ["Experiment.callbacks=[@EpisodeLengthCurriculum]", "EpisodeLengthCurriculum.start=2"]
    words += ["EpisodeLengthCurriculum.end=9", "EpisodeLengthCurriculum.over_epochs=9"]
    words += ["RewardShaping.shaper=@ScaleRewards()", "ScaleRewards.scale=100.0"]
    try:
        assert main(words) == 0
    finally:
        gin.clear_config()
    (log,) = tmp_path.glob("runs/*-test/logs/metrics.jsonl")
    found = {name: value for line in log.read_text().splitlines() for name, value in json.loads(line).items()}
    assert (found["collect/episode_length"], found["collect/return"]) == (2.0, 2.0)
    assert found["ppo/return"] > 10  # training rewards are shaped
    assert found["time/update_ms"] > 0


# ---- the test after training ----


# its own environment, or that of validation
@pytest.mark.parametrize("setting", ["FinalTest.make_env", "make_val_env"])
def test_the_final_test_runs_once_after_training(tmp_path: Path, setting: str) -> None:
    env = EnvSpec(CountingEnv, {"length": 2})
    exp = run(make_experiment(tmp_path, **{setting: env, "FinalTest.timesteps": 6}))
    (test,) = named(exp, "test/return")
    assert test["test/episode_length"] == 2
    assert metrics(exp.run_dir, with_time=True)[-1] == test
    assert exp.train_envs is None


class OtherEnv(CountingEnv):
    """Has one more action, or another observation space."""

    def __init__(self, obs_space: spaces.Space[Any] | None = None) -> None:
        super().__init__()
        if obs_space is None:
            self.action_space = type(self.action_space)(4)
        else:
            self.observation_space = obs_space


@pytest.mark.parametrize("setting", ["FinalTest.make_env", "make_val_env"])
@pytest.mark.parametrize(
    ("obs_space", "words"),
    [
        (None, r"actions Discrete\(4\), .* and Discrete\(3\)"),
        (spaces.Discrete(4), r"Discrete\(4\).*built for Dict\('observation': Box"),
        (spaces.Dict(observation=CountingEnv().observation_space, more=spaces.Discrete(2)), "'more'"),
    ],
)
def test_environments_that_do_not_fit_are_reported_before_training(
    tmp_path: Path, setting: str, obs_space: Any, words: str
) -> None:
    env = EnvSpec(OtherEnv, {"obs_space": obs_space}, env_name="other")
    exp = make_experiment(tmp_path, **{setting: env, "FinalTest.timesteps": 6})
    with pytest.raises(
        ValueError, match=rf"evaluation environments \(other\) have .*{words}.*Fix:.*make_val_env"
    ):
        exp.start()
    exp.close()


# ---- time ----


def test_stages_are_divided_by_their_number_of_steps_or_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = StageTimer()
    now = iter([1.0, 2.5, 2.75, 10.0])
    monkeypatch.setattr("loxodon.experiment.collect.collector.time.perf_counter", lambda: next(now))
    after_policy = timer.lap("policy", 0.5)
    after_env = timer.lap("env", after_policy)
    timer.lap("store", after_env)
    timer.lap("update", 2.0)
    timer.num_updates = 4
    assert timer.step_metrics(5) == {
        "time/policy_ms_per_step": 100.0,
        "time/env_ms_per_step": 300.0,
        "time/store_ms_per_step": 50.0,
    }
    assert timer.update_metrics() == {"time/update_ms": 2000.0}
    assert (timer.step_metrics(0), timer.update_metrics()) == ({}, {})
    assert set(timer.seconds.values()) == {0.0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_logged_stages_add_up_to_at_most_their_whole(tmp_path: Path, mode: str) -> None:
    exp = run(make_experiment(tmp_path, env_mode=mode, async_env_mp_context="fork"))
    stages = [f"time/{stage}_ms_per_step" for stage in ("policy", "env", "store")]
    for record in (collected := named(exp, *stages)):
        assert all(record[stage] > 0 for stage in stages)
        assert sum(record[stage] for stage in stages) * 12 <= 1e3 * record["time/collect_s"]
    for record in (learned := named(exp, "time/update_ms")):
        assert 0 < record["time/update_ms"] * record["train/updates"] <= 1e3 * record["time/learn_s"]
    assert (len(collected), len(learned)) == (2, 2)


def test_one_epoch_is_profiled(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, **{"ProfileEpoch.epoch": 1}, val_timesteps_per_epoch=0))
    (trace,) = (exp.run_dir / "logs").glob("profile_epoch_*.json")
    assert trace.name == "profile_epoch_1.json"
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_full_disk_is_one_line_instead_of_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fills() -> int:
        raise OSError(28, "No space left on device", "report.md")

    assert exit_status(fills) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: [Errno 28] No space left on device: 'report.md'. Fix: free space there")


@pytest.mark.parametrize(
    ("agent", "setting"),
    [("off-policy", "PPOLearner.update_epochs=9"), ("ppo", "EpsilonGreedy.eps_start=0.5")],
)
def test_settings_of_the_other_kind_of_agent_are_an_error(
    capsys: pytest.CaptureFixture[str], agent: str, setting: str
) -> None:
    words = ["--agent", "ppo"] if agent == "ppo" else []
    assert main(["--env", "CartPole-v1", *words, "--test-run", setting]) == 2
    assert (
        f"{setting.replace('=', ' = ')} is set, but nothing in this experiment uses it"
        in capsys.readouterr().err
    )
