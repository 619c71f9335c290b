"""A tiny agent, a scripted environment, and an Experiment made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from loxodon.agents import ActOutput, Agent, BaseAgent, FixedUnits, LossTerms, OffPolicyAgent
from loxodon.data import Batch, DiskTrajDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from ..agents.recommended import all_of, recommended

TINY = """
Experiment.run_name = 'tiny'
Experiment.ckpt_base_dir = 'runs'
Experiment.max_seq_len = 8
Experiment.dataset = @DiskTrajDataset()
Experiment.tstep_encoder_type = @FFTstepEncoder
Experiment.traj_encoder_type = @FFTrajEncoder
Experiment.agent_type = @Agent
Experiment.val_timesteps_per_epoch = 4
Experiment.make_train_env = @TMazePassive
Experiment.make_val_env = @TMazePassive
Experiment.parallel_actors = 2
Experiment.env_mode = 'sync'
Experiment.dloader_workers = 0
Experiment.epochs = 1
Experiment.train_timesteps_per_epoch = 8
Experiment.train_batches_per_epoch = 1
Experiment.batch_size = 2
MetricLogger.tensorboard = False
TMazePassive.horizon = 3
FFTstepEncoder.d_hidden = 8
FFTstepEncoder.d_output = 8
FFTrajEncoder.d_model = 8
Agent.num_critics = 2
Actor.d_hidden = 8
CriticEnsemble.d_hidden = 8
"""


class CountingEnv(gym.Env[np.ndarray, int]):
    """Observes [episode number, timestep]; ends after `length` steps, by termination or by truncation.

    The reward of a step is 1 for action 1 and 0 otherwise, plus noise from the env's own generator.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 5, truncates: bool = False, noise: float = 0.0) -> None:
        self.length, self.truncates, self.noise = length, truncates, noise
        self.episode = -1

    def _obs(self) -> np.ndarray:
        return np.array([self.episode, self.timestep], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.timestep = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.timestep += 1
        over = self.timestep >= self.length
        reward = float(action == 1) + self.noise * float(self.np_random.standard_normal())
        info = {"metric/success": float(action == 1)} if over else {}
        return self._obs(), reward, over and not self.truncates, over and self.truncates, info


class TinyAgent(nn.Module):
    """Linear policy and value on [observation, rl2]; its hidden state counts the steps of each env."""

    action_mask = None

    def __init__(
        self, obs_space: spaces.Dict, action_space: Any, tstep_type: Any, traj_type: Any, max_seq_len: int
    ) -> None:
        super().__init__()
        self.action_dim = int(action_space.n)
        width = sum(int(np.prod(s.shape or (1,))) for s in obs_space.spaces.values()) + 1 + self.action_dim
        self.actor, self.critic = nn.Linear(width, self.action_dim), nn.Linear(width, 1)
        # gets gradients, but no optimizer holds it
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=True)
        self.num_after_update = 0
        self.seen_hidden: list[Tensor] = []

    def _inputs(self, obs: dict[str, Tensor], rl2s: Tensor) -> Tensor:
        return torch.tanh(torch.cat([obs["observation"].float(), rl2s], dim=-1))

    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Tensor, sample: bool
    ) -> ActOutput:
        assert rl2s.shape[1] == 1 + self.action_dim
        assert torch.equal(hidden_state, time_idxs[:, 0])  # reset exactly where an episode begins
        logits = self.actor(self._inputs(obs, rl2s))
        actions = torch.distributions.Categorical(logits=logits).sample() if sample else logits.argmax(-1)
        return ActOutput(actions, hidden_state + 1)

    leaves_out_transitions = False
    get_actions = BaseAgent.get_actions
    on_checkpoint_loaded = BaseAgent.on_checkpoint_loaded

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Tensor:
        return torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset_hidden_state(self, hidden_state: Tensor, ended: Tensor) -> Tensor:
        return hidden_state.masked_fill(ended, 0)

    def export_hidden_state(self, hidden_state: Tensor) -> dict[str, Tensor]:
        return {"steps": hidden_state.clone()}

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["steps"].clone()

    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        inputs = self._inputs(batch.obs, batch.rl2s)[:, :-1]
        log_probs = torch.log_softmax(self.actor(inputs), dim=-1)
        actor = -(log_probs * batch.actions).sum(-1, keepdim=True)[:, :, None] * self.frozen.mean()
        critic = (self.critic(inputs) - batch.rews).square()[:, :, None, None]
        metrics = {"entropy": -(log_probs.exp() * log_probs).sum(-1).mean()} if with_metrics else {}
        return LossTerms(actor.expand(-1, -1, 2, -1), critic.expand(-1, -1, 3, 2, -1), metrics)

    def trainable_params(self) -> list[nn.Parameter]:
        return [*self.actor.parameters(), *self.critic.parameters()]

    def after_update(self) -> None:
        self.num_after_update += 1


