from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.experiment.logs import MetricLogger, to_plain

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
    """Stands for the wandb module and for its run."""

    id = "abc"

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.is_finished = False

    def init(self, **arguments: Any) -> FakeWandb:
        self.arguments = arguments
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def finish(self) -> None:
        self.is_finished = True


def test_wandb_gets_numbers_and_axes_and_is_continued_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    logger = MetricLogger(tmp_path, tensorboard=False, wandb={"project": "p", "name": "run"})
    logger.log({"val/return": 1.0, "text": "x"}, AXES)
    assert fake.arguments["project"] == "p"
    assert fake.records == [{"val/return": 1.0, **AXES}]
    again = MetricLogger(tmp_path, tensorboard=False, wandb={"project": "p"})
    again.load_state_dict(logger.state_dict())
    again.log({"a": 1}, AXES)
    assert fake.arguments["id"] == "abc"
    again.close()
    assert fake.is_finished
