"""Minari datasets in a folder of the test's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from loxodon.data import MinariDataset, Trajectory, save_trajectory
from loxodon.data.minari import export_minari, require_minari

MakeTraj = Callable[..., Trajectory]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def _make_minari(dataset_id: str, columns: list[dict[str, Any]], env: gym.Env[Any, Any]) -> Any:
    minari = require_minari()
    from minari.data_collector import EpisodeBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional metadata
        return minari.create_dataset_from_buffers(
            dataset_id,
            [EpisodeBuffer(**episode) for episode in columns],
            observation_space=env.observation_space,
            action_space=env.action_space,
        )


@pytest.fixture
def make_minari() -> Callable[..., Any]:
    """Make a dataset of raw episodes in the spaces of an environment, without code of ours."""
    return _make_minari


@pytest.fixture
def configured(make_dataset: Callable[..., MinariDataset]) -> Callable[..., MinariDataset]:
    def make(dataset_id: str, max_seq_len: int = 100, **kwargs: Any) -> MinariDataset:
        return make_dataset(MinariDataset(dataset_id, **kwargs), max_seq_len=max_seq_len, edit=False)

    return make


@pytest.fixture
def numbered(make_traj: MakeTraj, tmp_path: Path) -> str:
    """A Minari dataset of episodes of 10, 20 and 30 steps that observe 1000 * episode + time."""
    paths = []
    for index, length in enumerate((10, 20, 30)):
        traj = make_traj(length, first=1000 * index, env_name="numbers")
        traj = Trajectory(**{**vars(traj), "obs": {"observation": traj.obs["position"]}})
        paths.append(
            save_trajectory(tmp_path, traj, save_as="traj", traj_id=f"{index:08x}", unix_time=1e9 + index)
        )
    export_minari(paths, "test/numbers-v0")
    return "test/numbers-v0"
