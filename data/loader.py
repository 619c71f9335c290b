"""Batches for an epoch, sampled in this process or by worker processes that live as long as the run."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .batch import Batch, pad_batch
from .dataset import RLDataset
from .trajectory import Array

if TYPE_CHECKING:
    from ctypes import Array as SharedArray
    from ctypes import c_longlong

# A batch on its way out of a worker: its arrays, by (field, observation key). Tensors would travel through
# one file descriptor each, which takes five times as long for a small batch.
_Wire: TypeAlias = "dict[tuple[str, str], Array]"


class BatchLoader:
    """Samples padded batches.

    The batches of an epoch depend only on seed, rank, epoch number, the number of workers and the data. With
    workers, one DataLoader serves the whole run: its processes start with the first epoch and stay; each of
    them lists the dataset again when an epoch begins.

    Args:
        dataset: where windows come from; configured already.
        batch_size: B, windows per batch.
        num_workers: worker processes; 0 samples in this process.
        seed: of the run.
        rank: number of this process among those that train together.

    Raises:
        ValueError: If batch_size or num_workers is not allowed.
    """

    def __init__(
        self, dataset: RLDataset, *, batch_size: int, num_workers: int, seed: int, rank: int = 0
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"batch_size is {batch_size} and the number of loader workers {num_workers}, but they must "
                "be at least 1 and 0. Fix: set Experiment.batch_size and Experiment.dloader_workers."
            )
        order: SharedArray[c_longlong] = multiprocessing.RawArray("q", 2)
        self._source = _EpochSource(dataset, batch_size, seed, rank, order)
        self._order = order
        self._num_workers = num_workers
        self._loader: DataLoader[_Wire] | None = None

    def epoch(self, epoch: int, num_batches: int) -> Iterator[Batch]:
        """Yield the `num_batches` batches of one epoch. An epoch that was left unfinished is dropped.

        Raises:
            ValueError: From the dataset, if there is nothing to sample or a file is broken.
        """
        self._order[:] = [epoch, num_batches]
        if self._num_workers == 0:
            yield from self._source.sample(worker=0, num_workers=1)
            return
        if self._loader is None:
            self._loader = DataLoader(
                self._source,
                batch_size=None,
                num_workers=self._num_workers,
                persistent_workers=True,
                collate_fn=_keep,
                worker_init_fn=_leave_interrupts_to_parent,
            )
        for wire in self._loader:
            yield _unpack(wire)

    def close(self) -> None:
        """End the worker processes; a later epoch would start new ones."""
        self._loader = None


class _EpochSource(IterableDataset["_Wire"]):
    """The batches, or one worker's share, of the epoch that `order` (epoch, number of batches) asks for."""

    def __init__(
        self, dataset: RLDataset, batch_size: int, seed: int, rank: int, order: SharedArray[c_longlong]
    ) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._seed, self._rank, self._order = seed, rank, order

    def __iter__(self) -> Iterator[_Wire]:
        """Sample and pack batches. Runs once per epoch in each worker process."""
        info = get_worker_info()
        if info is None:
            raise RuntimeError("_EpochSource is for worker processes. Fix: iterate over BatchLoader.epoch().")
        yield from map(_pack, self.sample(worker=info.id, num_workers=info.num_workers))

    def sample(self, *, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yield batches w, w + W, w + 2W, ... of the epoch, for worker w of W."""
        epoch, num_batches = self._order
        self._dataset.refresh()
        rng = np.random.default_rng([self._seed, self._rank, epoch, worker])
        for _ in range(worker, num_batches, num_workers):
            yield pad_batch([self._dataset.sample_random_trajectory(rng) for _ in range(self._batch_size)])


def _keep(wire: Any) -> Any:
    return wire


def _leave_interrupts_to_parent(worker: int) -> None:
    """Ignore Ctrl-C, which reaches every process, so that the parent can end the run in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _pack(batch: Batch) -> _Wire:
    wire: _Wire = {("obs", key): value.numpy() for key, value in batch.obs.items()}
    for field in fields(batch):
        if field.name != "obs":
            wire[field.name, ""] = getattr(batch, field.name).numpy()
    return wire


def _unpack(wire: _Wire) -> Batch:
    obs = {key: torch.from_numpy(value) for (field, key), value in wire.items() if field == "obs"}
    others = {field: torch.from_numpy(value) for (field, _), value in wire.items() if field != "obs"}
    return Batch(obs=obs, **others)
