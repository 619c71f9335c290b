"""Mixtures of datasets: each window comes from one of several, with weights that may change smoothly."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gin
import numpy as np
import numpy.typing as npt

from .dataset import RLDataset
from .disk_dataset import DiskTrajDataset
from .errors import check_number
from .sampling import PrioritySampler
from .trajectory import Layout, Trajectory

_logger = logging.getLogger("loxodon")


@gin.configurable
class MixtureOfDatasets(RLDataset):
    """Draws each window from one of several datasets, with given weights among the ready datasets.

    A dataset that becomes ready during a run would suddenly change the training data. With
    `smooth_sudden_starts` = N, its weight grows from its initial to its final value over N epochs: in epoch e
    it is w0 + (w1 - w0) * clip((e - e_ready + 1) / N, 0, 1), where e_ready is the first epoch in which it was
    ready. Weights are then divided by their sum over the ready datasets.

    At most one of the datasets may take new trajectories; `delete` affects only that one. Two
    DiskTrajDatasets must not share a folder, two datasets must not share a sampler, and none may have a
    PrioritySampler.

    Args:
        datasets: the datasets to draw from.
        sampling_weights: final weight of each, above 0; they need not sum to 1.
        smooth_sudden_starts: N, epochs over which a weight grows; None gives a dataset its final weight at
            once.
        initial_sampling_weights: weight of each before it starts to grow, at least 0; None for zeros.

    Raises:
        ValueError: If the numbers of datasets and weights differ, or a value is not allowed.
        TypeError: If `datasets` contains anything that is not a dataset.
    """

    needed_in_state: ClassVar = frozenset({"datasets"})

    def __init__(
        self,
        datasets: Sequence[RLDataset],
        sampling_weights: Sequence[float],
        smooth_sudden_starts: int | None = None,
        initial_sampling_weights: Sequence[float] | None = None,
    ) -> None:
        initial = [0.0] * len(datasets) if initial_sampling_weights is None else initial_sampling_weights
        _check_arguments(datasets, sampling_weights, initial)
        name = "MixtureOfDatasets.smooth_sudden_starts"
        check_number(name, smooth_sudden_starts, lowest=1, optional=True)
        self.datasets = list(datasets)
        self.sampling_weights, self.initial_sampling_weights = sampling_weights, initial_sampling_weights
        self._final, self._initial = np.array(sampling_weights, float), np.array(initial, float)
        self.smooth_sudden_starts = smooth_sudden_starts
        self._labels = [f"{i}-{_name(dataset)}" for i, dataset in enumerate(datasets)]
        self._epoch = 0
        self._ready_epochs = [-1] * len(datasets)

    def configure(self, **settings: Any) -> None:
        """Pass the settings to all datasets.

        Raises:
            ValueError: If two datasets share a folder, or two take new trajectories.
        """
        super().configure(**settings)
        self._check_folders(settings["default_root"], settings["default_name"])
        for dataset in self.datasets:
            dataset.configure(**settings)
        self._check_takers()

    def expect(self, layout: Layout) -> None:
        super().expect(layout)
        for dataset in self.datasets:
            dataset.expect(layout)

    @property
    def save_new_trajs_to(self) -> Path | None:
        """The folder of the dataset that takes new trajectories, or None if none does."""
        return next((dataset.save_new_trajs_to for dataset in self._takers()), None)

    @property
    def ready_for_training(self) -> bool:
        return any(dataset.ready_for_training for dataset in self.datasets)

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        return self.sample_windows(1, rng)[0]

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return random windows; the dataset of each window is drawn independently.

        Raises:
            ValueError: If no dataset is ready.
        """
        self._note_ready()
        weights = self.current_weights()
        if not weights.any():
            raise ValueError(
                f"None of the {len(self.datasets)} datasets of MixtureOfDatasets is ready to be sampled "
                f"({', '.join(self._labels)}). Fix: collect first (Experiment.mode 'both' or 'collect'), or "
                "lower their minimum sizes."
            )
        choices = rng.choice(len(weights), size=count, p=weights)
        counts = np.bincount(choices, minlength=len(weights)).tolist()
        drawn = [
            iter(dataset.sample_windows(num_drawn, rng) if num_drawn else ())
            for dataset, num_drawn in zip(self.datasets, counts, strict=True)
        ]
        return [next(drawn[i]) for i in choices.tolist()]

    def current_weights(self) -> npt.NDArray[np.float64]:
        """Return the probability of each dataset in this epoch; all zeros if none is ready."""
        weights = self._final.copy()
        if self.smooth_sudden_starts is not None:
            ready_epochs = np.array(self._ready_epochs)
            passed = np.where(ready_epochs < 0, 1, self._epoch - ready_epochs + 1)
            progress = np.clip(passed / self.smooth_sudden_starts, 0, 1)
            weights = self._initial + (self._final - self._initial) * progress
        weights *= [dataset.ready_for_training for dataset in self.datasets]
        total: float = weights.sum()
        return weights / total if total > 0 else weights

    def describe_lack(self) -> str:
        return f"is empty: {'; '.join(f'{one} {one.describe_lack()}' for one in self.datasets)}"

    def on_run_start(self) -> None:
        for dataset in self.datasets:
            dataset.on_run_start()
            if not dataset.ready_for_training and dataset not in self._takers():
                _logger.warning(
                    "%s %s. Until it is ready, windows come from the other datasets of the mixture. "
                    "Fix: if that is not intended, correct its folder.",
                    dataset,
                    dataset.describe_lack(),
                )

    def on_new_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for dataset in self.datasets:
            dataset.on_new_epoch(epoch)
        self._note_ready()

    def refresh(self) -> None:
        for dataset in self.datasets:
            dataset.refresh()

    def on_end_of_collection(self) -> dict[str, float]:
        return self._merged([dataset.on_end_of_collection() for dataset in self.datasets])

    def metrics(self) -> dict[str, float]:
        """Return each dataset's probability in this epoch, and its own metrics."""
        metrics = self._merged([dataset.metrics() for dataset in self.datasets])
        for label, weight in zip(self._labels, self.current_weights(), strict=True):
            metrics[f"{label}/weight"] = float(weight)
        return metrics

    def delete(self) -> None:
        for dataset in self._takers():
            dataset.delete()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, even if one fails
            for dataset in self.datasets:
                stack.callback(dataset.close)

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs in which the datasets became ready, and their states."""
        return {
            "ready_epochs": list(self._ready_epochs),
            "datasets": [dataset.state_dict() for dataset in self.datasets],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if len(state["datasets"]) != len(self.datasets):
            raise ValueError(
                f"The checkpoint holds a mixture of {len(state['datasets'])} datasets, but this run has "
                f"{len(self.datasets)}. Fix: resume with the MixtureOfDatasets.datasets of the original run."
            )
        for dataset, own in zip(self.datasets, state["datasets"], strict=True):
            dataset.check_state(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ready_epochs = list(state["ready_epochs"])
        for dataset, own in zip(self.datasets, state["datasets"], strict=True):
            dataset.load_state_dict(own)

    def set_aside_newer(self, state: dict[str, Any]) -> int:
        states = zip(self.datasets, state["datasets"], strict=True)
        return sum(dataset.set_aside_newer(own) for dataset, own in states)

    def begin_new_run(self) -> int:
        return sum(dataset.begin_new_run() for dataset in self.datasets)

    def _note_ready(self) -> None:
        """Remember this epoch for datasets that have just become ready."""
        for i, dataset in enumerate(self.datasets):
            if self._ready_epochs[i] < 0 and dataset.ready_for_training:
                self._ready_epochs[i] = self._epoch

    def _takers(self) -> list[RLDataset]:
        return [dataset for dataset in self.datasets if dataset.save_new_trajs_to is not None]

    def _merged(self, metrics: list[dict[str, float]]) -> dict[str, float]:
        named = zip(self._labels, metrics, strict=True)
        return {f"{label}/{key}": value for label, own in named for key, value in own.items()}

    def _check_folders(self, default_root: str, default_name: str) -> None:
        found: dict[Path, str] = {}
        for label, dataset in zip(self._labels, self.datasets, strict=True):
            if not isinstance(dataset, DiskTrajDataset):
                continue
            folder = dataset.folder(default_root, default_name).resolve()
            if folder in found:
                raise ValueError(
                    f"The datasets {found[folder]} and {label} of the mixture both lie in {folder}, where "
                    "they would sample and delete the same files. Fix: give each its own "
                    "DiskTrajDataset.dset_name, with scopes in gin: @demos/DiskTrajDataset() and "
                    "demos/DiskTrajDataset.dset_name = 'demos'."
                )
            found[folder] = label

    def _check_takers(self) -> None:
        named = zip(self._labels, self.datasets, strict=True)
        takers = [f"{label} ({d.save_new_trajs_to})" for label, d in named if d in self._takers()]
        if len(takers) > 1:
            raise ValueError(
                f"The datasets {' and '.join(takers)} of the mixture all take new trajectories, but "
                "collected trajectories can go to only one dataset. Fix: set takes_new_trajs = False in "
                "the others, e.g. demos/DiskTrajDataset.takes_new_trajs = False."
            )


def _check_arguments(datasets: Sequence[RLDataset], final: Sequence[float], initial: Sequence[float]) -> None:
    if not datasets:
        raise ValueError(
            "MixtureOfDatasets.datasets is empty, but there must be at least one. "
            "Fix: set MixtureOfDatasets.datasets = [@a/DiskTrajDataset(), @b/DiskTrajDataset()]."
        )
    for i, dataset in enumerate(datasets):
        if not isinstance(dataset, RLDataset):
            raise TypeError(
                f"MixtureOfDatasets.datasets[{i}] is {dataset!r}, but must be an RLDataset. "
                "Fix: write @DiskTrajDataset() in gin, with parentheses."
            )
        if isinstance(dataset.sampler, PrioritySampler):
            raise ValueError(
                f"MixtureOfDatasets.datasets[{i}] has a PrioritySampler, but a mixture does not tell its "
                "datasets the priorities of their windows. Fix: use Sampler there, or a single dataset."
            )
    if len({id(dataset.sampler) for dataset in datasets}) < len(datasets):
        raise ValueError(
            "Two datasets of a MixtureOfDatasets have the same sampler object, but a sampler knows the "
            "trajectories of one dataset. Fix: make a sampler for each."
        )
    fits = len(final) == len(initial) == len(datasets)
    if not fits or not all(0 < w < np.inf for w in final) or not all(0 <= w < np.inf for w in initial):
        raise ValueError(
            f"A mixture of {len(datasets)} datasets has sampling_weights {list(final)} and "
            f"initial_sampling_weights {list(initial)}, but needs one of each per dataset: sampling_weights "
            "above 0, initial_sampling_weights at least 0. Fix: set MixtureOfDatasets.sampling_weights, "
            "and remove datasets that should never be sampled."
        )


def _name(dataset: RLDataset) -> str:
    name = getattr(dataset, "dset_name", None)
    return name if isinstance(name, str) else type(dataset).__name__
