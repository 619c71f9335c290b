"""Acting on a device: per vector step one transfer to it, one from it, no other wait, and few operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import Agent, PPOAgent
from loxodon.data import TrajectoryWriter
from loxodon.envs import EnvSpec, EpsilonGreedy, make_vector_env
from loxodon.experiment import Collector
from loxodon.experiment.collect import RolloutGroup
from loxodon.experiment.process.transfer import joined, parts
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, TransformerTrajEncoder

from ..transformers import recommended
from .fakes import CountingEnv

STEPS, WINDOW, META = 4, 8, torch.device("meta")
ENCODERS = {
    "gru": partial(GRUTrajEncoder, d_hidden=8, n_layers=1),
    "transformer": partial(TransformerTrajEncoder, d_model=16, n_layers=1, d_ff=16, **recommended(8)),
}


class ToyBox(CountingEnv):
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        return super().step(int(action[0] > 0.0))


class Transfers(TorchDispatchMode):
    """Counts transfers to and from the meta device; every other wait (`item`, a mask) is an error there."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        self.operations += not (is_view or func.overloadpacket.__name__.startswith("empty"))
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            goal = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)), args[0].device)
            self.up += goal.type == "meta" and not args[0].is_meta
            if goal.type == "cpu" and args[0].is_meta:
                self.down += 1
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "encoder", "env", "limit"),
    [(Agent, "transformer", CountingEnv, 75), (PPOAgent, "gru", ToyBox, 42)],
)
def test_a_vector_step_waits_once_and_takes_few_operations(
    kind: type, encoder: str, env: type, limit: int, tmp_path: Any
) -> None:
    specs = [EnvSpec(env, {"length": length}) for length in (2, 3, 40)]
    envs: Any = make_vector_env(specs, "sync")
    tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8)
    given = (envs.single_observation_space, envs.single_action_space)
    agent = kind(*given, tstep, ENCODERS[encoder], WINDOW).eval().to(META)
    noise = EpsilonGreedy(envs.single_action_space, len(specs), 0) if kind is Agent else None
    group = RolloutGroup(envs, noise, [TrajectoryWriter(tmp_path, len(specs))])
    collector = Collector([group], agent, META, sample=True)
    collector.restart(0)
    with Transfers():
        collector.collect(1)  # moves constants
    with Transfers() as transfers:
        collector.collect(STEPS)
    assert (transfers.up, transfers.down) == (STEPS, STEPS)
    assert transfers.operations < limit * STEPS
    collector.close()


class Casts(TorchDispatchMode):
    """Counts the parameters that are cast."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy)
        self.count += is_cast and isinstance(args[0], torch.nn.Parameter)
        return func(*args, **(kwargs or {}))


class TorchModes(CountingEnv):
    """An environment with a model of its own, which it trains while it is stepped."""

    def step(self, action: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        output = model(torch.ones(2))
        output.sum().backward()
        assert model.weight.grad is not None
        assert output.dtype == torch.float32
        return super().step(action)


def test_weights_are_cast_once_per_call_and_environments_notice_nothing() -> None:
    envs: Any = make_vector_env([EnvSpec(TorchModes, {"length": 3})], "sync")
    tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8)
    agent = Agent(
        envs.single_observation_space, envs.single_action_space, tstep, ENCODERS["transformer"], WINDOW
    )
    bf16 = partial(torch.autocast, "cpu", torch.bfloat16)
    collector = Collector([RolloutGroup(envs, None, [])], agent.eval(), torch.device("cpu"), True, cast=bf16)
    counts = []
    for steps in (1, 5):
        with Casts() as casts:
            collector.collect(steps)
        counts.append(casts.count)
    assert 0 < counts[0] == counts[1]
    collector.close()


def test_tensors_of_all_widths_share_a_block() -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "none": torch.zeros(0, 3),
        "times": torch.tensor([[5], [7]]),
        "image": torch.arange(5, dtype=torch.uint8),
        "alone": torch.tensor(2.5, dtype=torch.float64),
    }
    found = parts(joined(tensors), tensors)
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)
