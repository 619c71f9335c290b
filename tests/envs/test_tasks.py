"""The built-in tasks with the settings of their presets behave as docs/tasks.md says."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gin
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import loxodon.experiment  # noqa: F401  # registers what the presets name
from loxodon.envs import (
    Bandit,
    ClassicControlState,
    Counting,
    DarkKeyToDoor,
    DarkRoom,
    EnvSpec,
    FrozenLake,
    KShotWrapper,
    Recall,
    TMazeActive,
    TMazePassive,
    resolve_env,
)
from loxodon.envs.builtin.frozen_lake import steps_to_goal
from loxodon.envs.builtin.task import GRID_MOVES
from loxodon.envs.env_state import get_state, set_state
from loxodon.experiment.config import load_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"


class Row(NamedTuple):
    """One row of the table on the page; `explorer` is given only if the optimum uses hidden information."""

    steps: int
    random: float
    optimal: float
    explorer: float | None


def read_page() -> dict[str, Row]:
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and (name := re.fullmatch(r"`(\w+)`", cells[1])):
            figures = [float(cell) if cell else None for cell in cells[4:]]
            rows[name[1]] = Row(*figures)  # type: ignore[arg-type]  # a missing figure fails the test
    return rows


# --- scripted policies -----------------------------------------------------------------------------------


class Play:
    """An episode for a policy: the environment, past observations and rewards, and the policy's own notes."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env: Any = env.unwrapped
        self.seen: list[Any] = []
        self.rewards = [0.0]  # one for each observation
        self.notes: dict[str, Any] = {}


Policy = Callable[[Play], Any]


def tmaze(play: Play) -> int:
    """Looks for the clues where they are, and turns accordingly."""
    obs, num_bits = play.seen[-1], play.env.num_bits
    if (cues := obs[1 : 1 + num_bits]).any():
        play.notes["cues"] = cues
    if "cues" not in play.notes:
        return 2
    at_fork = np.flatnonzero(obs[1 + num_bits :])
    if not at_fork.size:
        return 0
    return 1 if play.notes["cues"][at_fork[0]] > 0 else 3


def recall(play: Play) -> int:
    shown, asked = play.env.num_symbols, play.seen[-1]
    if not asked[shown]:
        return 0
    if not play.notes:
        play.notes["symbols"] = [int(np.argmax(obs[:shown])) for obs in play.seen[:-1]]
        play.notes["keys"] = [int(np.argmax(obs[shown:])) for obs in play.seen[:-1]]
    symbols, number = play.notes["symbols"], len(play.seen) - 1 - len(play.notes["symbols"])
    if len(asked) > shown + 1:
        return int(symbols[play.notes["keys"].index(1 + int(np.argmax(asked[shown + 1 :])))])
    return int(symbols[number if play.env.order == "forward" else -1 - number])


def counting(play: Play) -> int:
    shown, asked = play.env.num_symbols, play.seen[-1]
    if not asked[shown:].any():
        return 0
    return sum(int(obs[np.argmax(asked[shown:])]) for obs in play.seen)


def best_arm(play: Play) -> int:
    """Uses the hidden probabilities of the arms."""
    return int(np.argmax(play.env._means))


def thompson(play: Play) -> int:
    """Thompson sampling: pulls the arm with the largest mean drawn from the posterior."""
    if not play.notes:
        play.notes = {"counts": np.ones((2, play.env.num_arms)), "rng": np.random.default_rng(0)}
    else:
        play.notes["counts"][int(1 - play.rewards[-1]), play.notes["arm"]] += 1
    play.notes["arm"] = int(np.argmax(play.notes["rng"].beta(*play.notes["counts"])))
    return int(play.notes["arm"])


def over_ice(holes: Any, x: int, y: int) -> tuple[int, tuple[int, int]]:
    """The action of a shortest path to the goal, and the tile that it leads to."""
    steps = steps_to_goal(holes)
    for action, (right, down) in enumerate(GRID_MOVES):
        column, row = x + right, y + down
        inside = 0 <= column < len(steps) and 0 <= row < len(steps)
        if inside and 0 <= steps[row][column] < steps[y][x]:
            return action, (column, row)
    raise AssertionError("no way")


def frozen_lake(play: Play) -> int:
    """Uses the hidden map of the lake."""
    return over_ice(play.env._holes, play.env._x, play.env._y)[0]


