"""Scenarios of the on-policy tests, run by their processes, and by the test itself for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from loxodon.agents import AdvantageNorm, PPOAgent, PPOLoss, RewardNormalizer
from loxodon.envs import EnvSpec, make_vector_env
from loxodon.experiment.ppo import KLAdaptiveLR, PPOLearner
from loxodon.experiment.process.distributed import merge_metrics
from loxodon.nets import Categorical, GRUTrajEncoder, IdentityTrajEncoder

from ..experiment.ppo.rollouts import RandomLengths, make_agent, make_collector, make_learner

NUM_ENVS, NUM_STEPS, NUM_ROLLOUTS = 4, 8, 3
GRU = partial(GRUTrajEncoder, d_hidden=8, d_output=8)
CASES: dict[str, dict[str, Any]] = {
    "feed-forward": {"norm": "batch", "lr_schedule": True, "resets": "NextStep"},
    "feed-forward, everything normalised": {
        "norm": "minibatch",
        "agent": {"value_norm": "popart", "normalize_inputs": True},
        "spoils": True,
        "learner": {
            "reward_normalizer": RewardNormalizer,
            "lr_adapter": partial(KLAdaptiveLR, kl_threshold=1e-4, per="minibatch"),
        },
    },
    "gru": {
        "encoder": GRU,
        "norm": "ema",
        "resets": "NextStep",
        "agent": {"value_norm": "running", "normalize_inputs": True, "share_encoder": False},
        "learner": {
            "reward_normalizer": RewardNormalizer,
            "lr_adapter": partial(KLAdaptiveLR, kl_threshold=1e-4),
        },
    },
    "gru, penalty": {
        "encoder": GRU,
        "norm": "batch",
        "agent": {"value_norm": "popart", "loss_type": partial(PPOLoss, kind="kl_penalty", kl_target=1e-5)},
        "learner": {"chunk_len": 4, "target_kl": 1e-3, "stop_scope": "epoch"},
    },
}


class Scripted(RandomLengths):
    """An env whose episodes depend only on its number; the first numbers have short episodes."""

    def __init__(self, number: int) -> None:
        super().__init__(longest=2 + 3 * number)
        self.number: int | None = number

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        seed, self.number = self.number, None
        return super().reset(seed=seed)


def scripted_envs(numbers: tuple[int, ...], mode: str) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.vector.SyncVectorEnv(
        [partial(Scripted, n) for n in numbers], autoreset_mode=AutoresetMode(mode)
    )


@contextmanager
def scripted_actions(rows: slice) -> Iterator[None]:
    """The actions of all envs are the same for any number of processes."""
    rng = np.random.default_rng(5)

    def sample(self: Categorical) -> Tensor:
        return torch.eye(3)[rng.integers(3, size=NUM_ENVS)[rows]]

    with mock.patch.object(Categorical, "sample", sample):
        yield


def make_pair(
    rank: int, world: int, case: dict[str, Any], **settings: Any
) -> tuple[PPOAgent, PPOLearner, Any, slice]:
    """Agent, learner, collector and the envs of one process."""
    num_envs = NUM_ENVS // world
    rows = slice(rank * num_envs, (rank + 1) * num_envs)
    agent = make_agent(case.get("encoder", IdentityTrajEncoder), **case.get("agent", {}))
    chosen = {
        "minibatches": 1,
        "update_epochs": 3,
        "advantage_norm": partial(AdvantageNorm, mode=case.get("norm", "batch")),
        **case.get("learner", {}),
        **settings,
    }
    learner = make_learner(agent, NUM_STEPS, num_envs, **chosen)
    numbers = tuple(range(NUM_ENVS))[rows]
    spec = EnvSpec(scripted_envs, {"numbers": numbers, "mode": case.get("resets", "SameStep")})
    collector = make_collector(agent, learner, make_vector_env([spec], "already_vectorized"))
    return agent, learner, collector, rows


def train(
    rank: int,
    world: int,
    case: dict[str, Any],
    prepare: Callable[[PPOLearner], None] = lambda learner: None,
    **settings: Any,
) -> dict[str, Any]:
    """The state after several rollouts of scripted envs, and the metrics on the way."""
    agent, learner, collector, rows = make_pair(rank, world, case, **settings)
    prepare(learner)
    if case.get("spoils"):
        _spoil_once(learner, is_here=rank == world - 1)
    figures = []
    with scripted_actions(rows):
        for epoch in range(NUM_ROLLOUTS):
            if case.get("lr_schedule"):
                learner.learner.lr_scale = 1.0 - epoch / NUM_ROLLOUTS
            collector.collect(NUM_STEPS)
            figures.append(merge_metrics(learner.learn_from_rollout(epoch), 1.0, learner.accelerator))
    return {
        "state": {name: value.clone() for name, value in agent.state_dict().items()},
        "figures": figures,
        "updates": learner.learner.gradient_steps,
        "learner": learner.state_dict(),
    }


def _spoil_once(learner: PPOLearner, is_here: bool) -> None:
    """Make the second gradient NaN, in one process only."""
    learner.learner.on_nan = "skip"
    backward, spoils = learner.accelerator.backward, iter([False, is_here])
    learner.accelerator.backward = lambda loss: backward(  # type: ignore[method-assign]
        loss * torch.nan if next(spoils, False) else loss
    )


def equality(rank: int, world: int) -> dict[str, Any]:
    """Results of all forms of training."""
    return {name: train(rank, world, case) for name, case in CASES.items()}


class _Lying:
    """Replaces the KL divergence of this process and records the weights before every step."""

    def __init__(self, kl_per_call: float, learner: PPOLearner) -> None:
        self.kl_per_call, self.learner, self.calls = kl_per_call, learner, 0
        self.before: list[list[Tensor]] = []
        self.compute_loss = learner.learner.compute_loss
        learner.learner.compute_loss = self

    def __call__(self, batch: Any, log_step: bool) -> Any:
        self.before.append([p.detach().clone() for p in self.learner.agent.parameters()])
        found = self.compute_loss(batch, log_step=log_step)
        self.calls += 1
        return {**found, "kl": torch.tensor(self.kl_per_call * (self.calls - 1))}


def early_stop(rank: int, scope: str) -> dict[str, Any]:
    """The KL of process 1 is too large from the second minibatch on, and the mean KL from the third on."""
    agent, learner, collector, rows = make_pair(
        rank, 2, CASES["gru"] | {"learner": {}}, minibatches=2, target_kl=0.02, stop_scope=scope
    )
    liar = _Lying([0.0, 0.03][rank], learner)
    with scripted_actions(rows):
        collector.collect(NUM_STEPS)
        figures = learner.learn_from_rollout(0)
    after = [p.detach().clone() for p in agent.parameters()]
    return {"figures": figures, "calls": liar.calls, "before": liar.before, "after": after}


def uneven(rank: int) -> dict[str, Any]:
    """Rollouts with many pieces in one process and few in the other."""
    found = {}
    for name, encoder, minibatches in (("many", GRU, 2), ("too few", IdentityTrajEncoder, 2 * NUM_STEPS)):
        counts: list[int] = []
        case = {"encoder": encoder, "norm": "minibatch", "resets": "NextStep"}
        result = train(rank, 2, case, partial(_count, counts), minibatches=minibatches, update_epochs=2)
        found[name] = result | {"pieces": counts}
    return found


def _count(counts: list[int], learner: PPOLearner) -> None:
    """Record the number of pieces of each rollout."""
    cut = learner._pieces

    def counted(tensors: Any) -> Any:
        pieces = cut(tensors)
        counts.append(len(pieces))
        return pieces

    learner._pieces = counted  # type: ignore[method-assign]


def everything(rank: int) -> dict[str, Any]:
    """Results of all scenarios."""
    return {
        "equality": equality(rank, 2),
        "epoch": early_stop(rank, "epoch"),
        "update": early_stop(rank, "update"),
        "uneven": uneven(rank),
    }
