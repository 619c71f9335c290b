"""Updates for GPUs: few operations, no waits, no shape that depends on data, losses that are one graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import Agent, MultiTaskAgent, Retrace
from loxodon.data import Batch
from loxodon.experiment.learn.learner import masked_losses
from loxodon.nets import FFTrajEncoder, TransformerTrajEncoder

from ..transformers import recommended
from .recommended import recommended as recommended_agent
from .test_off_policy_agents import BOX, CASES, DISCRETE, make, make_batch

transformer = partial(
    TransformerTrajEncoder, d_model=16, n_layers=1, d_ff=16, dropout_ff=0.0, dropout_emb=0.0, **recommended(8)
)
memoryless = partial(FFTrajEncoder, d_model=16)


def on(device: str, batch: Batch) -> Batch:
    return batch.to(torch.device(device))


def loss_of(agent: nn.Module, batch: Batch) -> Tensor:
    found = masked_losses(batch, agent(batch))
    loss: Tensor = found["Actor Loss"] + found["Critic Loss"]
    return loss


def update(agent: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(agent, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(agent.trainable_params(), 1.0)
    optimizer.step()
    agent.after_update()
    return loss.detach()


# torch samples from a Beta distribution with an operation that has no meta kernel.
PLANNED = [case for case, (_, _, settings) in CASES.items() if settings.get("distribution_type") != "Beta"]


@pytest.mark.parametrize("case", [*PLANNED, "bc box", "transformer"])
def test_an_update_runs_on_shapes_alone(case: str) -> None:
    """On the meta device, every operation that needs a value (`item`, `if tensor`, a mask) is an error."""
    is_transformer = case == "transformer"
    kind, space, settings = (Agent, DISCRETE, {"encoder": transformer}) if is_transformer else CASES[case]
    agent = make(kind, space, **settings).to("meta")
    optimizer = torch.optim.AdamW(agent.trainable_params(), lr=1e-3)
    assert update(agent, optimizer, on("meta", make_batch(space))).is_meta


class _Operations(TorchDispatchMode):
    """Counts operations, except views and allocations: about the kernels that a GPU would launch."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        self.num += not (is_view or func.overloadpacket.__name__.startswith(("empty", "new_empty")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "settings", "limit"),
    [(Agent, recommended_agent(), 1_800), (MultiTaskAgent, {"returns": Retrace()}, 2_500)],
)
def test_an_update_of_long_windows_takes_few_operations(
    kind: type, settings: dict[str, Any], limit: int
) -> None:
    encoder = partial(transformer, n_layers=3)
    agent = make(kind, DISCRETE, encoder=encoder, **settings).to("meta")
    batch = on("meta", make_batch(DISCRETE, rows=24, length=2048, lengths=(2048,) * 24))
    with _Operations() as operations:
        loss_of(agent, batch).backward()
        agent.after_update()
    assert operations.num < limit


@pytest.mark.slow  # tracing takes seconds
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Agent, recommended_agent(encoder=transformer)), (MultiTaskAgent, {"encoder": memoryless})],
)
def test_compiled_losses_are_one_graph_with_the_same_gradients(kind: type, settings: dict[str, Any]) -> None:
    graphs: list[Any] = []

    def count_graphs(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    found = []
    for is_compiled in (False, True):
        agent = make(kind, DISCRETE, **settings)
        names = list(agent.state_dict())
        if is_compiled:
            agent.compile_learning(backend=count_graphs)
        assert list(agent.state_dict()) == names
        batch = make_batch(DISCRETE)
        for _ in range(2):  # statistics and targets move between the two
            torch.manual_seed(2)
            agent.zero_grad()
            loss = loss_of(agent, batch)
            loss.backward()
            agent.after_update()
        found.append([loss.detach(), *(p.grad for p in agent.trainable_params())])
        assert agent(batch, with_metrics=True).metrics.keys() >= {"td_target"}
    assert len(graphs) == 1
    torch.testing.assert_close(found[1], found[0])


def test_a_warning_comes_before_losses_are_no_longer_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    agent = make(Agent, DISCRETE)
    agent.compile_learning()
    for length in [*range(1, 8), 1, 2, 8]:
        assert "8 shapes" not in caplog.text
        agent(make_batch(DISCRETE, length=length))
    assert "compiled for batches of 8 shapes, the last one (3, 8)" in caplog.text


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", [Agent, MultiTaskAgent])
@pytest.mark.parametrize("space", [DISCRETE, BOX])
def test_on_a_gpu_compiled_updates_learn_like_others_and_never_wait(kind: type, space: Any) -> None:
    losses = []
    for is_compiled in (False, True):
        agent = make(kind, space, encoder=transformer).cuda()
        if is_compiled:
            agent.compile_learning()
        optimizer = torch.optim.AdamW(agent.trainable_params(), lr=1e-3, fused=True)
        batch = on("cuda", make_batch(space))
        first = [update(agent, optimizer, batch) for _ in range(3)]  # compiles and fills caches
        torch.cuda.set_sync_debug_mode("error")
        try:
            later = [update(agent, optimizer, batch) for _ in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(torch.stack([*first, *later]).cpu())
    assert losses[1].isfinite().all()
    if space is DISCRETE:  # for a Box, the two draw different actions
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)
