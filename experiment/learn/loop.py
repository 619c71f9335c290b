"""The loop over batches, off-policy and in pre-training, and the losses that are kept and shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..contracts import RunContext
from ..process.distributed import StopPoller
from .learner import Learner, log_metrics

T = TypeVar("T")
LOSSES = ("loss", "actor_loss", "critic_loss")
_SHOW_EVERY_S = 0.3


class Update(NamedTuple):
    """An update that was made.

    Attributes:
        metrics: its scalars, under the names used in logs.
        logs: True if they belong in the log of single updates.
    """

    metrics: dict[str, Any]
    logs: bool


def updates(
    batches: Iterable[T],
    num_batches: int,
    step: Callable[[Sequence[T], bool], Mapping[str, Any]],
    *,
    ctx: RunContext,
    batches_per_update: int,
    log_interval: int,
    num_before: int = 0,
    may_update: Callable[[], bool] = lambda: True,
) -> Iterator[Update]:
    """Make updates until the batches are used up or a process was asked to stop.

    Args:
        batches: the last update has those that are left.
        num_batches: their number.
        step: (batches of an update, with metrics for the log) -> its results.
        ctx: context of the run.
        batches_per_update: number of batches whose gradients are added up.
        log_interval: batches between logged updates.
        num_before: number of batches before these, from which the interval counts.
        may_update: called before each update; False ends the loop.
    """
    stops, of_update = StopPoller(ctx.stop.requested, ctx.accelerator), list[T]()
    for i, batch in enumerate(batches, 1):
        of_update.append(batch)
        if len(of_update) < batches_per_update and i < num_batches:
            continue
        if not may_update():
            return
        numbers = range(num_before + i - len(of_update), num_before + i)
        logs = any(number % log_interval == 0 for number in numbers)
        yield Update(log_metrics(step(of_update, logs)), logs)
        of_update = []
        if stops.after_update():
            return


class LossDisplay:
    """Shows the loss in the terminal, a few times per second, because reading it waits for the device."""

    def __init__(self, ctx: RunContext, epoch: int) -> None:
        self._console, self._epoch, self._shown_s = ctx.console, epoch, time.perf_counter()

    def show(self, phase: str, loss: Any) -> None:
        """Show it unless it was shown just now. loss: a float or a scalar tensor."""
        if self._console.verbose and time.perf_counter() - self._shown_s > _SHOW_EVERY_S:
            self._shown_s = time.perf_counter()
            self._console.show(self._epoch, phase, {"loss": float(loss)})


class LossSums:
    """Sums of the losses of an epoch, over all updates but those that the learner skipped.

    Attributes:
        num_updates: number of updates, including skipped ones.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner, self._skipped_before = learner, learner.skipped_updates
        self._sums: dict[str, Any] = dict.fromkeys(LOSSES, 0.0)
        self.num_updates, self._num_skipped = 0, 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add an update that was just made."""
        self.num_updates += 1
        was_skipped = self.num_skipped > self._num_skipped
        self._num_skipped = self.num_skipped
        if not was_skipped:
            self._sums = {name: total + metrics[name] for name, total in self._sums.items()}

    @property
    def num_skipped(self) -> int:
        """Number of skipped updates."""
        return self._learner.skipped_updates - self._skipped_before

    def means(self) -> dict[str, float]:
        """Means over the updates that count; empty without any."""
        num_counted = self.num_updates - self.num_skipped
        return {name: float(total) / num_counted for name, total in self._sums.items() if num_counted}
