"""Support for Minari, Farama's standard for offline reinforcement learning: train on it, import and export.

Names, offsets and scalings are those of the library's environments, so a policy trained on a dataset can act
in the environment that the dataset was recorded in. `minari` and gymnasium are imported on first use.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gin
import numpy as np

from .disk_dataset import DiskTrajDataset
from .episodes import Track, concatenate, join_pieces
from .errors import WrongValueError
from .files import load_trajectory, parse_name, save_trajectory
from .foreign import episode
from .sampling import Sampler
from .trajectory import Array, Layout, Trajectory, action_indices, action_rows
from .values import cast, find_bad_value

if TYPE_CHECKING:
    from gymnasium import Space

ENV_NAME_KEY, POLICY_KEY = "loxodon_env_name", "loxodon_policy_version"  # keys of an episode's metadata
CACHE_FOLDER = "loxodon-cache"
_CONVERSION = 5  # increase it when the same episode would give another file
_CONVERTING = ".loxodon-converting-"  # prefix of unfinished conversions, used by nothing else
_STALE_S = 86_400.0
_EPISODES_AT_ONCE = 32  # episodes in memory during an export
_logger = logging.getLogger("loxodon")


def require_minari() -> Any:
    """The package `minari`; raises ImportError if it or one of its readers is not installed."""
    missing = [name for name in ("minari", "h5py", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Minari datasets need {', '.join(missing)}, which is not installed. "
            "Fix: pip install 'loxodon[minari]'."
        )
    return importlib.import_module("minari")


def open_minari(dataset_id: str, *, download: bool = False) -> Any:
    """The `minari.MinariDataset` with that id, from the folder MINARI_DATASETS_PATH (or ~/.minari/datasets).

    Args:
        dataset_id: such as "D4RL/door/human-v2".
        download: fetch a missing dataset from Farama's server.

    Raises:
        ImportError: If a package is missing.
        FileNotFoundError: If the dataset does not exist.
        ValueError: If it cannot be read.
    """
    minari = require_minari()
    try:
        return minari.load_dataset(dataset_id, download=download)
    except ImportError as error:
        raise ImportError(
            f"Minari dataset {dataset_id!r} needs a package that is not installed: {error}. Fix: install "
            "the package that it names."
        ) from error
    except FileNotFoundError as error:
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        known = ", ".join(sorted(minari.list_local_datasets())) or "none"
        raise FileNotFoundError(
            f"There is no Minari dataset {dataset_id!r} in {root}; datasets there: {known}. Fix: set "
            f"MINARI_DATASETS_PATH, run `minari download {dataset_id}`, or set MinariDataset.download = True "
            "(in `loxodon data import-minari`, write --download)."
        ) from error
    except (OSError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"Minari dataset {dataset_id!r} cannot be read: {error}. Fix: delete and download or export it "
            "again."
        ) from error


# ---- episodes as trajectories, and back ----


class EpisodeCodec:
    """Converts whole episodes of one pair of spaces to trajectories and back.

    Raises: TypeError or ValueError for spaces that trajectories cannot hold.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        from .spaces import ActionCode, ActionMap, ObsLayout

        self._space = observation_space
        self._layout = ObsLayout(observation_space)
        self.leaves = self._layout.leaves
        self._map = ActionMap(action_space)
        self._code = ActionCode(self._map.policy_space)

    def to_trajectory(self, source: Any, env_name: str, policy_version: int | None = None) -> Trajectory:
        """Convert an episode: `observations` (T+1) and `actions`, `rewards`, `terminations` (T).

        Truncation is not stored: a trajectory that ends without `dones` was cut off.

        Raises:
            ValueError: If lengths, shapes or values contradict each other or the spaces.
        """
        rews = np.asarray(source.rewards, np.float32).reshape(-1, 1)
        try:
            obs = {
                leaf.key: np.asarray(leaf.convert(value, len(rews) + 1), leaf.dtype)
                for leaf, value in zip(self.leaves, self._layout.values(source.observations), strict=True)
            }
            for leaf in self.leaves:
                if leaf.has_checks:
                    leaf.check(obs[leaf.key])
        except WrongValueError as error:
            place = "" if error.row is None else f"timestep {error.row}"
            raise error.completed(
                f"Episode {source.id} has", place, more="Otherwise leave out this episode."
            ) from None
        nvec = self._code.nvec
        actions = action_rows(self._map.from_env(source.actions), self._code.width, nvec)
        dones = cast("terminations", np.asarray(source.terminations), np.bool_).reshape(-1, 1)
        traj = episode(obs, actions, rews, dones, env_name, policy_version=policy_version, nvec=nvec)
        if problem := find_bad_value(traj):
            raise ValueError(
                f"Episode {source.id} cannot be trained on: {problem}. Fix: repair or leave out this episode."
            )
        return traj

    def to_columns(self, traj: Trajectory) -> dict[str, Any]:
        """Observations and actions in the environment's form, with rewards and flags of an episode.

        Rewards are those of the environment, without shaping.

        Raises:
            ValueError: If the trajectory does not fit these spaces.
        """
        missing = [leaf.key for leaf in self.leaves if leaf.key not in traj.obs]
        if missing or len(traj.obs) != len(self.leaves):
            raise ValueError(
                f"The trajectory has the observations {sorted(traj.obs)}, but the environment has "
                f"{[leaf.key for leaf in self.leaves]}. Fix: name the environment that the trajectories "
                "come from."
            )
        for leaf in self.leaves:
            found = traj.obs[leaf.key]
            if found.shape[1:] != leaf.shape or not np.can_cast(found.dtype, leaf.dtype, "same_kind"):
                raise ValueError(
                    f"Observation {leaf.key!r} of the trajectory is {found.dtype}{list(found.shape[1:])}, "
                    f"but that of the environment {leaf.dtype}{list(leaf.shape)}. Fix: name the environment "
                    "that the trajectories come from, with its wrappers."
                )
        terminations = traj.dones[:, 0].copy()
        truncations = np.zeros_like(terminations)
        truncations[-1] = not terminations[-1]
        return {
            "observations": self._nest(traj, self._space, ()),
            "actions": self._actions_of(traj),
            "rewards": traj.extras.get("raw_rewards", traj.rews)[:, 0].astype(np.float32),
            "terminations": terminations,
            "truncations": truncations,
        }

    def _actions_of(self, traj: Trajectory) -> Array:
        """Actions, (T,) integers or (T, *shape), in the bounds, numbering and dtype of the environment."""
        code = self._code
        found = action_indices(traj) if code.has_integers else traj.actions
        fits = traj.nvec == code.nvec and traj.actions.shape[1] == code.width
        if found is None or not fits or (not code.has_integers and found.dtype.kind != "f"):
            raise ValueError(
                f"Actions of shape {traj.actions.shape} and dtype {traj.actions.dtype} do not belong to the "
                "environment's action space. Fix: name the environment that the trajectories come from."
            )
        return np.asarray(self._map.to_env(found[:, 0] if code.has_integers and not code.nvec else found))

    def _nest(self, traj: Trajectory, space: Any, path: tuple[str | int, ...]) -> Any:
        """Restore the nesting of the space below a path."""
        if leaf := next((leaf for leaf in self.leaves if leaf.path == path), None):
            return leaf.restore(traj.obs[leaf.key])
        if isinstance(space.spaces, tuple):
            return tuple(self._nest(traj, child, (*path, i)) for i, child in enumerate(space.spaces))
        return {name: self._nest(traj, child, (*path, name)) for name, child in space.spaces.items()}


