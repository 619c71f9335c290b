"""One group of two processes for all comparisons, because starting it takes longer than its work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .launching import run_scenarios
from .scenarios import store_trajectories


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the processes."""
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="session")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """The results of the two processes, by scenario."""
    store_trajectories(folder / "data" / "buffer" / "fifo")
    run_scenarios(folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
