"""Batches for an epoch, sampled in this process or by worker processes that live as long as the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gin
import numpy as np
import torch
from torch import Tensor

from .batch import Batch, as_batch
from .collate import Arrays, Name, Specs, block_bytes, block_views, new_arrays, pad_windows
from .dataset import RLDataset
from .sampling_workers import SamplingWorkers
from .trajectory import Trajectory


@gin.configurable(denylist=["dataset", "batch_size", "num_workers", "seed", "rank", "pin_memory"])
class BatchLoader:
    """Samples padded batches.

    The batches of an epoch depend only on seed, rank, epoch number, the number of workers and the data.
    Workers start with the first epoch and stay; each of them lists the dataset again when an epoch begins,
    and prepares its next batches while the learner is busy.

    Windows of similar length share a batch: those of `pool_batches` batches are drawn together, sorted by
    length and cut into batches, which come in random order. Each window that was drawn is used once, so a
    window is as likely as without a pool; only its company differs. Where all have one length, nothing is
    sorted. Windows are views of files or memory until their batch is made, so what they refer to stays alive
    that long: with images in compressed files, a smaller pool saves memory.

    Args:
        dataset: where windows come from; configured already.
        batch_size: B, windows per batch.
        num_workers: worker processes; 0 samples in this process.
        seed: of the run.
        rank: number of this process among those that train together.
        pin_memory: whether batches lie in page-locked memory, for a learner on a CUDA device.
        pool_batches: batches whose windows are drawn together; 1 leaves them in the order of drawing.

    Raises:
        ValueError: If batch_size, num_workers or pool_batches is not allowed.
    """

    def __init__(
        self,
        dataset: RLDataset,
        *,
        batch_size: int,
        num_workers: int,
        seed: int,
        rank: int = 0,
        pin_memory: bool = False,
        pool_batches: int = 8,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"batch_size is {batch_size} and the number of loader workers {num_workers}, but they must "
                "be at least 1 and 0. Fix: set Experiment.batch_size and Experiment.dloader_workers."
            )
        if pool_batches < 1:
            raise ValueError(
                f"pool_batches is {pool_batches}, but windows are drawn for at least 1 batch at a time. "
                "Fix: set BatchLoader.pool_batches = 1 to switch sorting by length off."
            )
        self._dataset = dataset
        self._source = _EpochSource(dataset, batch_size, seed, rank, pool_batches)
        self._memory = _Pinned() if pin_memory else _Ordinary()
        self._num_workers = num_workers
        self._workers: SamplingWorkers | None = None
        self._num_timesteps = self._num_padded = 0

    def epoch(self, epoch: int, num_batches: int) -> Iterator[Batch]:
        """Yield the `num_batches` batches of one epoch. An epoch that was left unfinished is dropped.

        Raises:
            ValueError: From the dataset, if there is nothing to sample.
            RuntimeError: If a worker process died.
        """
        self._num_timesteps = self._num_padded = 0
        if self._num_workers == 0:
            batches = self._source.sample(epoch, num_batches, 0, 1, self._memory.allocate)
            for arrays in batches:
                yield self._count(self._memory.to_batch(arrays))
            return
        # Here too, although nothing is sampled here: what a dataset reports comes from this process.
        self._dataset.on_new_epoch(epoch)
        if self._workers is None or self._workers.closed:
            self._workers = SamplingWorkers(self._source, self._num_workers)
        for shared in self._workers.epoch(epoch, num_batches):
            own = self._memory.allocate({name: (value.shape, value.dtype) for name, value in shared.items()})
            for name, value in shared.items():
                np.copyto(own[name], value)
            yield self._count(self._memory.to_batch(own))

    def metrics(self) -> dict[str, float]:
        """Return the fraction of padded timesteps in the batches of the last epoch, once there are any."""
        if self._num_timesteps == 0:
            return {}
        return {"padded_fraction": self._num_padded / self._num_timesteps}

    def close(self) -> None:
        """End the worker processes; a later epoch would start new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _count(self, batch: Batch) -> Batch:
        mask = batch.mask.numpy()
        self._num_timesteps += mask.size
        self._num_padded += mask.size - int(np.count_nonzero(mask))
        return batch


class _EpochSource:
    """Samples the batches of an epoch, or one worker's share of them."""

    def __init__(self, dataset: RLDataset, batch_size: int, seed: int, rank: int, pool_batches: int) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._seed, self._rank, self._pool_batches = seed, rank, pool_batches

    def sample(
        self, epoch: int, num_batches: int, worker: int, num_workers: int, allocate: Callable[[Specs], Arrays]
    ) -> Iterator[Arrays]:
        """Yield batches w, w + W, w + 2W, ... of the epoch, for worker w of W."""
        self._dataset.on_new_epoch(epoch)
        self._dataset.refresh()
        layout = self._dataset.layout
        rng = np.random.default_rng([self._seed, self._rank, epoch, worker])
        remaining = len(range(worker, num_batches, num_workers))
        while remaining:
            pool = min(self._pool_batches, remaining)
            remaining -= pool
            windows = self._dataset.sample_windows(pool * self._batch_size, rng)
            for batch in cut_by_length(windows, self._batch_size, rng):
                yield pad_windows(batch, layout, allocate)


def cut_by_length(
    windows: list[Trajectory], batch_size: int, rng: np.random.Generator
) -> Iterator[list[Trajectory]]:
    """Yield the windows in batches of similar length, the batches in random order.

    Args:
        windows: as many as fill whole batches.
        batch_size: B.
        rng: draws the order of the batches; not used if all windows have one length.
    """
    lengths = np.array([len(window) for window in windows])
    starts = np.arange(0, len(windows), batch_size)
    if lengths.min() < lengths.max():
        windows = [windows[i] for i in np.argsort(lengths, kind="stable")]
        rng.shuffle(starts)
    for start in starts:
        yield windows[start : start + batch_size]


class _Ordinary:
    """Batches in ordinary memory."""

    def allocate(self, specs: Specs) -> Arrays:
        """Make the arrays of one batch."""
        return new_arrays(specs)

    def to_batch(self, arrays: Arrays) -> Batch:
        """Wrap what `allocate` returned and somebody filled."""
        return as_batch({name: torch.from_numpy(value) for name, value in arrays.items()})


class _Pinned:
    """Batches in page-locked memory, one block each, so that copies to a GPU run in the background.

    Torch reuses such blocks. It knows that a copy is still on its way only for tensors cut from the block,
    not for those made from a numpy view of it, hence both are kept.
    """

    def __init__(self) -> None:
        self._tensors: dict[Name, Tensor] = {}

    def allocate(self, specs: Specs) -> Arrays:
        """Make the arrays of one batch."""
        block = new_pinned_block(block_bytes(specs))
        views = block_views(block.numpy(), specs)
        begin = block.data_ptr()
        for name, view in views.items():
            start = view.ctypes.data - begin
            flat = block[start : start + view.nbytes].view(torch.from_numpy(view).dtype)
            self._tensors[name] = flat.view(view.shape)
        return views

    def to_batch(self, arrays: Arrays) -> Batch:
        """Wrap what `allocate` returned and somebody filled."""
        tensors, self._tensors = self._tensors, {}
        return as_batch(tensors)


def new_pinned_block(num_bytes: int) -> Tensor:
    """Return uninitialised page-locked bytes."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