def guess_spaces(traj: Trajectory) -> tuple[Space[Any], Space[Any]]:
    """Guess the spaces of a trajectory from an unknown environment: the widest that its dtypes allow."""
    from gymnasium import spaces

    from .spaces import SINGLE_KEY

    def widest_box(value: Array) -> spaces.Box:
        low, high, dtype = -np.inf, np.inf, value.dtype.type
        if value.dtype.kind == "b":
            low, high, dtype = 0, 1, np.int8
        elif value.dtype.kind != "f":
            low, high = np.iinfo(value.dtype).min, np.iinfo(value.dtype).max
        return spaces.Box(low, high, value.shape[1:], dtype)

    def as_space(columns: dict[str, Array]) -> Space[Any]:
        if "" in columns:
            return widest_box(columns[""])
        groups: dict[str, dict[str, Array]] = {}
        for key, value in columns.items():
            name, _, rest = key.partition("/")
            groups.setdefault(name, {})[rest] = value
        return spaces.Dict({name: as_space(group) for name, group in groups.items()})

    width = traj.actions.shape[1]
    actions: Space[Any] = spaces.Box(-1.0, 1.0, (width,), np.float32)
    if traj.nvec is not None:
        actions = spaces.MultiDiscrete(np.array(traj.nvec))
    elif action_indices(traj) is not None:
        actions = spaces.Discrete(width)
    if set(traj.obs) == {SINGLE_KEY}:
        return widest_box(traj.obs[SINGLE_KEY]), actions
    return as_space(traj.obs), actions


