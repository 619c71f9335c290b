"""A mass on a line with hidden velocity: continuous control with memory in 30 timesteps.

Registers `DoubleIntegrator-v0`; with `PYTHONPATH=benchmarks`, presets find it as
`gym_env.env_id = 'double_integrator:DoubleIntegrator-v0'`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

STEPS, SECONDS, FAR = 30, 0.2, 3.0


class DoubleIntegrator(gym.Env[np.ndarray, np.ndarray]):
    """Push the mass to the origin and hold it there.

    Observation: Box (1,) float32, the position. Action: Box (1,) float32 in [-1, 1], the acceleration.
    Initial position and velocity are uniform in [-1, 1] and [-0.5, 0.5]. The reward at x is
    (1 - min(|x|, 1)) / 30, so that a return is between 0 and 1. Episodes are truncated. The return is 0.29
    for random actions, 0.32 for the constant action 0, and 0.92 for a regulator that knows the velocity.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-FAR, FAR, (1,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._position, self._velocity = 0.0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw a position and a velocity."""
        super().reset(seed=seed)
        self._position, self._velocity = self.np_random.uniform(-1.0, 1.0), self.np_random.uniform(-0.5, 0.5)
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Accelerate for 0.2 seconds."""
        self._velocity += SECONDS * float(np.clip(action[0], -1.0, 1.0))
        self._position += SECONDS * self._velocity
        reward = (1.0 - min(abs(self._position), 1.0)) / STEPS
        return self._observation(), reward, False, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([np.clip(self._position, -FAR, FAR)], np.float32)


gym.register("DoubleIntegrator-v0", f"{__name__}:DoubleIntegrator", max_episode_steps=STEPS)
