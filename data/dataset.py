"""Datasets as sources of training windows: their interface, and a dataset that holds nothing."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import gin
import numpy as np

from .errors import check_number
from .relabeling import Relabeler
from .sampling import Sampler
from .trajectory import Layout, Trajectory


@gin.configurable
class RLDataset(ABC):
    """A source of trajectory windows.

    To make your own, implement `sample_random_trajectory`; everything else has a default.

    Args:
        sampler: draws the windows of datasets that store trajectories; None for Sampler().

    Attributes:
        max_seq_len, has_edit_rights: see configure.
        layout: the layout that the run expects of every trajectory; None while it is unknown.
        relabeler: changes whole trajectories before windows are taken from them; None changes nothing.
        needed_in_state: keys that load_state_dict needs.
    """

    max_seq_len: int
    has_edit_rights: bool
    layout: Layout | None = None
    relabeler: Relabeler | None = None
    needed_in_state: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.sampler = Sampler() if sampler is None else sampler

    def __str__(self) -> str:
        """The class, and the folder if there is one, for messages."""
        return f"{type(self).__name__} {self.save_new_trajs_to or ''}".rstrip()

    @functools.cached_property
    def sampler(self) -> Sampler:
        """The argument of that name, or a default if a subclass does not call `RLDataset.__init__`."""
        return Sampler()

    def configure(
        self,
        *,
        max_seq_len: int,
        padded_sampling: str,
        has_edit_rights: bool,
        default_root: str,
        default_name: str,
    ) -> None:
        """Receive the settings of the run, once, before anything else is called.

        Args:
            max_seq_len: transitions in the longest window.
            padded_sampling: how windows may extend beyond the ends of a trajectory; see Sampler.window.
            has_edit_rights: True if this process may delete or move files.
            default_root: folder for datasets without their own.
            default_name: name for datasets without their own.

        Raises:
            ValueError: If a setting is not allowed.
        """
        check_number("Experiment.max_seq_len", max_seq_len, lowest=1, whole=True)
        self.max_seq_len, self.has_edit_rights = max_seq_len, has_edit_rights
        self.sampler.configure(max_seq_len=max_seq_len, padded_sampling=padded_sampling)

    def expect(self, layout: Layout) -> None:
        """Receive the layout of this run's trajectories, once its spaces are known."""
        self.layout = layout

    @property
    def save_new_trajs_to(self) -> Path | None:
        """Folder for new trajectories; None if this dataset does not take any."""
        return None

    @property
    def ready_for_training(self) -> bool:
        """True if there is enough to sample from."""
        return True

    def describe_lack(self) -> str:
        """A verb phrase about what is missing while the dataset is not ready, for errors."""
        return "holds too few trajectories"

    @property
    def newest_time_s(self) -> float | None:
        """Unix time of the newest trajectory, as of the last refresh; None if unknown."""
        return None

    @abstractmethod
    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Return a random window of at most `max_seq_len` transitions; `rng` is the only randomness."""

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return `count` random windows; override this if drawing many at once is cheaper."""
        return [self.sample_random_trajectory(rng) for _ in range(count)]

    def window_of(
        self, traj: Trajectory, traj_id: str, fraction: float, rng: np.random.Generator
    ) -> Trajectory:
        """Return the window of a stored trajectory that the sampler chooses, after relabelling it."""
        if self.relabeler is not None:
            traj = traj.slice(0, len(traj))  # slicing reads the file
            try:
                traj = self.relabeler.apply(traj, rng)
            except OSError as error:  # callers take an OSError for one of the trajectory file
                raise RuntimeError(
                    f"{type(self.relabeler).__name__}.relabel failed: {error}. Fix: correct the relabeler, "
                    "or leave it out."
                ) from error
        window = traj.slice(*self.sampler.window(len(traj), fraction))
        slot = self.sampler.priority_slot(traj_id)
        return window if slot < 0 else window.with_priority_slot(slot)

    def on_run_start(self) -> None:  # noqa: B027 (optional hook)
        """Check the data. Called once before the first epoch, after a checkpoint (if any) was loaded.

        Raises:
            ValueError: If training would destroy data that the run has not collected.
        """

    def on_new_epoch(self, epoch: int) -> None:
        """Receive an epoch's number. Called before refresh in every process that samples."""
        if self.relabeler is not None:
            self.relabeler.epoch = epoch

    def refresh(self) -> None:  # noqa: B027 (optional hook)
        """Look for new data. Called in every process that samples, at the start of each epoch."""

    def on_end_of_collection(self) -> dict[str, float]:
        """Look for collected data, and delete old data beyond the limits. Returns metrics."""
        self.refresh()
        return {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last epoch."""
        return {}

    def delete(self) -> None:  # noqa: B027 (optional hook)
        """Delete the data that was collected into this dataset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-able."""
        return {"sampler": self.sampler.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if load_state_dict cannot restore a state, because other datasets made it."""
        if missing := self.needed_in_state - state.keys():
            raise ValueError(
                f"The checkpoint was made with another kind of dataset than {type(self).__name__}: its state "
                f"has no {' and no '.join(sorted(missing))}. Fix: resume with the Experiment.dataset of the "
                "original run."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict returned."""
        self.sampler.load_state_dict(state.get("sampler", {}))

    def set_aside_newer(self, state: dict[str, Any]) -> int:
        """Hide data that arrived after `state` was taken, for exact resumption. Returns how much it hid."""
        return 0

    def begin_new_run(self) -> int:
        """Hide data that an earlier run of the same name left in this run's own folder. Returns how much."""
        return 0

    def close(self) -> None:  # noqa: B027 (optional hook)
        """Release locks and close open files."""


@gin.configurable
class DoNothingDataset(RLDataset):
    """A dataset that is never ready and never written to; for runs that only evaluate."""

    @property
    def ready_for_training(self) -> bool:
        """Always False."""
        return False

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Raise an error, since there is nothing to sample."""
        raise ValueError(
            "DoNothingDataset holds no trajectories, so training on it is impossible. "
            "Fix: set Experiment.dataset = @DiskTrajDataset()."
        )
