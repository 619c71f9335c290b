"""Episodes of a Minari dataset as trajectories, and back.

Names, offsets and scalings are those of the library's environments, so that a policy trained on the result
acts in the environment that the dataset was recorded in. Imports gymnasium, so it is imported only where
Minari is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from .action_forms import discrete_indices, factor_indices, factor_rows, one_hot_rows
from .trajectory import Array, Trajectory

SINGLE_KEY = "observation"


class ObsLeaf(NamedTuple):
    """One array inside a (possibly nested) observation."""

    key: str
    path: tuple[str | int, ...]
    space: Space[Any]
    offset: Any  # subtracted from integers that do not start at zero

    def read(self, raw: Any) -> Array:
        """The leaf's array inside raw observations, in the dtype of its space and counted from zero."""
        for part in self.path:
            raw = raw[part]
        value: Array = np.asarray(raw) - self.offset if np.any(self.offset) else np.asarray(raw)
        return value.astype(self.space.dtype, copy=False)

    def restore(self, value: Array) -> Array:
        """Undo `read`: what the environment itself would return, one row per timestep."""
        dtype = np.dtype(self.space.dtype)
        return np.asarray(value + self.offset if np.any(self.offset) else value).astype(dtype, copy=False)


def obs_leaves(space: Space[Any], path: tuple[str | int, ...] = ()) -> Iterator[ObsLeaf]:
    """The arrays of an observation space; nested names are joined with "/", a lone array is "observation".

    Raises:
        TypeError: If a part of the space has no fixed array form.
    """
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from obs_leaves(child, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from obs_leaves(child, (*path, index))
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.Discrete | spaces.MultiDiscrete):
        key = "/".join(map(str, path)) or SINGLE_KEY
        yield ObsLeaf(key, path, space, np.asarray(getattr(space, "start", 0)))
    else:
        raise TypeError(
            f"Observation {'/'.join(map(str, path)) or SINGLE_KEY!r} has the space {space}, which has no "
            "fixed array form. Allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of "
            "these. Fix: make a Minari dataset without it (minari.create_dataset_from_buffers)."
        )


