"""Feed-forward PPO with skrl, set up according to its documentation. Started by ../peers_ppo.py.

    cd benchmarks && PYTHON_OF_THE_PEERS -m peers.skrl_ppo '{"env": "CartPole-v1", "updates": 10,
        "evaluate_every": 10}'

Gymnasium's SyncVectorEnv keeps its default autoreset (the step after an end only resets), since skrl
bootstraps a truncated episode from the observation that step returns. These extra rows count as env steps,
following skrl.
"""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import skrl
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn

from .common import Settings, env_makers, read_settings, report_run

Spaces = dict[str, gym.Space[Any]]


def tanh_layers(width: int, hidden: tuple[int, ...], out: int) -> nn.Sequential:
    """An MLP of tanh layers and a linear output."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


class CategoricalPolicy(CategoricalMixin, Model):  # type: ignore[misc]  # skrl is not installed where mypy runs
    """Policy of a Discrete action space."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...]) -> None:
        Model.__init__(self, **spaces, device="cpu")
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = tanh_layers(self.num_observations, hidden, self.num_actions)

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {}


class GaussianPolicy(GaussianMixin, Model):  # type: ignore[misc]
    """Policy of a Box action space, with one standard deviation per action."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...]) -> None:
        Model.__init__(self, **spaces, device="cpu")
        GaussianMixin.__init__(self, clip_actions=False, reduction="sum")
        self.net = tanh_layers(self.num_observations, hidden, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):  # type: ignore[misc]
    """State value function."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...]) -> None:
        Model.__init__(self, **spaces, device="cpu")
        DeterministicMixin.__init__(self, clip_actions=False)
        self.net = tanh_layers(self.num_observations, hidden, 1)

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {}


def ppo_cfg(settings: Settings, observation_space: gym.Space[Any]) -> PPO_CFG:
    """The settings in skrl's form; nothing is written to disk."""
    cfg = PPO_CFG(
        rollouts=settings.rollout,
        learning_epochs=settings.epochs,
        mini_batches=settings.minibatches,
        discount_factor=settings.gamma,
        gae_lambda=settings.lam,
        learning_rate=settings.learning_rate,
        grad_norm_clip=settings.grad_clip,
        ratio_clip=settings.clip_eps,
        value_clip=0.0,
        entropy_loss_scale=settings.entropy_coef,
        value_loss_scale=settings.critic_loss_weight,
        time_limit_bootstrap=True,
    )
    cfg.learning_rate_scheduler = torch.optim.lr_scheduler.LinearLR  # skrl steps it once per epoch
    steps = settings.updates * settings.epochs
    cfg.learning_rate_scheduler_kwargs = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps}
    if settings.normalize:
        cfg.observation_preprocessor = cfg.value_preprocessor = RunningStandardScaler
        cfg.observation_preprocessor_kwargs = {"size": observation_space, "device": "cpu"}
        cfg.value_preprocessor_kwargs = {"size": 1, "device": "cpu"}
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    return cfg


def main() -> None:
    """Train, and report by `report_run`."""
    settings = read_settings()
    logging.getLogger("skrl").setLevel(logging.ERROR)
    torch.set_num_threads(settings.threads)
    set_seed(settings.seed)
    vector_env = gym.vector.SyncVectorEnv(env_makers(settings, settings.num_envs))
    vector_env.action_space.seed(settings.seed)
    env = wrap_env(vector_env)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    is_discrete = isinstance(env.action_space, gym.spaces.Discrete)
    policy = (CategoricalPolicy if is_discrete else GaussianPolicy)(spaces, settings.hidden)
    models = {"policy": policy, "value": Value(spaces, settings.hidden)}
    memory = RandomMemory(memory_size=settings.rollout, num_envs=settings.num_envs, device="cpu")
    agent = PPO(
        models=models, memory=memory, device="cpu", cfg=ppo_cfg(settings, env.observation_space), **spaces
    )
    trainer = SequentialTrainer(
        env=env,
        agents=agent,
        cfg={"timesteps": settings.rollout, "headless": True, "disable_progressbar": True},
    )

    def train(updates: int) -> None:
        trainer.cfg.timesteps = updates * settings.rollout
        trainer.train()

    @torch.no_grad()
    def act(obs: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        inputs = {"observations": agent._observation_preprocessor(torch.as_tensor(obs, dtype=torch.float32))}
        output, _ = policy.compute(inputs)
        return (output.argmax(-1) if is_discrete else output).numpy()

    parameters = sum(parameter.numel() for model in models.values() for parameter in model.parameters())
    about = {"peer": "skrl", "version": skrl.__version__, "torch": torch.__version__}
    report_run(settings, train, act, {**about, "parameters": parameters})


if __name__ == "__main__":
    main()