# ---- from Minari ----


def import_episodes(
    dataset: Any, folder: Path, save_as: str, track: Track = iter
) -> tuple[list[tuple[str, int]], int]:
    """Write every episode of a Minari dataset as one trajectory file; existing files stay.

    Returns: (file name, number of transitions) of every new file, and how many episodes existed already.

    Raises: TypeError if trajectories cannot hold the spaces, ValueError if an episode contradicts them.
    """
    codec = EpisodeCodec(dataset.observation_space, dataset.action_space)
    folder.mkdir(parents=True, exist_ok=True)
    names = [parse_name(name) for name in os.listdir(folder)]  # noqa: PTH208 (only names are needed)
    present = {name.traj_id for name in names if name is not None}
    # The library's environments use the registered name without version.
    default_name = str(dataset.id).replace("/", "-") if dataset.env_spec is None else dataset.env_spec.name
    begin_us, num_present = time.time_ns() // 1000, 0  # an integer, as in file names
    written: list[tuple[str, int]] = []
    metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
    numbers = track(range(len(dataset)))
    for number, source, extra in zip(numbers, dataset.iterate_episodes(), metadata, strict=True):
        traj_id = hashlib.blake2b(f"{dataset.id} {source.id}".encode(), digest_size=4).hexdigest()
        if traj_id in present:
            num_present += 1
        elif len(source.rewards):  # an episode without a step has no transition to store
            version = extra.get(POLICY_KEY)
            name = str(extra.get(ENV_NAME_KEY, default_name))
            traj = codec.to_trajectory(source, name, None if version is None else int(version))
            path = save_trajectory(
                folder, traj, save_as=save_as, traj_id=traj_id, unix_time=(begin_us + number) / 1e6
            )
            written.append((path.name, len(traj)))
    return written, num_present


