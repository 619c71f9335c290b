"""PPO on another device than that of the environments: nothing stays behind, and nothing is mixed up."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import PPOLoss, RewardNormalizer
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.experiment.ppo import KLAdaptiveLR
from loxodon.experiment.process.transfer import joined, parts

from .rollouts import make_agent, make_collector, make_learner
from .whole_runs import ENCODERS

META = torch.device("meta")  # has shapes and types, but no values
CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("ff", True, {"reward_normalizer": RewardNormalizer}),
    ("gru", False, {"target_kl": 1.0}),
    ("transformer", True, {"lr_adapter": KLAdaptiveLR, "batches_per_update": 2}),
    ("transformer", False, {"context_mode": "segment"}),
]


class Device(TorchDispatchMode):
    """Lets values be read from the meta device: True, 0, or zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = func.overloadpacket
        if called is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            return args[0].dtype is torch.bool or torch.zeros((), dtype=args[0].dtype).item()
        if called is torch.ops.aten._to_copy and args[0].is_meta:
            goal = kwargs.get("device")
            if goal is not None and goal.type == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


class OnMeta:
    """An accelerator that has moved to the meta device."""

    device = META

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@pytest.mark.parametrize(("encoder", "is_discrete", "settings"), CASES)
def test_a_rollout_is_learned_from_on_another_device(
    encoder: str, is_discrete: bool, settings: dict[str, Any]
) -> None:
    agent = make_agent(
        ENCODERS[encoder], is_discrete=is_discrete, loss_type=lambda: PPOLoss(kind="kl_penalty")
    )
    trainer = make_learner(agent, 8, 4, update_epochs=2, **settings)
    make_collector(agent, trainer).collect(8)
    agent.to(META)
    learner = trainer.learner
    learner.optimizer = make_optimizer(
        agent, agent.trainable_params(), learning_rate=1e-2, l2_coeff=0.0, fused=False
    )
    for group in learner.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    trainer.accelerator = learner.accelerator = cast("Any", OnMeta(trainer.accelerator))
    with Device(), fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # for indices by a mask
        assert trainer.learn_from_rollout(0)["updates"] == 4
    assert all(parameter.is_meta for parameter in agent.parameters())


def test_parts_of_a_transfer_keep_their_order_and_values() -> None:
    arrays = {"flags": np.array([True, False]), "times": np.array([[5], [7]]), "obs": np.eye(3, dtype="f4")}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    found = parts(joined(tensors), tensors)
    assert list(found) == list(arrays)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
