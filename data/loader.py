"""Batches for an epoch, sampled in this process or by torch's DataLoader workers."""

from __future__ import annotations

import atexit
import itertools
import math
import multiprocessing
import random
import signal
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import gin
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .batch import Arrays, Batch, Rows, Specs, as_batch, batch_of, fill_batch, packed_rows, specs_of
from .dataset import RLDataset
from .errors import check_number
from .trajectory import Array, Trajectory

_MESSAGE_BYTES = 4 << 20  # approximate size of the batches that a worker sends together
_POOL_BYTES = 256 << 20  # approximate memory of windows that are drawn together
_HEAD_BYTES = 64  # size of a block's head; its first byte marks whether the parent has copied the block
_SENT, _COPIED = 0, 1
_KEPT_BLOCKS = 4  # per worker
_GRACE_S = 15  # seconds that a worker has after SIGTERM


@gin.configurable(denylist=["dataset", "batch_size", "num_workers", "seed", "rank", "packs"])
class BatchLoader:
    """Samples padded or packed batches.

    The batches of an epoch depend only on seed, rank, epoch number, the number of workers and the data.
    Workers start with the first epoch and stay alive. Each of them lists the dataset again when an epoch
    begins, and prepares its next batches while the learner is busy. Small batches are sent several at a time,
    since a message costs more than making such a batch.

    Windows of similar length share a batch: the windows of `pool_batches` batches are drawn together, sorted
    by length and cut into batches, which are returned in random order. Each drawn window is used once, so
    sampling probabilities are the same as without a pool; only the grouping differs. If all windows have one
    length, they are not sorted. The windows of a pool stay in memory until their batches are made. The pool
    is therefore smaller if it would take more than 256 MB; for images in compressed files, choose a smaller
    `pool_batches`.

    Packed batches take windows in the order of drawing. They leave about as few places empty as sorted
    windows would, and every batch has windows of all lengths.

    Args:
        dataset: source of the windows; configured already.
        batch_size: B, windows per batch.
        num_workers: worker processes; 0 samples in this process.
        seed: seed of the run.
        rank: number of this process among those that train together.
        packs: whether short windows share rows of at most the dataset's max_seq_len transitions.
        pool_batches: number of batches whose windows are drawn together; 1 keeps the order of drawing.

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
        packs: bool = False,
        pool_batches: int = 8,
    ) -> None:
        check_number("Experiment.batch_size", batch_size, lowest=1, whole=True)
        check_number("Experiment.dloader_workers", num_workers, lowest=0, whole=True)
        check_number("BatchLoader.pool_batches", pool_batches, lowest=1, whole=True)
        self._dataset, self._num_workers = dataset, num_workers
        self._seed = seed
        self._source = _EpochSource(dataset, batch_size, rank, pool_batches, packs)
        self._num_epochs = 0  # number of epochs begun
        self._workers: DataLoader[Batch] | None = None
        self._blocks: dict[tuple[int, int], Tensor] = {}  # the workers' blocks, as last received
        self._num_timesteps = self._num_padded = 0

    def reseed(self, seed: int) -> None:
        """Draw batches like a run with this seed, from the next epoch on."""
        self._seed = seed

    def epoch(self, epoch: int, num_batches: int) -> Iterator[Batch]:
        """Yield the `num_batches` batches of one epoch. The epoch ends early when another one begins.

        Raises:
            ValueError: From the dataset, if there is nothing to sample.
            RuntimeError: If a worker process died, or raised something other than a ValueError.
        """
        self._num_timesteps = self._num_padded = 0
        self._num_epochs += 1
        number = self._num_epochs
        if self._num_workers == 0:
            sampled = self._source.sample(epoch, self._seed, num_batches)
            batches: Iterator[Batch] = (batch_of(rows, self._dataset.layout) for rows in sampled)
        else:
            # Call this here too, although the workers sample: the dataset's metrics come from this process.
            self._dataset.on_new_epoch(epoch)
            self._source.order[:] = epoch, self._seed, num_batches, self._batches_per_message(num_batches)
            batches = self._of_workers()
        for batch in batches:
            self._num_timesteps += batch.mask.numel()
            self._num_padded += batch.mask.numel() - int(batch.mask.count_nonzero())
            yield batch
            if self._num_epochs != number:
                return

    def metrics(self) -> dict[str, float]:
        """Return the share of places without a transition in the last epoch, once there are batches."""
        if self._num_timesteps == 0:
            return {}
        return {"padded_share": self._num_padded / self._num_timesteps}

    def close(self) -> None:
        """End the worker processes; a later epoch starts new ones."""
        running, self._workers = getattr(self._workers, "_iterator", None), None
        self._blocks.clear()
        if running is not None:
            running._shutdown_workers()  # otherwise they live as long as an unfinished epoch
        atexit.unregister(self.close)

    def _batches_per_message(self, num_batches: int) -> int:
        """Batches per message: limited by size, by the pool, and to leave a message for each worker."""
        by_size = self._source.num_batches_in(_MESSAGE_BYTES) or 1
        return max(1, min(by_size, self._source.pool_batches, num_batches // self._num_workers))

    def _of_workers(self) -> Iterator[Batch]:
        if self._workers is None:
            self._workers = DataLoader(
                self._source,
                batch_size=None,
                num_workers=self._num_workers,
                collate_fn=_unchanged,
                persistent_workers=True,
                worker_init_fn=_leave_signals_to_the_parent,
                # A separate generator, since drawing the workers' seeds must not change the run's random
                # numbers.
                generator=torch.Generator().manual_seed(0),
            )
            atexit.register(self.close)
        try:
            for item in self._workers:
                if isinstance(item, _Failure):
                    raise item.kind(item.text) from RuntimeError(f"in a loader worker:\n{item.trace}")
                if item.data is not None:
                    self._blocks[item.place] = item.data
                shared = self._blocks[item.place]
                own = shared.clone()
                shared[0] = _COPIED
                for arrays in _arrays(item.specs, own.numpy()):
                    yield as_batch({name: torch.from_numpy(array) for name, array in arrays.items()})
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.close()
            raise RuntimeError(
                f"A loader worker died: {error}. The usual reasons are too little memory (each worker holds "
                "two batches and its own cache of files; /dev/shm counts too) or a crash in the code of a "
                "dataset. Fix: lower Experiment.dloader_workers or batch_size, or set dloader_workers = 0 "
                "to see the crash in this process."
            ) from error


class _Failure(NamedTuple):
    """Description of a worker's exception, which itself might not survive pickling."""

    kind: type[Exception]
    text: str
    trace: str


