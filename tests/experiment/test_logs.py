from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.experiment.output.logs import MetricLogger, to_plain

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


def test_a_new_run_of_the_same_name_keeps_the_old_records_apart(tmp_path: Path) -> None:
    for value in (1, 2):
        logger = MetricLogger(tmp_path, tensorboard=False)
        logger.log({"a": value}, AXES)
        logger.close()
    assert [record["a"] for record in lines(logger)] == [2]
    assert "1" in (tmp_path / "logs" / "metrics_old1.jsonl").read_text()


def test_records_continue_after_a_power_cut_that_shortened_the_file(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    for value in (1, 2):
        logger.log({"a": value}, AXES)
    state = logger.state_dict()
    logger.path.write_bytes(logger.path.read_bytes()[:-5])
    resumed = MetricLogger(tmp_path, tensorboard=False)
    resumed.load_state_dict(state)
    resumed.log({"a": 3}, AXES)
    assert [record["a"] for record in lines(resumed)] == [1, 3]


def test_a_deleted_folder_of_logs_costs_only_the_records_in_it(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    logger.log({"a": 1}, AXES)
    shutil.rmtree(tmp_path / "logs")
    assert logger.state_dict()["metrics_bytes"] == 0
    logger.log({"a": 2}, AXES)
    assert [record["a"] for record in lines(logger)] == [2]


def test_tensorboard_files_are_written_if_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = MetricLogger(tmp_path)
    logger.log({"val/return": 1.0}, AXES)
    logger.close()
    assert list((tmp_path / "logs" / "tensorboard").glob("events.*"))


def test_the_wandb_id_survives_a_process_without_wandb(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False)
    logger.load_state_dict({"metrics_bytes": 0, "wandb_id": "abc"})
    assert logger.state_dict()["wandb_id"] == "abc"
    with pytest.raises(ValueError, match=r"does not use Weights & Biases.*Fix: set Experiment.log_to_wandb"):
        logger.start_wandb()


def test_wandb_is_required_only_if_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    MetricLogger(tmp_path, tensorboard=False).log({"a": 1}, {"epoch": 0})
    with pytest.raises(ImportError, match=r"needs wandb, which .*Fix: pip install 'loxodon\[wandb\]'"):
        MetricLogger(tmp_path, wandb={"project": "x"})
