"""Fixtures for all tests of runs."""

from __future__ import annotations

from collections.abc import Iterator

import gin
import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset gin bindings and global switches after each test; skip plots, which are slow."""
    gin.clear_config()
    monkeypatch.setattr("loxodon.experiment.experiment.draw_if_possible", lambda run_dir: None)
    yield
    gin.clear_config()
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
