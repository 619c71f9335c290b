"""Shared code of the scripts in this folder: settings of a run, environments, and greedy evaluation."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

ActFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
EVAL_SEED = 10_000


@dataclass(frozen=True)
class Settings:
    """One training run, in terms that all libraries share.

    env: gymnasium id. obs_indices: the visible entries of the observation; None for all. rollout: timesteps
    per environment between updates. updates: number of rollouts in the run. evaluate_every: rollouts between
    evaluations. minibatches: number per pass over a rollout. hidden: widths of the layers of the policy and
    of the value function, tanh in the peers. lstm: hidden units of the LSTM before them; 0 for none.
    lstm_critic: `shared` with the policy, or its `own`. critic_loss_weight: weight of the mean squared error.
    normalize: standardise observations and values by running statistics. The learning rate falls linearly to
    zero over the run. threads: number of torch threads.
    """

    env: str
    updates: int
    evaluate_every: int
    obs_indices: tuple[int, ...] | None = None
    seed: int = 0
    threads: int = 2
    num_envs: int = 8
    rollout: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lam: float = 0.95
    clip_eps: float = 0.2
    entropy_coef: float = 0.0
    critic_loss_weight: float = 0.5
    grad_clip: float = 0.5
    hidden: tuple[int, ...] = (64, 64)
    lstm: int = 0
    lstm_critic: str = "shared"
    normalize: bool = False
    eval_episodes: int = 20

    @property
    def env_steps_per_update(self) -> int:
        """Env steps of one rollout, over all environments."""
        return self.num_envs * self.rollout


class ShownEntries(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Shows only some entries of a flat observation, to hide velocities, for example."""

    def __init__(self, env: gym.Env[np.ndarray, Any], indices: tuple[int, ...]) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, gym.spaces.Box):
            raise TypeError(f"The observation space is {box}, not a Box. Fix: set obs_indices to None.")
        self.indices = list(indices)
        self.observation_space = gym.spaces.Box(
            box.low[self.indices], box.high[self.indices], dtype=box.dtype.type
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self.indices]


def env_makers(settings: Settings, number: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    """Factories of `number` environments, for the vector environments of gymnasium and SB3."""

    def make() -> gym.Env[Any, Any]:
        env = gym.make(settings.env)
        return env if settings.obs_indices is None else ShownEntries(env, settings.obs_indices)

    return [make] * number


def make_eval_envs(settings: Settings) -> gym.vector.VectorEnv[Any, Any, Any]:
    """One environment per episode of an evaluation."""
    return gym.vector.SyncVectorEnv(env_makers(settings, settings.eval_episodes))


def mean_return(envs: gym.vector.VectorEnv[Any, Any, Any], act: ActFn) -> float:
    """Mean return of one episode in each environment.

    act: takes observations (N, ...) and is_first (N,) bool, returns actions. Environments wait after their
    first episode, so that short episodes do not count more often.
    """
    obs, _ = envs.reset(seed=EVAL_SEED)
    is_first, running = np.ones(envs.num_envs, bool), np.ones(envs.num_envs, bool)
    returns = np.zeros(envs.num_envs)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(act(obs, is_first))
        returns += np.where(running, rewards, 0.0)
        running &= ~(terminated | truncated)
        is_first = np.zeros(envs.num_envs, bool)
    return float(returns.mean())


def read_settings() -> Settings:
    """Read the settings from the only command-line argument, a JSON object."""
    given = json.loads(sys.argv[1])
    for key in ("obs_indices", "hidden"):
        given[key] = None if given.get(key) is None else tuple(given[key])
    return Settings(**given)


def report_run(settings: Settings, train: Callable[[int], None], act: ActFn, about: dict[str, Any]) -> None:
    """Train between evaluations, and print a JSON line per evaluation; evaluations are not timed.

    train: called with a number of rollouts. about: information that is printed first.
    """
    print(json.dumps(about), flush=True)
    envs, seconds, updates = make_eval_envs(settings), 0.0, 0
    while updates < settings.updates:
        number = min(settings.evaluate_every, settings.updates - updates)
        start_s = time.perf_counter()
        train(number)
        seconds += time.perf_counter() - start_s
        updates += number
        figures = {
            "env_steps": updates * settings.env_steps_per_update,
            "seconds": round(seconds, 3),
            "return": round(mean_return(envs, act), 2),
        }
        print(json.dumps(figures), flush=True)
    envs.close()
