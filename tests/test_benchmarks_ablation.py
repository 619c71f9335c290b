"""Statistics of the ablation's table, on curves with a known result; no training."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import ablation

    yield ablation
    for name in ("ablation", "ablation_rows", "learning", "learning_tasks", "provenance"):
        sys.modules.pop(name, None)


def record(row: str, task: Any, name: str, seed: int, share: float) -> dict[str, Any]:
    """A run at chance until the given share of the budget, and at the target from there on."""
    jump = round(share * task.num_env_steps)
    curve = [(0, task.chance), (jump, task.chance), (jump + 1, task.target)]
    return {"row": row, "task": name, "seed": seed, "reached": jump + 1, "curve": curve, "cpu_s": 1.0}


def test_area_is_the_share_of_the_budget_after_the_target_was_reached(ablation: ModuleType) -> None:
    for name, task in ablation.TASKS.items():
        for share in (0.0, 0.25, 0.75):
            curve = record("recommended", task, name, 0, share)["curve"]
            assert ablation.area(curve, task) == pytest.approx(1.0 - share, abs=1e-3)
        late = [(0, task.target), (2 * task.num_env_steps, task.target)]
        assert ablation.area(late, task) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "sign"),
    [([-0.3, -0.2, -0.25, -0.1, -0.2], -1), ([0.2, 0.1, 0.3, 0.2, 0.1], 1), ([-0.3, 0.3, -0.1, 0.2, 0.0], 0)],
)
def test_interval_excludes_zero_if_all_differences_have_one_sign(
    ablation: ModuleType, values: list[float], sign: int
) -> None:
    interval = ablation.bootstrap([values])
    assert interval.sign == sign
    assert interval.low <= interval.mean <= interval.high
    assert interval.mean == pytest.approx(sum(values) / 5)


def test_the_verdict_follows_the_signs_of_the_intervals(ablation: ModuleType) -> None:
    worse, none, better = (ablation.Interval(mean, mean - 0.1, mean + 0.1) for mean in (-0.5, 0.0, 0.5))
    assert ablation.verdict([worse, none], none) == "helps"
    assert ablation.verdict([none, none], none) == "no effect"
    assert ablation.verdict([none, better], none) == "harms"
    assert ablation.verdict([worse, better], none) == "mixed"
    assert ablation.verdict([worse, better], worse) == "helps"


def test_the_report_pairs_runs_by_seed_and_counts_failed_ones(ablation: ModuleType, tmp_path: Path) -> None:
    name, task = next(iter(ablation.TASKS.items()))
    path = tmp_path / "runs.jsonl"
    for seed in range(5):
        ablation.store(record("recommended", task, name, seed, 0.25), path)
        ablation.store(record("n_step", task, name, seed, 0.5 + 0.02 * seed), path)
    lost = {**record("n_step", task, name, 4, 0.5), "reached": None, "curve": [(0, task.chance)]}
    ablation.store(lost, path)  # the later record of a run counts
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(lost)[:20])  # the writer died
    found = ablation.stored(path)
    assert len(found) == 10
    lines = ablation.report(found).splitlines()
    assert f"| {name} | {task.kind} | 0.75 |" in ablation.report(found)
    line = next(line for line in lines if line.startswith("| Retrace and lambda-returns"))
    assert "], 5 runs |" in line
    assert f"| {name} -0.37 |" in line
    assert line.endswith("| helps |")


def test_the_queue_skips_rows_without_a_switch_and_tasks_that_a_change_cannot_affect(
    ablation: ModuleType,
) -> None:
    keys = ablation.keys_of(ablation.ROWS, list(ablation.TASKS), ablation.SEEDS)
    assert keys[0] == ("recommended", next(iter(ablation.TASKS)), 0)
    assert len(set(keys)) == len(keys)
    for row, task, _ in keys:
        assert ablation.ROWS[row].settings is not None
        assert task not in ablation.ROWS[row].cannot_matter_on


def test_the_page_on_the_algorithm_shows_the_stored_runs(ablation: ModuleType) -> None:
    page = (BENCHMARKS.parent / "docs" / "algorithm.md").read_text(encoding="utf-8")
    assert ablation.report(ablation.stored(ablation.RESULTS)) in page
