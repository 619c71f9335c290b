"""The passive T-maze: remember one bit for a whole corridor; as numbers and as a picture."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np

from ..env_state import generator_state, set_generator_state
from ..sequence_env import METRIC_PREFIX

RIGHT, UP, LEFT, DOWN = range(4)


@gin.configurable
class TMazePassive(gym.Env[np.ndarray, Any]):
    """A corridor with a fork at its end; the side that pays is shown at the first timestep only.

    Observation: Box (3,) float32 = [is first timestep, cue (+1 up, -1 down, 0 after the first timestep), is
    at the junction]. Actions: 0 right, 1 up, 2 left, 3 down. The junction is `horizon` steps to the right of
    the start, the episode lasts at most `horizon + 1` steps and always terminates (never truncates). The best
    return is `goal_reward`; without memory the success rate is one half. `info["metric/success"]` is 0 or 1
    at the end.

    Args:
        horizon: length of the corridor in env steps.
        penalty: reward of each action other than right before the junction. None means -1 / horizon.
        goal_reward: reward for turning to the side the cue named.

    Source: Ni et al. 2023, arXiv:2307.03864, section 4.1 (our observation layout).
    """

    def __init__(
        self, horizon: int = gin.REQUIRED, penalty: float | None = None, goal_reward: float = 1.0
    ) -> None:
        if not isinstance(horizon, int) or horizon < 1:
            raise ValueError(
                f"TMazePassive.horizon is {horizon!r}, but must be an integer of at least 1. "
                "Fix: bind it in gin, e.g. TMazePassive.horizon = 50."
            )
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.horizon = horizon
        self.penalty = -1.0 / horizon if penalty is None else penalty
        self.goal_reward = goal_reward
        self._cue, self._position, self._time = 1, 0, 0
        self._corridor_obs, self._junction_obs = _obs(0, 0, 0), _obs(0, 0, 1)
        self._start_obs = {cue: _obs(1, cue, 0) for cue in (-1, 1)}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Walk back to the start and draw a new cue."""
        super().reset(seed=seed)
        self._cue = int(self.np_random.choice((-1, 1)))
        self._position, self._time = 0, 0
        return self._start_obs[self._cue].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move; see the class for rewards."""
        self._time += 1
        if self._position == self.horizon and action in (UP, DOWN):
            has_success = (action == UP) == (self._cue == 1)
            return self._end(self._junction_obs, self.goal_reward if has_success else 0.0, has_success)
        reward = self.penalty if self._position < self.horizon and action != RIGHT else 0.0
        if action == RIGHT:
            self._position = min(self._position + 1, self.horizon)
        elif action == LEFT:
            self._position = max(self._position - 1, 0)
        obs = self._junction_obs if self._position == self.horizon else self._corridor_obs
        if self._time > self.horizon:
            return self._end(obs, reward, False)
        return obs.copy(), reward, False, False, {}

    def get_state(self) -> dict[str, Any]:
        """Where the agent is, the cue, and the generator of cues."""
        place = {"cue": self._cue, "position": self._position, "time": self._time}
        return {**place, "generator": generator_state(self)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Put back what `get_state` returned.

        Raises: ValueError if that was in a longer corridor, at a place that is not here.
        """
        if state["position"] > self.horizon:
            raise ValueError(
                f"The saved state is {state['position']} steps from the start, this corridor has "
                f"{self.horizon}. Fix: resume with the TMazePassive.horizon of the earlier run, or set "
                "Collector.save_env_state = False."
            )
        self._cue, self._position, self._time = state["cue"], state["position"], state["time"]
        set_generator_state(self, state["generator"])

    @staticmethod
    def _end(
        obs: np.ndarray, reward: float, has_success: bool
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return obs.copy(), reward, True, False, {METRIC_PREFIX + "success": float(has_success)}


def _obs(is_first: int, cue: int, is_at_junction: int) -> np.ndarray:
    return np.array([is_first, cue, is_at_junction], np.float32)


SIDE = 64  # pixels
_ROWS = slice(28, 36)  # the corridor
_AGENT = 8  # pixels, the side of its square
_COLORS = {"floor": (90, 90, 90), "agent": (255, 255, 255), 1: (40, 200, 60), -1: (220, 50, 40)}


@gin.configurable
class TMazePixels(TMazePassive):
    """The passive T-maze seen from above, as a picture: (64, 64, 3) uint8.

    Grey are the corridor from left to right and the fork at its right end, white is the agent. At the first
    timestep the agent is green if up pays, and red if down does. Everything else is as in `TMazePassive`.

    Args:
        horizon: length of the corridor in env steps.
        penalty: as in `TMazePassive`.
        goal_reward: as in `TMazePassive`.
    """

    def __init__(
        self, horizon: int = gin.REQUIRED, penalty: float | None = None, goal_reward: float = 1.0
    ) -> None:
        super().__init__(horizon, penalty, goal_reward)
        self.observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self._maze = np.zeros((SIDE, SIDE, 3), np.uint8)
        self._maze[_ROWS] = self._maze[:, -_AGENT:] = _COLORS["floor"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Walk back to the start and draw a new cue."""
        _, info = super().reset(seed=seed, options=options)
        return self._draw(_COLORS[self._cue]), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move; see the class for rewards."""
        _, reward, terminated, truncated, info = super().step(action)
        return self._draw(_COLORS["agent"]), reward, terminated, truncated, info

    def _draw(self, color: tuple[int, int, int]) -> np.ndarray:
        picture = self._maze.copy()
        left = self._position * (SIDE - _AGENT) // self.horizon  # the last column at the junction only
        picture[_ROWS, left : left + _AGENT] = color
        return picture