class Predicting(Agent):
    """Predicts the next observation (two numbers), and one scalar per timestep."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        parts = recommended(num_critics=3, critic_subset=all_of(3), training_discounts=(0.9,))
        settings = parts | settings
        super().__init__(*args, **settings)
        self.predictor = torch.nn.Linear(self.state_dim, 2)

    def losses(self, transitions: Any, with_metrics: bool) -> LossTerms:
        terms = super().losses(transitions, with_metrics)
        predicted = self.predictor(transitions.current.state)
        error = (predicted - transitions.following.obs["observation"]).square()
        return dataclasses.replace(terms, extra={"next_obs": error, "size": predicted.square().sum(-1)})


def make_experiment(folder: Path, kind: type[Experiment] = Experiment, **changes: Any) -> Experiment:
    """A small, silent run in one process; `changes` override any setting, those of its parts by gin names."""
    settings: dict[str, Any] = {
        "run_name": "tiny",
        "ckpt_base_dir": str(folder),
        "max_seq_len": 8,
        "dataset": DiskTrajDataset(),
        "tstep_encoder_type": nn.Identity,
        "traj_encoder_type": nn.Identity,
        "agent_type": TinyAgent,
        "val_timesteps_per_epoch": 12,
        "make_train_env": EnvSpec(CountingEnv, {"noise": 1.0}),
        "make_val_env": EnvSpec(CountingEnv, {"noise": 1.0}),
        "parallel_actors": 3,
        "env_mode": "sync",
        "dloader_workers": 0,
        "verbose": False,
        "epochs": 2,
        "train_timesteps_per_epoch": 12,
        "train_batches_per_epoch": 4,
        "val_interval": 1,
        "ckpt_interval": 2,
        "batch_size": 4,
        "log_interval": 2,
        "lr_warmup_steps": 4,
        "learning_rate": 1e-2,
        "seed": 7,
        "MetricLogger.tensorboard": False,
    }
    settings |= changes
    for name in [name for name in settings if "." in name]:
        gin.bind_parameter(name, settings.pop(name))
    return kind(**settings)


def learning(folder: Path, kind: type[Experiment] = Experiment, **changes: Any) -> Experiment:
    """A started run of a real agent with 3 critics and 2 discounts, and no environments."""
    parts = recommended(critic_subset=all_of(3))
    agent = partial(Agent, num_critics=3, training_discounts=(0.9,), tau=0.1, **parts)
    settings: dict[str, Any] = {
        "agent_type": agent,
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=16, d_output=8),
        "traj_encoder_type": partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        "val_timesteps_per_epoch": 0,
        "train_timesteps_per_epoch": 0,
    }
    exp = make_experiment(folder, kind, **{**settings, **changes})
    exp.start()
    exp.policy.train()
    if isinstance(exp.policy, OffPolicyAgent) and isinstance(exp.policy.values, FixedUnits):
        exp.policy.values.unit.fill_(1.0)  # otherwise all values and gradients are 0 in the first update
    return exp


def run(experiment: Experiment, prepare: Callable[[Experiment], Any] | None = None) -> Experiment:
    """Start, learn and close."""
    experiment.start()
    if prepare is not None:
        prepare(experiment)
    experiment.learn()
    experiment.close()
    return experiment


class KilledError(GeneratorExit):
    """Simulates the death of the process, which saves nothing."""


def die_in(exp: Experiment, epoch: int) -> None:
    """Learn, and die in the middle of an epoch's updates without cleaning up."""
    update = exp.learner.update

    def dying(*args: Any, **kwargs: Any) -> Any:
        if exp.epoch == epoch and exp.learner.gradient_steps % 4 == 2:
            raise KilledError
        return update(*args, **kwargs)

    exp.learner.update = dying  # type: ignore[method-assign]
    try:
        exp.learn()
    except KilledError:
        exp.loader.close()  # a real death ends these too
        exp.dataset.close()
    else:
        raise AssertionError("it has not died")


def metrics(run_dir: Path, with_time: bool = False) -> list[dict[str, Any]]:
    """All records of a run, by default without times."""
    lines = (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    return [{k: v for k, v in one.items() if with_time or not k.startswith("time/")} for one in parsed]


def stored(exp: Experiment) -> list[tuple[Any, ...]]:
    """Everything in the trajectory files, in any order."""
    found = []
    for path in Path(exp.dataset.save_new_trajs_to).glob("*.npz"):
        with np.load(path) as file:
            found.append(tuple((name, file[name].tobytes()) for name in sorted(file.files)))
    return sorted(found)
