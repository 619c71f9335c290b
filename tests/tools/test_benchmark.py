"""A benchmark: its runs, their files and scores, the page, and the reference values of its tasks."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from loxodon.data.lock import FolderLock
from loxodon.experiment.output.plots import COLORS
from loxodon.tools.benchmark import main as command
from loxodon.tools.benchmark import page, results
from loxodon.tools.benchmark.main import main
from loxodon.tools.benchmark.results import Run, path_of, read_run, read_runs, references, store
from loxodon.tools.benchmark.suites import SUITES, Task

from ..experiment.processes import wait_for
from ..experiment.test_heartbeat import write_beat

ROOT = Path(__file__).resolve().parents[2]
# A run with three evaluations, whose last value is its seed; while a file "wait" exists, it does not end.
STUB = """
import json, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
name, seed = (sys.argv[sys.argv.index(option) + 1] for option in ("--run-name", "--seed"))
run_dir = pathlib.Path(words["Experiment.ckpt_base_dir"].strip("'"), name)
(run_dir / "words.json").write_text(json.dumps(sys.argv[1:]))
if name == "recall_reverse-seed0":
    sys.exit(7)
while pathlib.Path("wait").exists():
    time.sleep(0.1)
for epoch, value in enumerate((0.0, 0.5, float(seed))):
    record = {"epoch": epoch, "env_steps": 100 * epoch, "gradient_steps": epoch, "time/collect_s": 2.0}
    with (run_dir / "logs" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**record, "val/return": value}) + "\\n")
