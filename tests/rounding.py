"""Tolerances for results that should differ only in the order of their floating-point operations."""

from __future__ import annotations

import math
from typing import Any

import torch


def rounding(scale: float, num_ops: int) -> float:
    """Bound of the difference between two float32 results that are computed in different orders.

    Each operation rounds by at most half a unit in the last place of its operands, which are at most `scale`.
    The errors have either sign, so n of them add up to about sqrt(n) (Higham and Mary 2019,
    doi:10.1137/18M1226312). The factor 8 covers the largest of many results, and layers that amplify errors.
    A wrong state, mask or formula gives differences near `scale` itself.

    scale: largest number on the way. num_ops: consecutive operations that lead to a result, e.g.
        width of a layer * layers * timesteps * updates.
    """
    return 8 * torch.finfo(torch.float32).eps / 2 * math.sqrt(num_ops) * scale


def assert_equal_but_for_rounding(found: Any, expected: Any, num_ops: int, msg: Any = None) -> None:
    """For tensors, arrays or numbers; intermediate numbers are assumed to be as large as the result, or 1."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(scale, num_ops), msg=msg)
