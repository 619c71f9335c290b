"""Equal hyper-parameters have equal names, whatever the settings; and other ones have others."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.agents import LinearSchedule
from loxodon.data import DiskTrajDataset, DoNothingDataset, HindsightRelabeler, MixtureOfDatasets
from loxodon.envs import EnvSpec, TMazePassive
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.record import bindings_of
from loxodon.experiment.config.hash import SETTINGS, config_hash

from .fakes import CountingEnv, TinyAgent, make_experiment, run
from .test_metadata import saved_metadata


@pytest.fixture(autouse=True)
def _no_configuration() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


def digest(text: str = "", **changes: Any) -> str:
    exp = make_experiment(Path("somewhere"), **changes)
    return config_hash(exp, bindings_of(text))


def test_settings_leave_it_and_hyperparameters_change_it() -> None:
    plain = digest()
    assert len(plain) == 16
    settings = {
        "verbose": True,
        "wandb_project": "x",
        "run_name": "other",
        "CheckpointManager.keep": 3,
        "dloader_workers": 2,
        "seed": 8,
        "ckpt_interval": 1,
        "dataset": DiskTrajDataset(dset_root="/elsewhere"),
    }
    assert digest(**settings) == plain
    changes = [
        {"learning_rate": 0.5},
        {"epochs": 9},
        {"l2_coeff": 0.5},
        {"make_train_env": EnvSpec(CountingEnv, {"noise": 2.0})},
        {"agent_type": partial(TinyAgent)},
    ]
    exact = "CheckpointManager.exact_resume = True"  # where checkpoints cut episodes
    found = {plain, *(digest(**change) for change in changes), digest(exact), digest(exact, ckpt_interval=1)}
    assert len(found) == 3 + len(changes)


class Own:
    """Keeps what it was made from under another name."""

    def __init__(self, factor: float) -> None:
        self.by = factor

    def __call__(self, progress: float) -> float:
        return progress * self.by


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("lr_schedule", Own),
        ("lr_schedule", lambda x: LinearSchedule(1.0, x)),
        ("dataset", lambda x: DiskTrajDataset(relabeler=HindsightRelabeler(share=x))),
        ("dataset", lambda x: MixtureOfDatasets([DiskTrajDataset(), DoNothingDataset()], [x, 1.0 - x])),
    ],
)
def test_arguments_of_objects_built_in_python_count(setting: str, make: Any) -> None:
    hashes = [digest(**{setting: make(x)}) for x in (0.1, 0.1, 0.5)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_bindings_of_gin_count_and_macros_by_their_values() -> None:
    plain = digest("TMazePassive.horizon = 5\nDiskTrajDataset.dset_root = 'a'")
    assert digest("H = 5\nD = 'b'\nTMazePassive.horizon = %H\nDiskTrajDataset.dset_root = %D") == plain
    assert digest("H = 6\nTMazePassive.horizon = %H") != plain
    assert digest("train/TMazePassive.horizon = 5") != plain
    assert digest("FolderStore.root = 'x'") == digest()


def test_every_pattern_for_a_setting_of_the_experiment_names_one() -> None:
    names = [f"Experiment.{one.name}" for one in fields(Experiment)]
    for pattern in (one for one in SETTINGS if one.startswith("Experiment.")):
        assert fnmatch.filter(names, pattern), pattern


def test_it_is_written_beside_the_run_and_into_checkpoints(tmp_path: Path) -> None:
    gin.parse_config("TMazePassive.horizon = 4")
    exp = run(make_experiment(tmp_path, make_train_env=TMazePassive, make_val_env=TMazePassive, seed=1))
    assert saved_metadata(exp)[1]["config_hash"] == exp.config_hash
    assert json.loads((exp.checkpoints.root / "versions.json").read_text())["config_hash"] == exp.config_hash
