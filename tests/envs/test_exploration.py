"""Noise schedules and their effect on actions."""

from __future__ import annotations

import json
from typing import Any

import gin
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.envs import BilevelEpsilonGreedy, EpsilonGreedy

DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (3,), np.float32)
ZEROS, LATER = np.zeros(6, np.int64), np.ones(1, np.int64)  # env steps since the episode began


def test_epsilon_is_linear_then_constant() -> None:
    noise = EpsilonGreedy(DISCRETE, 6, 0, eps_start=0.9, eps_end=0.1, steps_anneal=8, randomize_eps=False)
    levels = []
    for _ in range(12):
        levels.append(float(noise.current_eps(ZEROS)[0]))
        noise.add_exploration_noise(ZEROS, ZEROS)
        noise.on_episode_end(np.ones(6, bool))  # has no effect without randomisation
    np.testing.assert_allclose(levels, [0.9 - 0.1 * min(t, 8) for t in range(12)], atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 10_000))
def test_bilevel_formula_and_limits(calls: int, timestep: int) -> None:
    noise = BilevelEpsilonGreedy(DISCRETE, 1, 0, rollout_horizon=10, steps_anneal=100, randomize_eps=False)
    noise.num_calls = calls
    p, h = min(calls / 100, 1), min(timestep / 10, 1)
    start, end = 1.0 - 0.95 * p, 0.8 - 0.79 * p
    (eps,) = noise.current_eps(np.array([timestep]))
    assert eps == pytest.approx(start - (start - end) * h)
    assert 0.01 - 1e-9 <= eps <= 1.0
    noise.eps_first = 0.3
    np.testing.assert_equal(noise.current_eps(np.array([timestep])), 0.3 if timestep == 0 else eps)


def test_discrete_actions_are_replaced_with_probability_eps() -> None:
    noise = EpsilonGreedy(DISCRETE, 20_000, 0, eps_start=0.4, eps_end=0.4, randomize_eps=False)
    actions = np.full(20_000, 2)
    noisy = noise.add_exploration_noise(actions, np.zeros(20_000, int))
    assert noisy.dtype == actions.dtype
    assert (noisy != 2).mean() == pytest.approx(0.4 * 3 / 4, abs=0.015)
    assert np.bincount(noisy)[[0, 1, 3]].min() > 0.08 * 20_000
    assert (actions == 2).all()  # the input is unchanged


@pytest.mark.parametrize(
    ("space", "allowed"),
    [(DISCRETE, [0, 1, 0, 1]), (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1]), (DISCRETE, [0, 0, 0, 0])],
)
def test_random_actions_are_drawn_from_the_allowed_ones(space: Any, allowed: list[int]) -> None:
    noise = EpsilonGreedy(space, 1000, 0, eps_start=0.6, eps_end=0.6, randomize_eps=False, mean_repeat=1.0)
    mask = np.tile(np.array(allowed, bool), (1000, 1))
    shape = (1000,) if space is DISCRETE else (1000, 2)
    noisy = np.stack([noise.add_exploration_noise(np.full(shape, 9), ZEROS[:1], mask) for _ in range(100)])
    assert abs((noisy == 9).mean() - 0.4) < 0.01  # actions of the policy
    for values, part in zip(
        noisy.reshape(100_000, -1).T, np.split(mask[0], [2]) if len(shape) > 1 else [mask[0]], strict=True
    ):
        free = np.flatnonzero(part | ~part.any())
        drawn, counts = np.unique(values[values != 9], return_counts=True)
        assert drawn.tolist() == free.tolist()
        np.testing.assert_allclose(counts / counts.sum(), 1 / len(free), atol=0.01)


