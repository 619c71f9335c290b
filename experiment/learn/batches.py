"""Batches on their way to the device: copied in the background, and padded to a few lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...data import Batch
from ...data.batch import BlockReader, in_one_block

NUM_LENGTHS = 4
"""Number of different lengths of batches for compiled losses; torch.compile gives up after eight."""


def in_buckets(batches: Iterable[Batch], size: int | None) -> Iterator[Batch]:
    """Batches padded to multiples of `size` transitions, because torch.compile compiles every length.

    size: None for no padding.
    """
    for batch in batches:
        yield batch if size is None else batch.padded(-(-batch.mask.shape[1] // size) * size)


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on a CUDA device: each is copied in the background while the one before it is in use.

    On other devices they are returned as they are.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream, ahead = torch.cuda.Stream(device), None  # type: ignore[no-untyped-call]
    for batch in batches:
        block, read = in_one_block(batch, pin_memory=True)
        with torch.cuda.stream(stream):
            copy = block.to(device, non_blocking=True)
        before, ahead = ahead, (copy, stream.record_event(), read)
        if before is not None:
            yield _arrived(*before, device)
    if ahead is not None:
        yield _arrived(*ahead, device)


def _arrived(copy: torch.Tensor, event: torch.cuda.Event, read: BlockReader, device: torch.device) -> Batch:
    """A copied batch, for use by the current stream, which waits for the copy; the host does not."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    copy.record_stream(current)  # its memory is reused only after the current stream's work
    return read(copy)
