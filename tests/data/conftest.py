"""Small trajectories in which every number follows from its position."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import DiskTrajDataset, Sampler, Trajectory, save_trajectory

MakeTraj = Callable[..., Trajectory]


def _make_traj(length: int, *, first: int = 0, num_actions: int = 3, env_name: str = "env") -> Trajectory:
    """A discrete-action episode that observes `first + t` at timestep t and terminates at its end."""
    actions = np.arange(length)[:, None] % num_actions
    rews = np.arange(1, length + 1, dtype=np.float32)[:, None] / 10
    rl2s = np.zeros((length + 1, 1 + num_actions), np.float32)
    rl2s[1:, :1] = rews
    rl2s[1:, 1:] = np.eye(num_actions)[actions[:, 0]]
    times = np.arange(length + 1)
    return Trajectory(
        obs={
            "position": (first + times)[:, None].astype(np.float32),
            "image": np.full((length + 1, 2, 2), 7, np.uint8),
        },
        rl2s=rl2s,
        time_idxs=times[:, None],
        actions=actions,
        rews=rews,
        dones=(times[1:] == length)[:, None],
        env_name=env_name,
    )


@pytest.fixture
def make_traj() -> MakeTraj:
    return _make_traj


@pytest.fixture
def fill() -> Callable[[Path, list[int]], list[Path]]:
    """Write trajectories of the given lengths, one second apart; file i observes 1000 * i + t."""

    def write(folder: Path, lengths: list[int]) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            save_trajectory(folder, traj, save_as="npz", traj_id=f"{i:08x}", unix_time=1e9 + i)
            for i, traj in enumerate(_make_traj(length, first=1000 * i) for i, length in enumerate(lengths))
        ]

    return write


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """The folder in which the DiskTrajDataset of make_dataset looks for files."""
    return tmp_path / "set/buffer/fifo"


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Any]:
    """A configured dataset of any kind; the default is a DiskTrajDataset at tmp_path/set."""

    def make(
        dataset: Any = None,
        *,
        max_seq_len: int = 5,
        edit: bool = True,
        mode: str = "none",
        sample_by: str = "trajectory",
        **kwargs: Any,
    ) -> Any:
        dataset = dataset or DiskTrajDataset(**{"sampler": Sampler(sample_by), **kwargs})
        dataset.configure(
            max_seq_len=max_seq_len,
            padded_sampling=mode,
            has_edit_rights=edit,
            default_root=str(tmp_path),
            default_name="set",
        )
        return dataset

    return make


@pytest.fixture
def run_python() -> Callable[..., int]:
    """Run code in a fresh interpreter and return its exit code."""

    def run(code: str, *args: str) -> int:
        return subprocess.run([sys.executable, "-c", code, *args], check=False, timeout=300).returncode

    return run
