"""Where a collector hands its steps to: an off-policy writer, an on-policy buffer, or a fake in a test."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]


class Sink(Protocol):
    """Takes whole [N, ...] environment steps from the collector and copies what it keeps.

    policy_version: number of the policy that acts from now on; None if it has none.
    """

    policy_version: int | None

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
        ignored: np.ndarray | None = None,
        extras: Arrays | None = None,
    ) -> None:
        """One env step of all N envs; obs is what followed the action, the final observation where ended.

        ignored: (N,) bool, True on rows in which this was no step; `begin` follows there. None without any.
        extras: each (N, ...), what the agent said about its step, such as `log_probs` (N, 1); the same names
            and shapes with every step.
        """
        ...

    def flush_partial(self) -> None:
        """Close every running piece."""
        ...

    def wait(self) -> None:
        """Return when everything handed over is stored."""
        ...

    def close(self) -> None:
        """Store everything handed over and end."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What exact resumption needs, for `tensor_tree`, running pieces included."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; after `begin` with all rows if running pieces go on."""
        ...
