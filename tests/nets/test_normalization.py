"""Running statistics: correct values, insensitive to padding, updated only by `commit`."""

from __future__ import annotations

import pytest
import torch

from loxodon.nets import RunningNorm


def test_running_norm_equals_the_statistics_of_all_rows_and_moves_only_at_commit() -> None:
    torch.manual_seed(0)
    norm, chunks = RunningNorm(3), torch.randn(4, 5, 4, 3) * 7 + 2
    for one, two in chunks.view(2, 2, 5, 4, 3):
        norm.gather(one)
        before = norm(two)
        norm.gather(two)
        assert torch.equal(norm(two), before)
        norm.commit()
    rows = chunks.reshape(-1, 3)
    torch.testing.assert_close(norm.mean, rows.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.var, rows.var(0, unbiased=False), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm(rows).mean(0), torch.zeros(3), rtol=0, atol=1e-4)


def test_only_real_rows_reach_the_statistics() -> None:
    norm, x = RunningNorm(1), torch.tensor([[[1.0], [3.0], [1e6]]])
    norm.gather(x, torch.zeros(1, 3, 1, dtype=torch.bool))
    norm.commit()
    assert (norm.mean.item(), norm.count.item()) == (0.0, 0.0)
    norm.gather(x, torch.tensor([[[True], [True], [False]]]))
    norm.commit()
    assert (norm.mean.item(), norm.var.item(), norm.count.item()) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    "kwargs", [{"clip": 0.0}, {"min_std": 0.0}, {"stop_after": 0.0}, {"stop_after": 9.0, "window": 8.0}]
)
def test_impossible_settings_are_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"RunningNorm has .*Fix:"):
        RunningNorm(1, **kwargs)


def test_sums_of_two_processes_are_the_statistics_of_all_rows() -> None:
    torch.manual_seed(0)
    # far from 0, where float32 would not be enough
    rows = 1000.0 + torch.randn(60, 2) * torch.tensor([1e-1, 3.0])
    whole, parts = RunningNorm(2), [RunningNorm(2) for _ in range(3)]
    whole.gather(rows)
    for part, share in zip(parts, rows.split([40, 20, 0]), strict=True):
        part.gather(share)
    parts[2].set_pending_sums(sum(part.pending_sums() for part in parts))
    whole.commit()
    parts[2].commit()
    assert parts[2].count.item() == 60
    torch.testing.assert_close(parts[2].mean, whole.mean)
    torch.testing.assert_close(parts[2].var, whole.var, rtol=1e-3, atol=0)
