"""The choice of a mode."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_envs import ScriptedEnv

from loxodon.envs import EnvSpec, make_vector_env


def test_async_halves_must_alternate(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv)] * 2)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"without step_async.*Fix"):
        env.step_wait()
    env.step_async([0, 0])
    with pytest.raises(RuntimeError, match=r"twice.*Fix"):
        env.step_async([0, 0])
    assert env.step_wait()[1].tolist() == [10.0, 10.0]


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
