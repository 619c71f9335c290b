"""MazeRunner: visit goals in order, in a maze that is new in every episode."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import numpy as np
from gymnasium import spaces

from ...data.errors import check_number
from ..returned import METRIC_PREFIX
from .task import Task, check_counts

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1), (0, 0))
"""Row and column step of the moves 0 up, 1 right, 2 down, 3 left, 4 stay."""

REACHED = -1.0
"""Coordinate shown for goals already reached; (-1, -1) is a corner, which is always a wall."""

SMALLEST_SIZE = 5
Obs = dict[str, Any]  # float32 arrays


@gin.configurable
class MazeRunner(Task):
    """A random maze with a sequence of goal cells that count only in this order.

    The maze has odd size and a border of walls. Coordinates are (x, y) = (column, row), scaled so that the
    border's outer cells lie at -1 and 1. Observations, all float32:
        sensors (7,): x, y; free cells ahead in the directions up, right, down, left, divided by `size`;
            time since reset divided by `time_limit`.
        goals (num_goals, 2): the goals still to be reached, the next one first; the last rows, one for each
            reached goal, are -1.
        achieved (2,): the current position again, for comparison with goals.
    Actions: 0 up, 1 right, 2 down, 3 left, 4 stay; walls stop a move. The reward is 1 for a step that ends on
    the next goal, else 0. At most one goal is reached per step, and none at reset. Reaching the last goal
    terminates the episode, and `time_limit` truncates it. `info["metric/success"]` is the share of goals
    reached, reported at the end.

    The seed alone decides all random draws. `reset(options={"goals": (num_goals, 2) array})` replaces the
    drawn goals by free cells in the coordinates of `achieved`; maze, start and actions are those of the seed.

    Args:
        size: cells per side, borders included; odd.
        num_goals: length of the sequence; goals and the start are different cells.
        time_limit: env steps.
        loop_share: share of the walls between two corridors that are opened, so that several paths exist.
        randomize_actions: draw the mapping from actions to moves in each episode.

    Raises:
        ValueError: If an argument, or an option of reset, is not allowed.
    """

    settings: ClassVar[tuple[str, ...]] = ("size", "num_goals")
    variables: ClassVar[tuple[str, ...]] = (
        "_is_free",
        "_goals",
        "_action_to_move",
        "_cell",
        "_time",
        "_num_reached",
    )

    def __init__(
        self,
        size: int = 11,
        num_goals: int = 3,
        time_limit: int = 250,
        loop_share: float = 0.1,
        randomize_actions: bool = False,
    ) -> None:
        _check_sizes(size, num_goals)
        check_counts(self, time_limit=time_limit)
        check_number("MazeRunner.loop_share", loop_share, lowest=0, highest=1)
        self.size, self.num_goals, self.time_limit, self.loop_share = size, num_goals, time_limit, loop_share
        self.randomize_actions = randomize_actions
        low = np.array([-1, -1, 0, 0, 0, 0, 0], np.float32)
        self.observation_space = spaces.Dict(
            {
                "sensors": spaces.Box(low, np.ones(7, np.float32), dtype=np.float32),
                "goals": spaces.Box(-1.0, 1.0, (num_goals, 2), np.float32),
                "achieved": spaces.Box(-1.0, 1.0, (2,), np.float32),
            }
        )
        self.action_space = spaces.Discrete(len(MOVES))
        rows, columns = np.divmod(np.arange(size * size), size)
        self._coordinates = (2 * np.stack([columns, rows], axis=1) / (size - 1) - 1).astype(np.float32)
        self._is_free = np.zeros((size, size), np.bool_)
        self._next_cells: list[list[int]] = []  # [move][cell] -> cell
        self._sensors = np.zeros((size * size, 7), np.float32)  # observation of every cell, at time 0
        self._action_to_move = list(range(len(MOVES)))
        self._goals: list[int] = []
        self._shown_goals = np.full((num_goals, num_goals, 2), REACHED, np.float32)  # axis 0: goals reached
        self._nothing_left = np.full((num_goals, 2), REACHED, np.float32)
        self._cell = self._time = self._num_reached = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Draw a maze, a start, goals and, with `randomize_actions`, the mapping from actions to moves."""
        super().reset(seed=seed)
        self._enter(carve_maze(self.size, self.loop_share, self.np_random))
        free = np.flatnonzero(self._is_free)
        chosen = self.np_random.permutation(free)[: self.num_goals + 1].tolist()
        if self.randomize_actions:
            self._action_to_move = self.np_random.permutation(len(MOVES)).tolist()
        self._cell, self._goals = chosen[0], chosen[1:]
        if options is not None and "goals" in options:
            self._goals = self._cells_at(options["goals"])
        self._time = self._num_reached = 0
        self._show_goals()
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Move the agent; see the class."""
        self._cell = self._next_cells[self._action_to_move[action]][self._cell]
        self._time += 1
        reward, terminated = 0.0, False
        if self._num_reached < self.num_goals and self._cell == self._goals[self._num_reached]:
            self._num_reached += 1
            reward, terminated = 1.0, self._num_reached == self.num_goals
        truncated = self._time >= self.time_limit and not terminated
        info = {}
        if terminated or truncated:
            info[METRIC_PREFIX + "success"] = self._num_reached / self.num_goals
        return self._obs(), reward, terminated, truncated, info

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        super().set_state(state)
        self._enter(self._is_free)
        self._show_goals()

    def _show_goals(self) -> None:
        coordinates = self._coordinates[self._goals]
        for num_reached in range(self.num_goals):
            self._shown_goals[num_reached, : self.num_goals - num_reached] = coordinates[num_reached:]

    def _obs(self) -> Obs:
        sensors = self._sensors[self._cell].copy()
        sensors[6] = min(self._time / self.time_limit, 1.0)
        is_done = self._num_reached == self.num_goals
        goals = self._nothing_left if is_done else self._shown_goals[self._num_reached]
        return {"sensors": sensors, "goals": goals.copy(), "achieved": self._coordinates[self._cell].copy()}

    def _enter(self, is_free: np.ndarray) -> None:
        """Store a maze: the result of every move from every cell, and the observation there."""
        size = self.size
        self._is_free = is_free
        flat, cells = is_free.ravel(), np.arange(size * size)
        targets = [(cells + row * size + column) % (size * size) for row, column in MOVES]
        self._next_cells = [np.where(flat[target], target, cells).tolist() for target in targets]
        self._sensors[:, :2] = self._coordinates
        self._sensors[:, 2:6] = _free_distances(is_free).reshape(4, -1).T / size

    def _cells_at(self, goals: Any) -> list[int]:
        """Return the free cells at coordinates (num_goals, 2)."""
        wanted = np.asarray(goals, np.float64)
        if wanted.shape == (self.num_goals, 2) and np.abs(wanted).max() < 1:
            columns, rows = np.rint((wanted.T + 1) / 2 * (self.size - 1)).astype(np.int64)
            if self._is_free[rows, columns].all():
                return [int(cell) for cell in rows * self.size + columns]
        raise ValueError(
            f"reset(options={{'goals': ...}}) names {wanted.tolist()}, but must name {self.num_goals} free "
            "cells as (x, y) within (-1, 1), one row each. Fix: take positions from the observation "
            "'achieved' of an episode with the same seed."
        )


def carve_maze(size: int, loop_share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a maze in which all free cells are connected.

    Args:
        size: cells per side, odd. Depth-first carving connects the cells at odd rows and columns.
        loop_share: probability of opening each remaining wall between two such cells afterwards.
        rng: source of randomness.

    Returns: (size, size) bool, True where a cell is free.
    """
    rooms_per_side = size // 2
    num_rooms = rooms_per_side**2
    is_free = np.zeros((size, size), np.bool_)
    is_free[1::2, 1::2] = True
    draws = iter(rng.random(num_rooms).tolist())
    room = int(next(draws) * num_rooms)
    path, unvisited = [divmod(room, rooms_per_side)], np.ones(num_rooms, np.bool_).tolist()
    unvisited[room] = False
    while path:
        row, column = path[-1]
        options = [
            (row + down, column + right)
            for down, right in MOVES[:4]
            if 0 <= row + down < rooms_per_side
            and 0 <= column + right < rooms_per_side
            and unvisited[(row + down) * rooms_per_side + column + right]
        ]
        if not options:
            path.pop()
            continue
        there = options[int(next(draws) * len(options))]
        unvisited[there[0] * rooms_per_side + there[1]] = False
        is_free[1 + row + there[0], 1 + column + there[1]] = True  # the wall halfway between the two cells
        path.append(there)
    opened = rng.random((size, size)) < loop_share
    is_free[1:-1:2, 2:-1:2] |= opened[1:-1:2, 2:-1:2]
    is_free[2:-1:2, 1:-1:2] |= opened[2:-1:2, 1:-1:2]
    return is_free


def _free_distances(is_free: np.ndarray) -> np.ndarray:
    """(4, size, size) number of free cells ahead in the directions of MOVES, up to the next wall."""
    # Turned so that each direction becomes up.
    grids = np.stack([np.rot90(is_free, turns) for turns in range(4)])
    distances = np.zeros(grids.shape, np.float32)
    for row in range(1, grids.shape[1]):
        distances[:, row] = (distances[:, row - 1] + 1) * grids[:, row - 1]
    return np.stack([np.rot90(distances[turns], -turns) for turns in range(4)])


def _check_sizes(size: int, num_goals: int) -> None:
    if size < SMALLEST_SIZE or size % 2 == 0:
        raise ValueError(
            f"MazeRunner.size is {size}, but must be odd and at least {SMALLEST_SIZE}. Fix: set "
            "MazeRunner.size = 11, for example."
        )
    most_goals = 2 * (size // 2) ** 2 - 2  # all free cells of a maze without loops, except the start
    check_number("MazeRunner.num_goals", num_goals, lowest=1, highest=most_goals, whole=True)
