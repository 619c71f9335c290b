"""With the same budget, hindsight finds the goals of a maze that are never reached without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gin
import pytest
import torch

from loxodon.experiment import Experiment
from loxodon.experiment.config import load_config

NUM_EPOCHS = 5  # of 100 updates and 12 x 120 env steps; the first one only collects
SEED = 0


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    gin.clear_config()


def share_of_goals_reached(strategy: str, folder: Path, seed: int = SEED) -> float:
    """Train the preset for a few epochs; what it reaches in new mazes."""
    settings = {
        "HindsightRelabeler.strategy": strategy,
        "Experiment.ckpt_base_dir": str(folder),
        "Experiment.run_name": strategy,
        "Experiment.seed": seed,
        "Experiment.epochs": NUM_EPOCHS,
        "Experiment.val_interval": None,  # only at the end
        "Experiment.ckpt_interval": None,
        "Experiment.torch_threads": 1,
        "Experiment.verbose": False,
        "MetricLogger.tensorboard": False,
    }
    load_config(["mazerunner"], [f"{name}={value!r}" for name, value in settings.items()])
    experiment = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    experiment.start()
    metrics = experiment.learn()
    experiment.close()
    return metrics["val/success"]


@pytest.mark.slow
@pytest.mark.learning
def test_hindsight_learns_where_rewards_are_too_rare(tmp_path: Path) -> None:
    without = share_of_goals_reached("none", tmp_path)
    relabelled = share_of_goals_reached("some", tmp_path)
    assert relabelled > 0.3
    assert relabelled > without + 0.25
