"""Episodes of a Minari dataset as trajectories, and back.

Names, offsets and scalings are those of the library's environments, so that a policy trained on the result
acts in the environment that the dataset was recorded in. Imports gymnasium, so it is imported only where
Minari is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from .action_forms import action_indices, discrete_indices
from .spaces import SINGLE_KEY, ActionCode, ActionMap, ObsLayout, is_text
from .trajectory import Array, Trajectory


class EpisodeCodec:
    """Turns whole episodes of one pair of spaces into trajectories and back.

    Raises: TypeError or ValueError for spaces that trajectories cannot hold.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self.leaves = ObsLayout(observation_space).leaves
        if texts := [leaf.key for leaf in self.leaves if is_text(leaf.space)]:
            raise TypeError(
                f"Observations {texts} are texts, which trajectories cannot hold. Fix: make a Minari dataset "
                "without them (minari.create_dataset_from_buffers)."
            )
        self._map = ActionMap(action_space)
        self._code = ActionCode(self._map.policy_space)

    def to_trajectory(self, episode: Any, env_name: str, policy_version: int | None = None) -> Trajectory:
        """A trajectory of an episode with `observations` (T+1) and `actions`, `rewards`, `terminations` (T).

        Truncation is not stored: a trajectory that ends without `dones` was cut off.

        Raises:
            ValueError: If the lengths or shapes contradict each other or the spaces.
        """
        actions = self._map.from_env(episode.actions)
        rews = np.asarray(episode.rewards, np.float32).reshape(-1, 1)
        obs = {
            leaf.key: np.asarray(leaf.read(episode.observations)).astype(leaf.space.dtype, copy=False)
            for leaf in self.leaves
        }
        for leaf in self.leaves:
            if obs[leaf.key].shape != (len(rews) + 1, *(leaf.space.shape or ())):
                raise ValueError(
                    f"Observation {leaf.key!r} of episode {episode.id} has the shape {obs[leaf.key].shape}, "
                    f"but {len(rews)} rewards and the space {leaf.space} ask for "
                    f"{(len(rews) + 1, *(leaf.space.shape or ()))}. Fix: repair or leave out this episode."
                )
        rl2s = np.zeros((len(rews) + 1, 1 + self._code.width), np.float32)
        rl2s[1:, :1] = rews
        self._code.write(actions, rl2s[1:, 1:])
        return Trajectory(
            obs=obs,
            rl2s=rl2s,
            time_idxs=np.arange(len(rews) + 1)[:, None],
            actions=actions.reshape(len(rews), -1),
            rews=rews,
            dones=np.asarray(episode.terminations, np.bool_).reshape(-1, 1),
            env_name=env_name,
            policy_version=policy_version,
            nvec=self._code.nvec,
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
            "actions": self._actions_of(traj),
            "rewards": traj.rews[:, 0].astype(np.float32),
            "terminations": terminations,
            "truncations": truncations,
        }

    def _actions_of(self, traj: Trajectory) -> Array:
        """(T,) integers or (T, *shape) in the bounds, numbering and dtype of the environment."""
        found = traj.actions
        if self._code.has_integers:
            indices = action_indices(traj)
            found = np.empty((0, 0)) if indices is None else indices
        is_factored = isinstance(self._map.policy_space, spaces.MultiDiscrete)
        fits = traj.nvec == self._code.nvec and traj.rl2s.shape[1] == 1 + self._code.width
        if not fits or len(found) != len(traj) or (found.dtype.kind == "f") is self._code.has_integers:
            raise ValueError(
                f"Actions of shape {traj.actions.shape} and dtype {traj.actions.dtype} are not of the "
                "environment's action space. Fix: name the environment that the trajectories come from."
            )
        return np.asarray(self._map.to_env(found if is_factored or found.dtype.kind == "f" else found[:, 0]))

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
