"""Episodes joined from files that may hold pieces of them, and a selection by highest return."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import check_number
from .files import load_trajectory
from .trajectory import Array, Trajectory

Track = Callable[[Any], Any]  # yields the items of an iterable and may show progress, such as tqdm


def join_pieces(paths: Sequence[Path], track: Track = iter) -> list[list[Path]]:
    """Group files into episodes; files are passed and returned oldest first.

    A piece follows another if it begins in mid-episode with exactly the last timestep of the other: the same
    environment name, time index, observation, previous reward and previous action. If several pieces match,
    the oldest is taken.
    """
    episodes: list[list[Path]] = []
    # Episodes without a termination and, so far, without a next piece, by their last timestep; oldest first.
    open_ends: dict[bytes, list[list[Path]]] = {}
    for path in track(paths):
        traj = load_trajectory(path)
        waiting = open_ends.get(_boundary(traj, 0)) if traj.time_idxs[0, 0] > 0 else None
        if waiting:
            pieces = waiting.pop(0)
        else:
            pieces = []
            episodes.append(pieces)
        pieces.append(path)
        if not traj.dones[-1, 0]:
            open_ends.setdefault(_boundary(traj, len(traj)), []).append(pieces)
    return episodes


def _boundary(traj: Trajectory, timestep: int) -> bytes:
    """Everything known about one timestep, as a key."""
    digest = hashlib.blake2b(traj.env_name.encode(), digest_size=16)
    for array in (traj.time_idxs, traj.rl2s, *(traj.obs[key] for key in sorted(traj.obs))):
        digest.update(np.ascontiguousarray(array[timestep]).tobytes())
    return digest.digest()


def concatenate(pieces: Sequence[Trajectory]) -> Trajectory:
    """Join pieces that share their boundary timesteps into one trajectory.

    Of the extras only the rewards before shaping are kept.
    """
    if len(pieces) == 1:
        return pieces[0]

    def timesteps(parts: list[Array]) -> Array:
        return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])

    per_transition = ("actions", "rews", "dones")
    transitions: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in pieces]) for name in per_transition
    }
    raw_rewards = [piece.extras["raw_rewards"] for piece in pieces if "raw_rewards" in piece.extras]
    return dataclasses.replace(
        pieces[-1],
        obs={key: timesteps([piece.obs[key] for piece in pieces]) for key in pieces[0].obs},
        rl2s=timesteps([piece.rl2s for piece in pieces]),
        time_idxs=timesteps([piece.time_idxs for piece in pieces]),
        extras={"raw_rewards": np.concatenate(raw_rewards)} if len(raw_rewards) == len(pieces) else {},
        **transitions,
    )


def best_files(paths: Sequence[Path], share: float, track: Track = iter) -> list[Path]:
    """Return the files of the episodes with the highest returns, to imitate only those.

    Args:
        paths: trajectory files, oldest first. Episodes without their first file are left out.
        share: fraction of the episodes of each environment to keep, within (0, 1]; at least one is kept.
        track: wrapper that may show progress, used once per reading of the files; see Track.
    Returns: the files of these episodes, in the order of `paths`.
    Raises: ValueError for another share, or if no episode has its first file in `paths`.
    Source: Chen et al. 2021, "Decision Transformer", arXiv:2106.01345, section 5.1 (percentile behaviour
        cloning).
    """
    check_number("--best", share, above=0, highest=1)
    returns: dict[str, list[tuple[float, list[Path]]]] = defaultdict(list)
    for pieces in track(join_pieces(paths, track)):
        trajs = [load_trajectory(path) for path in pieces]
        if trajs[0].time_idxs[0, 0] == 0:
            paid = sum(float(traj.extras.get("raw_rewards", traj.rews).sum()) for traj in trajs)
            returns[trajs[0].env_name].append((paid, pieces))
    if not returns:
        raise ValueError(
            f"None of the {len(paths)} files holds the beginning of an episode, so no return is known. Fix: "
            "leave out --best, or give a folder that also holds the first pieces of the episodes."
        )
    chosen: set[Path] = set()
    for episodes in returns.values():
        episodes.sort(key=lambda episode: -episode[0])
        for _, pieces in episodes[: max(1, round(share * len(episodes)))]:
            chosen.update(pieces)
    return [path for path in paths if path in chosen]
