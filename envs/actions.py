"""From the policy's action space to the environment's, and to what networks see of an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

PolicyActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


class ActionMap:
    """Maps whole [N, ...] batches of policy actions to environment actions.

    `policy_space` is one of

    - Discrete(n), starting at zero.
    - MultiDiscrete(nvec) of K factors in one row, each starting at zero; MultiBinary has factors of 2.
    - Box(-1, 1, (A,), float32), A the number of elements of the environment's Box; it is rescaled to the
      environment's bounds, shape and dtype.

    Raises: TypeError for other spaces and integer Boxes; ValueError for a Box without finite bounds.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.policy_space: PolicyActionSpace
        if isinstance(space, spaces.Discrete):
            self.policy_space = spaces.Discrete(int(space.n))
            self.to_env = self._shift_from(int(space.start))
        elif isinstance(space, spaces.MultiDiscrete):
            self.policy_space = spaces.MultiDiscrete(space.nvec.reshape(-1))
            self.to_env = self._reshape_to(space, np.asarray(getattr(space, "start", 0)))
        elif isinstance(space, spaces.MultiBinary):
            self.policy_space = spaces.MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
            self.to_env = self._reshape_to(space, np.asarray(0))
        elif isinstance(space, spaces.Box):
            _check_box(space)
            self.policy_space = spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),), np.float32)
            self.to_env = self._rescale_to(space)
        else:
            raise TypeError(
                f"The action space is {space}, but Discrete, MultiDiscrete, MultiBinary and Box are the ones "
                "supported. "
                "Fix: wrap the environment so that it takes one of these "
                "(gymnasium.wrappers.TransformAction)."
            )

    @staticmethod
    def _shift_from(start: int) -> Any:
        def to_env(actions: np.ndarray) -> Sequence[Any]:
            """(N,) integers -> list of N Python integers in the environment's numbering."""
            shifted: list[int] = (actions + start if start else actions).tolist()
            return shifted

        return to_env

    @staticmethod
    def _reshape_to(space: Space[Any], start: np.ndarray) -> Any:
        def to_env(actions: np.ndarray) -> Sequence[Any]:
            """(N, K) integers -> (N, *shape) in the environment's numbering and dtype."""
            shaped: Any = (actions.reshape(-1, *(space.shape or ())) + start).astype(space.dtype)
            return shaped  # type: ignore[no-any-return]

        return to_env

    @staticmethod
    def _rescale_to(space: spaces.Box) -> Any:
        dtype = np.result_type(space.dtype, np.float32)
        low, high = space.low.astype(dtype).reshape(-1), space.high.astype(dtype).reshape(-1)
        middle, half_width = low / 2 + high / 2, high / 2 - low / 2
        shape = space.shape

        def to_env(actions: np.ndarray) -> Sequence[Any]:
            """(N, A) floats, clipped to [-1, 1] -> (N, *shape) in the environment's bounds and dtype."""
            scaled = np.clip(actions, -1.0, 1.0) * half_width + middle
            np.clip(scaled, low, high, out=scaled)
            result: Any = scaled.astype(space.dtype, copy=False).reshape(-1, *shape)
            return result  # type: ignore[no-any-return]

        return to_env


class ActionCode:
    """Policy actions as networks see them: one-hot, the one-hots of all factors side by side, or as they are.

    Attributes:
        width: A, the number of columns.
        nvec: numbers of actions of the K factors of a MultiDiscrete space; None for the others.
        has_integers: True if policy actions are integers, (N,) or (N, K); False if they are (N, A) floats.
    """

    def __init__(self, space: PolicyActionSpace) -> None:
        self.nvec: tuple[int, ...] | None = None
        self.has_integers = not isinstance(space, spaces.Box)
        if isinstance(space, spaces.Discrete):
            self.width = int(space.n)
        elif isinstance(space, spaces.MultiDiscrete):
            self.nvec = tuple(space.nvec.tolist())
            self.width = sum(self.nvec)
            self._offsets = np.cumsum((0, *self.nvec[:-1]))
        else:
            self.width = int(space.shape[0])

    def write(self, actions: np.ndarray, out: np.ndarray) -> None:
        """Write actions, (N,) or (N, K) integers or (N, A) floats, to zeros `out`, (N, A) float32."""
        if not self.has_integers:
            out[:] = actions
        elif self.nvec is None:
            out[np.arange(len(out)), actions] = 1.0
        else:
            out[np.arange(len(out))[:, None], actions + self._offsets] = 1.0


def _check_box(space: spaces.Box) -> None:
    if not np.issubdtype(space.dtype, np.floating):
        raise TypeError(
            f"The action space is {space}, an integer Box, which has no meaningful scaling from [-1, 1]. "
            "Allowed are Discrete, MultiDiscrete, MultiBinary and Box with a float dtype. "
            "Fix: wrap the environment to take a Discrete action, or a float Box that it rounds itself."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"The action space {space} has infinite bounds, so actions in [-1, 1] cannot be scaled to it. "
            "Fix: give it finite bounds, e.g. gymnasium.wrappers.TransformAction(env, lambda action: action, "
            f"gymnasium.spaces.Box(-1.0, 1.0, {space.shape}))."
        )