"""


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "library_program", lambda: [sys.executable, "-c", STUB])
    monkeypatch.setattr(page, "draw", lambda suite, agents: b"")


def words_of(name: str, run: str) -> list[str]:
    words: list[str] = json.loads(Path("benchmark/memory", name, "runs", run, "words.json").read_text())
    return words


# ---- the command ----


@pytest.mark.usefixtures("_in_a_folder")
def test_a_benchmark_stores_its_runs_continues_and_writes_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("wait").touch()
    started = Path("benchmark/memory/loxodon/runs/recall-seed0/words.json")
    thread = threading.Thread(target=lambda: [wait_for(started.exists), os.kill(os.getpid(), signal.SIGINT)])
    thread.start()
    assert main(["memory", "recall", "--seeds", "0:2"]) == 130
    thread.join()
    assert "recall-seed0 was interrupted" in capsys.readouterr().out
    assert not Path("benchmark/memory.md").exists()

    Path("wait").unlink()
    assert main(["memory", "recall", "--seeds", "0:2"]) == 0
    run = read_run(path_of(Path("benchmark/memory"), "loxodon", "recall", 1))
    assert run.curve == [[0, 0, 2.0, 0.0], [100, 1, 4.0, 0.5], [200, 2, 6.0, 1.0]]
    assert run.configs == ["base_offpolicy"]
    assert "Recall.length=100" in run.settings
    assert "Experiment.epochs=84" in run.settings  # 100,000 env steps in epochs of 1,200
    assert run.versions["loxodon"] is not None
    words = words_of("loxodon", "recall-seed1")
    assert words[:2] == ["--config", "base_offpolicy"]
    assert "Experiment.torch_threads=1" in words
    text = Path("benchmark/memory.md").read_text()
    assert "| recall | 0.25 | 1 |  | 0.5 [0, 1] (2) |" in text
    assert "| recall | loxodon | 0.95: 1 of 2 | 200 | 6 | 1.00 |" in text

    begun = started.stat().st_mtime_ns
    assert main(["memory", "recall", "--seeds", "0"]) == 0
    assert started.stat().st_mtime_ns == begun


@pytest.mark.usefixtures("_in_a_folder")
def test_an_agent_of_a_user_replaces_ours_and_is_compared_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Task] = []
    monkeypatch.setattr(command.Benchmark, "check", lambda self, task: checked.append(task))
    Path("mine.gin").write_text("include 'base_offpolicy.gin'\nExperiment.parallel_actors = 4\n")
    own = ["--config", "mine.gin", "--name", "mine", "Agent.tau=0.01", "--env-steps", "4000"]
    assert main(["memory", "recall", "recall_reverse", "--seeds", "0", *own]) == 1
    assert (
        "recall_reverse-seed0 failed (exit status 7), the end of benchmark/memory/mine"
        in capsys.readouterr().out
    )
    assert main(["memory", "recall", "--seeds", "0", *own]) == 0
    assert checked == [SUITES["memory"].tasks["recall"]]
    words = words_of("mine", "recall-seed0")
    assert words[:2] == ["--config", "mine.gin"]
    assert {"Agent.tau=0.01", "Experiment.epochs=10"} < set(words)
    assert main(["memory", "recall", "--seeds", "0"]) == 0
    assert "score of loxodon | score of mine |" in Path("benchmark/memory.md").read_text()

    again = [*own[:-1], "8000"]
    assert main(["memory", "recall", "--seeds", "0", *again]) == 1
    error = capsys.readouterr().err
    assert "only one of the two has Experiment.epochs=10, Experiment.epochs=20. Fix: choose another" in error
    Path("mine.gin").write_text("include 'base_offpolicy.gin'\nExperiment.parallel_actors = 4\nTAU = 0.5\n")
    assert main(["memory", "recall", "--seeds", "0", *own]) == 1
    assert "recall-seed0.json was made before mine.gin changed. Fix: choose" in capsys.readouterr().err
    Path("benchmark/memory/mine/recall-seed0.json").unlink()
    assert main(["memory", "recall", "--seeds", "0", *own]) == 1
    assert "mine/runs/recall-seed0 holds a run that was begun with other settings" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_a_folder")
def test_a_file_that_an_agent_includes_is_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.Benchmark, "check", lambda self, task: None)
    Path("base.gin").write_text("include 'base_offpolicy.gin'\n")
    Path("mine.gin").write_text("include 'base.gin'\n")
    words = ["memory", "recall", "--seeds", "0", "--config", "mine.gin", "--name", "mine"]
    assert main(words) == 0
    Path("base.gin").write_text("include 'base_offpolicy.gin'\nTAU = 0.5\n")
    assert main(words) == 1
    assert "base.gin changed. Fix: choose" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize(
    ("setting", "option"),
    [("Experiment.epochs=3", "--env-steps"), ("Experiment.ckpt_base_dir='x'", "-o")],
)
def test_settings_that_the_benchmark_decides_are_refused(
    capsys: pytest.CaptureFixture[str], setting: str, option: str
) -> None:
    assert main(["memory", "recall", "--seeds", "0", "--name", "mine", setting]) == 2
    error = capsys.readouterr().err
    assert f"{setting.partition('=')[0]} cannot be set" in error.replace("`", "")
    assert f"Fix: use {option} instead." in error


@pytest.mark.usefixtures("_in_a_folder")
def test_a_run_that_stopped_early_is_not_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = Path("benchmark/memory/loxodon/runs/recall-seed0")
    write_beat(run_dir, role="learner", state="stopped", note="by SIGTERM")
    assert main(["memory", "recall", "--seeds", "0"]) == 1
    assert "recall-seed0 stopped early (by SIGTERM); run the same command" in capsys.readouterr().out
    assert not path_of(Path("benchmark/memory"), "loxodon", "recall", 0).exists()


@pytest.mark.usefixtures("_in_a_folder")
def test_an_agent_without_env_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--name", "mine", "Experiment.train_timesteps_per_epoch=0"]
    assert main(["memory", "recall", "--seeds", "0", *own]) == 2
    error = capsys.readouterr().err
    assert "config error: Experiment.train_timesteps_per_epoch is 0" in error
    assert "Fix: set it to a positive number" in error


@pytest.mark.usefixtures("_in_a_folder")
def test_runs_of_other_processes_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(folder: Path, *args: object) -> FolderLock:
        if folder.name == "recall-seed0":
            raise ValueError("another process")
        return FolderLock(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "FolderLock", taken)
    assert main(["memory", "recall", "--seeds", "0:2"]) == 0
    assert "made by other processes: recall-seed0" in capsys.readouterr().out
    assert [run.seed for run in read_runs(Path("benchmark/memory"))["loxodon"]["recall"]] == [1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["memory", "recal"],
            "'recal' is not a task of memory. Did you mean 'recall'? Fix: choose from recall,",
        ),
        (["memory", "Agent.tau=0.1"], "an agent of your own needs a name. Fix: add --name mine."),
        (["memory", "--name", "a/b"], "--name 'a/b' is not a file name. Fix: use letters, digits and"),
        (["memory", "--name", ".."], "--name '..' is not a file name."),
        (["memory", "--name", "x", "--config", "nothing"], "there is no such file or preset"),
        (["popgim"], "argument SUITE: invalid choice: 'popgim'"),
    ],
)
def test_mistakes_are_found_before_any_run(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "memory"}'])
def test_a_file_that_is_not_a_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine" / "recall-seed0.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=r"recall-seed0\.json is not a result .+ Fix: delete it"):
        read_runs(tmp_path)


# ---- scores and the page ----


def run_of(*values: float, seed: int = 0, stopped_at: float | None = None, task: str = "recall") -> Run:
    """A run with the given evaluations, one every 100 env steps and every second."""
    curve = [[100.0 * i, float(i), float(i), value] for i, value in enumerate(values, 1)]
    return Run("memory", task, "mine", seed, curve, [], [], stopped_at)


def test_the_score_is_the_mean_of_the_last_fifth() -> None:
    run = run_of(0.0, 0.2, 0.4, 1.0, 0.5, 0.7, 0.7, 0.6, 0.8, 0.6)
    assert run.score == pytest.approx((0.6 + 0.8 + 0.6) / 3)  # from 800 of 1,000 env steps on
    assert run.retention(0.5) == pytest.approx((2 / 3 - 0.5) / (1.0 - 0.5))
    assert run.retention(1.0) is None
    assert run_of(0.0, 0.2, 0.9, stopped_at=0.9).score == 0.9


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    run = run_of(0.1, 0.25, stopped_at=0.2)
    store(run, tmp_path)
    assert read_runs(tmp_path) == {"mine": {"recall": [run]}}


def test_costs_are_medians_over_the_seeds_that_reached_the_target() -> None:
    runs = [run_of(0.0, 0.96, 0.25), run_of(0.0, 0.1, 0.2, 0.95, seed=1), run_of(0.0, 0.4, 0.4, seed=2)]
    row = page.Row("recall", SUITES["memory"].tasks["recall"], runs)
    assert row.learned() == ["0.95: 2 of 3", "300", "3", "0.50"]  # one seed kept nothing, the other all
    assert row.verdict() == ""
    assert page.Row("recall", row.task, runs[2:]).verdict() == "recall"
    low = page.Row("recall", row.task, [run_of(0.1, 0.2, stopped_at=0.2)])
    assert low.verdict() == "recall (below random play, not run as far as the target)"
    assert low.arrivals() == []


def test_the_comparison_normalises_scores_between_random_play_and_the_reference() -> None:
    easy = page.Row("recall", SUITES["memory"].tasks["recall"], [run_of(1.0), run_of(0.25, seed=1)])
    published = page.Row(
        "RepeatPreviousMedium", SUITES["popgym"].tasks["RepeatPreviousMedium"], [run_of(0.8)]
    )
    assert easy.normalized is not None
    np.testing.assert_allclose(easy.normalized, [1.0, 0.0])
    cells = page.summary("mine", [easy, published])
    assert cells == ["mine", "2", f"{(0.5 + (0.8 + 0.5087) / 1.5087) / 2:.3g}", "1 of 1", "0", "300", "0.0"]


def test_a_page_may_be_a_part_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "draw", lambda suite, agents: b"png")
    path = tmp_path / "results.md"
    path.write_text("Before.\n<!-- memory: begin -->\nold\n<!-- memory: end -->\nAfter.\n")
    page.write_page("memory", {"mine": {"recall": [run_of(1.0)]}}, path)
    text = path.read_text()
    assert text.startswith("Before.\n<!-- memory: begin -->\n| agent |")
    assert text.endswith("![learning curves](results_memory.png)\n<!-- memory: end -->\nAfter.\n")
    assert (tmp_path / "results_memory.png").read_bytes() == b"png"


def test_curves_are_drawn() -> None:
    pytest.importorskip("matplotlib", reason="pictures are an extra")
    picture = page.draw(SUITES["memory"], {"mine": {"recall": [run_of(0.0, 1.0)]}, "b": {}})
    assert picture.startswith(b"\x89PNG")


def test_agents_with_few_points_keep_their_colors() -> None:
    pytest.importorskip("matplotlib", reason="pictures are an extra")
    image = pytest.importorskip("PIL.Image")
    agents = {name: {"recall": [run_of(*values)]} for name, values in (("a", [0.0] * 99), ("b", [1.0, 0.0]))}
    drawn = image.open(io.BytesIO(page.draw(SUITES["memory"], agents))).convert("RGB")
    found = np.array([color for _, color in drawn.getcolors(1 << 20)])
    for expected in COLORS[:2]:
        color = [int(expected[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(found - color).max(axis=1).min() < 8


# ---- this project's own results ----


def test_the_page_of_results_shows_the_stored_runs() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- (\w+): begin -->", text)
    assert {"popgym", "memory", "classic", "meta"} <= set(shown)
    for suite in shown:
        runs = read_runs(ROOT / "benchmarks" / "results" / suite)
        picture = f"results_{suite}.png"
        section = page.section_of(SUITES[suite], runs, picture)
        assert f"<!-- {suite}: begin -->\n{section}\n<!-- {suite}: end -->" in text
        assert (ROOT / "docs" / picture).stat().st_size < 100_000


def test_targets_lie_above_random_play_and_at_most_at_the_optimum() -> None:
    num_checked = 0
    for suite in SUITES.values():
        for name, task in suite.tasks.items():
            target, optimum = (
                results.target_of(name, task),
                references()["tasks"].get(name, {}).get("optimum"),
            )
            random = results.reference(name, "random")
            if target is not None and random is not None:
                assert target > random, name
                num_checked += 1
            if target is not None and optimum is not None and optimum["is_exact"]:
                assert target <= optimum["value"], name
    assert num_checked > 35


def test_every_reference_value_belongs_to_a_task_and_has_a_source() -> None:
    tasks = {name for suite in SUITES.values() for name in suite.tasks}
    assert references()["tasks"].keys() - tasks == set()
    values = [value for task in references()["tasks"].values() for value in task.values()]
    assert {value["source"] for value in values} == references()["sources"].keys()
    assert all("episodes" in value for value in values if value["source"].startswith("random"))


def test_tasks_of_popgym_exist_and_windows_hold_their_whole_episodes() -> None:
    pytest.importorskip("popgym", reason="POPGym is an extra")
    for task in SUITES["popgym"].tasks.values():
        settings = " ".join(task.settings)
        (env_id,), (length,) = (
            re.findall(word, settings) for word in (r"env_id='(.*)'", r"max_seq_len=(\d+)")
        )
        env: Any = gym.make(env_id, disable_env_checker=True).unwrapped
        longest = getattr(env, "max_episode_length", None) or getattr(env, "episode_length", None)
        longest = longest or env.deck_size - 1  # HigherLower shows the first card at the reset
        assert longest + 1 == int(length), env_id
