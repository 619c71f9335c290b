"""Time of calls: CPU seconds of this process, or seconds between two events of a GPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch


def now_s(device: torch.device) -> float:
    """The time after all work so far; only differences have a meaning."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes; on a GPU, until the device has finished it."""
    if device.type == "cpu":
        start_s = time.process_time()
        call()
        return time.process_time() - start_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def waits_of(call: Callable[[], object]) -> list[str]:
    """Places of code at which a call waits for the GPU, one for each wait, as file:line."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [x for x in seen if "synchroniz" in str(x.message)]
    return [f"{x.filename.rpartition('/')[2]}:{x.lineno}" for x in found]
