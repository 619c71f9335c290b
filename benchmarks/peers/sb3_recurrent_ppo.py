"""Recurrent PPO with sb3-contrib, set up according to its documentation. Started by ../peers_ppo.py.

    cd benchmarks && PYTHON_OF_THE_PEERS -m peers.sb3_recurrent_ppo '{"env": "CartPole-v1", "updates": 10,
        "evaluate_every": 10, "obs_indices": [0, 2], "hidden": [64], "lstm": 64}'

In sb3-contrib, a shared LSTM learns only from the policy's gradient. `lstm_critic` = `own` gives the critic a
separate LSTM, which is the library's default.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sb3_contrib
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from torch import nn

from .common import Settings, env_makers, read_settings, report_run


def make_envs(settings: Settings) -> VecEnv:
    """Make the environments; with `normalize`, the library standardises observations and scales rewards."""
    envs = DummyVecEnv(env_makers(settings, settings.num_envs))
    return VecNormalize(envs, gamma=settings.gamma) if settings.normalize else envs


def make_model(settings: Settings) -> Any:
    """Build the model from the settings; nothing is written to disk."""
    has_own = settings.lstm_critic == "own"
    models: list[Any] = []

    def learning_rate(_: float) -> float:
        """Linear decay over the whole run; the argument only covers a single call of learn()."""
        total = settings.updates * settings.env_steps_per_update
        return settings.learning_rate * max(0.0, 1 - (models[0].num_timesteps if models else 0) / total)

    widths = list(settings.hidden)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_envs(settings),
        learning_rate=learning_rate,
        n_steps=settings.rollout,
        batch_size=settings.env_steps_per_update // settings.minibatches,
        n_epochs=settings.epochs,
        gamma=settings.gamma,
        gae_lambda=settings.lam,
        clip_range=settings.clip_eps,
        clip_range_vf=None,
        ent_coef=settings.entropy_coef,
        vf_coef=settings.critic_loss_weight,
        max_grad_norm=settings.grad_clip,
        policy_kwargs={
            "lstm_hidden_size": settings.lstm,
            "n_lstm_layers": 1,
            "shared_lstm": not has_own,
            "enable_critic_lstm": has_own,
            "net_arch": {"pi": widths, "vf": widths},
            "activation_fn": nn.Tanh,
        },
        seed=settings.seed,
        device="cpu",
        verbose=0,
    )
    models.append(model)
    return model


def main() -> None:
    """Train, and report by `report_run`."""
    settings = read_settings()
    torch.set_num_threads(settings.threads)
    model, state = make_model(settings), None

    def train(updates: int) -> None:
        model.learn(updates * settings.env_steps_per_update, reset_num_timesteps=model.num_timesteps == 0)

    def act(obs: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        nonlocal state
        statistics = model.get_vec_normalize_env()
        obs = obs if statistics is None else statistics.normalize_obs(obs)
        actions, state = model.predict(
            obs, state=None if is_first.all() else state, episode_start=is_first, deterministic=True
        )
        return np.asarray(actions)

    parameters = sum(parameter.numel() for parameter in model.policy.parameters())
    about = {"peer": "sb3-contrib", "version": sb3_contrib.__version__, "torch": torch.__version__}
    report_run(settings, train, act, {**about, "parameters": parameters})


if __name__ == "__main__":
    main()
