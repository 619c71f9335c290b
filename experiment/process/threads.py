"""Number of torch threads: never more than this process may use, and one if more would not pay off."""

from __future__ import annotations

import logging
import os

import torch

from ...envs import num_usable_cores

logger = logging.getLogger("loxodon")
# Multiply-adds of a forward pass; below this, threads on busy cores wait longer than they work.
WORTH_MORE = 1e10
_replaced: dict[int, int] = {}  # number of threads before the last change, by the number set then


def choose_threads(wanted: int | None, work: float = 0.0) -> None:
    """Set torch's threads.

    The limit is the number that torch found at the start of the process (OMP_NUM_THREADS, MKL_NUM_THREADS) or
    that torch.set_num_threads has set since, and this process's share of the cores.

    Args:
        wanted: Experiment.torch_threads; more than the limit is cut to it, with a warning. None chooses by
            `work`.
        work: multiply-adds of a forward pass on the CPU.
    """
    found = torch.get_num_threads()
    found = _replaced.get(found, found)  # the choice of an earlier run of this process is not a limit
    # Number of processes that train together on this machine.
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = max(1, min(found, num_usable_cores() // num_local))
    if wanted is not None and wanted > limit:
        logger.warning(
            "Experiment.torch_threads is %d, but the limit of this process is %d (from OMP_NUM_THREADS, "
            "MKL_NUM_THREADS, torch.set_num_threads, or its share of the CPU cores), so it uses %d. "
            "Fix: lower Experiment.torch_threads or raise the limit.",
            wanted,
            limit,
            limit,
        )
    chosen = min(wanted, limit) if wanted is not None else limit if work >= WORTH_MORE else 1
    torch.set_num_threads(chosen)
    _replaced.clear()
    _replaced[chosen] = found
