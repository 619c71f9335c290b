"""How the C library hands main memory to tensors."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep what tensors free for the next ones, and have large ones in large pages.

    Each update frees and asks for the same hundreds of megabytes. glibc gives large blocks back to the
    kernel, which fills new ones with zeros, page by page: a third of an update on long sequences
    (docs/gpu.md). The process then holds as much memory as it has ever needed. Whoever has set a MALLOC_
    variable has decided otherwise. Does nothing without glibc.

    To be called before the first tensor of 2 MB is made.
    """
    mallopt = (
        getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    )  # musl has none
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first large block
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
