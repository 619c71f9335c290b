"""T-mazes: at the end of a corridor, turn in the direction that was shown at its start."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ..returned import METRIC_PREFIX
from .task import StepResult, Task, check_counts

RIGHT, UP, LEFT, DOWN = range(4)
SIDE = 64  # width and height of an image of the maze, in pixels
_ROWS = slice(28, 36)  # pixel rows of the corridor
_AGENT = 8  # side of the agent's square, in pixels
_COLORS = {"floor": (90, 90, 90), "agent": (255, 255, 255), 1: (40, 200, 60), -1: (220, 50, 40)}


class _TMaze(Task):
    """A corridor with `num_bits` forks at its end; see the classes below.

    Attributes:
        horizon: length of the corridor from the next episode on, for curricula.
        oracle_distance: number of steps to the left of the start at which the cues are shown; 0 shows them
            only at the first timestep, even if the agent stays there.
    """

    oracle_distance: ClassVar[int] = 0
    settings: ClassVar[tuple[str, ...]] = ("num_bits",)
    variables: ClassVar[tuple[str, ...]] = (
        "_length",
        "_cues",
        "_position",
        "_time",
        "_num_turns",
        "_num_correct",
    )

    def __init__(
        self,
        horizon: int = gin.REQUIRED,
        penalty: float | None = None,
        goal_reward: float = 1.0,
        num_bits: int = 1,
    ) -> None:
        check_counts(self, horizon=horizon, num_bits=num_bits)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1 + 2 * num_bits,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.horizon, self.num_bits = horizon, num_bits
        self.penalty, self.goal_reward = penalty, goal_reward
        self._oracle = -self.oracle_distance
        self._length = horizon  # length of the corridor in this episode
        self._cues, self._position, self._time = [1] * num_bits, 0, 0
        self._num_turns, self._num_correct = 0, 0
        self._corridor_obs = np.zeros(1 + 2 * num_bits, np.float32)
        self._fork_obs = np.eye(1 + 2 * num_bits, dtype=np.float32)[1 + num_bits :]
        self._enter()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return to the start and draw new cues."""
        super().reset(seed=seed)
        check_counts(self, horizon=self.horizon)
        self._length = self.horizon
        self._cues = self.np_random.choice((-1, 1), self.num_bits).tolist()
        self._position, self._time, self._num_turns, self._num_correct = 0, 0, 0, 0
        self._enter()
        return self._start_obs.copy(), {}

    def step(self, action: int) -> StepResult:
        """Move the agent; see the class for rewards."""
        self._time += 1
        is_over, reward = self._time >= self._length + self.num_bits + 2 * self.oracle_distance, 0.0
        obs = self._corridor_obs
        if self._position == self._length and action in (UP, DOWN):
            is_correct = (action == UP) == (self._cues[self._num_turns] == 1)
            self._num_turns += 1
            if is_correct:
                self._num_correct += 1
                reward = self.goal_reward / self.num_bits
            is_over = is_over or self._num_turns == self.num_bits
            obs = self._fork_obs[min(self._num_turns, self.num_bits - 1)]
        else:
            if self._position < self._length and action != RIGHT:
                reward = -1.0 / self._length if self.penalty is None else self.penalty
            if action == RIGHT:
                self._position = min(self._position + 1, self._length)
            elif action == LEFT and self._position > self._oracle:
                self._position -= 1
                if self._position == self._oracle < 0:
                    reward = 0.0  # the step to the oracle costs nothing
            if self._position == self._length:
                obs = self._fork_obs[self._num_turns]
            elif self._position == self._oracle < 0:
                obs = self._oracle_obs
        info = {METRIC_PREFIX + "success": self._num_correct / self.num_bits} if is_over else {}
        return obs.copy(), reward, is_over, False, info

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned; the episode continues in a corridor of the stored length.

        Raises: ValueError if the state has another number of cues.
        """
        super().set_state(state)
        self._enter()

    def _enter(self) -> None:
        """Compute the observations that depend on the cues."""
        self._oracle_obs = self._corridor_obs.copy()
        self._oracle_obs[1 : 1 + self.num_bits] = self._cues
        self._start_obs = (self._oracle_obs if self._oracle == 0 else self._corridor_obs).copy()
        self._start_obs[0] = 1.0


@gin.configurable
class TMazePassive(_TMaze):
    """A corridor with a fork at its end; the rewarded side is only shown at the first timestep.

    Observation: Box (1 + 2 * num_bits,) float32 = [is first timestep, cues (+1 up, -1 down, 0 after the first
    timestep), is at fork i]. Actions: 0 right, 1 up, 2 left, 3 down. The fork is `horizon` steps to the right
    of the start. With several bits, the next fork follows directly, whichever way the agent turned; cue i is
    the rewarded side at fork i. The episode lasts at most `horizon + num_bits` steps and always terminates
    (never truncates). The best return is `goal_reward`; without memory, half of the turns are right.
    `info["metric/success"]` is the share of forks passed on the right side, reported at the end.

    Args:
        horizon: length of the corridor in env steps.
        penalty: reward of each action other than right before the forks. None means -1 / horizon.
        goal_reward: reward for all turns together if they match the cues.
        num_bits: number of cues and forks.

    Source: Ni et al. 2023, arXiv:2307.03864, section 4.1 (our observation layout, and forks in a row).
    """


@gin.configurable
class TMazeActive(_TMaze):
    """A `TMazePassive` in which the cues are only shown one step to the left of the start.

    That step costs nothing; all other steps in a wrong direction do. The episode lasts at most
    `horizon + num_bits + 2` steps, so there is time to look once, at the beginning. The best return is
    `goal_reward`; without looking, half of the turns are right.

    Args:
        horizon: length of the corridor in env steps, from the start to the first fork.
        penalty: reward of each action before the forks other than right. None means -1 / horizon.
        goal_reward: reward for all turns together if they match the cues.
        num_bits: number of cues and forks.

    Source: Ni et al. 2023, arXiv:2307.03864, section 4.1 (our observation layout, and forks in a row).
    """

    oracle_distance = 1


@gin.configurable
class TMazePixels(TMazePassive):
    """The passive T-maze seen from above, as an image (64, 64, 3) uint8.

    The corridor from left to right and the fork at its right end are grey, and the agent is white. At the
    first timestep, the agent is green if up is rewarded, and red if down is. Otherwise it equals
    `TMazePassive`.

    Args:
        horizon: length of the corridor in env steps.
        penalty: see `TMazePassive`.
        goal_reward: see `TMazePassive`.
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
        """Return to the start and draw a new cue."""
        _, info = super().reset(seed=seed, options=options)
        return self._draw(_COLORS[self._cues[0]]), info

    def step(self, action: int) -> StepResult:
        """Move the agent; see the class for rewards."""
        _, reward, terminated, truncated, info = super().step(action)
        return self._draw(_COLORS["agent"]), reward, terminated, truncated, info

    def _draw(self, color: tuple[int, int, int]) -> np.ndarray:
        image = self._maze.copy()
        # The last column is reached only at the junction.
        left = self._position * (SIDE - _AGENT) // self._length
        image[_ROWS, left : left + _AGENT] = color
        return image