def careless_lake(play: Play) -> int:
    """Assumes every tile to be ice until it has fallen through."""
    last = play.env.size - 1
    holes = play.notes.setdefault("holes", [[False] * (last + 1) for _ in range(last + 1)])
    if play.seen[-1]["is_first_timestep"][0] and not play.rewards[-1] and "next" in play.notes:
        column, row = play.notes["next"]
        holes[row][column] = True
    x, y = np.rint(play.seen[-1]["observation"] * last).astype(int).tolist()
    action, play.notes["next"] = over_ice(holes, x, y)
    return action


def towards(goal: tuple[int, int], cell: tuple[int, int]) -> tuple[int, int]:
    right, down = int(np.sign(goal[0] - cell[0])), int(np.sign(goal[1] - cell[1]))
    return (right, 0) if right else (0, down)


def dark_room(play: Play) -> int:
    """Uses the hidden positions."""
    env = play.env
    return GRID_MOVES.index(towards(env._places[min(env._num_found, len(env._places) - 1)], env._cell))


def searcher(play: Play) -> int:
    """Goes to the nearest cell that may hold the next object, or to its known position."""
    size = play.env.size
    if not play.notes:
        unseen = [{(x, y) for x in range(size) for y in range(size)} for _ in range(2)]
        play.notes = {"unseen": unseen, "places": {}, "next": 0}
    x, y, *has_key = np.rint((play.seen[-1]["observation"] + 1) / 2 * (size - 1)).astype(int).tolist()
    if play.seen[-1]["is_first_timestep"][0]:
        play.notes["next"] = 0
    elif play.rewards[-1]:
        play.notes["places"][play.notes["next"]] = (x, y)
        play.notes["next"] = len(has_key)
    place, unseen = play.notes["places"].get(play.notes["next"]), play.notes["unseen"][play.notes["next"]]
    unseen.discard((x, y))
    goal = place or min(unseen, key=lambda cell: abs(cell[0] - x) + abs(cell[1] - y))
    return GRID_MOVES.index(towards(goal, (x, y)))


def mazerunner(play: Play) -> int:
    """Uses the map of the maze."""
    env = play.env
    goal = env._goals[env._num_reached]
    ways, queue = {env._cell: -1}, deque([env._cell])
    while goal not in ways:
        cell = queue.popleft()
        for action in range(4):
            there = env._next_cells[action][cell]
            if there not in ways:
                ways[there] = ways[cell] if ways[cell] >= 0 else action
                queue.append(there)
    return ways[goal]


def cartpole(play: Play) -> int:
    (x, angle), (last_x, last_angle) = play.seen[-1], play.seen[max(len(play.seen) - 2, 0)]
    speed, turn = (x - last_x) / 0.02, (angle - last_angle) / 0.02
    return int(angle + 0.4 * turn + 0.05 * x + 0.1 * speed > 0)


class SwingUp:
    """Near-optimal play of Pendulum by value iteration on a grid; velocities are derived from positions."""

    angles, speeds = np.linspace(-np.pi, np.pi, 71), np.linspace(-8, 8, 51)
    torques = np.linspace(-2, 2, 5)

    def __init__(self) -> None:
        angle, speed, torque = np.meshgrid(self.angles, self.speeds, self.torques, indexing="ij")
        reward, corners = self._ahead(angle, speed, torque)
        self.values = np.zeros(angle.shape[:2])
        for _ in range(100):
            self.values = (reward + 0.99 * sum(w * self.values[i, j] for w, i, j in corners)).max(axis=2)

    def _ahead(self, angle: Any, speed: Any, torque: Any) -> tuple[Any, list[Any]]:
        """Rewards, and the weights and indices of the grid points around the next states."""
        reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
        speed = np.clip(speed + (15 * np.sin(angle) + 3 * torque) * 0.05, -8, 8)
        angle = (angle + speed * 0.05 + np.pi) % (2 * np.pi) - np.pi
        i, j = (angle + np.pi) / (2 * np.pi) * 70, (speed + 8) / 16 * 50
        low_i, low_j = np.minimum(i.astype(int), 69), np.minimum(j.astype(int), 49)
        di, dj = i - low_i, j - low_j
        parts = [(a, b) for a in (0, 1) for b in (0, 1)]
        weigh = [(di if a else 1 - di) * (dj if b else 1 - dj) for a, b in parts]
        return reward, [(w, low_i + a, low_j + b) for w, (a, b) in zip(weigh, parts, strict=True)]

    def __call__(self, play: Play) -> np.ndarray:
        angle, last = (np.arctan2(obs[1], obs[0]) for obs in (play.seen[-1], play.seen[-2:][0]))
        speed = ((angle - last + np.pi) % (2 * np.pi) - np.pi) / 0.05
        reward, corners = self._ahead(angle, speed, self.torques)
        best = np.argmax(reward + 0.99 * sum(w * self.values[i, j] for w, i, j in corners))
        return self.torques[[best]].astype(np.float32)


