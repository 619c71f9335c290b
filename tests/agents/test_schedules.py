"""Settings that change over training."""

from __future__ import annotations

import gin
import pytest

from loxodon.agents import ConstantSchedule, CosineSchedule, LinearSchedule, PPOLoss, value_at


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LinearSchedule(1.0, 0.0), [1.0, 0.75, 0.5, 0.0]),
        (LinearSchedule(1.0, 3.0, until=0.5), [1.0, 2.0, 3.0, 3.0]),
        (CosineSchedule(2.0, 0.0), [2.0, 1.7071, 1.0, 0.0]),
        (CosineSchedule(2.0, 0.0, until=0.5), [2.0, 1.0, 0.0, 0.0]),
        (ConstantSchedule(0.3), [0.3] * 4),
        (0.7, [0.7] * 4),
        (1, [1.0] * 4),
    ],
)
def test_values(schedule: float, expected: list[float]) -> None:
    assert [value_at(schedule, p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected, abs=1e-4)
    assert [value_at(schedule, p) for p in (-0.1, 1.2)] == pytest.approx([expected[0], expected[-1]])


@pytest.mark.parametrize("schedule", [LinearSchedule, CosineSchedule])
def test_until_is_checked(schedule: type[LinearSchedule]) -> None:
    with pytest.raises(ValueError, match=r"until is 0\.0.*Fix"):
        schedule(1.0, 0.0, until=0.0)


@pytest.mark.parametrize("wrong", [float("nan"), "0.1", True, lambda progress: None])
def test_settings_that_are_no_numbers_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"must be a finite number.*Fix"):
        value_at(wrong, 0.5)


def test_schedules_are_bound_in_gin() -> None:
    with gin.unlock_config():
        gin.parse_config(
            "PPOLoss.clip_eps = @LinearSchedule()\nLinearSchedule.start = 0.4\nLinearSchedule.end = 0"
        )
    try:
        loss = PPOLoss()
        loss.set_progress(0.5)
        assert loss.clip_eps == pytest.approx(0.2)
    finally:
        gin.clear_config()
