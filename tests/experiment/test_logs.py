from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.experiment.logs import MetricLogger, to_plain

from .fakes import make_experiment, run

AXES = {"epoch": 0, "env_steps": 10, "gradient_steps": 2}


def lines(logger: MetricLogger) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logger.path.read_text().splitlines()]


def test_numbers_of_all_kinds_become_json_and_nan_becomes_null() -> None:
    values = [
        1,
        2.5,
        np.float32(0.5),
        np.int64(3),
        torch.tensor(4.0),
        math.nan,
        torch.tensor(math.inf),
        "x",
        True,
    ]
    assert [to_plain(v) for v in values] == [1, 2.5, 0.5, 3, 4.0, None, None, "x", True]


def test_records_carry_the_axes_and_empty_ones_are_not_written(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    logger.log({"val/return": 1.5}, AXES)
    logger.log({}, AXES)
    assert lines(logger) == [{**AXES, "val/return": 1.5}]


def test_a_resumed_log_drops_later_and_half_written_records(tmp_path: Path) -> None:
    first = MetricLogger(tmp_path, tensorboard=False)
    first.log({"a": 1}, AXES)
    state = first.state_dict()
    first.log({"a": 2}, AXES)
    with first.path.open("a") as file:
        file.write('{"a": 3, "brok')
    second = MetricLogger(tmp_path, tensorboard=False)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.log({"a": 4}, AXES)
    assert [record["a"] for record in lines(second)] == [1, 4]


def test_a_new_run_of_the_same_name_keeps_the_old_records_apart(tmp_path: Path) -> None:
    for value in (1, 2):
        logger = MetricLogger(tmp_path, tensorboard=False)
        logger.log({"a": value}, AXES)
        logger.close()
    assert [record["a"] for record in lines(logger)] == [2]
    assert "1" in (tmp_path / "logs" / "metrics_old1.jsonl").read_text()


def test_a_closed_log_goes_on(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    for value in (1, 2):
        logger.log({"a": value}, AXES)
        logger.close()
    assert [record["a"] for record in lines(logger)] == [1, 2]


def test_tensorboard_files_are_written_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = MetricLogger(tmp_path)
    logger.log({"val/return": 1.0}, AXES)
    logger.close()
    assert list((tmp_path / "logs" / "tensorboard").glob("events.*"))


class FakeWandb:
    """Stands for the wandb module and for its run; like wandb it takes no step twice."""

    def __init__(self, step: int = 0) -> None:
        self.id = "abc"
        self.arguments: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.is_finished = False
        self.step = step

    def init(self, **arguments: Any) -> FakeWandb:
        self.arguments = arguments
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, record: dict[str, Any], step: int, commit: bool) -> None:
        assert step >= self.step
        assert commit
        self.records.append(record)
        self.step = step + 1

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_numbers_and_axes_and_is_continued_by_its_id(tmp_path: Path, fake: FakeWandb) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False, wandb={"project": "p", "name": "run"})
    logger.log({"val/return": 1.0, "text": "x"}, AXES)
    assert fake.arguments["project"] == "p"
    assert fake.records == [{"val/return": 1.0, **AXES}]
    assert fake.axes == {"epoch": None, "env_steps": None, "gradient_steps": None, "*": "env_steps"}
    again = MetricLogger(tmp_path, tensorboard=False, wandb={"project": "p"})
    again.load_state_dict(logger.state_dict())
    again.log({"a": 1}, AXES)
    assert fake.arguments["id"] == "abc"
    again.close()
    assert fake.is_finished


def test_wandb_gets_project_entity_group_and_name_of_the_experiment(tmp_path: Path, fake: FakeWandb) -> None:
    names = {"wandb_project": "p", "wandb_entity": "e", "wandb_group_name": "g"}
    run(make_experiment(tmp_path, epochs=1, log_to_wandb=True, **names))
    assert [fake.arguments[key] for key in ("project", "entity", "group", "name")] == ["p", "e", "g", "tiny"]


def test_wandb_takes_repeated_records_after_those_that_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeWandb(step=5)  # two records after the checkpoint, which has three
    monkeypatch.setitem(sys.modules, "wandb", server)
    logger = MetricLogger(tmp_path, tensorboard=False, wandb={})
    logger.load_state_dict({"metrics_bytes": 120, "num_records": 3, "wandb_id": "abc"})
    for value in (3, 4, 5):
        logger.log({"a": value}, AXES)
    assert [record["a"] for record in server.records] == [3, 4, 5]


def test_wandb_for_artifacts_alone_gets_no_figures(tmp_path: Path, fake: FakeWandb) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False, wandb={}, wandb_metrics=False)
    logger.log({"a": 1}, AXES)
    assert fake.arguments == {}
    assert logger.start_wandb() is fake
    logger.log({"a": 2}, AXES)
    assert fake.records == []


def test_the_id_survives_a_process_without_wandb(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    logger.load_state_dict({"metrics_bytes": 0, "wandb_id": "abc"})
    assert logger.state_dict()["wandb_id"] == "abc"
    with pytest.raises(ValueError, match=r"does not use Weights & Biases.*Fix: set Experiment.log_to_wandb"):
        logger.start_wandb()
