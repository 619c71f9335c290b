"""The page of results shows the stored runs, and targets lie between random play and the optimum."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import results_page

    yield results_page
    for name in ("results_page", "learning_tasks"):
        sys.modules.pop(name, None)


def row_of(page: ModuleType, target: float, stopped_at: float, *curves: list[float]) -> Any:
    """A task that was run with the given results every 100 env steps, a second each; random play has 0."""
    runs = [
        {
            "final": values[-1],
            "reached": max(values) >= stopped_at,
            "curve": [(100 * i, 0, i, value) for i, value in enumerate(values)],
        }
        for values in curves
    ]
    task = page.Task(("any",), "val/return", target)
    return page.Row("task", task, stopped_at, runs, [], {"random": {"value": 0.0}})


def test_the_page_shows_the_stored_runs(page: ModuleType) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text
    for suite in page.re.findall(r"<!-- (\w+): begin -->", text):
        picture = page.PAGE.parent / f"results_{suite}.png"
        assert f"]({picture.name})" in text
        assert picture.stat().st_size < 100_000


def test_costs_are_medians_over_the_seeds_that_reached_the_present_target(page: ModuleType) -> None:
    row = row_of(page, 0.5, 0.5, [0.0, 0.6, 0.2], [0.0, 0.1, 0.2, 0.7], [0.0, 0.4, 0.4])
    assert row.cells()[4:] == ["0.433 [0.2, 0.7] (3)", "0.5: 2 of 3", "200", "2", ""]
    assert row.verdict() == page.SOME
    higher = row_of(page, 0.65, 0.5, [0.0, 0.6], [0.0, 0.1, 0.2, 0.7], [0.0, 0.4, 0.4])
    assert higher.cells()[5:] == ["0.65: 1 of 2", "300", "3", ""]  # the first run stopped at 0.5
    assert row_of(page, 0.4, 0.5, [0.0, 0.45]).verdict() == ""
    assert row_of(page, 0.8, 0.9, [0.0, 0.7]).verdict() == page.NONE


def test_a_run_that_stopped_at_a_lower_target_is_not_counted_as_a_failure(page: ModuleType) -> None:
    row = row_of(page, 0.5, -0.5, [-1.0, -0.4])
    assert row.cells()[5:] == ["0.5: not run that far", "", "", ""]
    assert row.verdict() == page.NOT_RUN
    assert row.remark() == "task (below random play)"


def test_targets_lie_above_random_play_and_at_most_at_the_optimum(page: ModuleType) -> None:
    references = json.loads(page.REFERENCES.read_text(encoding="utf-8"))
    checked = 0
    for suite in page.SUITES.values():
        for name, task in suite.items():
            known = references["tasks"].get(name.removesuffix(page.CONTROL), {})
            if "random" in known:
                assert task.target > known["random"]["value"], name
                checked += 1
            if known.get("optimum", {}).get("is_exact"):
                assert task.target <= known["optimum"]["value"], name
    assert checked > 40


def test_every_reference_value_has_a_source(page: ModuleType) -> None:
    references = json.loads(page.REFERENCES.read_text(encoding="utf-8"))
    values = [value for task in references["tasks"].values() for value in task.values()]
    assert {value["source"] for value in values} == references["sources"].keys()
    assert all("episodes" in value for value in values if value["source"].startswith("random"))
