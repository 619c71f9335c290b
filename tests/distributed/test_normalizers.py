"""Normalisers of on-policy training: two processes keep the statistics of one with all envs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..rounding import assert_equal_but_for_rounding
from .launching import run_scenario
from .scenarios import normalize_rollouts

pytestmark = pytest.mark.slow
NUM_OPS = 100  # numbers that are added up


def test_two_processes_normalise_like_one(tmp_path: Path) -> None:
    run_scenario("normalizers", tmp_path)
    ranks = [torch.load(tmp_path / f"normalizers_{rank}.pt") for rank in range(2)]
    alone = normalize_rollouts(slice(0, 4))
    for rollout, expected in enumerate(alone["normalized"]):
        for i, whole in enumerate(expected):
            halves = torch.cat([rank["normalized"][rollout][i] for rank in ranks], dim=1)
            assert_equal_but_for_rounding(halves, whole, NUM_OPS)
    for rank in ranks:
        assert_equal_but_for_rounding(rank["mean"], alone["mean"], NUM_OPS)
        assert_equal_but_for_rounding(rank["std"], alone["std"], NUM_OPS)
