"""A rollout in environments that disallow some actions at every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.agents import Agent, DQNAgent, PPOAgent
from loxodon.envs import EnvSpec, EpsilonGreedy, make_vector_env
from loxodon.experiment import Collector
from loxodon.experiment.collect import RolloutGroup
from loxodon.nets import FFTrajEncoder, FFTstepEncoder

from .test_collector import RecordingSink

NVEC = (3, 4)


class StrictEnv(gym.Env[Any, Any]):
    """Fails on an action that its newest observation did not allow. Episodes have 8 steps."""

    def __init__(self, is_single: bool) -> None:
        self.nvec = (4,) if is_single else NVEC
        self.action_space = spaces.Discrete(4) if is_single else spaces.MultiDiscrete(NVEC)
        allowed = spaces.MultiBinary(sum(self.nvec))
        self.observation_space = spaces.Dict(
            {"allowed": allowed, "observation": spaces.Box(-9, 9, (2,), np.float32)}
        )

    def _obs(self) -> Any:
        parts = [self.np_random.integers(0, 2, n) for n in self.nvec]
        for part in parts:
            part[self.np_random.integers(len(part))] = 1
        self.allowed = parts
        state = self.np_random.normal(size=2).clip(-9, 9).astype(np.float32)
        return {"allowed": np.concatenate(parts).astype(np.int8), "observation": state}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert all(part[a] for part, a in zip(self.allowed, np.atleast_1d(action), strict=True))
        self.t += 1
        return self._obs(), 0.0, False, self.t == 8, {}


@pytest.mark.parametrize("kind", [Agent, DQNAgent, PPOAgent])
@pytest.mark.parametrize("is_single", [True, False])
def test_disallowed_actions_are_never_taken(kind: Any, is_single: bool) -> None:
    if kind is DQNAgent and not is_single:
        return
    envs = make_vector_env([EnvSpec(StrictEnv, {"is_single": is_single})] * 8, "sync")
    torch.manual_seed(0)
    tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8)
    obs_space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    encoder = partial(FFTrajEncoder, d_model=8)
    agent = kind(obs_space, action_space, tstep, encoder, 8, action_mask_key="allowed").eval()
    noise, sink = (
        EpsilonGreedy(action_space, 8, 0, eps_start=1.0, eps_end=0.0, steps_anneal=60),
        RecordingSink(),
    )
    collector = Collector([RolloutGroup(envs, noise, [sink])], agent, torch.device("cpu"), True)
    collector.restart(seed=0)
    collector.collect(80)
    assert len(sink.added) == 80
    envs.close()
