"""Environments of other packages that have an extra."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from loxodon.envs import KShotWrapper, gym_env
from loxodon.envs.builtin import HalfCheetahVelocity, atari_env
from loxodon.envs.sequence_env import METRIC_PREFIX


def test_atari_games_are_grey_pictures_with_sticky_actions() -> None:
    pytest.importorskip("ale_py")
    env = atari_env("Pong").build()
    assert env.observation_space["observation"] == spaces.Box(0, 255, (84, 84, 1), np.uint8)
    assert env.action_space == spaces.Discrete(6)
    env.reset(seed=0)
    steps = [env.step(2) for _ in range(150)]
    assert np.ptp(steps[-1][0]["observation"]) > 0
    assert min(step[1] for step in steps) == -1.0  # a point was lost; rewards come as they are
    assert atari_env("Pong", screen_size=64, all_actions=True).build().action_space == spaces.Discrete(18)
    with pytest.raises(ValueError, match=r"'ALE/Pogn-v5'.*Did you mean 'ALE/Pong-v5'"):
        atari_env("Pogn").build()


def test_cheetahs_are_paid_for_the_wanted_velocity() -> None:
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


def test_attempts_of_a_cheetah_want_one_velocity() -> None:
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


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("dm_control/cartpole-balance-v0", "shimmy", "dm_control"),
        ("MiniGrid-MemoryS7-v0", "minigrid", "envs"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    env_id: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}, which is not installed.*\[{extra}\]"):
        gym_env(env_id).build()