POLICIES: dict[str, Callable[[], Policy]] = {
    "tmaze": lambda: tmaze,
    "tmaze_long": lambda: tmaze,
    "tmaze_active": lambda: tmaze,
    "tmaze_bits": lambda: tmaze,
    "recall": lambda: recall,
    "recall_reverse": lambda: recall,
    "recall_by_key": lambda: recall,
    "counting": lambda: counting,
    "bandit": lambda: best_arm,
    "meta_frozen_lake": lambda: frozen_lake,
    "dark_room": lambda: dark_room,
    "dark_key_to_door": lambda: dark_room,
    "mazerunner": lambda: mazerunner,
    "cartpole_no_velocity": lambda: cartpole,
    "pendulum_no_velocity": SwingUp,
}
EXPLORERS: dict[str, Policy] = {
    "bandit": thompson,
    "meta_frozen_lake": careless_lake,
    "dark_room": searcher,
    "dark_key_to_door": searcher,
}


@gin.configurable(module="tests.tasks")
def task_holder(make_env: Any = gin.REQUIRED) -> Any:
    """Receives a reference as Experiment does."""
    return make_env


def make(preset: str) -> gym.Env[Any, Any]:
    """The environment of a preset, without wrappers."""
    load_config([preset])
    gin.bind_parameter("task_holder.make_env", gin.query_parameter("Experiment.make_train_env"))
    env: gym.Env[Any, Any] = resolve_env(task_holder()).build_raw()
    return env


def returns_of(env: gym.Env[Any, Any], policy: Policy | None, episodes: int) -> tuple[np.ndarray, int]:
    """Returns of episodes and the longest length. The seed is 0; without a policy, actions are random."""
    env.action_space.seed(0)
    returns, longest = [], 0
    for episode in range(episodes):
        obs, _ = env.reset(seed=0 if episode == 0 else None)
        play, total, length, is_over = Play(env), 0.0, 0, False
        while not is_over:
            play.seen.append(obs)
            action = policy(play) if policy is not None else env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            play.rewards.append(float(reward))
            total, length, is_over = total + float(reward), length + 1, terminated or truncated
        returns.append(total)
        longest = max(longest, length)
    return np.array(returns), longest


