"""Where training windows come from: the dataset interface and the folder that actors and learners share."""

from __future__ import annotations

import difflib
import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import gin
import numpy as np

from .files import TrajectoryReader
from .folder import TrajectoryFile, TrajectoryFolder
from .layout import Layout
from .trajectory import Trajectory

PADDED_SAMPLING_MODES = ("none", "left", "right", "both")
_logger = logging.getLogger("loxodon")


def random_window(traj_len: int, max_seq_len: int, mode: str, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the window of a trajectory that goes into a batch.

    Args:
        traj_len: transitions in the trajectory.
        max_seq_len: transitions in the longest window.
        mode: which ends the window may hang over, and so be shorter: "none", "left", "right" or "both".
        rng: source of randomness; not used if the whole trajectory fits.

    Returns: start (inclusive) and stop (exclusive), 0 <= start < stop <= traj_len.

    Raises:
        ValueError: If the mode is unknown.
    """
    if mode not in PADDED_SAMPLING_MODES:
        near = difflib.get_close_matches(str(mode), PADDED_SAMPLING_MODES, n=1)
        raise ValueError(
            f"padded_sampling is {mode!r}; allowed are {', '.join(map(repr, PADDED_SAMPLING_MODES))}. "
            f"Fix: set Experiment.padded_sampling = {near[0] if near else 'none'!r}."
        )
    if traj_len <= max_seq_len:
        return 0, traj_len
    lowest = 1 - max_seq_len if mode in ("left", "both") else 0
    highest = traj_len - 2 if mode in ("right", "both") else traj_len - max_seq_len
    start = int(rng.integers(lowest, highest, endpoint=True))
    return max(start, 0), min(start + max_seq_len, traj_len)


class RLDataset(ABC):
    """A source of trajectory windows.

    To make your own, implement `sample_random_trajectory`; everything else has a sensible meaning already.
    """

    max_seq_len: int
    padded_sampling: str
    has_edit_rights: bool
    layout: Layout | None = None

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
        random_window(1, 1, padded_sampling, np.random.default_rng(0))  # refuses an unknown mode
        self.max_seq_len, self.padded_sampling = max_seq_len, padded_sampling
        self.has_edit_rights = has_edit_rights

    @property
    def save_new_trajs_to(self) -> Path | None:
        """Folder for new trajectories, or None if this dataset takes none."""
        return None

    @property
    def ready_for_training(self) -> bool:
        """True if there is enough to sample from."""
        return True

    @abstractmethod
    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Return a random window of at most `max_seq_len` transitions; `rng` is the only randomness."""

    def expect(self, layout: Layout) -> None:
        """Receive what the timesteps of the run look like, once its spaces are known."""
        self.layout = layout

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return `count` random windows; one call instead of many lets a dataset draw them together."""
        return [self.sample_random_trajectory(rng) for _ in range(count)]

    def on_new_epoch(self, epoch: int) -> None:  # noqa: B027 (optional hook)
        """Learn the number of the epoch that begins, in every process that samples, before refresh."""

    def metrics(self) -> dict[str, float]:
        """Return figures of the last epoch of training."""
        return {}

    def close(self) -> None:  # noqa: B027 (optional hook)
        """Let go of locks and open files."""

    def refresh(self) -> None:  # noqa: B027 (optional hook)
        """Take notice of new data. Called in every process that samples, at the start of each epoch."""

    def on_end_of_collection(self) -> dict[str, float]:
        """Take notice of what was collected and make room if needed. Returns metrics."""
        self.refresh()
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


@gin.configurable
class DiskTrajDataset(RLDataset):
    """Trajectory files in `<dset_root>/<dset_name>/buffer/{fifo,protected}/`.

    Any number of processes may add files and sample; one of them, the one with edit rights, deletes the
    oldest of `fifo`. Files in `protected` (demonstrations, for example) are sampled alike and never deleted.
    Files are sampled uniformly, whatever their length, and ordered by the time in their names, then by id.

    Args:
        dset_root: folder of datasets; None takes the run's folder.
        dset_name: name of this dataset; None takes the run's name.
        dset_max_size: files that may stay in `fifo`.
        dset_min_size: files in both folders together from which on training starts.

    Raises:
        ValueError: If the sizes contradict each other.
    """

    def __init__(
        self,
        dset_root: str | None = None,
        dset_name: str | None = None,
        dset_max_size: int = 20_000,
        dset_min_size: int = 1,
    ) -> None:
        if not 1 <= dset_min_size <= dset_max_size:
            raise ValueError(
                f"dset_min_size is {dset_min_size} and dset_max_size {dset_max_size}, but 1 <= dset_min_size "
                "<= dset_max_size must hold (both count files). Fix: set DiskTrajDataset.dset_max_size and "
                "dset_min_size."
            )
        self.dset_root, self.dset_name = dset_root, dset_name
        self.dset_max_size, self.dset_min_size = dset_max_size, dset_min_size
        self._buffer: Path | None = None
        self._files: list[TrajectoryFile] = []  # of both folders, oldest first
        self._sizes: dict[str, int] = {}  # path -> bytes
        self._reader = TrajectoryReader()

    def configure(
        self,
        *,
        max_seq_len: int,
        padded_sampling: str,
        has_edit_rights: bool,
        default_root: str,
        default_name: str,
    ) -> None:
        """Receive the settings of the run, make the folders and list them. See RLDataset.configure."""
        super().configure(
            max_seq_len=max_seq_len,
            padded_sampling=padded_sampling,
            has_edit_rights=has_edit_rights,
            default_root=default_root,
            default_name=default_name,
        )
        root = Path(default_root if self.dset_root is None else self.dset_root).expanduser()
        self._buffer = root / (default_name if self.dset_name is None else self.dset_name) / "buffer"
        self._fifo = TrajectoryFolder(self._buffer / "fifo")
        self._protected = TrajectoryFolder(self._buffer / "protected")
        self._files, self._sizes, self._reader = [], {}, TrajectoryReader()
        for folder in (self._fifo, self._protected):
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(
                    f"The dataset folder {folder.path} cannot be made: {error}. "
                    "Fix: set DiskTrajDataset.dset_root to a folder that this process may write to."
                ) from error
        self.refresh()

    @property
    def save_new_trajs_to(self) -> Path | None:
        """The fifo folder."""
        return self._require_buffer() / "fifo"

    @property
    def ready_for_training(self) -> bool:
        """True from dset_min_size files on, as of the last refresh."""
        return len(self._files) >= self.dset_min_size

    @property
    def num_files(self) -> int:
        """Number of files in both folders, as of the last refresh."""
        return len(self._files)

    def refresh(self) -> None:
        """List the folders again; files that were opened and are gone are let go of."""
        self._require_buffer()
        for folder in (self._fifo, self._protected):
            added, gone = folder.refresh()
            self._files.extend(added)
            self._drop(gone)
        self._files.sort()

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Return a random window of a random file; if that has vanished meanwhile, draw again.

        Raises:
            ValueError: If there is no file, or the drawn one is broken.
        """
        while self._files:
            file = self._files[int(rng.integers(len(self._files)))]
            try:
                traj = self._reader.load(file.path)
            except FileNotFoundError:
                self._fifo.discard(file)
                self._protected.discard(file)
                self._drop([file])
                continue
            start, stop = random_window(len(traj), self.max_seq_len, self.padded_sampling, rng)
            return traj.slice(start, stop)
        raise ValueError(
            f"{self._require_buffer()} holds no trajectories to sample from. Fix: collect first "
            "(Experiment.mode 'both' or 'collect'), or put files into its folder 'protected'."
        )

    def on_end_of_collection(self) -> dict[str, float]:
        """Refresh, and with edit rights delete the oldest files beyond dset_max_size."""
        self.refresh()
        num_deleted = 0
        if self.has_edit_rights:
            num_deleted = self._delete_oldest(len(self._fifo.files) - self.dset_max_size)
            self._fifo.remove_stale_temporaries()
        for file in self._files:
            if file.path not in self._sizes:
                self._sizes[file.path] = _size_bytes(file.path)
        return {
            "fifo_files": float(len(self._fifo.files)),
            "protected_files": float(len(self._protected.files)),
            "total_files": float(len(self._files)),
            "deleted_files": float(num_deleted),
            "disk_gb": sum(self._sizes.values()) / 1e9,
        }

    def delete(self) -> None:
        """Delete all files of `fifo`; those in `protected` stay.

        Raises:
            ValueError: Without edit rights.
        """
        self._require_buffer()
        self._require_edit_rights("deleting the collected trajectories")
        self.refresh()
        self._delete_oldest(len(self._fifo.files))

    def state_dict(self) -> dict[str, Any]:
        """Return time and id of the newest file in `fifo`, and how many there are."""
        newest = max(self._fifo.files.values(), default=None)
        return {
            "newest": None if newest is None else [newest.unix_time, newest.traj_id],
            "num_fifo_files": len(self._fifo.files),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refresh; the files themselves are the state."""
        self.refresh()

    def set_aside_newer(self, state: dict[str, Any]) -> int:
        """Move the files of `fifo` that are newer than `state` to `buffer/superseded/`. Returns their number.

        Warns if older ones were deleted since: then a resumed run samples from less than the original one
        did.

        Raises:
            ValueError: Without edit rights.
        """
        buffer = self._require_buffer()
        self._require_edit_rights("setting newer trajectories aside")
        self.refresh()
        newest = (-1.0, "") if state["newest"] is None else tuple(state["newest"])
        newer = [file for file in self._fifo.files.values() if file[:2] > newest]
        superseded = buffer / "superseded"
        superseded.mkdir(exist_ok=True)
        for file in newer:
            os.replace(file.path, superseded / Path(file.path).name)  # noqa: PTH105 (as in files.py)
        self.refresh()
        num_lost = int(state["num_fifo_files"]) - len(self._fifo.files)
        if num_lost > 0:
            _logger.warning(
                "%d trajectories that the checkpoint was trained on have been deleted since (DiskTrajDataset."
                "dset_max_size is %d), so the resumed run will differ from the original one.",
                num_lost,
                self.dset_max_size,
            )
        return len(newer)

    def begin_new_run(self) -> int:
        """Move what an earlier run of this name collected to `buffer/superseded/`. Returns how much.

        A folder that was chosen (dset_root or dset_name) is left as it is: its files are there on purpose.
        """
        if self.dset_root is not None or self.dset_name is not None:
            return 0
        return self.set_aside_newer({"newest": None, "num_fifo_files": 0})

    def __getstate__(self) -> dict[str, Any]:
        """Leave opened files behind when this goes to another process."""
        return {**self.__dict__, "_reader": TrajectoryReader()}

    def _drop(self, gone: list[TrajectoryFile]) -> None:
        if not gone:
            return
        missing = {file.path for file in gone}
        self._files = [file for file in self._files if file.path not in missing]
        self._reader.forget(missing)
        for path in missing:
            self._sizes.pop(path, None)

    def _delete_oldest(self, count: int) -> int:
        doomed = sorted(self._fifo.files.values())[: max(count, 0)]
        for file in doomed:
            Path(file.path).unlink(missing_ok=True)
            self._fifo.discard(file)
        self._drop(doomed)
        return len(doomed)

    def _require_buffer(self) -> Path:
        if self._buffer is None:
            raise ValueError(
                "This DiskTrajDataset does not know its folder yet. Fix: call configure() before using it; "
                "Experiment.start() does."
            )
        return self._buffer

    def _require_edit_rights(self, what: str) -> None:
        if not self.has_edit_rights:
            raise ValueError(
                f"This process has no edit rights on {self._buffer}, and {what} needs them. "
                "Fix: set Experiment.has_dset_edit_rights = True in one process per dataset."
            )


def _size_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0
