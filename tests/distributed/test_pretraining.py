"""Pre-training in two processes gives both the same weights, from the cache too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .launching import run_scenario

pytestmark = pytest.mark.slow


def test_two_processes_leave_pretraining_with_the_same_weights(tmp_path: Path) -> None:
    run_scenario("pretraining", tmp_path)
    first, second = (torch.load(tmp_path / f"pretraining_{rank}.pt") for rank in range(2))
    for method in ("bc", "off_policy"):
        trained, cached = first[f"{method}-trained"], first[f"{method}-cached"]
        assert len(trained) > 10
        for name, value in trained.items():
            assert torch.equal(value, cached[name]), name
            for place in ("trained", "cached"):
                assert torch.equal(value, second[f"{method}-{place}"][name]), name
        assert len(list((tmp_path / method).iterdir())) == 1
    assert not torch.equal(
        *(first[f"{m}-trained"]["policy_head.mlp.out.weight"] for m in ("bc", "off_policy"))
    )