@pytest.mark.parametrize("eps", [0.2, 0.9, 1.0])
def test_random_actions_are_held_and_stay_a_share_of_eps(eps: float) -> None:
    num_envs, mean_repeat, policy = 2000, 4.0, 30
    noise = EpsilonGreedy(
        spaces.Discrete(31),
        num_envs,
        0,
        eps_start=eps,
        eps_end=eps,
        randomize_eps=False,
        mean_repeat=mean_repeat,
        randomize_repeat=False,
    )
    actions = np.full(num_envs, policy)
    taken = np.stack([noise.add_exploration_noise(actions, LATER * t) for t in range(300)])
    is_random = taken != policy
    assert is_random.mean() == pytest.approx(eps * 30 / 31, abs=0.01)
    is_kept = (taken[1:] == taken[:-1])[is_random[:-1]]  # held, or drawn again by chance
    begin = eps / (eps + mean_repeat * (1 - eps))
    assert is_kept.mean() == pytest.approx(1 - 1 / mean_repeat * (1 - begin / 31), abs=0.01)
    noise.on_episode_end(np.ones(num_envs, bool))
    after = noise.add_exploration_noise(actions, LATER)
    is_kept = (after == taken[-1])[is_random[-1]]
    assert is_kept.mean() == pytest.approx(begin / 31, abs=0.02)


def test_the_holding_time_is_drawn_per_episode() -> None:
    num_envs, longest = 5000, 8.0
    noise = EpsilonGreedy(
        spaces.Discrete(1000),
        num_envs,
        0,
        eps_start=1.0,
        eps_end=1.0,
        randomize_eps=False,
        mean_repeat=longest,
    )
    shares = []
    for _ in range(2):
        noise.on_episode_end(np.ones(num_envs, bool))
        taken = np.stack([noise.add_exploration_noise(ZEROS[:1].repeat(num_envs), LATER) for _ in range(200)])
        shares.append((taken[1:] == taken[:-1]).mean(axis=0))
    # The mean and the quartiles are those of 1 - 1 / r, with r log-uniform between 1 and 8.
    assert np.mean(shares) == pytest.approx(1 - (1 - 1 / longest) / np.log(longest), abs=0.01)
    np.testing.assert_allclose(
        np.quantile(shares[0], [0.25, 0.5, 0.75]), 1 - longest ** -np.array([0.25, 0.5, 0.75]), atol=0.02
    )
    assert abs(np.corrcoef(*shares)[0, 1]) < 0.1


def test_a_run_that_continues_without_held_noise_has_the_same_amount_of_noise() -> None:
    actions, always = np.full(5000, 3), {"eps_start": 0.4, "eps_end": 0.4, "randomize_eps": False}
    before, after = (EpsilonGreedy(DISCRETE, 5000, 0, mean_repeat=mean, **always) for mean in (8.0, 1.0))
    before.add_exploration_noise(actions, LATER)
    after.load_state_dict(before.state_dict())
    taken = np.stack([after.add_exploration_noise(actions, LATER) for _ in range(20)])
    assert (taken != 3).mean() == pytest.approx(0.4 * 3 / 4, abs=0.01)


@pytest.mark.parametrize("mean_repeat", [1.0, 3.0])
@pytest.mark.parametrize("allowed", [None, [1, 0, 0, 1, 1]])
def test_the_probability_of_noisy_actions_is_their_frequency(
    mean_repeat: float, allowed: list[int] | None
) -> None:
    num_envs, space = 50_000, spaces.MultiDiscrete([2, 3])
    noise = EpsilonGreedy(
        space,
        num_envs,
        0,
        eps_start=0.6,
        eps_end=0.6,
        randomize_eps=False,
        mean_repeat=mean_repeat,
        randomize_repeat=False,
    )
    rng = np.random.default_rng(7)
    mask = None if allowed is None else np.tile(np.array(allowed, bool), (num_envs, 1))
    before, noisy = None, np.zeros((num_envs, 2), int)
    for t in range(12):
        likely = rng.random(num_envs) < 2 / 3
        chosen = np.stack([np.zeros(num_envs, int), np.where(likely, 2, 1)], axis=1)
        before, noisy = noisy, noise.add_exploration_noise(chosen, LATER * t, mask)
        of_policy = np.where(noisy[:, 0] == 0, np.array([0.0, 1 / 3, 2 / 3])[noisy[:, 1]], 0.0)
        found = np.exp(noise.log_probability(np.log(np.maximum(of_policy, 1e-30)), mask))
    assert before is not None
    goes_on = found == 1.0  # these envs were certain to repeat their actions
    assert (noisy == before)[goes_on].all()
    assert goes_on.mean() == pytest.approx(0.6 * (1 - 1 / mean_repeat), abs=0.01)
    for action in np.unique(noisy[~goes_on], axis=0):
        is_it = (noisy[~goes_on] == action).all(axis=1)
        assert found[~goes_on][is_it] == pytest.approx(is_it.mean(), abs=0.01)


