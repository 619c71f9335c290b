"""What takes the steps of a rollout: a writer of trajectory files, a rollout buffer, a fake in a test."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


class Sink:
    """Where a collector hands its steps to, whole [N, ...] arrays of which a sink copies what it keeps.

    Derive from this and override what is needed: a writer of files, a rollout buffer.

    Attributes:
        policy_version: number of the policy that acts from now on; None if it has none.
    """

    policy_version: int | None = None

    def before_act(self, agent: Any, hidden_state: Any) -> Any:
        """Before the agent acts in all N envs, or is saved; returns the hidden state to act from.

        Called again, it returns what it was given.
        """
        return hidden_state

    def restart(self) -> None:
        """`begin` with all N rows follows: the envs are reset, or go on from elsewhere."""

    def begin(
        self, rows: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray, env_names: list[str]
    ) -> None:
        """New trajectories start in the envs `rows` (k,) int; of the other arrays only these rows count.

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
        """One env step of all N envs.

        actions: (N,) or (N, K) integer if discrete, else (N, A) float32; rewards: (N,) float32.
        terminated: (N,) bool; ended: (N,) bool, True also where truncated; `begin` follows there.
        obs: each (N, ...), what followed the action, the final observation where ended.
        rl2s: (N, 1+A) float32, reward and action of this step.
        time_idxs: (N,) or (N, 1) integer, time index of `obs`.
        ignored: (N,) bool, True on rows in which this was no step; `begin` follows there. None without any.
        extras: each (N, ...), what the agent said about its step, such as `log_probs` (N, 1); the same names
            and shapes with every step.
        """

    def flush_partial(self) -> None:
        """Close every running piece."""

    def wait(self) -> None:
        """Return when everything handed over is stored."""

    def close(self) -> None:
        """Store everything handed over and end."""

    def state_dict(self) -> dict[str, Any]:
        """What exact resumption needs, running pieces included."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; after `begin` with all rows if running pieces go on."""

    def take_over(self, state: dict[str, Any], *, stores_pieces: bool) -> None:
        """Continue after a rollout in other environments, whose sink returned `state`.

        stores_pieces: store the pieces that were running; True for only one sink per state.
        """
