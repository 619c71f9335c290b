"""A frozen lake that is new in every task: find a path over it, and use it in all later attempts."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ...data.errors import check_number
from ..kshot import KEEP_TASK
from ..returned import METRIC_PREFIX
from .task import GRID_MOVES, StepResult, Task, check_counts

MOST_HOLES = 0.3
"""Maximum share of holes. With more, large lakes almost never have a path across."""
HARD_SWAP, HARD_NOISE, HARD_CRACK = 0.5, 0.25, 0.33
FALL_PENALTY = -0.1


@gin.configurable
class FrozenLake(Task):
    """Walk from the first to the last corner of an invisible lake without falling into a hole.

    Meta-FrozenLake is this task in a `KShotWrapper`, which gives several attempts at each lake. The start is
    the upper left corner, the goal is the lower right one, and a path between them always exists.
    Observation: Box (2,) float32 = column and row divided by `size - 1`. Actions: 0 stay, 1 right, 2 left, 3
    down, 4 up; the border stops a move. The goal pays 1 and ends the attempt. A hole also ends it. The
    attempt always terminates (never truncates), at the latest after size**2 steps, or twice as many in hard
    mode, divided by `1 - slip_prob`. `info["metric/success"]` is 0 or 1, reported at the end.

    Args:
        size: tiles per side, at least 2. A new value applies from the next lake on, for curricula.
        hole_prob: share of holes among the tiles.
        slip_prob: probability that a step leads in one of the four directions at random.
        hard_mode: actions 1 and 3 are swapped in half of the lakes; the observed column and row are each off
            by -1, 0 or 1 at a quarter of the timesteps; a third of the tiles that the agent leaves become
            holes until the next attempt.
        recover_mode: a hole does not end the attempt, but costs 0.1, and the agent stays in place.

    Source: MetaFrozenLake of Grigsby et al. 2024, arXiv:2310.09971 (rules; our observation layout).
    """

    can_keep_task: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("slip_prob", "hard_mode", "recover_mode")
    variables: ClassVar[tuple[str, ...]] = ("_holes", "_cracked", "_moves", "_x", "_y", "_time")

    def __init__(
        self,
        size: int = 5,
        hole_prob: float = 0.2,
        slip_prob: float = 0.0,
        hard_mode: bool = False,
        recover_mode: bool = False,
    ) -> None:
        check_counts(self, 2, size=size)
        check_number("FrozenLake.hole_prob", hole_prob, lowest=0, highest=MOST_HOLES)
        check_number("FrozenLake.slip_prob", slip_prob, lowest=0, highest=0.9)
        self.size, self.hole_prob, self.slip_prob = size, hole_prob, slip_prob
        self.hard_mode, self.recover_mode = hard_mode, recover_mode
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(len(GRID_MOVES))
        self._holes = [[False] * size for _ in range(size)]  # [row][column]
        self._cracked = [list(row) for row in self._holes]  # also has the holes that opened behind the agent
        self._moves = list(GRID_MOVES)
        self._x, self._y, self._time = 0, 0, 0

    @property
    def time_limit(self) -> int:
        """Maximum number of steps of an attempt at this lake."""
        return math.ceil((2 if self.hard_mode else 1) * len(self._holes) ** 2 / (1 - self.slip_prob))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return to the start of a new lake, or of the same one with the option "keep_task"."""
        super().reset(seed=seed)
        if not (options or {}).get(KEEP_TASK):
            check_counts(self, 2, size=self.size)
            self._holes = draw_lake(self.size, self.hole_prob, self.np_random)
            self._moves = list(GRID_MOVES)
            if self.hard_mode and self.np_random.random() < HARD_SWAP:
                self._moves[1], self._moves[3] = self._moves[3], self._moves[1]
        self._cracked = [list(row) for row in self._holes]
        self._x, self._y, self._time = 0, 0, 0
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        """Move the agent; see the class."""
        self._time += 1
        if self.slip_prob and self.np_random.random() < self.slip_prob:
            action = self.np_random.integers(1, len(GRID_MOVES))
        right, down = self._moves[action]
        last = len(self._holes) - 1
        x, y = min(max(self._x + right, 0), last), min(max(self._y + down, 0), last)
        if self.hard_mode and (x, y) != (self._x, self._y) and self.np_random.random() < HARD_CRACK:
            self._cracked[self._y][self._x] = True
        has_fallen, is_at_goal = self._cracked[y][x], x == y == last
        reward = float(is_at_goal)
        if has_fallen and self.recover_mode:
            reward = FALL_PENALTY
        else:
            self._x, self._y = x, y
        is_over = is_at_goal or (has_fallen and not self.recover_mode) or self._time >= self.time_limit
        info = {METRIC_PREFIX + "success": float(is_at_goal)} if is_over else {}
        return self._obs(), reward, is_over, False, info

    def _obs(self) -> np.ndarray:
        x, y, last = self._x, self._y, len(self._holes) - 1
        if self.hard_mode and self.np_random.random() < HARD_NOISE:
            off = self.np_random.integers(-1, 2, 2).tolist()
            x, y = min(max(x + off[0], 0), last), min(max(y + off[1], 0), last)
        return np.array([x / last, y / last], np.float32)


def draw_lake(size: int, hole_prob: float, rng: np.random.Generator) -> list[list[bool]]:
    """Draw holes of a lake as [row][column], until the first and the last corner are connected."""
    while True:
        is_hole = rng.random((size, size)) < hole_prob
        is_hole[0, 0] = is_hole[-1, -1] = False
        holes: list[list[bool]] = is_hole.tolist()
        if steps_to_goal(holes)[0][0] >= 0:
            return holes


def steps_to_goal(holes: list[list[bool]]) -> list[list[int]]:
    """Steps from each tile [row][column] to the last corner, -1 for holes and tiles without a path."""
    last = len(holes) - 1
    steps = [[-1] * (last + 1) for _ in holes]
    steps[last][last] = 0
    reached = [(last, last)]
    for x, y in reached:  # breadth first: the list grows during the loop
        for right, down in GRID_MOVES[1:]:
            column, row = x + right, y + down
            is_inside = 0 <= column <= last and 0 <= row <= last
            if is_inside and not holes[row][column] and steps[row][column] < 0:
                steps[row][column] = steps[y][x] + 1
                reached.append((column, row))
    return steps
