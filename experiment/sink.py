"""Where a collector hands its steps to: an off-policy writer, an on-policy buffer, or a fake in a test."""

from __future__ import annotations

from typing import Protocol

import numpy as np

Arrays = dict[str, np.ndarray]


class Sink(Protocol):
    """Takes whole [N, ...] environment steps from the collector and copies what it keeps."""

    def begin(
        self, rows: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray, env_names: list[str]
    ) -> None:
        """New trajectories start in the envs `rows` (k,) int; all other arrays have all N rows."""
        ...

    def add(
        self,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        ended: np.ndarray,
        obs: Arrays,
        rl2s: np.ndarray,
        time_idxs: np.ndarray,
    ) -> None:
        """One env step of all N envs; obs is what followed the action, the final observation where ended."""
        ...

    def flush_partial(self) -> None:
        """Close every running piece."""
        ...

    def wait(self) -> None:
        """Return when everything handed over is stored."""
        ...
