"""One contract for every kind of vector environment, checked on scripted environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from scripted_envs import ScriptedEnv, SpacesEnv, SubclassOfScripted, make_scripted
from vector_builders import KINDS, VECTORIZED_MODES, build

from loxodon.envs import EnvError, EnvSpec, resolve_env

NUM_ENVS = 5


def expected_stream(seeds: list[int], actions: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """The expected stream of the scripted environments, from a plain loop."""
    envs = [ScriptedEnv() for _ in seeds]
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    for row_actions in actions:
        results = [env.step(int(a)) for env, a in zip(envs, row_actions, strict=True)]
        final = np.stack([obs for obs, *_ in results])
        obs = np.stack(
            [
                env.reset()[0] if result[2] or result[3] else result[0]
                for env, result in zip(envs, results, strict=True)
            ]
        )
        metrics = [(i, "final_time", r[4]["metric/final_time"]) for i, r in enumerate(results) if r[4]]
        rewards, terminated, truncated = (np.array([r[k] for r in results]) for k in (1, 2, 3))
        yield obs, final, rewards, terminated, truncated, metrics


@pytest.mark.parametrize("kind", KINDS)
def test_streams_equal_a_plain_loop(kind: str, opened: Any) -> None:
    """Observations, rewards, ends, final observations, metrics, names, frames, spaces and dtypes agree."""
    has_own_batch = kind in VECTORIZED_MODES
    env = opened(kind, [EnvSpec(ScriptedEnv, {"num_names": 2})] * NUM_ENVS)
    assert env.num_envs == NUM_ENVS
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.single_action_space == gym.spaces.Discrete(4)
    assert env.action_space.shape == (NUM_ENVS,)
    assert env.observation_space["observation"].shape == (NUM_ENVS, 3)
    actions = np.random.default_rng(0).integers(4, size=(20, NUM_ENVS))
    obs, infos = env.reset(seed=7)
    np.testing.assert_array_equal(obs["observation"], [[7 + i, 0, 0] for i in range(NUM_ENVS)])
    assert "final_obs" not in infos
    seen, kept = {"terminated": 0, "truncated": 0}, []
    stream = expected_stream([7 + i for i in range(NUM_ENVS)], actions)
    for row_actions, expected in zip(actions, stream, strict=True):
        want_obs, want_final, *want_flags, want_metrics = expected
        obs, rewards, terminated, truncated, infos = env.step(row_actions)
        assert env.observation_space.contains(obs)
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)
        np.testing.assert_array_equal(obs["observation"], want_obs)
        for got, want in zip((rewards, terminated, truncated), want_flags, strict=True):
            np.testing.assert_array_equal(got, want)
        ended = terminated | truncated
        assert ("final_obs" in infos) == ended.any()
        if ended.any():
            np.testing.assert_array_equal(infos["_final_obs"], ended)
            np.testing.assert_array_equal(infos["final_obs"]["observation"][ended], want_final[ended])
        assert [tuple(m) for m in infos.get("metrics", [])] == want_metrics
        seen["terminated"] += int(terminated.sum())
        seen["truncated"] += int(truncated.sum())
        names = env.env_names
        kept.append((rewards, want_flags[0], names, list(names)))
        if not has_own_batch:
            assert names == [f"scripted{int(episode) % 2}" for episode in want_obs[:, 1]]
    assert min(seen.values()) > 5  # both kinds of ending occurred
    for rewards, expected_rewards, names, names_then in kept:  # only observations are reused
        np.testing.assert_array_equal(rewards, expected_rewards)
        assert names == names_then
    if not has_own_batch:
        assert [frame.tolist() for frame in env.render()] == [[[t] * 2] * 2 for t in want_obs[:, 2]]


def test_a_list_of_seeds_must_have_one_per_row(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv)] * 3)
    obs, _ = env.reset(seed=[4, 9, None])
    np.testing.assert_array_equal(obs["observation"][:, 0], [4, 9, 0])
    with pytest.raises(ValueError, match=r"2 seeds for 3 environments.*Fix"):
        env.reset(seed=[1, 2])


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_box_actions_and_nested_observations_are_supported(kind: str, opened: Any) -> None:
    obs_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "parts": gym.spaces.Tuple([gym.spaces.Discrete(5, start=2), gym.spaces.MultiBinary(3)]),
        }
    )
    spec = EnvSpec(
        SpacesEnv, {"action_space": gym.spaces.Box(0, 4, (2, 3), np.float64), "observation_space": obs_space}
    )
    env = opened(kind, [spec] * 3)
    assert env.single_action_space == gym.spaces.Box(-1, 1, (6,), np.float32)
    assert sorted(env.single_observation_space) == ["image", "parts/0", "parts/1"]
    obs, _ = env.reset(seed=0)
    assert obs["image"].dtype == np.uint8
    assert obs["image"].any()
    assert obs["parts/0"].max() < 5
    obs, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_every_actor_may_have_its_own_callable(kind: str, opened: Any) -> None:
    """The actors are a class, a function, and a recipe with a fixed name; names change with episodes."""
    own = EnvSpec(ScriptedEnv, {"gain": 3.0}, env_name="own")
    makers = [SubclassOfScripted, make_scripted, EnvSpec(ScriptedEnv, {"num_names": 3}), own]
    env = opened(kind, [resolve_env(maker) for maker in makers])
    env.reset(seed=0)
    assert env.env_names == ["scripted0", "scripted0", "scripted0", "own"]
    seen = {tuple(env.env_names)}
    for _ in range(12):
        _, rewards, *_ = env.step(np.zeros(4, np.int64))
        assert rewards[3] % 30 == 0  # only this one has a gain
        seen.add(tuple(env.env_names))
    assert {names[2] for names in seen} == {"scripted0", "scripted1", "scripted2"}
    assert {names[:2] + names[3:] for names in seen} == {("scripted0", "scripted0", "own")}


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_disagreeing_spaces_are_refused(kind: str) -> None:
    other = EnvSpec(SpacesEnv, {"action_space": gym.spaces.Discrete(4)})
    with pytest.raises(EnvError, match=r"(?s)Environment 1 \(SpacesEnv\) has observations.*Fix"):
        build(kind, [EnvSpec(ScriptedEnv), other])
