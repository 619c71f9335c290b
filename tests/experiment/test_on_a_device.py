"""Whole runs on another device than the CPU: no tensor stays behind, and none is mixed up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import Agent, BaseAgent, PPOLoss, RewardNormalizer, SACAgent
from loxodon.data import DiskTrajDataset, PrioritySampler
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment, experiment
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.experiment.ppo import KLAdaptiveLR
from loxodon.experiment.process.distributed import make_accelerator
from loxodon.experiment.process.transfer import joined, parts
from loxodon.nets import FFTstepEncoder

from .fakes import make_experiment, metrics
from .ppo.rollouts import RandomLengths
from .ppo.whole_runs import ENCODERS, ppo_experiment

META = torch.device("meta")  # has shapes and types, but no values
BOX = EnvSpec(RandomLengths, {"is_discrete": False})


class Device(TorchDispatchMode):
    """Lets values be read from the meta device: True, 0, or zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = func.overloadpacket
        if called is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            return args[0].dtype is torch.bool or torch.zeros((), dtype=args[0].dtype).item()
        if called in (torch.ops.aten.to, torch.ops.aten._to_copy) and args[0].is_meta:
            goal = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)), META)
            if goal.type == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


class MetaAccelerator:
    """An accelerator that leaves agents on the meta device."""

    device = META

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def prepare(self, agent: BaseAgent) -> BaseAgent:
        return agent


class OnMeta(Experiment):
    """A run whose agent is on the meta device."""

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        policy.to(META)
        optimizer: torch.optim.Optimizer = make_optimizer(
            policy, policy.trainable_params(), learning_rate=1e-3, l2_coeff=0.0, fused=False
        )
        return optimizer


def off_policy(folder: Path, encoder: str = "gru", **changes: Any) -> Experiment:
    """A small off-policy run."""
    tstep = partial(FFTstepEncoder, d_hidden=8, d_output=8)
    return make_experiment(
        folder, OnMeta, tstep_encoder_type=tstep, traj_encoder_type=ENCODERS[encoder], **changes
    )


CASES: dict[str, Callable[[Path], Experiment]] = {
    "PPO, GRU": partial(
        ppo_experiment,
        kind=OnMeta,
        agent={"loss_type": lambda: PPOLoss(kind="kl_penalty")},
        learner={"target_kl": 1.0, "reward_normalizer": RewardNormalizer},
    ),
    "PPO, Transformer": partial(
        ppo_experiment,
        encoder="transformer",
        kind=OnMeta,
        make_train_env=BOX,
        make_val_env=BOX,
        batches_per_update=2,
        learner={"context_mode": "segment", "lr_adapter": KLAdaptiveLR},
    ),
    "priorities": partial(
        off_policy, agent_type=Agent, dataset=DiskTrajDataset(sampler=PrioritySampler()), val_interval=1
    ),
    "SAC": partial(off_policy, agent_type=SACAgent, make_train_env=BOX, make_val_env=BOX),
}


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")  # a policy file has values
@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_evaluates_saves_and_continues(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "make_accelerator", lambda p: MetaAccelerator(make_accelerator(p)))
    with Device(), fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # for indices by a mask
        for epochs in (1, 2):
            exp = CASES[case](tmp_path, epochs=epochs, ckpt_interval=1)  # type: ignore[call-arg]
            exp.start(resume=epochs == 2)
            exp.learn()
            assert all(parameter.is_meta for parameter in exp.policy.parameters())
            exp.close()
    assert max(row["gradient_steps"] for row in metrics(exp.run_dir) if "gradient_steps" in row) == 8


def test_parts_of_a_transfer_keep_their_order_and_values() -> None:
    arrays = {"flags": np.array([True, False]), "times": np.array([[5], [7]]), "obs": np.eye(3, dtype="f4")}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    found = parts(joined(tensors), tensors)
    assert list(found) == list(arrays)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
