"""Where training windows come from: the interface of all datasets, and the one that holds nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import gin
import numpy as np
import numpy.typing as npt

from .errors import check_choice
from .relabeling import Relabeler
from .trajectory import Layout, Trajectory

PADDED_SAMPLING_MODES = ("none", "left", "right", "both", "shifted")


def random_window(traj_len: int, max_seq_len: int, mode: str, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the window of a trajectory that goes into a batch.

    Args:
        traj_len: transitions in the trajectory.
        max_seq_len: transitions in the longest window.
        mode: which ends the window may hang over, and so be shorter: "none", "left", "right" or "both"; or
            "shifted", the windows of "both" moved inside, so that all are full and the first and the last
            timesteps are drawn about as often as others.
        rng: source of randomness; not used if the whole trajectory fits.

    Returns: start (inclusive) and stop (exclusive), 0 <= start < stop <= traj_len.

    Raises:
        ValueError: If the mode is unknown.
    """
    check_choice("Experiment.padded_sampling", mode, PADDED_SAMPLING_MODES)
    fraction = rng.random() if traj_len > max_seq_len else 0.0
    return window_at(traj_len, max_seq_len, mode, fraction)


def window_at(traj_len: int, max_seq_len: int, mode: str, fraction: float) -> tuple[int, int]:
    """Return the window that lies at a fraction, in [0, 1), of the way from the first to the last.

    Uniform fractions give uniform window starts. All else is as in random_window.
    """
    if traj_len <= max_seq_len:
        return 0, traj_len
    last_full = traj_len - max_seq_len
    lowest = 1 - max_seq_len if mode in ("left", "both", "shifted") else 0
    highest = traj_len - 2 if mode in ("right", "both", "shifted") else last_full
    start = lowest + int(fraction * (highest + 1 - lowest))
    if mode == "shifted":
        start = min(max(start, 0), last_full)
    return max(start, 0), min(start + max_seq_len, traj_len)


class RLDataset(ABC):
    """A source of trajectory windows.

    To make your own, implement `sample_random_trajectory`; everything else has a sensible meaning already.

    Attributes:
        max_seq_len, padded_sampling, has_edit_rights: see configure.
        layout: what the run expects every trajectory to look like; None as long as that is not known.
        relabeler: changes whole trajectories before windows are taken from them; None changes nothing.
    """

    max_seq_len: int
    padded_sampling: str
    has_edit_rights: bool
    layout: Layout | None = None
    relabeler: Relabeler | None = None

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
            padded_sampling: mode of random_window.
            has_edit_rights: True if this process may delete or move files.
            default_root: folder for datasets that name none.
            default_name: name for datasets that have none.

        Raises:
            ValueError: If a setting is not allowed.
        """
        if max_seq_len < 1:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, but a window needs at least 1 transition. "
                "Fix: set Experiment.max_seq_len."
            )
        check_choice("Experiment.padded_sampling", padded_sampling, PADDED_SAMPLING_MODES)
        self.max_seq_len, self.padded_sampling = max_seq_len, padded_sampling
        self.has_edit_rights = has_edit_rights

    def expect(self, layout: Layout) -> None:
        """Learn what trajectories of this run look like, once its spaces are known."""
        self.layout = layout

    @property
    def save_new_trajs_to(self) -> Path | None:
        """Folder for new trajectories, or None if this dataset takes none."""
        return None

    @property
    def ready_for_training(self) -> bool:
        """True if there is enough to sample from."""
        return True

    @property
    def newest_time_s(self) -> float | None:
        """Unix time of the newest trajectory, as of the last refresh; None if that is not known."""
        return None

    @property
    def takes_priorities(self) -> bool:
        """True if windows are drawn by priorities, which `update_priorities` sets."""
        return False

    def update_priorities(self, slots: npt.NDArray[np.int64], priorities: npt.NDArray[Any]) -> None:  # noqa: B027
        """Set the priorities (B,) of what the windows with `source` = slots (B,) were drawn from."""

    @abstractmethod
    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Return a random window of at most `max_seq_len` transitions; `rng` is the only randomness."""

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return `count` random windows; override it where drawing many at once is cheaper."""
        return [self.sample_random_trajectory(rng) for _ in range(count)]

    def on_run_start(self) -> None:  # noqa: B027 (optional hook)
        """Check what is there. Called once before the first epoch, after a checkpoint was loaded, if any.

        Raises:
            ValueError: If training would destroy data that the run has not collected.
        """

    def on_new_epoch(self, epoch: int) -> None:
        """Take notice of an epoch's number. Called before refresh in every process that samples."""
        if self.relabeler is not None:
            self.relabeler.epoch = epoch

    def refresh(self) -> None:  # noqa: B027 (optional hook)
        """Take notice of new data. Called in every process that samples, at the start of each epoch."""

    def on_end_of_collection(self) -> dict[str, float]:
        """Take notice of what was collected and make room if needed. Returns metrics."""
        self.refresh()
        return {}

    def metrics(self) -> dict[str, float]:
        """Return figures of the last epoch, to be logged."""
        return {}

    def delete(self) -> None:  # noqa: B027 (optional hook)
        """Delete what was collected into this dataset."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must remember, JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional hook)
        """Restore what state_dict returned."""

    def set_aside_newer(self, state: dict[str, Any]) -> int:
        """Hide data that arrived after `state` was taken, for exact resumption. Returns how much."""
        return 0

    def begin_new_run(self) -> int:
        """Hide what an earlier run of the same name left in this run's own folder. Returns how much."""
        return 0

    def fingerprint(self) -> str | None:
        """A text that changes with the data and with how they are drawn; None where that is not known."""
        return None

    def close(self) -> None:  # noqa: B027 (optional hook)
        """Let go of locks and open files."""


def dataset_fingerprint(dataset: RLDataset) -> str | None:
    """What `dataset.fingerprint()` returns.

    Files count by name and size, as of the last refresh; the folder does not, so a copy is the same.
    """
    return dataset.fingerprint()


@gin.configurable
class DoNothingDataset(RLDataset):
    """Never ready and never written to; for runs that only evaluate."""

    @property
    def ready_for_training(self) -> bool:
        """False."""
        return False

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Raise, since there is nothing to sample."""
        raise ValueError(
            "DoNothingDataset holds no trajectories, so training on it is impossible. "
            "Fix: set Experiment.dataset = @DiskTrajDataset()."
        )
