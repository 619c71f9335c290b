"""Settings that change over a training run.

A schedule is any function from training progress in [0, 1] to a value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import gin
import torch
from torch.optim import lr_scheduler

from ..data.errors import check_number

Schedule = Callable[[float], float]
_ROUNDING = 1e-6  # share of a step; absorbs rounding errors of progress, a quotient of epochs


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


class _Ramp(ABC):
    """A value that moves from `start` to `end`, and is constant after progress `until`."""

    def __init__(self, start: float = gin.REQUIRED, end: float = gin.REQUIRED, until: float = 1.0) -> None:
        check_number(f"{type(self).__name__}.until", until, above=0, highest=1)
        self.start, self.end, self.until = float(start), float(end), until

    def __call__(self, progress: float) -> float:
        """The value at `progress` in [0, 1]."""
        share = self._share(min(progress / self.until, 1.0))
        return (1.0 - share) * self.start + share * self.end

    @abstractmethod
    def _share(self, done: float) -> float:
        """Share of the way from `start` to `end`, after a share `done` of the time."""


@gin.configurable
class LinearSchedule(_Ramp):
    """A straight line from `start` to `end`, constant after progress `until`.

    Args:
        start: value at the beginning of training.
        end: value at progress `until`.
        until: share of training.
    Raises: ValueError for `until` outside (0, 1].
    """

    def _share(self, done: float) -> float:
        return done


@gin.configurable
class CosineSchedule(_Ramp):
    """Half a cosine wave from `start` to `end`, constant after progress `until`.

    Args:
        start: value at the beginning of training.
        end: value at progress `until`.
        until: share of training.
    Raises: ValueError for `until` outside (0, 1].
    """

    def _share(self, done: float) -> float:
        return 0.5 - 0.5 * math.cos(math.pi * done)


@gin.configurable
class TorchSchedule:
    """A torch scheduler for Experiment.lr_schedule, which is a factor of the learning rate.

    The scheduler runs on a rate of 1, so its settings that are rates, such as `max_lr`, are factors too. The
    factor depends only on training progress, so a resumed run continues exactly.

    Args:
        scheduler: a class of torch.optim.lr_scheduler, or its name, such as "CosineAnnealingLR".
        num_steps: number of its steps in the whole run; Experiment.epochs for one per epoch.
        settings: its keyword arguments, without the optimizer.
    Raises: ValueError for an unknown name, a scheduler that depends on more than its step count, or settings
        that it does not take.
    """

    def __init__(
        self,
        scheduler: str | Callable[..., Any] = gin.REQUIRED,
        num_steps: int = gin.REQUIRED,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if num_steps < 1:
            raise ValueError(
                f"TorchSchedule.num_steps is {num_steps}, but must be at least 1. Fix: set it to the value "
                "of Experiment.epochs for one step per epoch."
            )
        kind = getattr(lr_scheduler, scheduler, None) if isinstance(scheduler, str) else scheduler
        if not callable(kind) or kind is lr_scheduler.ReduceLROnPlateau:
            raise ValueError(
                f"TorchSchedule.scheduler is {scheduler!r}, but must be a class of torch.optim.lr_scheduler "
                "that depends on the number of steps only, unlike ReduceLROnPlateau. Fix: name one, such "
                "as 'CosineAnnealingLR'."
            )
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
        try:
            stepped = kind(optimizer, **(settings or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"TorchSchedule.scheduler {scheduler!r} does not take TorchSchedule.settings = "
                f"{settings!r}: {error}. Fix: use arguments that torch documents for this class."
            ) from error
        factors = [optimizer.param_groups[0]["lr"]]
        for _ in range(num_steps):
            optimizer.step()
            stepped.step()
            factors.append(optimizer.param_groups[0]["lr"])
        self.factors = tuple(map(float, factors))

    def __call__(self, progress: float) -> float:
        """The factor at `progress` in [0, 1]."""
        num_done = math.floor(min(max(progress, 0.0), 1.0) * (len(self.factors) - 1) + _ROUNDING)
        return self.factors[num_done]


def value_at(setting: float | Schedule, progress: float) -> float:
    """The value of a number or schedule at `progress`, which is clipped to [0, 1].

    Raises: ValueError if the value is not a finite number.
    """
    value: Any = setting
    if callable(setting) and not isinstance(setting, type):  # a class lacks its parentheses
        value = setting(min(max(progress, 0.0), 1.0))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{setting!r} gives {value!r} at training progress {progress:.3f}, but must give a finite "
            "number. Fix: bind a number, or a schedule with parentheses: @LinearSchedule()."
        )
    return float(value)
