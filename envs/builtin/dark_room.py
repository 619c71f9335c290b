"""DarkRoom tasks: find an unseen goal by exploration, and go straight to it in all later attempts."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ..kshot import KEEP_TASK
from ..returned import METRIC_PREFIX
from .task import GRID_MOVES, StepResult, Task, check_counts

Cell = tuple[int, int]  # column, row


class _DarkGrid(Task):
    """An empty square grid in which the agent sees its position; see the classes below."""

    can_keep_task: ClassVar[bool] = True
    variables: ClassVar[tuple[str, ...]] = (
        "_side",
        "_start",
        "_places",
        "_moves",
        "_cell",
        "_time",
        "_num_found",
    )

    def __init__(self, size: int, time_limit: int, randomize_actions: bool, obs_dim: int) -> None:
        check_counts(self, 2, size=size)
        check_counts(self, time_limit=time_limit)
        self.size, self.time_limit, self.randomize_actions = size, time_limit, randomize_actions
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (obs_dim,), np.float32)
        self.action_space = gym.spaces.Discrete(len(GRID_MOVES))
        self._side = size  # cells per side in the current task
        self._start: Cell = (0, 0)
        self._places: list[Cell] = []  # cells to be found, in this order
        self._moves = list(GRID_MOVES)
        self._cell, self._time, self._num_found = self._start, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return to the start with a new task, or with the same one for the option "keep_task"."""
        super().reset(seed=seed)
        if not (options or {}).get(KEEP_TASK):
            check_counts(self, 2, size=self.size)
            self._side = self.size
            self._draw_places()
            if self.randomize_actions:
                self._moves = [GRID_MOVES[i] for i in self.np_random.permutation(len(GRID_MOVES)).tolist()]
        self._cell, self._time, self._num_found = self._start, 0, 0
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        """Move the agent; see the class."""
        self._time += 1
        last = self._side - 1
        (x, y), (right, down) = self._cell, self._moves[action]
        self._cell = min(max(x + right, 0), last), min(max(y + down, 0), last)
        reward, has_opened = self._look()
        is_over = has_opened or self._time >= self.time_limit
        has_success = self._num_found == len(self._places)
        info = {METRIC_PREFIX + "success": float(has_success)} if is_over else {}
        return self._obs(), reward, is_over, False, info

    def _draw_cells(self, count: int) -> list[Cell]:
        """Draw different cells."""
        drawn = self.np_random.permutation(self._side**2)[:count].tolist()
        return [divmod(cell, self._side) for cell in drawn]

    def _draw_places(self) -> None:
        raise NotImplementedError

    def _look(self) -> tuple[float, bool]:
        """Return the reward for entering the current cell, and whether it ends the attempt."""
        raise NotImplementedError

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self.observation_space.shape or (), np.float32)
        last = self._side - 1
        obs[:2] = 2 * self._cell[0] / last - 1, 2 * self._cell[1] / last - 1
        if len(obs) > 2:  # noqa: PLR2004 - the key
            obs[2] = self._num_found > 0
        return obs


@gin.configurable
class DarkRoom(_DarkGrid):
    """A square grid with an invisible goal; every step that ends on it pays 1.

    Use it inside a `KShotWrapper`, which gives several attempts at each task. The start is the middle, and
    the goal is any other cell. Observation: Box (2,) float32 = column and row, scaled to [-1, 1]. Actions: 0
    stay, 1 right, 2 left, 3 down, 4 up; walls stop a move. The attempt terminates after `time_limit` steps
    (it is never truncated). `info["metric/success"]` is 1 if the goal was found, else 0, reported at the end.

    Args:
        size: cells per side, at least 2. A new value applies from the next task on, for curricula.
        time_limit: env steps of an attempt.
        randomize_actions: draw the mapping from actions to moves for each task.

    Source: Laskin et al. 2022, arXiv:2210.14215, section 4.
    """

    def __init__(self, size: int = 9, time_limit: int = 20, randomize_actions: bool = False) -> None:
        super().__init__(size, time_limit, randomize_actions, obs_dim=2)

    def _draw_places(self) -> None:
        self._start = (self._side // 2, self._side // 2)
        self._places = [cell for cell in self._draw_cells(2) if cell != self._start][:1]

    def _look(self) -> tuple[float, bool]:
        is_at_goal = self._cell == self._places[0]
        if is_at_goal:
            self._num_found = 1
        return float(is_at_goal), False


@gin.configurable
class DarkKeyToDoor(_DarkGrid):
    """A square grid with an invisible key and door: fetch the key, then open the door; each pays 1, once.

    Use it inside a `KShotWrapper`, which gives several attempts at each task. Start, key and door are
    different cells, equal in all attempts. Observation: Box (3,) float32 = column and row, scaled to [-1, 1],
    and whether the agent has the key. Actions: 0 stay, 1 right, 2 left, 3 down, 4 up; walls stop a move. The
    attempt terminates when the door is opened or after `time_limit` steps (it is never truncated).
    `info["metric/success"]` is 1 if the door was opened, else 0, reported at the end.

    Args:
        size: cells per side, at least 2. A new value applies from the next task on, for curricula.
        time_limit: env steps of an attempt.
        randomize_actions: draw the mapping from actions to moves for each task.

    Source: Laskin et al. 2022, arXiv:2210.14215, section 4.
    """

    def __init__(self, size: int = 9, time_limit: int = 50, randomize_actions: bool = False) -> None:
        super().__init__(size, time_limit, randomize_actions, obs_dim=3)

    def _draw_places(self) -> None:
        self._start, *self._places = self._draw_cells(3)

    def _look(self) -> tuple[float, bool]:
        if self._cell != self._places[self._num_found]:
            return 0.0, False
        self._num_found += 1
        return 1.0, self._num_found == len(self._places)
