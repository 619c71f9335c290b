"""What the runner asks of an agent and of a trajectory sink. Anything with these methods will do (tests use fakes)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]


class LossTermsLike(Protocol):
    """Unreduced losses of one batch; G discounts, C critics."""

    @property
    def actor(self) -> Tensor:
        """Actor loss (B, L, G, 1) float."""
        ...

    @property
    def critic(self) -> Tensor:
        """Critic loss (B, L, C, G, 1) float."""
        ...

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Named figures for the log; empty unless asked for."""
        ...


class AgentLike(Protocol):
    """The part of an agent the runner uses (an nn.Module beside that)."""

    def get_actions(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any]:
        """Actions (N,) int64 or (N, A) float and the next hidden state."""
        ...

    def init_hidden_state(self, num_envs: int, device: Any) -> Any:
        """Blank hidden state of N envs."""
        ...

    def reset_hidden_state(self, hidden_state: Any, ended: Tensor) -> Any:
        """Hidden state with the rows where `ended` (N,) bool is True blanked."""
        ...

    def trainable_params(self) -> list[nn.Parameter]:
        """Parameters of the optimizer, each once."""
        ...

    def after_update(self) -> None:
        """Called after every optimizer step that was applied."""
        ...


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
