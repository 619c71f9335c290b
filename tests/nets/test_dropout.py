"""Dropout on the CPU: which entries are dropped, how many, and how the rest is scaled."""

from __future__ import annotations

import pytest
import torch

from loxodon.nets.dropout import Dropout


@pytest.mark.parametrize("p", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_given_share_is_dropped_everywhere_and_the_rest_is_scaled_up(
    p: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.ones(1001, 401, dtype=dtype)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    kept = y[y != 0]
    torch.testing.assert_close(
        kept, torch.full_like(kept, 1 / (1 - p)), rtol=2e-3 + 4 * torch.finfo(dtype).eps, atol=0
    )
    for part in (y, y[:, ::4], y[:, 3::4], y[:500], y[500:]):  # four neighbours share a draw
        assert abs((part == 0).float().mean() - p) < 5 * (p * (1 - p) / part.numel()) ** 0.5 + 2**-16
    assert abs(y.float().mean() - 1.0) < 0.05


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(0)
    gone = (Dropout(0.5)(torch.ones(100_000, 4)) == 0).double()
    assert (torch.corrcoef(gone.T) - torch.eye(4)).abs().max() < 0.02


def test_gradients_pass_where_entries_were_kept() -> None:
    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    y = Dropout(0.25)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(5, 7)
    assert torch.equal(Dropout(0.3).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros_like(x))
