"""MazeRunner: connected mazes, goals that count in order, and observations that determine the position."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from loxodon.envs import MazeRunner
from loxodon.envs.builtin.mazerunner import MOVES, carve_maze

UP, RIGHT, DOWN, LEFT, STAY = range(5)


def cell_of(position: np.ndarray, size: int) -> tuple[int, int]:
    """Row and column of a position (x, y)."""
    column, row = np.rint((position.astype(float) + 1) / 2 * (size - 1)).astype(int)
    return int(row), int(column)


def ways_from(is_free: np.ndarray, start: tuple[int, int]) -> dict[tuple[int, int], list[int]]:
    """The moves of a shortest path to every reachable cell, by breadth-first search."""
    ways: dict[tuple[int, int], list[int]] = {start: []}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for move, (down, right) in enumerate(MOVES[:4]):
            there = cell[0] + down, cell[1] + right
            if is_free[there] and there not in ways:
                ways[there] = [*ways[cell], move]
                queue.append(there)
    return ways


@pytest.mark.parametrize("size", [5, 21])
@pytest.mark.parametrize("loop_share", [0.0, 0.3, 1.0])
def test_a_maze_has_a_border_and_is_connected(size: int, loop_share: float) -> None:
    rng, mazes = np.random.default_rng(0), set()
    for _ in range(10):
        is_free = carve_maze(size, loop_share, rng)
        mazes.add(is_free.tobytes())
        assert not np.concatenate([is_free[0], is_free[-1], is_free[:, 0], is_free[:, -1]]).any()
        assert len(ways_from(is_free, (1, 1))) == is_free.sum()
        num_rooms = (size // 2) ** 2
        num_passages = int(is_free.sum()) - num_rooms
        num_walls = 2 * (size // 2) * (size // 2 - 1)
        if loop_share == 0.0:
            assert num_passages == num_rooms - 1  # a tree
        elif loop_share == 1.0:
            assert num_passages == num_walls
        else:
            assert num_rooms - 1 <= num_passages <= num_walls
    assert len(mazes) > 3 or loop_share == 1.0  # mazes differ between episodes


def test_beams_are_the_distances_to_the_walls() -> None:
    env = MazeRunner(size=9, num_goals=1, loop_share=0.5, time_limit=500)
    obs, _ = env.reset(seed=3)
    rng = np.random.default_rng(0)
    for _ in range(200):
        row, column = cell_of(obs["achieved"], 9)
        np.testing.assert_array_equal(obs["sensors"][:2], obs["achieved"])
        for beam, (down, right) in zip(obs["sensors"][2:6], MOVES[:4], strict=True):
            free = 0
            while env._is_free[row + (free + 1) * down, column + (free + 1) * right]:
                free += 1
            assert beam * 9 == pytest.approx(free)
        obs, *_ = env.step(rng.integers(5))


def test_the_shortest_path_through_all_goals_succeeds() -> None:
    env = MazeRunner(size=11, num_goals=3, time_limit=200)
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        goals = obs["goals"].copy()
        total, time = 0.0, 0
        for number in range(3):
            np.testing.assert_array_equal(obs["goals"][: 3 - number], goals[number:])
            np.testing.assert_array_equal(obs["goals"][3 - number :], -1)
            way = ways_from(env._is_free, cell_of(obs["achieved"], 11))[cell_of(goals[number], 11)]
            assert way
            for left, move in zip(reversed(range(len(way))), way, strict=True):
                obs, reward, terminated, truncated, info = env.step(move)
                total, time = total + reward, time + 1
                assert reward == float(left == 0)
                assert obs["sensors"][6] == pytest.approx(time / 200)
                assert not truncated
            np.testing.assert_array_equal(obs["achieved"], goals[number])
            assert terminated == (number == 2)
        assert total == 3.0
        assert info == {"metric/success": 1.0}
        np.testing.assert_array_equal(obs["goals"], -1)


def test_a_later_goal_does_not_count_early_and_time_runs_out() -> None:
    env = MazeRunner(size=7, num_goals=2, time_limit=40)
    obs, _ = env.reset(seed=0)
    start, goals = obs["achieved"].copy(), obs["goals"].copy()
    way = ways_from(env._is_free, cell_of(start, 7))[cell_of(goals[0], 7)]
    assert way
    # The second goal is the start. The first action stays there, which gives no reward yet.
    obs, _ = env.reset(seed=0, options={"goals": [goals[0], start]})
    rewards, ends = [], []
    for move in [STAY, *way, *[STAY] * (39 - len(way))]:
        obs, reward, terminated, truncated, info = env.step(move)
        rewards.append(reward)
        ends.append((terminated, truncated))
    assert rewards == [0.0] * len(way) + [1.0] + [0.0] * (39 - len(way))
    assert ends == [(False, False)] * 39 + [(False, True)]
    assert info == {"metric/success": 0.5}


def test_the_last_goal_at_the_last_moment_terminates() -> None:
    env = MazeRunner(size=5, num_goals=1, time_limit=1)
    obs, _ = env.reset(seed=0)
    env.reset(seed=0, options={"goals": obs["achieved"][None]})
    assert env.step(STAY)[1:4] == (1.0, True, False)


def test_walls_block_moves() -> None:
    env = MazeRunner(size=5, num_goals=1, time_limit=100, loop_share=1.0)
    env.reset(seed=0)
    for moves, corner in (((LEFT, UP), (1, 1)), ((RIGHT, DOWN), (3, 3))):
        for move in moves * 4:
            obs, *_ = env.step(move)
        assert cell_of(obs["achieved"], 5) == corner


def test_goals_and_start_are_different_free_cells() -> None:
    env = MazeRunner(size=5, num_goals=6, time_limit=10)  # the tree has seven free cells
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        cells = [cell_of(position, 5) for position in (obs["achieved"], *obs["goals"])]
        assert len(set(cells)) == 7
        assert all(env._is_free[cell] for cell in cells)


def test_actions_are_permuted_per_episode_if_asked() -> None:
    meanings = set()
    env = MazeRunner(size=5, num_goals=1, loop_share=1.0, randomize_actions=True, time_limit=100)
    for seed in range(30):
        effects = []
        for action in range(5):
            obs, _ = env.reset(seed=seed)
            before = obs["achieved"]
            for _ in range(4):
                obs, *_ = env.step(action)
            effects.append(tuple(np.sign(obs["achieved"] - before)))
        assert sum(effect == (0, 0) for effect in effects) >= 1
        meanings.add(tuple(env._action_to_move))
    assert len(meanings) > 15


@pytest.mark.parametrize("settings", [{}, {"size": 5, "num_goals": 1, "randomize_actions": True}])
def test_it_passes_the_environment_checker_of_gymnasium(settings: dict[str, Any]) -> None:
    """The checker also demands that the seed determines everything."""
    check_env(MazeRunner(**settings), skip_render_check=True)


def test_observations_are_new_arrays() -> None:
    env = MazeRunner(size=5, num_goals=1, time_limit=100)
    first, _ = env.reset(seed=0)
    copies = {key: value.copy() for key, value in first.items()}
    for value in env.step(STAY)[0].values():
        value[:] = 0.25
    second, *_ = env.step(STAY)
    for key in ("goals", "achieved"):
        np.testing.assert_array_equal(first[key], copies[key])
        np.testing.assert_array_equal(second[key], copies[key])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"size": 10}, r"MazeRunner.size is 10, .*odd.*Fix"),
        ({"size": 3}, r"MazeRunner.size is 3, .*Fix"),
        ({"size": 5, "num_goals": 7}, r"MazeRunner.num_goals is 7, .*at most 6.*Fix"),
        ({"num_goals": 0}, r"MazeRunner.num_goals is 0.*Fix"),
        ({"time_limit": 0}, r"time_limit is 0.*Fix"),
        ({"loop_share": 1.5}, r"loop_share is 1.5.*Fix"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MazeRunner(**settings)


@pytest.mark.parametrize(
    "goals", [[[0.0, -1.0]], [[0.0, 0.0], [0.0, 0.0]], [[3.0, 0.0]], [[float("nan"), 0.0]]]
)
def test_impossible_goals_are_refused(goals: Any) -> None:
    with pytest.raises(ValueError, match=r"must name 1 free cells.*Fix"):
        MazeRunner(size=5, num_goals=1).reset(seed=0, options={"goals": goals})
