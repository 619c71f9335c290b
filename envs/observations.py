"""From any supported observation space to a flat dict of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

SINGLE_KEY = "observation"


@dataclass(frozen=True)
class ObsLeaf:
    """One array inside a (possibly nested) observation.

    key: its name in the flat dict; path: how to reach it in the raw observation; offset: subtracted from
    integer observations that do not start at zero, else None.
    """

    key: str
    path: tuple[str | int, ...]
    space: Space[Any]
    offset: Any

    def read(self, raw: Any) -> Any:
        """The leaf's raw value inside a raw observation."""
        for part in self.path:
            raw = raw[part]
        return raw if self.offset is None else np.asarray(raw) - self.offset


def is_text(space: Space[Any]) -> bool:
    """Whether values of the space are Python strings (Text and spaces like it)."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def storage_dtype(space: Space[Any]) -> Any:
    """The dtype of arrays that hold values of the space: its own, object for text."""
    return np.dtype(object) if is_text(space) else space.dtype


def _array_leaf(space: Space[Any], path: tuple[str | int, ...]) -> ObsLeaf:
    key = "/".join(str(part) for part in path) or SINGLE_KEY
    if isinstance(space, (spaces.Box, spaces.MultiBinary)) or is_text(space):
        return ObsLeaf(key, path, space, None)
    if isinstance(space, spaces.Discrete):
        zero_based = spaces.Discrete(int(space.n))
        return ObsLeaf(key, path, zero_based, int(space.start) or None)
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(getattr(space, "start", 0))
        return ObsLeaf(key, path, spaces.MultiDiscrete(space.nvec), start if start.any() else None)
    raise TypeError(
        f"Observation {key!r} has the space {space}, which has no fixed array form. Allowed are Box, "
        "Discrete, MultiDiscrete, MultiBinary, Text, and Dict or Tuple of these. "
        "Fix: wrap the environment with gymnasium.wrappers.TransformObservation (or FilterObservation to "
        "drop it)."
    )


def _leaves(space: Space[Any], path: tuple[str | int, ...]) -> Iterator[ObsLeaf]:
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves(child, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _leaves(child, (*path, index))
    else:
        yield _array_leaf(space, path)


class ObsLayout:
    """The flat form of one observation space, and the way values get into it.

    Attributes:
        leaves: one per array, sorted by key; the columns given to `write` have the same order.
        space: Dict of the leaves' spaces. A lone Box, Discrete, … sits under "observation"; nested names are
            joined with "/"; integers start at zero.

    Text stays text: Python strings in object arrays.

    Raises: TypeError for spaces without a fixed array form (Graph, Sequence, OneOf).
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = tuple(sorted(_leaves(space, ()), key=lambda leaf: leaf.key))  # spaces.Dict sorts too
        self.space = spaces.Dict({leaf.key: leaf.space for leaf in self.leaves})
        if len(self.space.spaces) != len(self.leaves):
            keys = [leaf.key for leaf in self.leaves]
            raise ValueError(
                f"Two observations share a key after nested names are joined with '/': {keys}. "
                "Fix: rename one of them in the environment."
            )
        self._shapes = tuple(_shape_of(leaf.space) for leaf in self.leaves)
        self._is_plain = len(self.leaves) == 1 and not self.leaves[0].path and self.leaves[0].offset is None

    def write(self, raw: Any, columns: Sequence[np.ndarray], row: int) -> None:
        """Copy a raw observation into row `row` of every column ([N, ...] arrays, one per leaf)."""
        if self._is_plain:
            shape = self._shapes[0]
            if shape and getattr(raw, "shape", None) != shape:
                self._check_shape(0, raw)
            columns[0][row] = raw
            return
        for index, leaf in enumerate(self.leaves):
            value = leaf.read(raw)
            if getattr(value, "shape", None) != self._shapes[index]:
                self._check_shape(index, value)
            columns[index][row] = value

    def flatten(self, raw: Any) -> dict[str, np.ndarray]:
        """One raw observation as a new flat dict: arrays in their space's dtype, and strings."""
        flat = self.empty(1)
        self.write(raw, list(flat.values()), 0)
        return {
            key: column[0] if column.ndim > 1 or column.dtype == object else column.reshape(())
            for key, column in flat.items()
        }

    def empty(self, num_envs: int) -> dict[str, np.ndarray]:
        """Uninitialised columns: one [num_envs, ...] array per leaf, in leaf order."""
        return {
            leaf.key: np.empty((num_envs, *shape), storage_dtype(leaf.space))
            for leaf, shape in zip(self.leaves, self._shapes, strict=True)
        }

    def _check_shape(self, index: int, value: Any) -> None:
        if np.shape(value) != self._shapes[index]:
            leaf = self.leaves[index]
            raise ValueError(
                f"The environment returned observation {leaf.key!r} with shape {np.shape(value)}, but its "
                f"space {leaf.space} says {self._shapes[index]}. Fix: make the environment's "
                "observation_space and its observations agree."
            )


def _shape_of(space: Space[Any]) -> tuple[int, ...]:
    return tuple(space.shape or ())
