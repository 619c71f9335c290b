"""Communication between processes that train together: decisions, metrics and finished episodes.

All of them have to call every function here, in the same order; with one process it costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object

from ...envs import Histories

T = TypeVar("T")
logger = logging.getLogger("loxodon")
_LONGEST_WAIT = timedelta(minutes=30)  # longest wait for a process that evaluates or writes a checkpoint
_ASK_EVERY_S = 1.0
_MAX_UPDATES_UNASKED = 1000
_TRANSPORTS = re.compile("gloo|nccl", re.IGNORECASE)  # their error texts contain their names


def make_accelerator(mixed_precision: str) -> Accelerator:
    """Accelerate's view of devices and processes. The learner does accumulation itself, so it is off here."""
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()  # an earlier Experiment of this process had another precision
    waits = InitProcessGroupKwargs(timeout=_LONGEST_WAIT)
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[waits])
    if not accelerator.is_main_process:
        logger.setLevel(logging.WARNING)
    asked_for_more = {"MASTER_PORT", "ACCELERATE_USE_CPU"} <= os.environ.keys() and "RANK" not in os.environ
    if asked_for_more and accelerator.num_processes == 1:
        logger.warning(
            "The launcher was asked for several processes but has started only this one, as `accelerate "
            "launch --cpu` does without MPI. Fix: start two on the CPU with ACCELERATE_USE_CPU=true "
            "accelerate launch --multi_gpu --num_processes 2 ..."
        )
    return accelerator


def from_main(compute: Callable[[], T], accelerator: Accelerator) -> T:
    """Call `compute` in the main process only, and return its result in all processes."""
    if accelerator.num_processes == 1:
        return compute()
    values = [compute() if accelerator.is_main_process else None]
    broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]  # the main process put one there


def gather(item: T, accelerator: Accelerator) -> list[T]:
    """The items of all processes, by rank; they are pickled for the transfer."""
    return [item] if accelerator.num_processes == 1 else list(gather_object([item]))


def any_process(flag: bool, accelerator: Accelerator) -> bool:
    """True in all processes if `flag` is True in any."""
    return flag if accelerator.num_processes == 1 else sum_over_ranks([float(flag)], accelerator)[0] > 0


def sum_over_ranks(values: list[float], accelerator: Accelerator) -> list[float]:
    """Each of `values`, added up over all processes."""
    if accelerator.num_processes == 1:
        return values
    sums: list[float] = accelerator.reduce(
        torch.tensor(values, device=accelerator.device), reduction="sum"
    ).tolist()
    return sums


def merge_episodes(histories: Histories, accelerator: Accelerator) -> Histories:
    """The finished episodes of all processes; each weighs the same in means and quantiles."""
    if accelerator.num_processes == 1:
        return histories
    merged = Histories.create(num_envs=1)
    for other in gather(histories, accelerator):
        for name, values in other.returns.returns.items():
            merged.returns.returns[name] += values
            merged.returns.lengths[name] += other.returns.lengths[name]
        for metric, groups in other.specials.values.items():
            for name, numbers in groups.items():
                merged.specials.values[metric][name] += numbers
    return merged


def merge_metrics(
    metrics: Mapping[str, float],
    weight: float,
    accelerator: Accelerator,
    *,
    sums: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
) -> dict[str, float]:
    """One metric of each name for all processes together.

    Args:
        metrics: metrics of this process. Names that end in `_min` or `_max` give the extreme, all others a
            mean.
        weight: weight of this process in these means, such as its real timesteps.
        accelerator: accelerator of the run.
        sums: names of metrics that are added up instead.
        shares: names of metrics with equal weight for every process.
    """
    return merged(gather((dict(metrics), weight), accelerator), sums, shares)


def merged(
    every: Sequence[tuple[Mapping[str, Any], float]], sums: Sequence[str] = (), shares: Sequence[str] = ()
) -> dict[str, float]:
    """One metric of each name from several (metrics, weight); sums, shares: see merge_metrics."""
    found = {}
    for name in {name: None for one, _ in every for name in one}:  # a set would lose the order
        values = [(float(one[name]), w) for one, w in every if name in one]
        numbers = [value for value, _ in values]
        if name in sums:
            found[name] = sum(numbers)
        elif name.endswith(("_min", "_max")):
            found[name] = min(numbers) if name.endswith("_min") else max(numbers)
        else:
            found[name] = _mean([(value, 1.0) for value in numbers] if name in shares else values)
    return found


class StopPoller:
    """Lets all processes stop at the same update if any of them was asked to stop during training.

    A single process checks after every update. Several processes check together about once a second, after a
    number of updates that follows from the duration of the last ones in all processes.
    """

    def __init__(self, requested: Callable[[], bool], accelerator: Accelerator) -> None:
        self._requested, self._accelerator = requested, accelerator
        self._num_updates, self._ask_after, self._start_s = 0, 1, time.monotonic()

    def after_update(self) -> bool:
        """True if training should end here."""
        if self._accelerator.num_processes == 1:
            return self._requested()
        self._num_updates += 1
        if self._num_updates < self._ask_after:
            return False
        own = [float(self._requested()), time.monotonic() - self._start_s]
        stops, elapsed_s = sum_over_ranks(own, self._accelerator)
        update_s = elapsed_s / self._accelerator.num_processes / self._num_updates
        self._ask_after = max(1, min(int(_ASK_EVERY_S / max(update_s, 1e-6)), _MAX_UPDATES_UNASKED))
        self._num_updates, self._start_s = 0, time.monotonic()
        return stops > 0


@contextlib.contextmanager
def explained_loss_of_contact(accelerator: Accelerator) -> Iterator[None]:
    """Explain that another process is gone, when a message to it fails.

    Raises: RuntimeError instead of the transport's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if accelerator.num_processes == 1 or not _is_loss_of_contact(error):
            raise
        raise RuntimeError(
            f"Training process {accelerator.process_index} of {accelerator.num_processes} lost contact with "
            "another one, which has ended or does not answer; if that one failed, its own error is in the "
            "output too. Fix: start the same command with --resume; it continues from the newest complete "
            "checkpoint."
        ) from error


def _mean(values: list[tuple[float, float]]) -> float:
    """Weighted mean of (value, weight); without any weight a plain one."""
    counted = [(value, weight) for value, weight in values if weight > 0] or [(v, 1.0) for v, _ in values]
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _is_loss_of_contact(error: RuntimeError) -> bool:
    kinds = getattr(torch.distributed, "DistError", ())
    return isinstance(error, kinds) or _TRANSPORTS.search(str(error)) is not None
