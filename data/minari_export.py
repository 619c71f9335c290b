"""From trajectory files to a Minari dataset: pieces are joined to whole episodes and written in chunks."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .files import load_trajectory
from .minari import ENV_NAME_KEY, POLICY_KEY, Report, require_minari
from .trajectory import Array, Trajectory

_CHUNK_BYTES = 256 << 20


@dataclass
class Episode:
    """Files that follow each other in one episode, in order; usually one."""

    paths: list[Path]
    is_terminated: bool = False
    begins_at_reset: bool = True


@dataclass
class ExportReport:
    """What an export found.

    Attributes:
        num_episodes: episodes written.
        num_timesteps: transitions written.
        num_joined: files that were joined to the one before.
        num_headless: episodes whose beginning is not among the files.
        num_truncated: episodes that do not end with termination, and are marked as truncated at their last
            step.
    """

    num_episodes: int = 0
    num_timesteps: int = 0
    num_joined: int = 0
    num_headless: int = 0
    num_truncated: int = 0


@dataclass
class _OpenEnds:
    """Episodes without termination or, so far, a following piece, by their last timestep."""

    ends: dict[bytes, deque[Episode]] = field(default_factory=dict)

    def put(self, key: bytes, episode: Episode) -> None:
        self.ends.setdefault(key, deque()).append(episode)

    def take(self, key: bytes) -> Episode | None:
        waiting = self.ends.get(key)
        return waiting.popleft() if waiting else None


def join_pieces(paths: Sequence[Path], report: Report = lambda done, total: None) -> list[Episode]:
    """Group files into episodes.

    A piece follows another if it begins in mid-episode with exactly the timestep that the other ends with:
    the same environment name, time index, observation, previous reward and previous action. If several would
    fit, the oldest.

    Args:
        paths: trajectory files, oldest first.
        report: called with the number of files read and of all.
    """
    episodes: list[Episode] = []
    open_ends = _OpenEnds()
    for number, path in enumerate(paths):
        traj = load_trajectory(path)
        starts_late = int(traj.time_idxs[0, 0]) > 0
        episode = open_ends.take(_boundary(traj, 0)) if starts_late else None
        if episode is None:
            episode = Episode([path], begins_at_reset=not starts_late)
            episodes.append(episode)
        else:
            episode.paths.append(path)
        episode.is_terminated = bool(traj.dones[-1, 0])
        if not episode.is_terminated:
            open_ends.put(_boundary(traj, len(traj)), episode)
        report(number + 1, len(paths))
    return episodes


def _boundary(traj: Trajectory, timestep: int) -> bytes:
    """Everything that is known of one timestep, as a key."""
    digest = hashlib.blake2b(traj.env_name.encode(), digest_size=16)
    for array in (traj.time_idxs, traj.rl2s, *(traj.obs[key] for key in sorted(traj.obs))):
        digest.update(np.ascontiguousarray(array[timestep]).tobytes())
    return digest.digest()


def concatenate(pieces: Sequence[Trajectory]) -> Trajectory:
    """One trajectory of pieces that share their boundary timesteps."""
    if len(pieces) == 1:
        return pieces[0]

    def timesteps(read: Callable[[Trajectory], Array]) -> Array:
        return np.concatenate([*(read(piece)[:-1] for piece in pieces[:-1]), read(pieces[-1])])

    def transitions(read: Callable[[Trajectory], Array]) -> Array:
        return np.concatenate([read(piece) for piece in pieces])

    return Trajectory(
        obs={key: timesteps(lambda piece, key=key: piece.obs[key]) for key in pieces[0].obs},  # type: ignore[misc]
        rl2s=timesteps(lambda piece: piece.rl2s),
        time_idxs=timesteps(lambda piece: piece.time_idxs),
        actions=transitions(lambda piece: piece.actions),
        rews=transitions(lambda piece: piece.rews),
        dones=transitions(lambda piece: piece.dones),
        env_name=pieces[0].env_name,
        policy_version=pieces[-1].policy_version,
        nvec=pieces[0].nvec,
    )


def export_minari(
    paths: Sequence[Path],
    dataset_id: str,
    env_id: str | None = None,
    report: Report = lambda done, total: None,
) -> ExportReport:
    """Make a new Minari dataset of trajectory files.

    Images are stored without loss. An episode remembers its environment name and policy version.

    Args:
        paths: trajectory files of one pair of spaces, oldest first.
        dataset_id: such as "maze/collected-v0"; it must not exist yet.
        env_id: registered gymnasium environment whose spaces and actions the dataset gets; without it,
            observations are unbounded and actions stay as the policy gave them: indices from 0, or numbers in
            [-1, 1].
        report: called with the number of finished files and of all; every file is read twice.

    Raises:
        ImportError: If `minari` is not installed.
        ValueError: If the id is wrong or taken, or a trajectory does not fit the spaces.
        FileExistsError: If the dataset exists.
    """
    minari = require_minari()
    folder = _new_dataset_folder(dataset_id)
    episodes = join_pieces(paths, lambda done, total: report(done, 2 * total))
    options = _space_options(env_id, load_trajectory(paths[0]))
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False
    done, dataset = len(paths), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional metadata, such as an e-mail address
            for buffers, metadata, num_files in _chunks(episodes, options):
                if dataset is None:
                    dataset = minari.create_dataset_from_buffers(dataset_id, buffers, **options)
                else:
                    dataset.update_dataset_from_buffer(buffers)
                first = int(dataset.storage.total_episodes) - len(buffers)
                dataset.storage.update_episode_metadata(metadata, range(first, first + len(buffers)))
                done += num_files
                report(done, 2 * len(paths))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return ExportReport(
        num_episodes=len(episodes),
        num_timesteps=int(dataset.total_steps) if dataset is not None else 0,
        num_joined=len(paths) - len(episodes),
        num_headless=sum(not episode.begins_at_reset for episode in episodes),
        num_truncated=sum(not episode.is_terminated for episode in episodes),
    )


def _new_dataset_folder(dataset_id: str) -> Path:
    parse = importlib.import_module("minari.dataset.minari_dataset").parse_dataset_id
    try:
        parse(dataset_id)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{dataset_id!r} is not the id of a Minari dataset; allowed are name-v0, env/name-v0, "
            "group/env/name-v0. Fix: end it with -v and a number."
        ) from error
    root = importlib.import_module("minari.storage.datasets_root_dir").get_dataset_path()
    folder = Path(root) / dataset_id
    if folder.exists():
        raise FileExistsError(
            f"Minari dataset {dataset_id!r} exists in {folder}. Fix: raise its version number, or delete it "
            f"with `minari delete {dataset_id}`."
        )
    return folder


def _space_options(env_id: str | None, example: Trajectory) -> dict[str, Any]:
    """The environment, if known, and the two spaces, as minari takes them."""
    import gymnasium

    from .minari_episodes import guess_spaces

    if env_id is None:
        observation_space, action_space = guess_spaces(example)
        return {"observation_space": observation_space, "action_space": action_space}
    try:
        env = gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(
            f"The environment {env_id!r} cannot be made: {error}. Fix: give a registered id, or module:id, "
            "or leave --env out."
        ) from error
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    env.close()
    return {"env": env.spec, **spaces}


def _chunks(
    episodes: Sequence[Episode], options: dict[str, Any]
) -> Iterator[tuple[list[Any], list[dict[str, Any]], int]]:
    """Episode buffers and their metadata, some at a time, so that memory stays bounded, and their files."""
    from .minari_episodes import EpisodeCodec

    make_buffer = importlib.import_module("minari.data_collector").EpisodeBuffer
    codec = EpisodeCodec(options["observation_space"], options["action_space"])
    buffers: list[Any] = []
    metadata: list[dict[str, Any]] = []
    num_files = num_bytes = 0
    for episode in episodes:
        traj = concatenate([load_trajectory(path) for path in episode.paths])
        buffers.append(make_buffer(**codec.to_columns(traj), infos={}))
        version = {} if traj.policy_version is None else {POLICY_KEY: traj.policy_version}
        metadata.append({ENV_NAME_KEY: traj.env_name, **version})
        num_files += len(episode.paths)
        num_bytes += sum(value.nbytes for value in (*traj.obs.values(), traj.rl2s))
        if num_bytes > _CHUNK_BYTES:
            yield buffers, metadata, num_files
            buffers, metadata, num_files, num_bytes = [], [], 0, 0
    if buffers:
        yield buffers, metadata, num_files
