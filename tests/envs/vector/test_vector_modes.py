"""The choice of a mode."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from scripted_envs import ScriptedEnv

from loxodon.envs import AsyncVectorEnv, EnvSpec, SyncVectorEnv, make_vector_env


def test_async_halves_must_alternate(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv)] * 2)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"without step_async.*Fix"):
        env.step_wait()
    env.step_async([0, 0])
    with pytest.raises(RuntimeError, match=r"twice.*Fix"):
        env.step_async([0, 0])
    assert env.step_wait()[1].tolist() == [10.0, 10.0]


@pytest.mark.parametrize(("speeds", "chosen"), [((9.0, 8.0), "sync"), ((8.0, 9.0), "async")])
def test_auto_chooses_the_faster_mode_and_logs_it(
    speeds: tuple[float, float],
    chosen: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter(speeds)
    monkeypatch.setattr("loxodon.envs.vector.make._steps_per_s", lambda _: next(measured))
    with caplog.at_level(logging.INFO, logger="loxodon"):
        env = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "auto", num_workers=1)
    assert type(env) is {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[chosen]
    assert [
        f"auto chose {chosen}: {speeds[0]:.0f} env steps/s in process" in r.message for r in caplog.records
    ] == [True]
    env.close()


def test_auto_measures_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loxodon.envs.vector.make.AUTO_TRIAL_S", 0.02)
    env = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "auto", num_workers=1)
    obs, _ = env.reset(seed=3)
    np.testing.assert_array_equal(obs["observation"], [[3, 0, 0], [4, 0, 0]])
    env.close()


@pytest.mark.parametrize(
    ("num_envs", "kwargs", "words"),
    [
        (1, {"mode": "asink"}, r"env_mode is 'asink'.*'async'.*Fix"),
        (1, {"mode": "async", "context": "forc"}, r"async_env_mp_context is 'forc'.*'fork'.*Fix"),
        (1, {"mode": "async", "num_workers": 0}, r"num_workers is 0.*Fix"),
        (0, {"mode": "sync"}, r"no environments.*parallel_actors"),
    ],
)
def test_impossible_choices_are_refused(num_envs: int, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_vector_env([EnvSpec(ScriptedEnv)] * num_envs, **kwargs)
