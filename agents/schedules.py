"""Settings that change over a training run.

A schedule is any function from training progress in [0, 1] to a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import gin

Schedule = Callable[[float], float]


@gin.configurable
class ConstantSchedule:
    """The same value throughout.

    Args:
        value: that value.
    """

    def __init__(self, value: float = gin.REQUIRED) -> None:
        self.value = float(value)

    def __call__(self, progress: float) -> float:
        """The value at `progress` in [0, 1]."""
        return self.value


@gin.configurable
class LinearSchedule:
    """A straight line from `start` to `end`, which is kept from progress `until` on.

    Args:
        start: value at the begin of training.
        end: value at progress `until`.
        until: share of training.
    Raises: ValueError for `until` outside (0, 1].
    """

    def __init__(self, start: float = gin.REQUIRED, end: float = gin.REQUIRED, until: float = 1.0) -> None:
        _check_until("LinearSchedule", until)
        self.start, self.end, self.until = float(start), float(end), until

    def __call__(self, progress: float) -> float:
        """The value at `progress` in [0, 1]."""
        share = min(progress / self.until, 1.0)
        return (1.0 - share) * self.start + share * self.end


@gin.configurable
class CosineSchedule:
    """Half a cosine wave from `start` to `end`, which is kept from progress `until` on.

    Args:
        start: value at the begin of training.
        end: value at progress `until`.
        until: share of training.
    Raises: ValueError for `until` outside (0, 1].
    """

    def __init__(self, start: float = gin.REQUIRED, end: float = gin.REQUIRED, until: float = 1.0) -> None:
        _check_until("CosineSchedule", until)
        self.start, self.end, self.until = float(start), float(end), until

    def __call__(self, progress: float) -> float:
        """The value at `progress` in [0, 1]."""
        share = 0.5 - 0.5 * math.cos(math.pi * min(progress / self.until, 1.0))
        return (1.0 - share) * self.start + share * self.end


def value_at(setting: float | Schedule, progress: float) -> float:
    """What a number or schedule stands for at `progress`, which is clipped to [0, 1].

    Raises: ValueError for a schedule that returns no finite number.
    """
    value = setting(min(max(progress, 0.0), 1.0)) if callable(setting) else setting
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{setting!r} gives {value!r} at training progress {progress:.3f}, but a setting must be a "
            "finite number there. Fix: bind a number, or a schedule with parentheses: @LinearSchedule()."
        )
    return float(value)


def _check_until(name: str, until: float) -> None:
    if not 0.0 < until <= 1.0:
        raise ValueError(
            f"{name}.until is {until}, but must lie in (0, 1]. Fix: bind the share of training after which "
            f"the end is reached, e.g. {name}.until = 0.8."
        )
