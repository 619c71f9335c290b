"""Environments of other packages that are optional extras."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from loxodon.envs import KShotWrapper, gym_env
from loxodon.envs.builtin import HalfCheetahVelocity, MetaWorld, atari_env
from loxodon.envs.returned import METRIC_PREFIX
from loxodon.envs.vector.adapter import AlreadyVectorizedEnv


def test_atari_games_are_grey_images_with_sticky_actions() -> None:
    pytest.importorskip("ale_py")
    env = atari_env("Pong").build()
    assert env.observation_space["observation"] == spaces.Box(0, 255, (84, 84, 1), np.uint8)
    assert env.action_space == spaces.Discrete(6)
    env.reset(seed=0)
    steps = [env.step(2) for _ in range(150)]
    assert np.ptp(steps[-1][0]["observation"]) > 0
    assert min(step[1] for step in steps) == -1.0  # a point was lost; rewards are not changed
    assert atari_env("Pong", screen_size=64, all_actions=True).build().action_space == spaces.Discrete(18)
    with pytest.raises(ValueError, match=r"'ALE/Pogn-v5'.*Did you mean 'ALE/Pong-v5'"):
        atari_env("Pogn").build()


def test_cheetahs_are_rewarded_for_the_wanted_velocity() -> None:
    pytest.importorskip("mujoco")
    env = HalfCheetahVelocity(time_limit=60)
    env.reset(seed=0)
    first = env.wanted
    assert 0.0 <= first <= 3.0
    info: dict[str, Any] = {}
    truncated, errors = False, []
    x = env.unwrapped.data.qpos[0]  # type: ignore[attr-defined]
    while not truncated:
        action = env.action_space.sample()
        _, reward, terminated, truncated, info = env.step(action)
        x, before = env.unwrapped.data.qpos[0], x  # type: ignore[attr-defined]
        errors.append(abs((x - before) / env.unwrapped.dt - first))  # type: ignore[attr-defined]
        assert reward == pytest.approx(-errors[-1] - 0.05 * np.square(action).sum(), abs=1e-5)
        assert not terminated
    assert len(errors) == 60
    assert info[METRIC_PREFIX + "velocity_error"] == pytest.approx(np.mean(errors[-50:]), abs=1e-5)
    env.reset()
    assert env.wanted != first


@pytest.mark.parametrize(("setting", "wrong"), [("time_limit", -1), ("slowest", 4.0), ("fastest", math.nan)])
def test_impossible_settings_of_cheetahs_are_refused(setting: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"HalfCheetahVelocity.{setting} is {wrong}.*Fix"):
        HalfCheetahVelocity(**{setting: wrong})


def test_attempts_of_a_cheetah_share_one_velocity() -> None:
    pytest.importorskip("mujoco")
    env = HalfCheetahVelocity(time_limit=5)
    trial = KShotWrapper(env, num_attempts=2)
    trial.reset(seed=0)
    first = env.wanted
    for t in range(10):
        *_, truncated, _ = trial.step(np.zeros(6, np.float32))
        assert env.wanted == first
        assert truncated == (t == 9)
    trial.reset()
    assert env.wanted != first


def test_meta_world_draws_goals_and_keeps_them_within_a_trial() -> None:
    pytest.importorskip("metaworld")
    env = MetaWorld("ML1", "reach-v3")
    first, _ = env.reset(seed=0)
    goal = env.env._last_rand_vec.copy()
    env.reset(options={"keep_task": True})
    np.testing.assert_array_equal(env.env._last_rand_vec, goal)
    env.reset()
    assert not np.array_equal(env.env._last_rand_vec, goal)
    again, _ = MetaWorld("ML1", "reach-v3").reset(seed=0)
    np.testing.assert_array_equal(again, first)
    for t in range(500):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        assert (terminated, truncated) == (False, t == 499)
    assert info == {METRIC_PREFIX + "success": 0.0}
    with pytest.raises(ValueError, match=r"MetaWorld.task is 'reach'; allowed are .*reach-v3.*Fix"):
        MetaWorld("ML1", "reach")


@pytest.mark.filterwarnings("ignore:.*precision lowered")
@pytest.mark.parametrize(
    ("package", "env_id", "length"),
    [
        ("gymnax", "gymnax/Catch-bsuite", 9),
        ("xminigrid", "xminigrid/MiniGrid-Empty-5x5", 150),
        ("envpool", "envpool/CartPole-v1", 200),
    ],
)
def test_batches_of_other_packages_run_and_are_reproducible_from_one_seed(
    package: str, env_id: str, length: int
) -> None:
    pytest.importorskip(package)

    def run() -> tuple[list[Any], int, AlreadyVectorizedEnv]:
        env = AlreadyVectorizedEnv([gym_env(env_id)] * 3)
        seen, num_ended = [{k: x.copy() for k, x in env.reset(seed=5)[0].items()}], 0
        for _ in range(length):
            obs, rewards, terminated, truncated, _ = env.step(np.zeros(3, np.int64))
            num_ended += int((terminated | truncated).sum())
            seen.append({"rewards": rewards.copy(), **{k: x.copy() for k, x in obs.items()}})
        return seen, num_ended, env

    one, num_ended, env = run()
    np.testing.assert_equal(run()[0], one)
    assert num_ended >= 3
    if env.state_problem() is None:
        states = env.get_states()
        first = [x.copy() for x in env.step(np.ones(3, np.int64))[0].values()]
        other = AlreadyVectorizedEnv([gym_env(env_id)] * 3)
        other.reset(seed=0)
        other.set_states(states)
        np.testing.assert_equal([*other.step(np.ones(3, np.int64))[0].values()], first)
    else:
        assert package == "envpool"


def test_a_world_without_a_goal_and_unknown_parameters_are_refused() -> None:
    pytest.importorskip("xminigrid")
    with pytest.raises(ValueError, match=r"XLand-MiniGrid-R1-9x9 has no goal.*Fix"):
        gym_env("xminigrid/XLand-MiniGrid-R1-9x9").build_vector(2)
    with pytest.raises(ValueError, match=r"has no parameter haste, only height.*Fix"):
        gym_env("xminigrid/MiniGrid-Empty-5x5", kwargs={"haste": 3}).build_vector(2)


@pytest.mark.parametrize(
    ("env_id", "package", "absent", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "ale_py", "atari"),
        ("dm_control/cartpole-balance-v0", "shimmy", "shimmy", "dm_control"),
        ("MiniGrid-MemoryS7-v0", "minigrid", "minigrid", "envs"),
        ("gymnax/CartPole-v1", "gymnax", "gymnax", "jax"),
        ("gymnax/CartPole-v1", "gymnax", "six", "jax"),  # gymnax imports it
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    env_id: str, package: str, absent: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=rf"{absent}, which is not installed.*\[{extra}\]"):
        gym_env(env_id).build()