@pytest.mark.parametrize("sizes", [[2] * 128, [5] * 28])
def test_many_factors_are_random_and_have_exact_probabilities(sizes: list[int]) -> None:
    space, num_envs = spaces.MultiDiscrete(sizes), 2_000
    zeros = np.zeros((num_envs, len(sizes)), np.int64)
    at = np.ones(num_envs, np.int64)
    for mask in (None, np.ones((num_envs, sum(sizes)), bool)):
        noise = EpsilonGreedy(space, num_envs, 0, eps_start=1.0, eps_end=1.0, randomize_eps=False)
        noisy = noise.add_exploration_noise(zeros, at, mask)
        assert noisy.mean(axis=0) == pytest.approx((np.array(sizes) - 1) / 2, abs=0.2)
        found = noise.log_probability(np.full(num_envs, -300.0), mask)
        assert found == pytest.approx(-np.log(sizes).sum())


def test_gaussian_noise_is_held() -> None:
    noise = EpsilonGreedy(
        BOX,
        2000,
        0,
        eps_start=0.2,
        eps_end=0.2,
        randomize_eps=False,
        mean_repeat=5.0,
        randomize_repeat=False,
    )
    added = np.stack([noise.add_exploration_noise(np.zeros((2000, 3)), ZEROS[:1]) for _ in range(100)])
    assert added.std() == pytest.approx(0.2, abs=0.01)
    assert (added[1:] == added[:-1]).all(-1).mean() == pytest.approx(1 - 1 / 5, abs=0.01)


