"""Sinks, which take the steps of a rollout: a writer of trajectory files, a rollout buffer, a test double."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


class Sink:
    """Receives the steps of a collector as [N, ...] arrays, and copies the data that it keeps.

    Derive from this class and override the methods that you need.

    Attributes:
        policy_version: number of the policy that acts from now on; None if unknown.
    """

    policy_version: int | None = None

    def before_act(self, agent: Any, hidden_state: Any) -> Any:
        """Prepare for the agent to act in all N envs, or to be saved; returns the hidden state to act from.

        A second call returns its argument unchanged.
        """
        return hidden_state

    def restart(self) -> None:
        """Announce a `begin` with all N rows: the envs are reset, or continue from another state."""

    def begin(
        self, rows: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray, env_names: list[str]
    ) -> None:
        """Start new trajectories in the envs `rows` (k,) int; other rows of the arrays are ignored.

        obs: each (N, ...), the first observations; rl2s: (N, 1+A) float32; time_idxs: (N,) or (N, 1) integer.
        """

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
        """Receive one env step of all N envs.

        actions: (N,) or (N, K) integer if discrete, else (N, A) float32; rewards: (N,) float32.
        terminated: (N,) bool; ended: (N,) bool, True also where truncated; `begin` follows there.
        obs: each (N, ...), the observation after the action, which is the final one where ended.
        rl2s: (N, 1+A) float32, reward and action of this step.
        time_idxs: (N,) or (N, 1) integer, time index of `obs`.
        ignored: (N,) bool, True on rows that took no step; `begin` follows there. None if all rows took one.
        extras: each (N, ...), further data from the agent about its step, such as `log_probs` (N, 1); every
            step has the same names and shapes.
        """

    def flush_partial(self) -> None:
        """Close every running piece."""

    def wait(self) -> None:
        """Wait until all received data is stored."""

    def close(self) -> None:
        """Store all received data and end."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for exact resumption, including running pieces."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; follows `begin` with all rows if running pieces continue."""

    def take_over(self, state: dict[str, Any], *, stores_pieces: bool) -> None:
        """Continue after a rollout in other environments, where the sink returned `state`.

        stores_pieces: whether to store the pieces that were running; True for only one sink per state.
        """