@gin.configurable
class MinariDataset(DiskTrajDataset):
    """Windows of the episodes of a Minari dataset, to train offline.

    The first use converts the episodes into trajectory files next to the dataset (`loxodon-cache/`, which may
    be deleted while it is not in use). From then on, this is a read-only DiskTrajDataset. Memory stays
    bounded, all processes share the pages, and the workers do not need HDF5, whose compressed chunks take
    milliseconds per episode. Observations have the names and dtypes, and actions the numbering and scaling,
    that the library's environments show to a policy.

    Args:
        dataset_id: such as "D4RL/door/human-v2", found below MINARI_DATASETS_PATH.
        download: fetch a missing dataset from Farama's server.
        sampler: draws episodes and windows; None for the sampler of RLDataset.
        cache_root: folder for the converted episodes; None for the folder of the dataset.
    """

    def __init__(
        self,
        dataset_id: str,
        *,
        download: bool = False,
        sampler: Sampler | None = None,
        cache_root: str | None = None,
    ) -> None:
        # Pass every argument by name, or gin's bindings of other DiskTrajDatasets would apply here.
        super().__init__(
            dset_root=None,
            dset_name=None,
            dset_max_size=20_000,
            dset_min_size=1,
            dset_max_timesteps=None,
            dset_max_bytes=None,
            sampler=sampler,
            relabeler=None,
            takes_new_trajs=False,
        )
        self.dataset_id, self.download, self.cache_root = dataset_id, download, cache_root

    def configure(self, **settings: Any) -> None:
        """Receive the settings of the run and open the dataset. See RLDataset.configure.

        Raises:
            ImportError: If a package is missing.
            FileNotFoundError: If the dataset does not exist.
            TypeError: If trajectories cannot hold its spaces.
            ValueError: If it is empty or cannot be read.
            OSError: If the cache cannot be written.
        """
        super().configure(**{**settings, "has_edit_rights": False})
        if not self.num_files:
            raise ValueError(
                f"Minari dataset {self.dataset_id!r} holds no episode with a step. Fix: choose another "
                "dataset."
            )

    def folder(self, default_root: str, default_name: str) -> Path:
        """Return the folder of the converted episodes; converts them if necessary."""
        return _converted(open_minari(self.dataset_id, download=self.download), self.cache_root)

    def expect(self, layout: Layout) -> None:
        """Compare the dataset with the spaces of the run.

        Raises:
            ValueError: If a policy for these spaces cannot be trained on this dataset.
        """
        super().expect(layout)
        found = load_trajectory(self._buffer.files[0].path).layout
        if (mismatch := layout.describe_mismatch(found)) is not None:
            raise ValueError(
                f"Minari dataset {self.dataset_id!r} does not fit the environments of this run: {mismatch}. "
                f"It holds {found}. Fix: set Experiment.make_train_env to the environment of the dataset, or "
                "MinariDataset.dataset_id to a dataset of this environment."
            )


def _converted(dataset: Any, cache_root: str | None) -> Path:
    """Return the folder of the converted episodes; makes it if the dataset's present state has none.

    The folder has a temporary name until it is complete, so several processes may do this at once.
    """
    data_path = Path(dataset.storage.data_path)
    root = data_path.parent / CACHE_FOLDER if cache_root is None else Path(cache_root).expanduser()
    files = sorted(path for path in data_path.rglob("*") if path.is_file())
    state = [
        [str(path.relative_to(data_path)), path.stat().st_size, path.stat().st_mtime_ns] for path in files
    ]
    state_hash = hashlib.blake2b(json.dumps([_CONVERSION, dataset.id, state]).encode(), digest_size=8)
    target = root / f"{dataset.id.replace('/', '-')}_{state_hash.hexdigest()}"
    if target.is_dir():
        return target
    _logger.info(
        "Converting the %d episodes of Minari dataset %s into %s (only once)",
        len(dataset),
        dataset.id,
        target,
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(f"{_CONVERTING}*"):  # left behind by a killed conversion
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=_CONVERTING, dir=root))
    except OSError as error:
        raise OSError(
            f"The episodes of {dataset.id!r} are converted once into {root}, but that folder cannot be "
            f"written to: {error}. Fix: set MinariDataset.cache_root to a folder that this process may "
            "write to."
        ) from error
    try:
        (temporary / "buffer" / "fifo").mkdir(parents=True)
        import_episodes(dataset, temporary / "buffer" / "protected", "npz")
        temporary.chmod(0o755)  # mkdtemp makes it private; others may share the dataset
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


# ---- from trajectory files to a Minari dataset: pieces are joined to whole episodes ----