class _Message(NamedTuple):
    """Batches in one piece of shared memory, a block.

    Sending a tensor to another process costs as much as many small batches, and new memory costs as much as
    filling it. Blocks are therefore reused, and each is sent only once.
    """

    specs: list[Specs]
    place: tuple[int, int]  # the block: the worker's number, and the index among its blocks
    data: Tensor | None  # the block's bytes: a head, then the arrays; None if it is the worker's last one


def _arrays(batches: list[Specs], block: Array) -> Iterator[Arrays]:
    """Yield the arrays of each batch, as parts of the bytes of a block."""
    start = _HEAD_BYTES
    for specs in batches:
        arrays = {}
        for name, (shape, dtype) in specs.items():
            arrays[name] = np.ndarray(shape, dtype, block, start)
            start += _room_bytes(shape, dtype)
        yield arrays


def _room_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // 64) * 64  # every array begins at a cache line


class _EpochSource(IterableDataset[Any]):
    """The batches of an epoch; in a worker, its share of them, several per message."""

    def __init__(
        self,
        dataset: RLDataset,
        batch_size: int,
        rank: int,
        pool_batches: int,
        packs: bool,
    ) -> None:
        self._dataset, self.batch_size, self._packs = dataset, batch_size, packs
        self._rank, self.pool_batches = rank, pool_batches
        # The workers' next task: epoch, seed, number of batches, and batches per message. They all share it.
        self.order = multiprocessing.RawArray("q", 4)
        self._blocks: list[Tensor] = []  # blocks of a worker
        self._num_made = 0

    def num_batches_in(self, num_bytes: int) -> int | None:
        """Approximate number of batches of full windows in `num_bytes`; None if the layout is unknown."""
        layout = self._dataset.layout
        if layout is None:
            return None
        obs_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.obs.values())
        timestep_bytes = obs_bytes + 8 * layout.action_width + 32
        return num_bytes // (self.batch_size * (self._dataset.max_seq_len + 1) * timestep_bytes)

    def sample(self, epoch: int, seed: int, num_batches: int, worker: int = 0) -> Iterator[Rows]:
        """Yield the rows of `num_batches` batches of the epoch."""
        self._dataset.on_new_epoch(epoch)
        self._dataset.refresh()
        rng = np.random.default_rng([seed, self._rank, epoch, worker])
        by_size = self.num_batches_in(_POOL_BYTES)
        largest = self.pool_batches if by_size is None else max(1, min(by_size, self.pool_batches))
        remaining = num_batches
        while remaining:
            pool = min(largest, remaining)
            remaining -= pool
            windows = self._dataset.sample_windows(pool * self.batch_size, rng)
            if self._packs:
                for i in range(0, len(windows), self.batch_size):
                    yield packed_rows(windows[i : i + self.batch_size], self._dataset.max_seq_len)
            else:
                for batch in cut_by_length(windows, self.batch_size, rng):
                    yield [[window] for window in batch]

    def __iter__(self) -> Iterator[_Message | _Failure]:
        """Yield a worker's messages. DataLoader asks its workers in turn, in a fixed order."""
        info, (epoch, seed, num_batches, size) = get_worker_info(), self.order
        assert info is not None
        own = np.random.SeedSequence([seed, self._rank, epoch, info.id, 1]).generate_state(1)[0]
        random.seed(int(own))  # a user's dataset may draw from these; seeding makes it follow the run's seed
        np.random.seed(own)  # noqa: NPY002
        torch.manual_seed(int(own))
        begins = range(info.id * size, num_batches, info.num_workers * size)
        batches = self.sample(epoch, seed, sum(min(size, num_batches - i) for i in begins), info.id)
        try:
            while some := list(itertools.islice(batches, size)):
                yield self._message(info.id, some)
        except ValueError as error:  # its text already contains the fix
            yield _Failure(ValueError, str(error), traceback.format_exc())
        except Exception as error:  # the parent raises any exception of a dataset again
            text = (
                f"A loader worker failed: {type(error).__name__}: {error}. Fix: see the traceback above; "
                "Experiment.dloader_workers = 0 raises the error in this process."
            )
            yield _Failure(RuntimeError, text, traceback.format_exc())

    def _message(self, worker: int, batches: list[Rows]) -> _Message:
        """Copy windows into a block that the parent has copied, or into a new one."""
        layout = self._dataset.layout
        specs = [specs_of(rows, layout) for rows in batches]
        size = _HEAD_BYTES + sum(_room_bytes(*spec) for one in specs for spec in one.values())
        free = (i for i, data in enumerate(self._blocks) if data[0] == _COPIED and len(data) >= size)
        if is_new := (place := next(free, None)) is None:
            place, self._num_made = self._num_made % _KEPT_BLOCKS, self._num_made + 1
            new = torch.empty(0, dtype=torch.uint8)
            new.set_(torch.UntypedStorage._new_shared(size))  # type: ignore[no-untyped-call]
            self._blocks[place : place + 1] = [new]
        data = self._blocks[place]
        data[0] = _SENT
        for rows, arrays in zip(batches, _arrays(specs, data.numpy()), strict=True):
            fill_batch(arrays, rows, layout)
        return _Message(specs, (worker, place), data if is_new else None)


def cut_by_length(
    windows: list[Trajectory], batch_size: int, rng: np.random.Generator
) -> Iterator[list[Trajectory]]:
    """Yield the windows in batches of similar length, the batches in random order.

    Args:
        windows: enough to fill whole batches.
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


def _unchanged(block: Any) -> Any:
    return block


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore signals, which often reach all processes; the parent saves first, and then ends its workers.

    After SIGTERM, a worker ends after some seconds, so that it does not outlive a parent that does not end
    it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
