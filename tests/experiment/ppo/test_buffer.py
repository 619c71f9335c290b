"""The rollout buffer returns every stored step exactly once, and sequences cover it exactly once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.experiment.ppo import RolloutBuffer
from loxodon.experiment.ppo.buffer import CollectedRollout
from loxodon.experiment.ppo.sequences import Pieces, cut, shuffled_minibatches
from loxodon.nets import GRUTrajEncoder

from .rollouts import make_agent, make_collector, make_learner, no_advantage_norm

N, T = 2, 4


def make_buffer(**kwargs: Any) -> RolloutBuffer:
    return RolloutBuffer(N, T, **{"chunk_len": 2, **kwargs})


def timestep(number: float) -> dict[str, Any]:
    """Observations of all envs, number + 100 * env, with rl2s and time indices."""
    obs = {"x": np.float32([[number], [number + 100]])}
    return {
        "obs": obs,
        "rl2s": np.full((N, 3), number, np.float32),
        "time_idxs": np.full((N, 1), int(number), np.int64),
    }


def begin(buffer: RolloutBuffer, number: float = 0.0) -> None:
    step = timestep(number)
    buffer.begin(np.arange(N), step["obs"], step["rl2s"], step["time_idxs"], ["a"] * N)


def add(buffer: RolloutBuffer, number: float, **changes: Any) -> None:
    """Add a step that leads to timestep `number`."""
    given = {
        "actions": np.full(N, number, np.int64),
        "rewards": np.full(N, number, np.float32),
        "terminated": np.zeros(N, bool),
        "ended": np.zeros(N, bool),
        "extras": {"log_probs": np.full((N, 1), -number, np.float32)},
        **timestep(number),
    }
    buffer.add(**{**given, **changes})


def test_an_unfinished_rollout_is_refused() -> None:
    buffer = make_buffer()
    with pytest.raises(ValueError, match=r"holds 0 of its 4 steps.*Fix:"):
        buffer.read()
    begin(buffer)
    for number in (1, 2):
        add(buffer, number)
    with pytest.raises(ValueError, match=r"holds 2 of its 4 steps.*Fix:"):
        buffer.read()


def test_extras_that_are_missing_at_some_steps_are_refused() -> None:
    buffer = make_buffer()
    begin(buffer)
    for number in (1, 2):
        add(buffer, number)
    with pytest.raises(ValueError, match=r"Step 2 of the rollout has .*valid, but.*valid, log_probs.*Fix:"):
        add(buffer, 3, extras=None)


# ---- sequences ----


def make_rollout(valid: np.ndarray, resets: np.ndarray, history: int = 0) -> CollectedRollout:
    """valid: (N, T) bool. resets: (N, T) bool, first timesteps of episodes."""
    num_envs, num_steps = valid.shape
    rows = np.zeros((history + num_steps + 1, num_envs), bool)
    rows[history : history + num_steps] = resets.T
    ages = np.zeros((len(rows), num_envs, 1), np.int64)
    for n in range(num_envs):
        age = 3  # episodes that began earlier
        for t in range(len(rows)):
            age = 0 if rows[t, n] else age + 1
            ages[t, n] = age
    states = {step: {"h": torch.zeros(num_envs, 1)} for step in range(num_steps)}
    return CollectedRollout(
        history, {}, np.zeros(0), ages, rows, np.zeros(num_envs, np.int64), {"valid": valid.T}, [], states
    )


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[CollectedRollout, int, int | None]:
    num_envs, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    valid = rng.random((num_envs, num_steps)) < draw(st.sampled_from([0.7, 0.95, 1.0]))
    resets = rng.random((num_envs, num_steps)) < draw(st.sampled_from([0.0, 0.2, 0.6]))
    history = draw(st.integers(0, 3))
    context = draw(st.sampled_from([None, history])) if history else None
    return make_rollout(valid, resets, history), draw(st.integers(1, num_steps)), context


@given(rollouts())
@settings(max_examples=150, deadline=None)
def test_pieces_cover_the_valid_steps_and_cross_no_episode_border(
    given_: tuple[CollectedRollout, int, int | None],
) -> None:
    rollout, chunk_len, context = given_
    valid, seen = rollout.steps["valid"], np.zeros(rollout.steps["valid"].shape, int)
    resets = rollout.resets[rollout.history :]
    pieces = cut(rollout, chunk_len, context=context)
    for n, first, length, prefix, start in zip(
        pieces.envs, pieces.firsts, pieces.lengths, pieces.prefixes, pieces.starts, strict=True
    ):
        seen[first : first + length, n] += 1
        assert length >= 1
        assert not resets[first + 1 : first + length, n].any()
        assert first // chunk_len == (first + length - 1) // chunk_len
        before = rollout.resets[rollout.history + first - prefix + 1 : rollout.history + first + 1, n]
        assert prefix == 0 or not before.any()  # the prefix belongs to the same episode
        assert prefix <= rollout.history + first
        if resets[first, n]:
            assert (prefix, start) == (0, np.iinfo(np.int64).min)
        elif context is None:
            assert start == first
    assert np.array_equal(seen, valid.astype(int))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_piece_is_in_one_minibatch_of_every_pass(lengths: list[int], count: int, seed: int) -> None:
    number = len(lengths)
    zeros = np.zeros(number, np.int64)
    pieces = Pieces(np.arange(number), zeros, np.array(lengths), zeros, zeros)
    groups = shuffled_minibatches(pieces, count, np.random.default_rng(seed))
    assert len(groups) == count
    assert all(len(group) for group in groups)
    # all processes make the same number of updates, however few pieces one of them has
    idle = groups[number:]
    assert not sum(group.lengths.sum() for group in idle)
    groups = groups[:number]
    assert sorted(np.concatenate([group.envs for group in groups])) == list(range(number))
    for group in groups:
        assert np.array_equal(group.lengths, pieces.lengths[group.envs])
    again = shuffled_minibatches(pieces, count, np.random.default_rng(seed))[:number]
    assert all(np.array_equal(a.envs, b.envs) for a, b in zip(groups, again, strict=True))
    if number >= 4 * count:
        sizes = [group.lengths.sum() for group in groups]
        assert max(sizes) - min(sizes) <= 3 * max(lengths)


def test_minibatches_hold_every_step_once_and_in_order() -> None:
    """The test observes the batches that the learner computes losses from."""
    agent = make_agent(partial(GRUTrajEncoder, d_hidden=8, d_output=8))
    learner = make_learner(agent, 8, 4, chunk_len=4, minibatches=3, update_epochs=2, batches_per_update=2)
    collector = make_collector(agent, learner)
    seen: list[list[float]] = []
    update = learner.learner.update

    def watching(batches: Any, *args: Any, **kwargs: Any) -> Any:
        for batch in batches:
            for obs, time_idxs, mask in zip(
                batch.obs["observation"], batch.time_idxs[..., 0], batch.mask[..., 0], strict=True
            ):
                assert (time_idxs[mask].diff() == 1).all()
                seen.extend(obs[mask].tolist())
        return update(batches, *args, **kwargs)

    learner.learner.update = watching  # type: ignore[method-assign]
    collector.collect(8)
    expected = learner.buffers[0].read().obs["observation"][:8].reshape(32, 3).tolist()
    learner.learn_from_rollout(0)
    assert sorted(seen) == sorted(expected + expected)


def test_advantages_that_are_nan_are_reported_before_the_first_update() -> None:
    agent = make_agent(partial(GRUTrajEncoder, d_hidden=8, d_output=8))
    learner = make_learner(agent, 8, 4, minibatches=1, advantage_norm=no_advantage_norm)
    collector = make_collector(agent, learner)
    collector.collect(8)
    judge = learner._prepare

    def spoilt(*args: Any) -> Any:
        results, figures = judge(*args)
        results["advantages"][5] = float("nan")
        return results, figures

    learner._prepare = spoilt  # type: ignore[method-assign]
    words = r"actor loss is nan \(first at .*; 1 of .*the batch's advantages is not finite \(first at .*Fix:"
    with pytest.raises(FloatingPointError, match=words):
        learner.learn_from_rollout(0)
