"""One collector, several sinks: for example an on-policy buffer to learn from, and files to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.sink import Arrays, Sink


class TeeSink:
    """Hands everything to several sinks, in their order.

    All of them get a call, even if one raises, so that none misses a step; the first error is raised then.

    Args:
        sinks: at least one.

    Attributes:
        policy_version: that of the first sink; setting it sets that of all.

    Raises:
        ValueError: If there is no sink.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        if not sinks:
            raise ValueError(
                "TeeSink received no sinks, but needs at least one. Fix: pass them, or let the collector's "
                "sink be None, which stores nothing."
            )
        self.sinks = tuple(sinks)

    @property
    def policy_version(self) -> int | None:
        """Number of the policy that acts from now on."""
        return self.sinks[0].policy_version

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        for sink in self.sinks:
            sink.policy_version = version

    def begin(
        self, rows: np.ndarray, obs: Arrays, rl2s: np.ndarray, time_idxs: np.ndarray, env_names: list[str]
    ) -> None:
        """See Sink."""
        self._call("begin", rows, obs, rl2s, time_idxs, env_names)

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
        """See Sink."""
        self._call("add", actions, rewards, terminated, ended, obs, rl2s, time_idxs, ignored, extras)

    def flush_partial(self) -> None:
        """Close every running piece."""
        self._call("flush_partial")

    def wait(self) -> None:
        """Return when everything handed over is stored."""
        self._call("wait")

    def close(self) -> None:
        """Store everything handed over and end."""
        self._call("close")

    def state_dict(self) -> dict[str, Any]:
        """What exact resumption of all of them needs."""
        return {"sinks": [sink.state_dict() for sink in self.sinks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: If it is that of another number of sinks.
        """
        states = state.get("sinks", [])
        if len(states) != len(self.sinks):
            raise ValueError(
                f"The saved state is that of {len(states)} sinks, but there are {len(self.sinks)} now. "
                "Fix: resume with the settings of collecting (what is stored, and where) that the checkpoint "
                "was made with."
            )
        for sink, own in zip(self.sinks, states, strict=True):
            sink.load_state_dict(own)

    def _call(self, method: str, *args: Any) -> None:
        first_error: Exception | None = None
        for sink in self.sinks:
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # raised below, when no sink has been left out
                first_error = first_error or error
        if first_error is not None:
            raise first_error