@pytest.mark.parametrize("preset", list(POLICIES))
def test_returns_and_lengths_are_as_documented(preset: str) -> None:
    row, env = read_page()[preset], make(preset)
    policies = {"random": None, "optimal": POLICIES[preset]()}
    if preset in EXPLORERS:
        policies["explorer"] = EXPLORERS[preset]
    num_episodes = int(np.clip(2_500 // row.steps, 10, 200))
    for kind, policy in policies.items():
        returns, steps = returns_of(env, policy, num_episodes)
        error = 4 * float(returns.std()) / math.sqrt(num_episodes) + 0.02 * max(0.5, abs(returns.mean()))
        assert getattr(row, kind) == pytest.approx(returns.mean(), abs=error), kind
        assert steps <= row.steps
    remembers_all = gin.query_parameter("Experiment.max_seq_len") >= row.steps
    assert remembers_all == ("velocity" not in preset)


def test_the_page_has_all_tasks() -> None:
    assert read_page().keys() == POLICIES.keys()


def stream(env: Any, actions: list[Any], seed: int | None = None) -> list[Any]:
    """The environment's answers to `actions` over several episodes; with a seed, it is reset first."""
    said = [] if seed is None else [env.reset(seed=seed)[0]]
    for action in actions:
        said.append(env.step(action))
        assert env.observation_space.contains(said[-1][0])
        if said[-1][2] or said[-1][3]:
            said.append(env.reset())
    return said


def same(one: list[Any], other: list[Any]) -> bool:
    try:
        np.testing.assert_equal(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("preset", list(POLICIES))
def test_seeds_and_stored_states_determine_everything(preset: str) -> None:
    raw = [make(preset) for _ in range(4)]
    if "velocity" in preset:
        raw = [ClassicControlState(env) for env in raw]
    else:
        check_env(raw[0].unwrapped, skip_render_check=True)
    one, other, third, fourth = (EnvSpec(lambda env=env: env).build() for env in raw)
    one.action_space.seed(0)
    actions = [one.action_space.sample() for _ in range(500)]
    first = stream(one, actions[:230], seed=3)
    assert same(first, stream(other, actions[:230], seed=3))
    assert not same(first, stream(third, actions[:230], seed=6))  # seeds 4 and 5 draw the same clue
    state = get_state(one)
    expected = stream(one, actions[230:])  # these steps follow the saved state
    fourth.reset(seed=8)
    set_state(fourth, state)
    assert same(stream(fourth, actions[230:]), expected)


# --- rules that the presets do not cover -------------------------------------------------------------------


def test_the_active_tmaze_shows_its_clue_only_at_its_end() -> None:
    env = TMazeActive(horizon=2)
    obs, _ = env.reset(seed=0)
    assert obs.tolist() == [1, 0, 0]
    steps = [env.step(action) for action in (2, 2, 0, 0, 0)]  # one extra step to the left
    assert [abs(step[0][1]) for step in steps] == [1, 1, 0, 0, 0]
    assert [step[1] for step in steps] == [0, -0.5, 0, 0, 0]
    assert [step[2] for step in steps] == [False] * 4 + [True]  # no time is left for the turn


def test_each_fork_of_the_tmaze_has_its_own_reward() -> None:
    env = TMazePassive(horizon=1, num_bits=3, goal_reward=6.0)
    cues = env.reset(seed=1)[0][1:4]
    right = [1 if cue > 0 else 3 for cue in cues]
    steps = [env.step(action) for action in (0, right[0], 4 - right[1], right[2])]
    assert [step[1] for step in steps] == [0.0, 2.0, 0.0, 2.0]
    assert [step[0][4:].tolist() for step in steps] == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert steps[-1][2:] == (True, False, {"metric/success": pytest.approx(2 / 3)})


def test_attempts_share_the_lake_and_trials_do_not() -> None:
    env = KShotWrapper(FrozenLake(slip_prob=0.5), num_attempts=3)
    lake: Any = env.unwrapped
    rng, lakes, ways, metrics = np.random.default_rng(0), [], [], {}
    for trial in range(8):
        obs, _ = env.reset(seed=0 if trial == 0 else None)
        is_over, way = False, []
        while not is_over:
            if obs["is_first_timestep"][0]:
                lakes.append((trial, str(lake._holes)))
                way = []
                ways.append(way)
            obs, _, is_over, truncated, info = env.step(int(rng.integers(1, 5)))
            way.append(tuple(obs["observation"]))
            assert not truncated
            metrics.update(info)
    assert len(lakes) == 24
    assert 6 <= len(set(lakes)) <= 8
    assert len({str(way) for way in ways}) > 16  # randomness continues within a trial
    assert {
        f"metric/{name}_attempt_{i}" for name in ("success", "return") for i in range(3)
    } <= metrics.keys()


@pytest.mark.parametrize("settings", [{}, {"recover_mode": True}, {"hard_mode": True}, {"slip_prob": 0.3}])
def test_paths_end_at_holes_at_the_goal_or_at_the_time_limit(settings: dict[str, Any]) -> None:
    env = FrozenLake(size=4, **settings)
    env.action_space.seed(1)
    ends, noisy, swapped = set(), 0, 0
    for episode in range(150):
        env.reset(seed=0 if episode == 0 else None)
        is_over, length = False, 0
        swapped += env._moves[1] != (1, 0)
        while not is_over:
            obs, reward, is_over, _, info = env.step(env.action_space.sample())
            length += 1
            noisy += not np.allclose(obs * 3, (env._x, env._y))
            in_hole = env._cracked[env._y][env._x]
            assert reward in (0.0, 1.0, -0.1 if settings.get("recover_mode") else 0.0)
        assert info["metric/success"] == (reward == 1.0)
        ends.add("goal" if reward == 1.0 else "hole" if in_hole else "time")
        assert ends & {"goal", "hole"} or length == env.time_limit
    assert ends >= ({"goal", "time"} if settings.get("recover_mode") else {"goal", "hole"})
    assert (noisy > 0) == (swapped > 0) == ("hard_mode" in settings)
    assert env.time_limit == {"hard_mode": 32, "slip_prob": 23}.get(next(iter(settings), ""), 16)


def places(env: Any) -> int:
    """The number of different observations that random play reaches in attempts at one task."""
    env.action_space.seed(0)
    seen = set()
    for _ in range(100):
        is_over = False
        seen.add(str(env.reset(options={"keep_task": True})[0][:2]))
        while not is_over:
            obs, _, is_over, _, _ = env.step(env.action_space.sample())
            seen.add(str(obs[:2]))
    return len(seen)


@pytest.mark.parametrize(
    "make_task", [lambda: FrozenLake(5, hole_prob=0.0), lambda: DarkRoom(5), lambda: DarkKeyToDoor(5)]
)
def test_a_new_size_takes_effect_with_the_next_task(make_task: Callable[[], Any]) -> None:
    env, other = make_task(), make_task()
    env.reset(seed=0)
    env.size = 3
    other.set_state(env.get_state())
    assert places(env) == places(other) == 25
    env.reset()
    assert places(env) == 9
    env.size = 1
    with pytest.raises(ValueError, match=r"size is 1, .*at least 2.*Fix:"):
        env.reset()


def test_rooms_permute_actions_if_asked() -> None:
    env = KShotWrapper(DarkRoom(size=5, time_limit=1, randomize_actions=True), num_attempts=2)
    room: Any = env.unwrapped
    meanings = []
    for _ in range(20):
        env.reset(seed=0 if not meanings else None)
        env.step(0)
        meanings.append(tuple(room._moves))
        env.step(0)
        assert tuple(room._moves) == meanings[-1]
    assert len(set(meanings)) > 10


def test_gaussian_arms_have_their_own_means_and_unit_deviation() -> None:
    env = Bandit(num_arms=3, num_steps=400, kind="gaussian")
    env.reset(seed=0)
    steps = [env.step(1) for _ in range(400)]
    assert np.mean([step[1] for step in steps]) == pytest.approx(env._means[1], abs=0.2)
    assert np.std([step[1] for step in steps]) == pytest.approx(1.0, abs=0.15)
    assert steps[-1][4] == {"metric/best_arm": float(np.argmax(env._means) == 1)}


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (
            TMazeActive,
            {"horizon": 0},
            r"TMazeActive.horizon is 0, but must be an integer of at least 1.*Fix:",
        ),
        (TMazePassive, {"horizon": 5, "num_bits": 1.5}, r"TMazePassive.num_bits is 1.5.*Fix:"),
        (FrozenLake, {"size": 1}, r"FrozenLake.size is 1, .*at least 2.*Fix:"),
        (FrozenLake, {"hole_prob": 0.5}, r"FrozenLake.hole_prob is 0.5, .*at most 0.3.*Fix:"),
        (FrozenLake, {"slip_prob": -0.1}, r"FrozenLake.slip_prob is -0.1.*Fix:"),
        (DarkRoom, {"time_limit": None}, r"DarkRoom.time_limit is None.*Fix:"),
        (DarkKeyToDoor, {"size": True}, r"DarkKeyToDoor.size is True.*Fix:"),
        (Bandit, {"kind": "normal"}, r"Bandit.kind is 'normal'; .*'bernoulli', 'gaussian'.*Fix:"),
        (Bandit, {"num_arms": 1}, r"Bandit.num_arms is 1.*Fix:"),
        (Recall, {"length": 4, "order": "back"}, r"Recall.order is 'back'.*'by_key'.*Fix:"),
        (Counting, {"length": 4, "num_symbols": 1}, r"Counting.num_symbols is 1.*Fix:"),
    ],
)
def test_impossible_settings_are_refused(task: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        task(**settings)


def test_the_state_of_other_settings_is_refused() -> None:
    one, other = Recall(length=3), Recall(length=4)
    one.reset(seed=0)
    with pytest.raises(
        ValueError, match=r"of Recall with .*'length': 3.*this environment has .*'length': 4.*Fix:"
    ):
        other.set_state(one.get_state())
