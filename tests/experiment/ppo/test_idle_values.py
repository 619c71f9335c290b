"""Values that acting finds are only worth their time where somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.experiment import Experiment
from loxodon.experiment.config import load_config

TO_DISK = ["Experiment.dataset=@DiskTrajDataset()", "DiskTrajDataset.dset_name='kept'"]


@pytest.fixture(autouse=True)
def no_bindings_left() -> Iterator[None]:
    """Later tests of this process build agents too."""
    yield
    gin.clear_config()


@pytest.mark.parametrize(
    ("overrides", "has_values"),
    [([], False), (["PPOLearner.recompute_old=False"], True), (TO_DISK, True)],
    ids=["nobody", "learner", "disk"],
)
def test_values_are_found_while_acting_if_somebody_reads_them(
    tmp_path: Path, overrides: list[str], has_values: bool
) -> None:
    small = ["train_timesteps_per_epoch=8", "val_timesteps_per_epoch=0", "val_interval=None", "verbose=False"]
    settings = [f"Experiment.{setting}" for setting in small]
    settings += [f"Experiment.ckpt_base_dir={str(tmp_path)!r}", "Experiment.seed=0", *overrides]
    load_config(["ppo/cartpole"], settings)
    make: Any = Experiment
    exp = make()
    exp.start()
    exp.collector.collect(8)
    (buffer,) = exp.trainer.buffers
    assert ("values" in buffer.read().steps) is has_values
    assert exp.trainer.learn_from_rollout(0)["updates"] == 16
    exp.close()
