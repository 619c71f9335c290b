from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loxodon.data import Layout, Trajectory

MakeTraj = Callable[..., Trajectory]


def layout(action_width: int = 3, **obs: tuple[tuple[int, ...], Any]) -> Layout:
    return Layout({key: (shape, np.dtype(dtype)) for key, (shape, dtype) in obs.items()}, action_width)


def test_layout_of_a_trajectory_and_of_its_windows(make_traj: MakeTraj) -> None:
    expected = layout(position=((1,), np.float32), image=((2, 2), np.uint8))
    assert make_traj(4).layout == make_traj(9).slice(2, 4).layout == expected
    assert str(expected) == "position float32[1], image uint8[2, 2]; 3 action columns"


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (layout(x=((2,), np.float32)), None),
        (layout(x=((2,), np.float64)), None),  # rounding is fine
        (layout(x=((2,), np.uint8)), None),
        (layout(x=((2,), np.int64)), None),
        (layout(x=((2,), np.complex64)), "observation 'x' is complex64[2], expected float32[2]"),
        (layout(x=((3,), np.float32)), "observation 'x' is float32[3], expected float32[2]"),
        (layout(x=((2,), "<U4")), "observation 'x' is <U4[2], expected float32[2]"),
        (layout(y=((2,), np.float32)), "observation 'x' is missing; observation 'y' is not expected"),
        (layout(5, x=((2,), np.float32)), "actions have 5 columns, expected 3"),
    ],
)
def test_what_can_be_trained_on(found: Layout, problem: str | None) -> None:
    assert layout(x=((2,), np.float32)).describe_mismatch(found) == problem


def test_floats_do_not_become_pixels() -> None:
    pixels = layout(x=((2,), np.uint8))
    problem = pixels.describe_mismatch(layout(x=((2,), np.float32)))
    assert problem == "observation 'x' is float32[2], expected uint8[2]"
