"""Trajectories as arrays: files, the background writer, datasets and padded batches.

Importing this package does not import torch; `Batch`, `pad_batch`, `pack_batch`, `BatchLoader` and
`RolloutBatch` import it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "data":
    raise ImportError(
        "Import this as 'loxodon.data', not 'data': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .dataset import DoNothingDataset, RLDataset
from .disk_dataset import DiskTrajDataset
from .errors import BrokenTrajectoryError
from .files import (
    FILE_FORMATS,
    TrajectoryReader,
    check_file,
    load_trajectory,
    save_trajectory,
)
from .foreign import split_episodes
from .memory import MemoryTrajDataset
from .minari import MinariDataset
from .mixture import MixtureOfDatasets
from .relabeling import HindsightRelabeler, NoOpRelabeler, Relabeler
from .sampling import PrioritySampler, Sampler
from .sink import Sink
from .trajectory import Layout, Trajectory
from .writer import TrajectoryWriter, WritingClock

if TYPE_CHECKING:
    from .batch import Batch, RolloutBatch, pack_batch, pad_batch
    from .loader import BatchLoader

_NEEDS_TORCH = {
    "Batch": "batch",
    "pack_batch": "batch",
    "pad_batch": "batch",
    "BatchLoader": "loader",
    "RolloutBatch": "batch",
}

__all__ = [
    "FILE_FORMATS",
    "Batch",
    "BatchLoader",
    "BrokenTrajectoryError",
    "DiskTrajDataset",
    "DoNothingDataset",
    "HindsightRelabeler",
    "Layout",
    "MemoryTrajDataset",
    "MinariDataset",
    "MixtureOfDatasets",
    "NoOpRelabeler",
    "PrioritySampler",
    "RLDataset",
    "Relabeler",
    "RolloutBatch",
    "Sampler",
    "Sink",
    "Trajectory",
    "TrajectoryReader",
    "TrajectoryWriter",
    "WritingClock",
    "check_file",
    "load_trajectory",
    "pack_batch",
    "pad_batch",
    "save_trajectory",
    "split_episodes",
]


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first use (PEP 562)."""
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(f".{_NEEDS_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