@pytest.mark.parametrize("space", [DISCRETE, spaces.MultiDiscrete([4, 3])])
def test_a_held_action_ends_when_it_is_forbidden(space: Any) -> None:
    noise = EpsilonGreedy(space, 500, 0, eps_start=1.0, eps_end=1.0, mean_repeat=50.0, randomize_eps=False)
    actions, num_all = np.zeros((500, *space.shape), int), 4 if space is DISCRETE else 7
    rng = np.random.default_rng(0)
    for _ in range(20):
        allowed = rng.random((500, num_all)) < 0.5
        allowed[:, [0, 4][: num_all // 3]] = True
        noisy = noise.add_exploration_noise(actions, ZEROS[:1], allowed)
        parts = noisy[:, None] if space is DISCRETE else noisy + np.array([0, 4])
        assert np.take_along_axis(allowed, parts, axis=1).all()


def test_continuous_noise_is_gaussian_and_clipped() -> None:
    noise = EpsilonGreedy(BOX, 5000, 0, eps_start=0.2, eps_end=0.2, randomize_eps=False)
    noisy = noise.add_exploration_noise(np.zeros((5000, 3), np.float32), np.zeros(5000, int))
    assert noisy.dtype == np.float32
    assert noisy.std() == pytest.approx(0.2, rel=0.05)
    edge = noise.add_exploration_noise(np.ones((5000, 3), np.float32), np.zeros(5000, int))
    assert edge.max() == 1.0
    assert edge.min() < 0.9


def test_multipliers_change_only_when_an_episode_ends() -> None:
    noise = EpsilonGreedy(DISCRETE, 6, 0)
    before = noise.current_eps(ZEROS)
    assert ((before >= 0) & (before < 1)).all()
    assert len(set(before)) == 6
    ended = np.array([1, 0, 0, 1, 0, 0], bool)
    noise.on_episode_end(ended)
    np.testing.assert_array_equal(noise.current_eps(ZEROS) != before, ended)


# Random numbers are drawn for 64 steps at once.
@pytest.mark.parametrize(
    ("num_steps", "space"),
    [(5, BOX), (64, DISCRETE), (70, DISCRETE), (70, spaces.MultiDiscrete([2, 5])), (70, BOX)],
)
def test_state_goes_through_json_and_continues_exactly(space: Any, num_steps: int) -> None:
    actions = np.zeros((6, *space.shape), space.dtype)
    first, second = (EpsilonGreedy(space, 6, seed, steps_anneal=20, mean_repeat=3.0) for seed in (1, 2))
    for _ in range(num_steps):
        first.add_exploration_noise(actions, ZEROS)
        first.on_episode_end(np.arange(6) % 2 == 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(num_steps):
        a, b = (noise.add_exploration_noise(actions, ZEROS) for noise in (first, second))
        np.testing.assert_array_equal(a, b)
        for noise in (first, second):
            noise.on_episode_end(np.ones(6, bool))


def test_the_same_seed_gives_the_same_noise_and_another_seed_does_not() -> None:
    streams = [
        EpsilonGreedy(DISCRETE, 50, s).add_exploration_noise(np.zeros(50, int), np.zeros(50))
        for s in (1, 1, 2)
    ]
    np.testing.assert_array_equal(streams[0], streams[1])
    assert (streams[0] != streams[2]).any()


def test_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for 6 environments, but this run has 2.*Fix"):
        EpsilonGreedy(DISCRETE, 2, 0).load_state_dict(EpsilonGreedy(DISCRETE, 6, 0).state_dict())


@pytest.mark.parametrize(
    ("kind", "kwargs", "words"),
    [
        (EpsilonGreedy, {"steps_anneal": 0}, r"EpsilonGreedy.steps_anneal is 0.*Fix"),
        (EpsilonGreedy, {"mean_repeat": 0.5}, r"EpsilonGreedy.mean_repeat is 0.5.*at least 1.*Fix"),
        (EpsilonGreedy, {"eps_start": 1.5}, r"EpsilonGreedy.eps_start is 1.5.*at most 1.*Fix"),
        (BilevelEpsilonGreedy, {"rollout_horizon": 5, "eps_end_end": -0.1}, r"eps_end_end is -0.1.*Fix"),
        (BilevelEpsilonGreedy, {"rollout_horizon": 5, "eps_first": 1.5}, r"eps_first is 1.5.*Fix"),
        (BilevelEpsilonGreedy, {"rollout_horizon": 0}, r"rollout_horizon is 0.*Fix"),
    ],
)
def test_impossible_schedules_are_refused(kind: Any, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(DISCRETE, 2, 0, **kwargs)


def test_gin_sets_the_schedule_but_not_the_arguments_of_the_code() -> None:
    gin.parse_config("BilevelEpsilonGreedy.rollout_horizon = 7\nEpsilonGreedy.eps_end = 0.3")
    assert BilevelEpsilonGreedy(DISCRETE, 2, 0).rollout_horizon == 7
    assert EpsilonGreedy(DISCRETE, 2, 0).eps_end == 0.3
    with pytest.raises(ValueError, match="num_envs"):
        gin.parse_config("EpsilonGreedy.num_envs = 3")


def test_a_call_may_count_for_several_processes_that_explore_alike() -> None:
    noise = EpsilonGreedy(DISCRETE, 6, 0, eps_start=1.0, eps_end=0.0, steps_anneal=100, randomize_eps=False)
    noise.steps_per_call = 4
    for _ in range(10):
        noise.add_exploration_noise(np.zeros(6, int), ZEROS)
    np.testing.assert_allclose(noise.current_eps(ZEROS), 0.6)
