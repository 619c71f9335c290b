"""The T-maze needs memory and nothing else, also when drawn as images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from loxodon.envs import TMazePassive, TMazePixels

RIGHT, UP, LEFT, DOWN = range(4)


def run(
    env: TMazePassive, choose: Any, seed: int | None = None
) -> tuple[float, int, float, list[np.ndarray]]:
    obs, _ = env.reset(seed=seed)
    seen, total, length = [obs], 0.0, 0
    while True:
        obs, reward, terminated, truncated, info = env.step(choose(seen))
        seen.append(obs)
        total, length = total + reward, length + 1
        assert not truncated
        if terminated:
            return total, length, info["metric/success"], seen
        assert "metric/success" not in info


def with_memory(seen: list[np.ndarray]) -> int:
    if not seen[-1][2]:
        return RIGHT
    return UP if seen[0][1] > 0 else DOWN


def without_memory(seen: list[np.ndarray]) -> int:
    return UP if seen[-1][2] else RIGHT


@pytest.mark.parametrize("horizon", [1, 2, 17])
def test_optimal_play_has_a_return_of_one(horizon: int) -> None:
    env = TMazePassive(horizon=horizon)
    cues = set()
    for seed in range(20):
        total, length, success, seen = run(env, with_memory, seed)
        assert (total, length, success) == (1.0, horizon + 1, 1.0)
        # the cue is visible at the first timestep only
        np.testing.assert_array_equal(np.stack(seen)[1:, :2], 0)
        assert seen[0][0] == 1
        assert [bool(obs[2]) for obs in seen] == [False] * horizon + [True, True]
        cues.add(seen[0][1])
    assert cues == {-1.0, 1.0}


def test_without_memory_success_is_a_coin_toss() -> None:
    env = TMazePassive(horizon=4)
    env.reset(seed=0)
    results = [run(env, without_memory)[2] for _ in range(400)]
    assert 0.42 < np.mean(results) < 0.58


@pytest.mark.parametrize(
    ("settings", "actions", "expected"),
    [
        ({"horizon": 4}, [LEFT] * 5, (-5 / 4, 5, 0.0)),  # not moving is penalised, and the episode ends
        ({"horizon": 4, "penalty": -2.0}, [UP] * 5, (-10.0, 5, 0.0)),
        # One wrong step is penalised once, and the goal is missed.
        ({"horizon": 3, "goal_reward": 5.0}, [RIGHT, LEFT, RIGHT, RIGHT], (-1 / 3, 4, 0.0)),
    ],
)
def test_wrong_steps_are_penalised(
    settings: dict[str, Any], actions: list[int], expected: tuple[float, int, float]
) -> None:
    *figures, seen = run(TMazePassive(**settings), lambda seen: actions[len(seen) - 1], seed=1)
    assert figures == pytest.approx(expected)
    assert not np.stack(seen)[1:].any()  # the cue does not reappear at the start cell


def test_a_new_corridor_begins_with_the_next_episode() -> None:
    env = TMazePassive(horizon=4)
    env.reset(seed=0)
    env.step(RIGHT)
    env.horizon = 2
    stored = env.get_state()
    assert [env.step(LEFT)[1:3] for _ in range(4)] == [(-1 / 4, False)] * 3 + [(-1 / 4, True)]
    env.reset()
    assert [env.step(LEFT)[1:3] for _ in range(3)] == [(-1 / 2, False)] * 2 + [(-1 / 2, True)]
    other = TMazePassive(horizon=2)
    other.set_state(stored)  # it continues in its corridor of 4
    assert [bool(other.step(RIGHT)[0][2]) for _ in range(3)] == [False, False, True]
    env.horizon = 0
    with pytest.raises(ValueError, match=r"horizon is 0, .*at least 1.*Fix"):
        env.reset()


@pytest.mark.parametrize("horizon", [0, -3, 2.5])
def test_an_impossible_horizon_is_refused(horizon: Any) -> None:
    with pytest.raises(ValueError, match=r"TMazePassive.horizon is .*at least 1.*Fix"):
        TMazePassive(horizon=horizon)


def play_images(seen: list[np.ndarray]) -> int:
    """Optimal play: the agent's pixels show its position, and the first image shows where to turn."""
    is_at_junction = (seen[-1][32, -8:] == 255).all()
    if not is_at_junction:
        return RIGHT
    return UP if seen[0][32, 0, 1] > seen[0][32, 0, 0] else DOWN  # green or red


@pytest.mark.parametrize("horizon", [1, 10, 100])
def test_the_images_show_everything_that_is_needed(horizon: int) -> None:
    drawn, numbers = TMazePixels(horizon=horizon), TMazePassive(horizon=horizon)
    for seed in range(6):
        total, length, success, seen = run(drawn, play_images, seed)
        assert (total, length, success) == run(numbers, with_memory, seed)[:3] == (1.0, horizon + 1, 1.0)
        assert all(drawn.observation_space.contains(image) for image in seen)
        later = np.stack(seen[1:])
        assert (later == later[..., :1]).all()  # only the first image has the cue's colour
    check_env(TMazePixels(horizon=3), skip_render_check=True)
