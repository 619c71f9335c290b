"""Real rollouts of a real agent in small scripted environments, and the values they should have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.agents import AdvantageNorm, PPOAgent
from loxodon.data import Sink
from loxodon.envs import EnvSpec, make_vector_env
from loxodon.experiment import Collector, Learner
from loxodon.experiment.collect import RolloutGroup
from loxodon.experiment.contracts import Progress
from loxodon.experiment.learn.learner import masked_losses
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.experiment.ppo import PPOLearner
from loxodon.experiment.process.distributed import make_accelerator
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

CPU = torch.device("cpu")


class RandomLengths(gym.Env[np.ndarray, Any]):
    """Observes noise; episodes have 1 to `longest` steps and end randomly by termination or truncation."""

    def __init__(self, longest: int = 6, is_discrete: bool = True) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(3) if is_discrete else spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.longest = longest

    def _obs(self) -> np.ndarray:
        return self.np_random.standard_normal(3).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, self.longest + 1))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        truncates = bool(self.np_random.random() < 0.5)
        over = self.left == 0
        return self._obs(), float(self.np_random.random()), over and not truncates, over and truncates, {}


def make_agent(
    traj_type: Callable[..., Any] = GRUTrajEncoder,
    *,
    max_seq_len: int = 8,
    is_discrete: bool = True,
    seed: int = 0,
    normalize_inputs: bool = False,
    **kwargs: Any,
) -> PPOAgent:
    """A small agent whose policy differs clearly from state to state."""
    torch.manual_seed(seed)
    env = RandomLengths(is_discrete=is_discrete)
    agent = PPOAgent(
        spaces.Dict({"observation": env.observation_space}),
        env.action_space,
        lambda *args: FFTstepEncoder(
            *args, n_layers=1, d_hidden=16, d_output=16, normalize_inputs=normalize_inputs
        ),
        traj_type,
        max_seq_len,
        **kwargs,
    )
    for parameter in agent.policy_head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return agent


def make_learner(agent: PPOAgent, num_steps: int, num_envs: int, **kwargs: Any) -> PPOLearner:
    """PPO's learner with a plain optimizer."""
    accelerator = make_accelerator("no")
    optimizer = make_optimizer(agent, agent.trainable_params(), learning_rate=1e-2, l2_coeff=0.0, fused=True)
    model, optimizer = accelerator.prepare(agent, optimizer)

    def compute_loss(batch: Any, log_step: bool) -> Any:
        return masked_losses(batch, model(batch, log_step))

    learner = Learner(
        agent,
        model,
        optimizer,
        accelerator,
        compute_loss=compute_loss,
        critic_loss_weight=0.5,
        lr_warmup_steps=0,
        grad_clip=1.0,
    )
    batches_per_update = kwargs.pop("batches_per_update", 1)
    return PPOLearner(
        agent,
        learner,
        Mock(accelerator=accelerator, progress=Progress(epochs=1, seed=0)),
        num_steps,
        num_envs,
        agent.max_seq_len,
        nullcontext,
        batches_per_update,
        keeps_trajectories=True,
        **{"minibatches": 2, **kwargs},
    )


def make_collector(
    agent: PPOAgent, learner: PPOLearner, envs: Any = None, num_envs: int = 4, sinks: Any = (), **kwargs: Any
) -> Collector:
    """A collector that fills the learner's buffer and other `sinks`; `kwargs` go to the environments."""
    if envs is None:
        is_discrete = isinstance(agent.action_space, spaces.Discrete)
        specs = [EnvSpec(RandomLengths, {"is_discrete": is_discrete, **kwargs})] * num_envs
        envs = make_vector_env(specs, "sync")
    agent.eval()
    return Collector([RolloutGroup(envs, sinks=[*learner.sinks(envs.num_envs), *sinks])], agent, CPU, True)


class Witness(Sink):
    """A sink that stores everything, so that the true past of each step is known.

    episodes: for each env and episode, a list of (obs, rl2s, time_idx) in temporal order.
    """

    def __init__(self) -> None:
        self.episodes: list[list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]] = []
        self.steps: list[list[tuple[int, int]]] = []  # by env: episode and position of each step
        self.finals: dict[tuple[int, int], tuple[int, int]] = {}  # (step, env) -> episode and position

    def begin(self, rows: Any, obs: Any, rl2s: Any, time_idxs: Any, env_names: Any) -> None:
        if not self.episodes:
            self.episodes, self.steps = [[] for _ in range(len(rl2s))], [[] for _ in range(len(rl2s))]
        for n in rows:
            self.episodes[n].append([_timestep(n, obs, rl2s, time_idxs)])

    def add(self, actions, rewards, terminated, ended, obs, rl2s, time_idxs, ignored=None, extras=None):  # type: ignore[no-untyped-def]
        for n in range(len(rl2s)):
            episode = self.episodes[n][-1]
            self.steps[n].append((len(self.episodes[n]) - 1, len(episode) - 1))
            episode.append(_timestep(n, obs, rl2s, time_idxs))


def _timestep(n: int, obs: Any, rl2s: Any, time_idxs: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return obs["observation"][n].copy(), rl2s[n].copy(), time_idxs[n].copy()


@torch.no_grad()
def values_of(agent: PPOAgent, episode: Sequence[Any]) -> Tensor:
    """The agent's values (len(episode),) when it acts through the episode."""
    hidden, values = agent.init_hidden_state(1, CPU), []
    for obs, rl2, time_idx in episode:
        output = agent.act(
            {"observation": torch.from_numpy(obs)[None]},
            torch.from_numpy(rl2)[None],
            torch.from_numpy(time_idx)[None],
            hidden,
            True,
        )
        hidden = output.hidden_state
        values.append(output.extras["values"][0, 0])
    return torch.stack(values)


class RecordingEstimator:
    """Records the arguments and results of GAE."""

    def __init__(self, estimator: Any) -> None:
        self.estimator, self.calls, self.results = estimator, [], []

    def __call__(self, *args: Tensor) -> Any:
        self.calls.append(args)
        self.results.append(self.estimator(*args))
        return self.results[-1]


def no_advantage_norm() -> AdvantageNorm:
    return AdvantageNorm(mode="none")
