"""One group of two processes for all that is compared; to start it takes longer than what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .launching import run_scenarios
from .scenarios import store_trajectories


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes work."""
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="session")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes got, by scenario."""
    store_trajectories(folder / "data" / "buffer" / "fifo")
    run_scenarios(folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
