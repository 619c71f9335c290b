"""The gin samples of docs/pretraining.md run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest

from loxodon.data import save_trajectory, split_episodes
from loxodon.experiment.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pretraining.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _no_config_left() -> Iterator[None]:
    yield
    gin.clear_config()


def test_the_samples_run(tmp_path: Path, monkeypatch: Any, capfd: Any, caplog: Any) -> None:
    monkeypatch.chdir(tmp_path)
    protected = tmp_path / "data" / "experts" / "buffer" / "protected"
    protected.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ended = np.zeros(40, bool)
    ended[9::10] = True
    obs = rng.standard_normal((40, 4)).astype(np.float32)
    episodes = split_episodes(
        obs, rng.integers(2, size=40), np.ones(40), ended, np.zeros(40, bool), num_actions=2
    )
    for number, traj in enumerate(episodes):
        save_trajectory(protected, traj, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
    pretraining, warm_start = re.findall(r"```gin\n(.*?)```", PAGE, flags=re.DOTALL)
    Path("page.gin").write_text(pretraining)
    shorter = ["Experiment.epochs=1", "Pretraining.num_batches=4", "Experiment.val_interval=None"]
    shorter += ["Experiment.evaluate_at_end=False", "Experiment.torch_threads=1"]
    words = ["--config", "page.gin", *shorter]
    assert main(words) == 0
    assert "The result of pre-training is kept in data/pretrained/" in capfd.readouterr().out
    again = ["--run-name", "again", "--seed", "1"]
    assert main([*words, *again]) == 0
    Path("warm.gin").write_text(pretraining + warm_start.replace("runs/tmaze", "runs/again"))
    gin.clear_config()
    assert main(["--config", "warm.gin", *shorter, "--run-name", "warm"]) == 0
    assert "Warm start from ./runs/again" in caplog.text
    gin.clear_config()
    assert main([*words, "--check"]) == 0
