"""Settings of the C library's memory allocation for tensors."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep memory that tensors free for the next ones in this process, and put large ones in large pages.

    Each update frees and allocates the same hundreds of megabytes. By default, glibc returns large blocks to
    the kernel, which fills new ones with zeros, page by page: a third of an update on long sequences
    (docs/gpu.md). With this setting, the process keeps as much memory as it has ever needed. This does
    nothing without glibc, or if a MALLOC_ variable is set.

    Call it before the first tensor of 2 MB is made.
    """
    # musl has no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first large block
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
