"""The dataset of trajectory files in a folder that actors and learners share."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gin
import numpy as np

from .buffer import Buffer, TrajectoryFile, make_folders, move_into
from .dataset import RLDataset
from .errors import READ_ONLY, check_number
from .lock import MANAGER, FolderLock
from .relabeling import Relabeler
from .sampling import Sampler
from .trajectory import Layout, Trajectory

_BEFORE_ALL = [-1.0, ""]  # time and id
_logger = logging.getLogger("loxodon")


@gin.configurable
class DiskTrajDataset(RLDataset):
    """Trajectory files in `<dset_root>/<dset_name>/buffer/{fifo,protected}/`.

    Any number of processes may add files and sample; one of them, the one with edit rights, deletes the
    oldest files of `fifo`. Files in `protected` (demonstrations, for example) are sampled too, but never
    deleted. Files are ordered by the time in their names, then by id. A file that cannot be used is moved to
    `buffer/quarantine/`, together with a text file that gives the reason.

    A run must not begin in a folder that the user named (dset_root or dset_name) and that already exceeds the
    limits: the first epoch would delete files that others may need.

    Args:
        dset_root: folder that contains datasets; None for `Experiment.ckpt_base_dir`.
        dset_name: name of this dataset; None for the run's name.
        dset_max_size: maximum number of files in `fifo`.
        dset_min_size: number of files in both folders together at which training starts. The limits below
            keep at least as many in `fifo`.
        dset_max_timesteps: maximum number of transitions in `fifo`; None for no limit.
        dset_max_bytes: maximum number of bytes in `fifo`; None for no limit.
        sampler: draws files and windows; None for the sampler of RLDataset.
        relabeler: changes every drawn trajectory, as a whole, before a window is taken from it.
        takes_new_trajs: False makes the dataset read-only: runs do not collect into this folder, and nothing
            in it is created, moved or deleted, not even with edit rights.

    Raises:
        ValueError: If a number is out of range, or the sizes contradict each other.
    """

    needed_in_state: ClassVar = frozenset({"newest", "num_fifo_files", "newest_found"})

    def __init__(
        self,
        dset_root: str | None = None,
        dset_name: str | None = None,
        dset_max_size: int = 20_000,
        dset_min_size: int = 1,
        *,
        dset_max_timesteps: int | None = None,
        dset_max_bytes: int | None = None,
        sampler: Sampler | None = None,
        relabeler: Relabeler | None = None,
        takes_new_trajs: bool = True,
    ) -> None:
        super().__init__(*[sampler] if sampler else [])  # gin gives RLDataset.sampler if nothing is passed
        check_number("DiskTrajDataset.dset_min_size", dset_min_size, lowest=1, whole=True)
        check_number("DiskTrajDataset.dset_max_size", dset_max_size, lowest=dset_min_size, whole=True)
        limits = {"dset_max_timesteps": dset_max_timesteps, "dset_max_bytes": dset_max_bytes}
        for name, limit in limits.items():
            check_number(f"DiskTrajDataset.{name}", limit, lowest=1, optional=True)
        self.dset_root, self.dset_name = dset_root, dset_name
        self.dset_max_size, self.dset_min_size = int(dset_max_size), int(dset_min_size)
        self.dset_max_timesteps, self.dset_max_bytes = dset_max_timesteps, dset_max_bytes
        self.relabeler, self.takes_new_trajs = relabeler, takes_new_trajs
        self._opened: Buffer | None = None
        self._lock: FolderLock | None = None
        self._newest_found: list[Any] | None = None  # time and id
        self._is_read_only = self._is_too_full = self._is_resumed = False
        self._shown: list[TrajectoryFile] = []  # files that the sampler knows

    def configure(self, **settings: Any) -> None:
        """Make the folders (unless this dataset is read-only) and list them.

        Raises:
            ValueError: If a setting is not allowed, or another process manages this folder.
            OSError: If the folders cannot be made.
        """
        super().configure(**settings)
        self.close()
        path = self.folder(settings["default_root"], settings["default_name"]) / "buffer"
        self._run_name = settings["default_name"]
        if self.takes_new_trajs:
            make_folders(path)
        self._is_read_only = not self.takes_new_trajs
        self.has_edit_rights = self.has_edit_rights and not self._is_read_only
        self._take_edit_rights(path)
        needs_values = self.sampler.needs_values or self.dset_max_timesteps is not None
        self._opened = Buffer(
            path,
            may_move=self.has_edit_rights,
            value=self._value_of if needs_values else None,
        )
        if self.layout is not None:
            self._opened.expect(self.layout)
        self.refresh()
        self._is_resumed = False
        self._newest_found = self._newest() if self._is_named else None
        self._is_too_full = self.has_edit_rights and self._is_named and bool(self._beyond_limits())

    def _value_of(self, traj: Trajectory) -> float:
        """The sampler's value; a sampler of the user's may need observations, which slicing reads."""
        needs_only_length = type(self.sampler).value is Sampler.value
        return self.sampler.value(traj if needs_only_length else traj.slice(0, len(traj)))

    def __str__(self) -> str:
        return f"{type(self).__name__} {self._buffer.fifo.parent}"

    def folder(self, default_root: str, default_name: str) -> Path:
        """The dataset's folder, given the run's folder and name."""
        root = Path(default_root if self.dset_root is None else self.dset_root).expanduser()
        return root / (default_name if self.dset_name is None else self.dset_name)

    def expect(self, layout: Layout) -> None:
        """Treat files of another layout as broken from now on."""
        super().expect(layout)
        if self._opened is not None:
            self._opened.expect(layout)

    @property
    def save_new_trajs_to(self) -> Path | None:
        """The fifo folder, or None if this dataset is read-only."""
        return self._buffer.fifo if self.takes_new_trajs else None

    @property
    def ready_for_training(self) -> bool:
        return self.num_files >= self.dset_min_size

    def describe_lack(self) -> str:
        path = self._buffer.path
        if not path.is_dir():
            return f"has no trajectories, because the folder {path} does not exist"
        if not self.num_files:
            return f"has no trajectories: {path} holds none in fifo/ and protected/"
        return f"holds {self.num_files} trajectories (DiskTrajDataset.dset_min_size is {self.dset_min_size})"

    @property
    def num_files(self) -> int:
        """Number of files in both folders, as of the last refresh."""
        return len(self._buffer.files)

    @property
    def newest_time_s(self) -> float | None:
        return max((file.unix_time for file in self._buffer.fifo_files), default=None)

    def refresh(self) -> None:
        self._buffer.refresh()

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        return self.sample_windows(1, rng)[0]

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Draw windows; a file that is gone or broken is replaced by another draw.

        Raises:
            ValueError: If the dataset is empty, or more than 5 % of the files are broken.
        """
        windows: list[Trajectory] = []
        while (num_missing := count - len(windows)) > 0:
            files = self._buffer.files
            if not files:
                raise ValueError(
                    f"{self._buffer.path} holds no trajectories to sample from."
                    f"{self._buffer.quarantine.describe()} Fix: collect first (Experiment.mode 'both' or "
                    "'collect'), or put files into its folder 'protected'."
                )
            if files is not self._shown:
                known = self._buffer.values
                values = [known[file.path] for file in files] if self.sampler.needs_values else None
                self.sampler.set_trajs([file.traj_id for file in files], values)
                self._shown = files
            for position, fraction in self.sampler.draw(num_missing, rng):
                file = files[position]
                window_of = partial(self.window_of, traj_id=file.traj_id, fraction=fraction, rng=rng)
                window = self._buffer.cut(file, window_of)
                if window is not None:
                    windows.append(window)
        return windows

    def on_run_start(self) -> None:
        """Refuse a named folder that exceeded the limits before this run added anything.

        Raises:
            ValueError: If the folder did, and this process would delete the oldest files.
        """
        self._check_room()
        if self._newest_found is not None and self.has_edit_rights and not self._is_resumed:
            _logger.warning(
                "%s already holds %d trajectories. They are the oldest there, so they are deleted first when "
                "the limits are reached (DiskTrajDataset.dset_max_size is %d). Fix: move those that must "
                "stay to %s.",
                self._buffer.fifo,
                len(self._buffer.fifo_files),
                self.dset_max_size,
                self._buffer.path / "protected",
            )

    def on_end_of_collection(self) -> dict[str, float]:
        """Refresh and, with edit rights, delete the oldest files beyond the limits.

        Raises:
            ValueError: If more than 5 % of the files are broken, or for the reasons of on_run_start.
        """
        self._check_room()
        self.refresh()
        buffer = self._buffer
        buffer.measure_sizes()
        num_deleted = 0
        if self._take_edit_rights(buffer.path):
            num_deleted = buffer.delete(self._beyond_limits())
            buffer.remove_stale_temporaries()
        buffer.check_broken_share()
        num_fifo = len(buffer.fifo_files)
        return {
            "fifo_files": float(num_fifo),
            "protected_files": float(self.num_files - num_fifo),
            "total_files": float(self.num_files),
            "deleted_files": float(num_deleted),
            "disk_gb": sum(buffer.sizes.values()) / 1e9,
            **self.metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Return the number of files found broken since the start, and the number in quarantine."""
        quarantine = self._buffer.quarantine
        return {
            "broken_files": float(quarantine.num_broken),
            "quarantined_files": float(quarantine.num_quarantined),
        }

    def delete(self) -> None:
        """Delete the files that the run collected into `fifo`.

        Files are kept if the dataset is read-only, if they are in `protected` or `quarantine`, or if they
        were in a named folder before this run began.

        Raises:
            ValueError: Without edit rights.
        """
        if not self.takes_new_trajs:
            return
        self._require_edit_rights("deleting the collected trajectories")
        self.refresh()
        self._buffer.delete(self._newer_than(self._newest_found))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, and what set_aside_newer and the limits must know about `fifo`.

        The latter is the time and id of the newest file, the numbers of files there and in quarantine, the
        folder as the user named it, the limits (None in a process that does not enforce them), and the newest
        file from before the run.
        """
        return {
            **super().state_dict(),
            "newest": self._newest(),
            "num_fifo_files": len(self._buffer.fifo_files),
            "num_quarantined": self._buffer.quarantine.num_quarantined,
            "named": self._named,
            "limits": self._limits if self.has_edit_rights else None,
            "newest_found": self._newest_found,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sampler and the ownership of the files; the files are the rest of the state."""
        self.refresh()
        if self._is_of_this_folder(state) and _allow_as_much(self._limits, state.get("limits")):
            num_older = len(self._buffer.fifo_files) - len(self._newer_than(state["newest"]))
            self._newest_found, self._is_resumed = state["newest_found"], True
            # The run's own files may exceed the limits; other processes may have added files since.
            self._is_too_full &= num_older - state["num_fifo_files"] > self.dset_max_size
        super().load_state_dict(state)

    def set_aside_newer(self, state: dict[str, Any]) -> int:
        """Move the files of `fifo` that are newer than `state` to `buffer/superseded/`. Returns their number.

        Files stay if the dataset is read-only, or if the state belongs to another folder. Warns if older
        files are gone, because a resumed run then samples from less data than the original one.

        Raises:
            ValueError: Without edit rights.
        """
        if self._is_read_only or not self._is_of_this_folder(state):
            return 0
        self._require_edit_rights("setting newer trajectories aside")
        self.refresh()
        newer = self._newer_than(state["newest"])
        superseded = self._buffer.path / "superseded"
        for file in newer:
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                move_into(superseded, Path(file.path))
        if newer and self._is_named:
            _logger.warning(
                "%d trajectories that are newer than the checkpoint were moved to %s, whoever wrote them. "
                "Fix: if other runs store theirs in this folder too, move the files back, and set "
                "Experiment.has_dset_edit_rights = False for all of them.",
                len(newer),
                superseded,
            )
        self.refresh()
        num_lost = int(state["num_fifo_files"]) - len(self._buffer.fifo_files)
        if num_lost > 0:
            quarantine = self._buffer.quarantine
            quarantine.refresh()
            now = quarantine.num_quarantined
            num_broken = min(now - state.get("num_quarantined", now), num_lost)
            _logger.warning(
                "%d trajectories that the checkpoint was trained on are gone, so the resumed run will "
                "differ from the original one. %s were deleted by hand or by the limits of DiskTrajDataset "
                "(dset_max_size is %d), or moved to %s when another run of this name started.",
                num_lost,
                f"Broken files ({num_broken}) were moved to {quarantine.folder}. Others"
                if num_broken > 0
                else "They",
                self.dset_max_size,
                superseded,
            )
        return len(newer)

    def begin_new_run(self) -> int:
        """Move all files of `fifo` to `buffer/superseded/`, unless the folder is a named one."""
        if self._is_named:
            return 0
        return self.set_aside_newer({"newest": None, "num_fifo_files": 0})

    def close(self) -> None:
        """Let another process manage the folder, and close opened files. The dataset can be used again."""
        if self._opened is not None:
            self._opened.close_files()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    @property
    def _named(self) -> list[str | None]:
        return [self.dset_root, self.dset_name]

    @property
    def _is_named(self) -> bool:
        """True if the user chose the folder, so that others may have files in it."""
        return self._named != [None, None]

    @property
    def _limits(self) -> list[int | None]:
        return [self.dset_max_size, self.dset_max_timesteps, self.dset_max_bytes]

    def _newest(self) -> list[Any] | None:
        """Time and id of the newest file in `fifo`; None if it is empty."""
        fifo = self._buffer.fifo_files
        return list(fifo[-1][:2]) if fifo else None

    def _newer_than(self, newest: list[Any] | None) -> list[TrajectoryFile]:
        """The files of `fifo` that are newer than a file with this time and id; all files for None."""
        return [file for file in self._buffer.fifo_files if list(file[:2]) > (newest or _BEFORE_ALL)]

    def _is_of_this_folder(self, state: dict[str, Any]) -> bool:
        return bool(state.get("named", self._named) == self._named)

    def _check_room(self) -> None:
        """Raise ValueError if the limits would delete files that a named folder held before the run."""
        if not self._is_too_full:
            return
        buffer, doomed = self._buffer, len(self._beyond_limits())
        raise ValueError(
            f"{buffer.fifo} already holds {len(buffer.fifo_files):,} trajectories of other runs, more than "
            f"the limits of DiskTrajDataset allow ({self._describe_limits()}), so the first epoch would "
            f"delete the oldest {doomed:,}. Fix: raise the limit, set DiskTrajDataset.takes_new_trajs = "
            f"False to only read the files, or move them to {buffer.path / 'protected'}, where they are "
            "sampled but never deleted."
        )

    def _describe_limits(self) -> str:
        names = ("dset_max_size", "dset_max_timesteps", "dset_max_bytes")
        named = zip(names, self._limits, strict=True)
        return ", ".join(f"{name} = {limit:,}" for name, limit in named if limit is not None)

    def _beyond_limits(self) -> list[TrajectoryFile]:
        """The oldest files of `fifo`, which must go to meet all limits."""
        buffer, fifo = self._buffer, self._buffer.fifo_files
        num_kept = min(len(fifo), self.dset_max_size)
        if self.dset_max_bytes is not None:
            buffer.measure_sizes()
        for used, limit in ((buffer.sizes, self.dset_max_bytes), (buffer.lengths, self.dset_max_timesteps)):
            if limit is not None:
                totals = np.cumsum([used[file.path] for file in reversed(fifo)])
                num_fitting = int(np.searchsorted(totals, limit, side="right"))
                num_kept = min(num_kept, max(num_fitting, self.dset_min_size))
        return fifo[: len(fifo) - num_kept]

    @property
    def _buffer(self) -> Buffer:
        if self._opened is None:
            raise ValueError(
                f"This {type(self).__name__} has no folder yet. Fix: call configure() before using it, as "
                "Experiment.start() does."
            )
        return self._opened

    def _require_edit_rights(self, what: str) -> None:
        if not self._take_edit_rights(self._buffer.path):
            raise ValueError(
                f"This process has no edit rights on {self._buffer.path}, and {what} needs them. Fix: set "
                "Experiment.has_dset_edit_rights = True in one process per dataset, and give that process "
                "write access to the folder."
            )

    def _take_edit_rights(self, path: Path) -> bool:
        """Lock the folder if this process is to manage it. Returns False without edit rights.

        If the folder is not writable, the rights are given up.
        """
        if not self.has_edit_rights or self._lock is not None:
            return self.has_edit_rights
        try:
            self._lock = FolderLock(path, self._run_name, MANAGER)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            self.has_edit_rights, self._is_read_only = False, True
            _logger.warning(
                "%s cannot be written to (%s), so trajectories there are only read: none is deleted or moved "
                "to quarantine. Fix: if that is intended, set DiskTrajDataset.takes_new_trajs = False; "
                "otherwise correct the permissions of the folder.",
                path,
                error.strerror,
            )
        return self.has_edit_rights


def _allow_as_much(limits: list[int | None], before: list[int | None] | None) -> bool:
    """Return True if these limits keep all that the earlier ones kept; False without earlier limits."""
    if before is None:
        return False
    pairs = zip(limits, before, strict=True)
    return all(now is None or (then is not None and now >= then) for now, then in pairs)
