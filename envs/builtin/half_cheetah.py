"""HalfCheetah with a hidden goal: find the target velocity by exploration, and keep it."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ...data.errors import check_count, check_number
from ..kshot import KEEP_TASK
from ..returned import METRIC_PREFIX

_NUM_LAST = 50  # timesteps that the velocity error is averaged over


@gin.configurable
class HalfCheetahVelocity(gym.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Run at a velocity that only the rewards reveal: -|velocity - target| minus the cost of the action.

    Metrics of an episode: `velocity_error`, the mean of |velocity - target| over its last 50 timesteps.

    Args:
        time_limit: timesteps of an episode, which is then truncated.
        slowest: minimum target velocity in metres per second. The target is drawn uniformly at every reset,
            and kept with the option "keep_task".
        fastest: maximum target velocity.
    Raises: ValueError for impossible settings; gymnasium.error.DependencyNotInstalled without the package
        mujoco.
    Source: Finn et al. 2017, arXiv:1703.03400, section 5.3.
    """

    can_keep_task: ClassVar[bool] = True

    def __init__(
        self,
        time_limit: int = 200,
        slowest: float = 0.0,
        fastest: float = 3.0,
    ) -> None:
        check_count("HalfCheetahVelocity.time_limit", time_limit)
        check_number("HalfCheetahVelocity.fastest", fastest)
        check_number("HalfCheetahVelocity.slowest", slowest, highest=fastest)
        super().__init__(
            gym.make(
                "HalfCheetah-v5",
                max_episode_steps=time_limit,
                ctrl_cost_weight=0.05,
                disable_env_checker=True,
            )
        )
        self.slowest, self.fastest = slowest, fastest
        self.wanted = 0.0
        self._errors: deque[float] = deque(maxlen=_NUM_LAST)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode with a new velocity, or with the same one for the option "keep_task"."""
        obs, info = self.env.reset(seed=seed)
        if not (options or {}).get(KEEP_TASK):
            self.wanted = float(self.np_random.uniform(self.slowest, self.fastest))
        self._errors.clear()
        return obs, info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the cheetah; see the class."""
        obs, _, terminated, truncated, info = self.env.step(action)
        self._errors.append(abs(info["x_velocity"] - self.wanted))
        shown = {}
        if terminated or truncated:
            shown = {METRIC_PREFIX + "velocity_error": float(np.mean(self._errors))}
        reward = info["reward_ctrl"] - self._errors[-1]
        return obs, float(reward), terminated, truncated, shown