def export_minari(
    paths: Sequence[Path],
    dataset_id: str,
    env_id: str | None = None,
    track: Track = iter,
) -> tuple[int, int]:
    """Make a new Minari dataset from trajectory files.

    Images are stored losslessly. Environment name and policy version are stored with each episode.

    Args:
        paths: trajectory files of one pair of spaces, oldest first.
        dataset_id: such as "maze/collected-v0"; it must not exist yet.
        env_id: registered gymnasium environment that gives the dataset its spaces and actions. Without it,
            observations are unbounded and actions stay in the policy's form: indices from 0, or numbers in
            [-1, 1].
        track: wrapper that may show progress, used once per reading of the files; see Track.

    Returns: number of episodes, and number of their transitions.

    Raises:
        ImportError: If `minari` is not installed.
        ValueError: If the id is invalid or taken, or a trajectory does not fit the spaces.
        FileExistsError: If the dataset exists.
    """
    minari = require_minari()
    folder = _new_dataset_folder(dataset_id)
    episodes = join_pieces(paths, track)
    options = _space_options(env_id, load_trajectory(paths[0]))
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False
    codec = EpisodeCodec(options["observation_space"], options["action_space"])
    make_buffer = importlib.import_module("minari.data_collector").EpisodeBuffer
    dataset, is_own = None, False  # another process may make the same dataset meanwhile
    num_timesteps = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about optional metadata, such as an e-mail address
            for first in track(range(0, len(episodes), _EPISODES_AT_ONCE)):
                some = [
                    concatenate([load_trajectory(path) for path in pieces])
                    for pieces in episodes[first : first + _EPISODES_AT_ONCE]
                ]
                buffers = [make_buffer(**codec.to_columns(traj), infos={}) for traj in some]
                if dataset is None:
                    is_own = not folder.exists()
                    dataset = minari.create_dataset_from_buffers(dataset_id, buffers, **options)
                else:
                    dataset.update_dataset_from_buffer(buffers)
                metadata = [_metadata_of(traj) for traj in some]
                dataset.storage.update_episode_metadata(metadata, range(first, first + len(some)))
                num_timesteps += sum(map(len, some))
    except BaseException as error:
        if is_own:
            shutil.rmtree(folder, ignore_errors=True)
        if type(error) is RuntimeError:  # h5py's error for a full disk
            raise OSError(f"{folder} cannot be written: {error}. Fix: free space on that disk.") from error
        raise
    return len(episodes), num_timesteps


def dataset_folder(dataset_id: str) -> Path:
    """The folder in which Minari keeps a dataset, below MINARI_DATASETS_PATH or in the home folder."""
    root = importlib.import_module("minari.storage.datasets_root_dir").get_dataset_path()
    return Path(root) / dataset_id


def _new_dataset_folder(dataset_id: str) -> Path:
    parse = importlib.import_module("minari.dataset.minari_dataset").parse_dataset_id
    try:
        parse(dataset_id)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{dataset_id!r} is not the id of a Minari dataset; allowed are name-v0, env/name-v0, "
            "group/env/name-v0. Fix: end it with -v and a number."
        ) from error
    folder = dataset_folder(dataset_id)
    if folder.exists():
        raise FileExistsError(
            f"Minari dataset {dataset_id!r} already exists in {folder}. Fix: raise its version number, or "
            f"delete it with `minari delete {dataset_id}`."
        )
    return folder


def _space_options(env_id: str | None, example: Trajectory) -> dict[str, Any]:
    """The environment, if known, and the two spaces, as arguments for minari."""
    import gymnasium

    if env_id is None:
        observation_space, action_space = guess_spaces(example)
        return {"observation_space": observation_space, "action_space": action_space}
    try:
        env = gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(
            f"The environment {env_id!r} cannot be created: {error}. Fix: give a registered id, or "
            "module:id, or leave --env out."
        ) from error
    env.close()
    return {
        "env": env.spec,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
    }


def _metadata_of(traj: Trajectory) -> dict[str, Any]:
    version = {} if traj.policy_version is None else {POLICY_KEY: traj.policy_version}
    return {ENV_NAME_KEY: traj.env_name, **version}
