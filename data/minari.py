"""Farama's Minari, the standard for offline reinforcement learning, as a dataset to train on.

The package `minari` is imported when a Minari dataset is opened and not before.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gin
import numpy as np

from .dataset import RLDataset
from .files import TrajectoryReader, format_name, parse_name, save_trajectory
from .layout import Layout
from .sampling import SAMPLE_BY, window_at
from .trajectory import StoredTrajectory, Trajectory

ENV_NAME_KEY, POLICY_KEY = "loxodon_env_name", "loxodon_policy_version"  # of the metadata of an episode
CACHE_FOLDER = "loxodon-cache"
_CONVERSION = 1  # raise it when the same episode would become another file
_CACHE_FORMAT = "traj"
_INDEX = "index.json"
_STALE_S = 86_400.0
_logger = logging.getLogger("loxodon")
Report = Callable[[int, int], object]


def require_minari() -> Any:
    """The package `minari`.

    Raises:
        ImportError: If it, or what it needs to read its files, is not installed.
    """
    missing = [name for name in ("minari", "h5py", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Minari datasets need {', '.join(missing)}, which is not installed. "
            "Fix: pip install 'minari[hdf5]' pillow, or in the checkout pip install -e '.[minari]'."
        )
    return importlib.import_module("minari")


def open_minari(dataset_id: str, *, download: bool = False) -> Any:
    """The `minari.MinariDataset` of that id, from the folder MINARI_DATASETS_PATH (or ~/.minari/datasets).

    Args:
        dataset_id: such as "D4RL/door/human-v2".
        download: fetch it from Farama's server if it is not there.

    Raises:
        ImportError: If a package is missing.
        FileNotFoundError: If there is no such dataset.
        ValueError: If there is one, but it cannot be read.
    """
    minari = require_minari()
    try:
        return minari.load_dataset(dataset_id, download=download)
    except ImportError as error:
        raise ImportError(
            f"Minari dataset {dataset_id!r} needs a package that is not installed: {error}. "
            "Fix: install what it names."
        ) from error
    except FileNotFoundError as error:
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        known = ", ".join(sorted(minari.list_local_datasets())) or "none"
        raise FileNotFoundError(
            f"There is no Minari dataset {dataset_id!r} in {root}; datasets there: {known}. Fix: set "
            f"MINARI_DATASETS_PATH, run `minari download {dataset_id}`, or set MinariDataset.download = True."
        ) from error
    except (OSError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"Minari dataset {dataset_id!r} cannot be read: {error}. Fix: delete and download or export it "
            "again."
        ) from error


def import_episodes(
    dataset: Any, folder: Path, save_as: str, report: Report = lambda done, total: None
) -> tuple[list[tuple[str, int]], int]:
    """Write every episode of a Minari dataset as one trajectory file; those that are there already stay.

    Args:
        dataset: a `minari.MinariDataset`.
        folder: where the files go; made if it is missing.
        save_as: one of FILE_FORMATS.
        report: called with the number of finished episodes and of all.

    Returns: (file name, number of transitions) of every new file, and how many episodes were there already.

    Raises:
        TypeError: If the spaces have no form as trajectories.
        ValueError: If an episode contradicts the spaces, or itself.
    """
    from .minari_episodes import EpisodeCodec

    codec = EpisodeCodec(dataset.observation_space, dataset.action_space)
    folder.mkdir(parents=True, exist_ok=True)
    names = [parse_name(name) for name in os.listdir(folder)]  # noqa: PTH208 (only names are needed)
    present = {name.traj_id for name in names if name is not None}
    begin_us, total, num_present = time.time_ns() // 1000, len(dataset), 0  # whole, as in file names
    written: list[tuple[str, int]] = []
    metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
    for number, (episode, extra) in enumerate(zip(dataset.iterate_episodes(), metadata, strict=True)):
        traj_id = hashlib.blake2b(f"{dataset.id} {episode.id}".encode(), digest_size=4).hexdigest()
        if traj_id in present:
            num_present += 1
        elif len(episode.rewards):  # an episode without a step is no trajectory
            version = extra.get(POLICY_KEY)
            name = str(extra.get(ENV_NAME_KEY, _env_name(dataset)))
            traj = codec.to_trajectory(episode, name, None if version is None else int(version))
            path = save_trajectory(
                folder, traj, save_as=save_as, traj_id=traj_id, unix_time=(begin_us + number) / 1e6
            )
            written.append((path.name, len(traj)))
        report(number + 1, total)
    return written, num_present


def _env_name(dataset: Any) -> str:
    """What the environments of this library would call it: the registered name without version."""
    if dataset.env_spec is not None:
        return str(dataset.env_spec.name)
    return str(dataset.id).replace("/", "-")


@gin.configurable
class MinariDataset(RLDataset):
    """Windows of the episodes of a Minari dataset, to train offline.

    The first use converts the episodes once into trajectory files beside the dataset (`loxodon-cache/`, which
    may be deleted while nothing uses it). From then on a window is a slice of a mapped file: memory stays
    bounded, all processes share the pages, and the worker processes need no HDF5, whose compressed chunks
    take milliseconds per episode. Observations have the names and dtypes, actions the numbering and scaling,
    that the environments of this library show to a policy.

    Args:
        dataset_id: such as "D4RL/door/human-v2", found below MINARI_DATASETS_PATH.
        download: fetch it from Farama's server if it is not there.
        sample_by: "trajectory" draws every episode equally often, "timestep" in proportion to its length.
        cache_root: folder for the converted episodes; None takes the folder of the dataset.

    Raises:
        ValueError: If sample_by is unknown.
    """

    def __init__(
        self,
        dataset_id: str,
        *,
        download: bool = False,
        sample_by: str = "trajectory",
        cache_root: str | None = None,
    ) -> None:
        if sample_by not in SAMPLE_BY:
            raise ValueError(
                f"sample_by is {sample_by!r}; allowed are {', '.join(map(repr, SAMPLE_BY))}. "
                "Fix: set MinariDataset.sample_by = 'trajectory'."
            )
        self.dataset_id, self.download, self.sample_by = dataset_id, download, sample_by
        self.cache_root = cache_root
        self._paths: list[str] = []
        self._starts = np.zeros(1, np.int64)  # timestep at which each episode begins, and the total
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
        """Receive the settings of the run and open the dataset. See RLDataset.configure.

        Raises:
            ImportError: If a package is missing.
            FileNotFoundError: If there is no such dataset.
            TypeError: If its spaces have no form as trajectories.
            ValueError: If it holds nothing, or cannot be read.
            OSError: If the cache cannot be written.
        """
        super().configure(
            max_seq_len=max_seq_len,
            padded_sampling=padded_sampling,
            has_edit_rights=has_edit_rights,
            default_root=default_root,
            default_name=default_name,
        )
        folder = _converted(open_minari(self.dataset_id, download=self.download), self.cache_root)
        entries = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if not entries:
            raise ValueError(
                f"Minari dataset {self.dataset_id!r} holds no episode with a step. Fix: take another."
            )
        self._paths = [f"{folder}/{name}" for name, _ in entries]
        self._starts = np.cumsum([0, *(length for _, length in entries)])

    @property
    def num_episodes(self) -> int:
        """Number of episodes with at least one transition."""
        return len(self._paths)

    @property
    def num_timesteps(self) -> int:
        """Number of transitions in all episodes."""
        return int(self._starts[-1])

    def expect(self, layout: Layout) -> None:
        """Compare with the spaces of the run.

        Raises:
            ValueError: If a policy for these spaces cannot be trained on this dataset.
        """
        super().expect(layout)
        found = self._reader.load(self._require_paths()[0]).layout
        if (mismatch := layout.describe_mismatch(found)) is not None:
            raise ValueError(
                f"Minari dataset {self.dataset_id!r} does not fit the environments of this run: {mismatch}. "
                f"It holds {found}. Fix: set Experiment.make_train_env to the environment of the dataset, or "
                "MinariDataset.dataset_id to a dataset of this environment."
            )

    def sample_random_trajectory(self, rng: np.random.Generator) -> Trajectory:
        """Return a random window of a random episode. Raises like sample_windows."""
        return self.sample_windows(1, rng)[0]

    def sample_windows(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return random windows of random episodes.

        Raises:
            FileNotFoundError: If the cache was deleted meanwhile.
            ValueError: If this dataset was not configured.
        """
        paths = self._require_paths()
        fractions, places = rng.random((2, count))
        if self.sample_by == "trajectory":
            indices = (fractions * len(paths)).astype(np.int64)
        else:
            timesteps = (fractions * self.num_timesteps).astype(np.int64)
            indices = np.searchsorted(self._starts, timesteps, side="right") - 1
        windows = []
        for index, place in zip(indices.tolist(), places.tolist(), strict=True):
            stored = self._open(paths[index])
            windows.append(
                stored.slice(*window_at(len(stored), self.max_seq_len, self.padded_sampling, place))
            )
        return windows

    def close(self) -> None:
        """Let go of open files."""
        self._reader = TrajectoryReader()

    def __getstate__(self) -> dict[str, Any]:
        """Leave opened files behind when this goes to another process."""
        return {**self.__dict__, "_reader": TrajectoryReader()}

    def _open(self, path: str) -> StoredTrajectory:
        try:
            return self._reader.load(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} is gone: the converted episodes of {self.dataset_id!r} were deleted while in use. "
                "Fix: start again, they are then converted anew."
            ) from error

    def _require_paths(self) -> list[str]:
        if not self._paths:
            raise ValueError(
                "This MinariDataset is not open yet. Fix: call configure() before using it; "
                "Experiment.start() does."
            )
        return self._paths


