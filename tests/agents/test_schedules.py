"""Settings that change over training."""

from __future__ import annotations

from typing import Any

import gin
import pytest
import torch

from loxodon.agents import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    PPOLoss,
    TorchSchedule,
    value_at,
)


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
def test_values_follow_their_schedules(schedule: float, expected: list[float]) -> None:
    assert [value_at(schedule, p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected, abs=1e-4)
    assert [value_at(schedule, p) for p in (-0.1, 1.2)] == pytest.approx([expected[0], expected[-1]])


@pytest.mark.parametrize("schedule", [LinearSchedule, CosineSchedule])
def test_until_is_checked(schedule: type[LinearSchedule]) -> None:
    with pytest.raises(ValueError, match=r"until is 0\.0.*Fix"):
        schedule(1.0, 0.0, until=0.0)


@pytest.mark.parametrize("wrong", [float("nan"), "0.1", True, lambda progress: None, LinearSchedule])
def test_settings_that_are_not_numbers_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"must give a finite number.*Fix"):
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


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": 0.1}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4}),
        ("OneCycleLR", {"max_lr": 2.0, "total_steps": 11}),
        (torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.9}),
    ],
)
def test_torch_schedulers_give_the_rates_that_they_give_an_optimizer(scheduler: Any, settings: Any) -> None:
    """One step per epoch of 10, at a rate of 0.02. Steps are asked for in any order, as after resuming."""
    kind = getattr(torch.optim.lr_scheduler, scheduler) if isinstance(scheduler, str) else scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02, momentum=0.9)
    absolute = {key: 0.02 * x if key in ("eta_min", "max_lr") else x for key, x in settings.items()}
    stepped, expected = kind(optimizer, **absolute), []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped.step()
    schedule = TorchSchedule(scheduler, 10, settings)
    for epoch in [7, *range(10)]:
        assert 0.02 * value_at(schedule, epoch / 10) == pytest.approx(expected[epoch])


def test_no_step_of_a_scheduler_is_lost_by_rounding() -> None:
    schedule = TorchSchedule("StepLR", 100, {"step_size": 29, "gamma": 0.5})
    assert 29 / 100 * 100 < 29
    assert [value_at(schedule, epoch / 100) for epoch in (28, 29)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("NoSuchLR", 5), r"scheduler is 'NoSuchLR'.*Fix: name one"),
        (("ReduceLROnPlateau", 5), r"unlike ReduceLROnPlateau.*Fix"),
        (("StepLR", 5), r"'StepLR' does not take TorchSchedule.settings = None.*step_size.*Fix"),
        (("StepLR", 0, {"step_size": 3}), r"num_steps is 0, .*at least 1.*Fix"),
    ],
)
def test_schedulers_that_cannot_be_stepped_on_their_own_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TorchSchedule(*arguments)
