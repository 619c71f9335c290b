"""Hindsight: a relabelled trajectory is one that the environment itself could have produced."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.data import HindsightRelabeler, Trajectory
from loxodon.envs import MazeRunner

ARRAYS = ("rl2s", "time_idxs", "actions", "rews", "dones")
FAR = 0.99  # no walk along a line reaches this coordinate


def play(env: MazeRunner, seed: int, actions: npt.NDArray[Any], goals: Any = None) -> Trajectory:
    """One episode; `goals` replace those that the environment draws."""
    obs, _ = env.reset(seed=seed, options=None if goals is None else {"goals": goals})
    seen, rews, dones = [obs], [], []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        seen.append(obs)
        rews.append(reward)
        dones.append(terminated)
        if terminated or truncated:
            break
    num_steps = len(rews)
    rl2s = np.zeros((num_steps + 1, 6), np.float32)
    rl2s[1:, 0] = rews
    rl2s[np.arange(1, num_steps + 1), 1 + actions[:num_steps]] = 1
    return Trajectory(
        obs={key: np.stack([obs[key] for obs in seen]) for key in seen[0]},
        rl2s=rl2s,
        time_idxs=np.arange(num_steps + 1)[:, None],
        actions=actions[:num_steps, None],
        rews=np.array(rews, np.float32)[:, None],
        dones=np.array(dones)[:, None],
        env_name="MazeRunner",
    )


def arrays_of(traj: Trajectory) -> dict[str, npt.NDArray[Any]]:
    return {**traj.obs, **{name: getattr(traj, name) for name in ARRAYS}}


def assert_same(one: Trajectory, other: Trajectory) -> None:
    ours, theirs = arrays_of(one), arrays_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
        assert value.dtype == theirs[name].dtype, name
    assert one.env_name == other.env_name


@settings(max_examples=100, deadline=None)
@given(
    strategy=st.sampled_from(["final", "future", "all", "some"]),
    num_goals=st.integers(1, 4),
    time_limit=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    randomize_actions=st.booleans(),
)
def test_relabelling_equals_playing_with_these_goals(
    strategy: str, num_goals: int, time_limit: int, seed: int, randomize_actions: bool
) -> None:
    env = MazeRunner(5, num_goals, time_limit, 0.2, randomize_actions)
    rng = np.random.default_rng(seed)
    actions = rng.integers(5, size=time_limit)
    traj = play(env, seed, actions)
    relabelled = HindsightRelabeler(strategy=strategy).relabel(traj, rng)
    assert_same(relabelled, play(env, seed, actions, relabelled.obs["goals"][0]))
    assert relabelled.rews.sum() >= traj.rews.sum()


def walk(
    positions: list[float], goals: list[float], *, reached_at: tuple[int, ...] = (), **other: Any
) -> Trajectory:
    """An episode along a line; the caller gives the timesteps at which its goals were reached."""
    num_steps, num_goals = len(positions) - 1, len(goals)
    num_reached = np.searchsorted(reached_at, np.arange(num_steps + 1), side="right")
    padded = np.array([*goals, *[-1.0] * num_goals], np.float32)
    rews = np.zeros((num_steps, 1), np.float32)
    rews[[time - 1 for time in reached_at]] = 1
    dones = np.zeros((num_steps, 1), np.bool_)
    dones[-1] = len(reached_at) == num_goals
    rl2s = np.ones((num_steps + 1, 3), np.float32)
    rl2s[0], rl2s[1:, :1] = 0, rews
    arrays: dict[str, Any] = {
        "obs": {
            "achieved": np.array(positions, np.float32)[:, None],
            "goals": np.stack([padded[n : n + num_goals] for n in num_reached])[..., None],
            "image": np.arange(num_steps + 1, dtype=np.uint8)[:, None],
        },
        "rl2s": rl2s,
        "time_idxs": np.arange(num_steps + 1)[:, None],
        "actions": np.full((num_steps, 2), 0.5, np.float32),
        "rews": rews,
        "dones": dones,
    }
    return Trajectory(**{**arrays, **other})


LINE = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def first_goals(traj: Trajectory) -> tuple[float, ...]:
    """All goals along the line, as shown at reset."""
    return tuple(np.round(traj.obs["goals"][0, :, 0].astype(float), 2).tolist())


def goals_drawn(strategy: str, traj: Trajectory, draws: int = 200) -> list[tuple[float, ...]]:
    """The distinct sequences of goals that a strategy gives."""
    relabeler, rng = HindsightRelabeler(strategy=strategy), np.random.default_rng(0)
    return sorted({first_goals(relabeler.relabel(traj, rng)) for _ in range(draws)})


ANYWHERE = [(0.1,), (0.2,), (0.3,), (0.4,), (0.5,)]
INSERTED = [(0.1, 0.3), (0.2, 0.3), (0.3, 0.4), (0.3, 0.5)]


@pytest.mark.parametrize(
    ("traj", "expected"),
    [
        (
            walk(LINE, [FAR]),
            {
                "none": [(FAR,)],
                "final": [(0.5,)],
                "future": ANYWHERE,
                "all": ANYWHERE,
                "some": [*ANYWHERE, (FAR,)],
            },
        ),
        (
            walk(LINE, [0.3, FAR], reached_at=(3,)),
            {"final": [(0.3, 0.5)], "future": INSERTED[2:], "all": INSERTED, "some": [*INSERTED, (0.3, FAR)]},
        ),
        (walk(LINE[:4], [0.9, 0.8]), {"final": [(0.1, 0.3), (0.2, 0.3)]}),
        (walk(LINE[:3], [0.9, 0.8, 0.7]), {"all": [(0.1, 0.2, 0.9)]}),  # more goals than timesteps
        (walk(LINE[:3], [0.2, 0.9], reached_at=(2,)), {"future": [(0.2, 0.9)]}),  # nothing comes after
        (walk(LINE, [0.2, 0.5], reached_at=(2, 5)), {"final": [(0.2, 0.5)], "some": [(0.2, 0.5)]}),
    ],
)
def test_each_strategy_draws_exactly_its_own_goals(
    traj: Trajectory, expected: dict[str, list[tuple[float, ...]]]
) -> None:
    before = {name: value.copy() for name, value in arrays_of(traj).items()}
    for value in arrays_of(traj).values():
        value.flags.writeable = False  # arrays of files are read-only too
    for strategy, goals in expected.items():
        assert goals_drawn(strategy, traj, 100) == goals
    for name, value in arrays_of(traj).items():
        np.testing.assert_array_equal(value, before[name])


def test_some_replaces_any_number_of_goals_equally_often_and_keeps_the_next_missing_ones() -> None:
    traj = walk(LINE, [0.9, 0.8, 0.7])
    relabeler, rng = HindsightRelabeler(strategy="some"), np.random.default_rng(0)
    counts = np.zeros(4, int)
    for _ in range(1000):
        goals = list(first_goals(relabeler.relabel(traj, rng)))
        num_new = sum(goal <= 0.5 for goal in goals)
        assert goals[:num_new] == sorted(goals[:num_new])
        assert goals[num_new:] == [0.9, 0.8, 0.7][: 3 - num_new]
        counts[num_new] += 1
    assert np.all(np.abs(counts / 1000 - 0.25) < 0.07)


def test_a_success_becomes_a_truncated_episode_under_goals_that_it_missed() -> None:
    traj = walk(LINE, [0.2, 0.5], reached_at=(2, 5))
    relabelled = HindsightRelabeler().with_goals(traj, np.array([[0.2], [FAR]], np.float32))
    assert_same(relabelled, walk(LINE, [0.2, FAR], reached_at=(2,)))


def test_other_rewards_and_other_terminations_stay() -> None:
    costs = np.full((5, 1), -0.25, np.float32)
    costs[1] += 1
    dones = np.array([[False]] * 4 + [[True]])  # a fall into a pit
    traj = walk(LINE, [0.2, 0.9], reached_at=(2,), rews=costs, dones=dones)
    relabelled = HindsightRelabeler().with_goals(traj, np.array([[0.3], [0.9]], np.float32))
    assert relabelled.rews[:, 0].tolist() == [-0.25, -0.25, 0.75, -0.25, -0.25]
    np.testing.assert_array_equal(relabelled.dones, dones)


def test_results_of_a_subclass_are_checked() -> None:
    class Wrong(HindsightRelabeler):
        def edit_rewards(self, traj: Trajectory, was_reached: Any, is_reached: Any) -> Any:
            return np.full((len(traj), 1), np.nan, np.float32)

    with pytest.raises(ValueError, match=r"Wrong.relabel returned rewards .* not finite.*Fix:"):
        Wrong(strategy="final").apply(walk(LINE, [9.0]), np.random.default_rng(0))


def test_a_single_goal_needs_no_axis_for_goals() -> None:
    flat = walk(LINE, [FAR])
    traj = dataclasses.replace(flat, obs={**flat.obs, "goals": flat.obs["goals"][:, 0]})
    relabelled = HindsightRelabeler(strategy="final").relabel(traj, np.random.default_rng(0))
    np.testing.assert_allclose(relabelled.obs["goals"], [[0.5]] * 5 + [[-1]])


def test_an_environment_with_other_rules_is_detected() -> None:
    by_hand = walk(LINE, [0.31, FAR], reached_at=(3,))  # its tolerance is wider than ours
    with pytest.raises(ValueError, match=r"At timestep 3 .*tolerance 0.001.*Fix"):
        HindsightRelabeler().relabel(by_hand, np.random.default_rng(0))
    wider = HindsightRelabeler(strategy="final", tolerance=0.02)
    assert wider.relabel(by_hand, np.random.default_rng(0)).rews.sum() == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"strategy": "futur"}, r"strategy is 'futur'; allowed are .*Fix.*'future'"),
        ({"tolerance": -1.0}, r"tolerance is -1.0.*Fix"),
        ({"share": 1.1}, r"share is 1.1.*Fix"),
        ({"goals_key": "desired"}, r"looks for the observations \['desired'\].*'goals'.*Fix"),
        ({}, r"begins at time index 2.*Fix.*stagger_traj_file_lengths = False"),  # a piece from mid-episode
    ],
)
def test_impossible_settings_and_pieces_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HindsightRelabeler(**arguments).relabel(walk(LINE, [FAR]).slice(2, 5), np.random.default_rng(0))


def test_the_given_share_is_relabelled() -> None:
    traj, rng = walk(LINE, [FAR]), np.random.default_rng(0)
    relabeler = HindsightRelabeler(strategy="final", share=0.3)
    assert 0.6 < sum(relabeler.relabel(traj, rng) is traj for _ in range(500)) / 500 < 0.8
