"""A tiny task, demonstrations of it, and on-policy runs on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from loxodon.agents import PPOAgent
from loxodon.data import DoNothingDataset, MemoryTrajDataset, Trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.optional.pretraining import Pretraining
from loxodon.experiment.ppo import PPOLearner
from loxodon.nets import FFTstepEncoder, IdentityTrajEncoder

from .fakes import make_experiment, run

ENCODER = partial(FFTstepEncoder, n_layers=1, d_hidden=32, d_output=32)
STEPS = 8


class Copy(gym.Env[np.ndarray, Any]):
    """Shows a number; the same number as the action gives reward 1. Episodes end after 8 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, kind: str = "discrete") -> None:
        self.kind = kind
        self.action_space = {
            "discrete": spaces.Discrete(3),
            "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
            "multi": spaces.MultiDiscrete([3, 3]),
        }[kind]

    def _obs(self) -> np.ndarray:
        self.shown = np.eye(3, dtype=np.float32)[self.np_random.integers(3)]
        return self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = STEPS
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        if self.kind == "box":
            reward = float(np.abs(action - expert(self.shown, "box")).max() < 0.3)
        else:
            reward = float(np.all(np.asarray(action) == self.shown.argmax()))
        return self._obs(), reward, self.left == 0, False, {}


def expert(obs: np.ndarray, kind: str) -> np.ndarray:
    return 0.5 - obs if kind == "box" else obs.argmax(-1)


def demonstration(seed: int, kind: str = "discrete") -> Trajectory:
    obs = np.eye(3, dtype=np.float32)[np.random.default_rng(seed).integers(3, size=STEPS + 1)]
    best = expert(obs[:-1], kind)
    rows = {
        "discrete": lambda: np.eye(3, dtype=np.float32)[best],
        "multi": lambda: np.tile(np.eye(3, dtype=np.float32)[best], 2),
        "box": lambda: best.astype(np.float32),
    }[kind]()
    rewards = np.ones((STEPS, 1), np.float32)
    rl2s = np.zeros((STEPS + 1, 1 + rows.shape[1]), np.float32)
    rl2s[1:] = np.concatenate([rewards, rows], axis=1)
    dones = np.zeros((STEPS, 1), bool)
    dones[-1] = True
    times = np.arange(STEPS + 1)[:, None]
    nvec = (3, 3) if kind == "multi" else None
    return Trajectory({"observation": obs}, rl2s, times, rows, rewards, dones, nvec=nvec)


def demos(kind: str = "discrete", count: int = 20) -> MemoryTrajDataset:
    return MemoryTrajDataset([demonstration(seed, kind) for seed in range(count)])


def make_ppo(folder: Path, kind: str = "discrete", **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "agent_type": PPOAgent,
        "tstep_encoder_type": ENCODER,
        "traj_encoder_type": IdentityTrajEncoder,
        "dataset": DoNothingDataset(),
        "on_policy_learner_type": partial(PPOLearner, update_epochs=1, minibatches=2),
        "make_train_env": EnvSpec(Copy, {"kind": kind}),
        "make_val_env": EnvSpec(Copy, {"kind": kind}),
        "exploration_wrapper_type": None,
        "sample_actions_val": False,
        "val_timesteps_per_epoch": 24,
        "train_timesteps_per_epoch": 8,
        "critic_loss_weight": 0.5,
        "learning_rate": 3e-4,
        "epochs": 1,
    }
    return make_experiment(folder, **{**settings, **changes})


def stage(dataset: Any = None, **changes: Any) -> Any:
    settings = {"num_batches": 150, "batch_size": 16, "learning_rate": 1e-2, **changes}
    made = Pretraining(dataset or demos(), **settings)
    return lambda: made


def weights_of(exp: Experiment) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in exp.policy.state_dict().items()}


def pretrained(exp: Experiment) -> dict[str, torch.Tensor]:
    """The weights just before the first epoch collects."""
    found: dict[str, torch.Tensor] = {}
    real = exp.collect_new_training_data

    def collect() -> Any:
        found.update(found or weights_of(exp))
        return real()

    exp.collect_new_training_data = collect  # type: ignore[method-assign]
    run(exp)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