def _converted(dataset: Any, cache_root: str | None) -> Path:
    """The folder of the converted episodes, made if the dataset was never converted in its present state.

    It is made under a temporary name and renamed when complete, so any number of processes may come at once.

    Raises:
        OSError: If it cannot be written.
    """
    data_path = Path(dataset.storage.data_path)
    root = data_path.parent / CACHE_FOLDER if cache_root is None else Path(cache_root).expanduser()
    files = sorted(path for path in data_path.rglob("*") if path.is_file())
    state = [
        [str(path.relative_to(data_path)), path.stat().st_size, path.stat().st_mtime_ns] for path in files
    ]
    fingerprint = hashlib.blake2b(json.dumps([_CONVERSION, dataset.id, state]).encode(), digest_size=8)
    target = root / format_name(str(dataset.id).replace("/", "-"), fingerprint.hexdigest(), 0.0).split(".")[0]
    if (target / _INDEX).is_file():
        return target
    _logger.info(
        "Converting the %d episodes of Minari dataset %s, once, into %s", len(dataset), dataset.id, target
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        temporary = Path(tempfile.mkdtemp(prefix="converting-", dir=root))
    except OSError as error:
        raise OSError(
            f"The episodes of {dataset.id!r} are converted once into {root}, but that folder cannot be "
            f"written: {error}. Fix: set MinariDataset.cache_root to a folder that this process may write to."
        ) from error
    try:
        entries, _ = import_episodes(dataset, temporary, _CACHE_FORMAT)
        (temporary / _INDEX).write_text(json.dumps(entries), encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes it private; others may share the dataset
        try:
            temporary.rename(target)
        except OSError:
            if not (target / _INDEX).is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _remove_stale(root: Path) -> None:
    """Delete what a killed conversion left behind."""
    for path in root.glob("converting-*"):
        if time.time() - path.stat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