class ActionCodec:
    """Between the actions of an environment and those of a policy.

    Attributes:
        width: A, the number of discrete actions (of all factors together) or of elements of the Box.
        nvec: numbers of actions of the factors of a MultiDiscrete or MultiBinary space; None for others.

    Raises:
        TypeError: If the space is none of Discrete, MultiDiscrete, MultiBinary and Box of floats.
        ValueError: If the Box has infinite bounds.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space, self._start = space, np.asarray(getattr(space, "start", 0))
        self.nvec: tuple[int, ...] | None = None
        if isinstance(space, spaces.Discrete):
            self.width = int(space.n)
            return
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            nvec = getattr(space, "nvec", np.full(space.shape, 2))
            self.nvec = tuple(nvec.reshape(-1).tolist())
            self.width = sum(self.nvec)
            return
        if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
            raise TypeError(
                f"The action space is {space}; allowed are Discrete, MultiDiscrete, MultiBinary and Box with "
                "a float dtype. Fix: make a Minari dataset whose actions are one of these."
            )
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ValueError(
                f"The action space {space} has infinite bounds, so its actions cannot be scaled to [-1, 1]. "
                "Fix: make a Minari dataset whose action_space has finite bounds."
            )
        self.width = int(np.prod(space.shape))
        dtype = np.result_type(space.dtype, np.float32)
        self._low, self._high = space.low.astype(dtype).reshape(-1), space.high.astype(dtype).reshape(-1)
        self._middle, self._half = self._low / 2 + self._high / 2, self._high / 2 - self._low / 2

    def from_env(self, actions: Any) -> tuple[Array, npt.NDArray[np.float32]]:
        """T actions of the environment -> what a file holds (see Trajectory.actions), and (T, A) for rl2s."""
        actions = np.asarray(actions)
        if isinstance(self.space, spaces.Discrete):
            indices = actions.reshape(-1).astype(np.int64) - self._start
            if len(indices) and (indices.min() < 0 or indices.max() >= self.width):
                raise ValueError(
                    f"Actions range from {actions.min()} to {actions.max()}, but the action space is "
                    f"{self.space}. Fix: make the dataset's action_space and its actions agree."
                )
            return indices[:, None], one_hot_rows(indices, self.width)
        if self.nvec is not None:
            shifted = (actions.astype(np.int64) - self._start).reshape(len(actions), -1)
            indices = factor_indices(shifted, self.nvec)
            return indices, factor_rows(indices, self.nvec).astype(np.float32)
        flat = actions.reshape(len(actions), self.width).astype(self._middle.dtype)
        half = np.where(self._half > 0, self._half, 1)  # an element with a single allowed value becomes 0
        rows = np.clip((flat - self._middle) / half, -1.0, 1.0).astype(np.float32)
        return rows, rows

    def to_env(self, actions: Array) -> Array:
        """Actions of a file -> (T,) integers or (T, *shape) in the bounds and dtype of the environment."""
        if isinstance(self.space, spaces.Discrete):
            indices = discrete_indices(actions)
            if indices is None or (len(indices) and indices.max() >= self.width):
                raise ValueError(
                    f"These actions of shape {actions.shape} and dtype {actions.dtype} are not of the action "
                    f"space {self.space}. Fix: name the environment that the trajectories come from."
                )
            return np.asarray(indices + self._start)
        if self.nvec is not None:
            indices = factor_indices(actions, self.nvec).reshape(-1, *(self.space.shape or ()))
            shifted: Array = (indices + self._start).astype(self.space.dtype)
            return shifted
        if actions.dtype.kind != "f" or actions.shape[1] != self.width:
            raise ValueError(
                f"These actions of shape {actions.shape} and dtype {actions.dtype} are not of the action "
                f"space {self.space}. Fix: name the environment that the trajectories come from."
            )
        scaled = np.clip(actions, -1.0, 1.0) * self._half + self._middle
        np.clip(scaled, self._low, self._high, out=scaled)
        return scaled.astype(self.space.dtype).reshape(-1, *(self.space.shape or ()))


class EpisodeCodec:
    """Turns whole episodes of one pair of spaces into trajectories and back.

    Raises: TypeError or ValueError for spaces that trajectories cannot hold.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self.leaves = sorted(obs_leaves(observation_space), key=lambda leaf: leaf.key)
        self.actions = ActionCodec(action_space)

    def to_trajectory(self, episode: Any, env_name: str, policy_version: int | None = None) -> Trajectory:
        """A trajectory of an episode with `observations` (T+1) and `actions`, `rewards`, `terminations` (T).

        Truncation is not stored: a trajectory that ends without `dones` was cut off.

        Raises:
            ValueError: If the lengths or shapes contradict each other or the spaces.
        """
        actions, action_rows = self.actions.from_env(episode.actions)
        rews = np.asarray(episode.rewards, np.float32).reshape(-1, 1)
        obs = {leaf.key: leaf.read(episode.observations) for leaf in self.leaves}
        for leaf in self.leaves:
            if obs[leaf.key].shape != (len(rews) + 1, *(leaf.space.shape or ())):
                raise ValueError(
                    f"Observation {leaf.key!r} of episode {episode.id} has the shape {obs[leaf.key].shape}, "
                    f"but {len(rews)} rewards and the space {leaf.space} ask for "
                    f"{(len(rews) + 1, *(leaf.space.shape or ()))}. Fix: repair or leave out this episode."
                )
        rl2s = np.zeros((len(rews) + 1, 1 + self.actions.width), np.float32)
        rl2s[1:, :1], rl2s[1:, 1:] = rews, action_rows
        return Trajectory(
            obs=obs,
            rl2s=rl2s,
            time_idxs=np.arange(len(rews) + 1)[:, None],
            actions=actions,
            rews=rews,
            dones=np.asarray(episode.terminations, np.bool_).reshape(-1, 1),
            env_name=env_name,
            policy_version=policy_version,
            nvec=self.actions.nvec,
        )

    def to_columns(self, traj: Trajectory) -> dict[str, Any]:
        """Observations and actions as the environment would have them, and rewards and flags of an episode.

        Raises:
            ValueError: If the trajectory is not of these spaces.
        """
        missing = [leaf.key for leaf in self.leaves if leaf.key not in traj.obs]
        if missing or len(traj.obs) != len(self.leaves):
            raise ValueError(
                f"The trajectory observes {sorted(traj.obs)}, but the environment "
                f"{[leaf.key for leaf in self.leaves]}. Fix: name the environment that the trajectories come "
                "from."
            )
        terminations = traj.dones[:, 0].copy()
        truncations = np.zeros_like(terminations)
        truncations[-1] = not terminations[-1]
        return {
            "observations": self._nest(traj),
            "actions": self.actions.to_env(traj.actions),
            "rewards": traj.rews[:, 0].astype(np.float32),
            "terminations": terminations,
            "truncations": truncations,
        }

    def _nest(self, traj: Trajectory) -> Any:
        """Flat observations in the nesting of the space; parts of a tuple become a tuple."""
        if len(self.leaves) == 1 and not self.leaves[0].path:
            return self.leaves[0].restore(traj.obs[SINGLE_KEY])
        root: dict[str | int, Any] = {}
        for leaf in self.leaves:
            at = root
            for part in leaf.path[:-1]:
                at = at.setdefault(part, {})
            at[leaf.path[-1]] = leaf.restore(traj.obs[leaf.key])
        return _with_tuples(root)


def _with_tuples(node: Any) -> Any:
    """Dicts with integer keys become tuples."""
    if not isinstance(node, dict):
        return node
    children = {part: _with_tuples(child) for part, child in node.items()}
    if all(isinstance(part, int) for part in children):
        return tuple(children[index] for index in sorted(children))
    return children


def guess_spaces(traj: Trajectory) -> tuple[Space[Any], Space[Any]]:
    """Spaces of a trajectory whose environment is not known: the widest that its dtypes allow."""
    boxes = {key: _widest_box(value) for key, value in traj.obs.items()}
    width = traj.rl2s.shape[1] - 1
    actions: Space[Any] = spaces.Box(-1.0, 1.0, (width,), np.float32)
    if traj.nvec is not None:
        actions = spaces.MultiDiscrete(np.array(traj.nvec))
    elif discrete_indices(traj.actions) is not None:
        actions = spaces.Discrete(width)
    if set(boxes) == {SINGLE_KEY}:
        return boxes[SINGLE_KEY], actions
    root: dict[str, Any] = {}
    for key, box in boxes.items():
        *parents, name = key.split("/")
        at = root
        for part in parents:
            at = at.setdefault(part, {})
        at[name] = box
    return _as_space(root), actions


def _as_space(node: Any) -> Space[Any]:
    return (
        spaces.Dict({name: _as_space(child) for name, child in node.items()})
        if isinstance(node, dict)
        else node
    )


def _widest_box(value: Array) -> spaces.Box:
    if value.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, value.shape[1:], value.dtype.type)
    if value.dtype.kind == "b":
        return spaces.Box(0, 1, value.shape[1:], np.int8)
    limits = np.iinfo(value.dtype)
    return spaces.Box(limits.min, limits.max, value.shape[1:], value.dtype.type)
