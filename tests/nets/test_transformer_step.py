"""The fast step of common Transformers on the CPU, against the general one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from loxodon.nets import TransformerTrajEncoder, cpu
from loxodon.nets.cpu.transformer_step import TransformerStep

from ..transformers import HEADS, recommended

CPU, DIM, ENVS, WINDOW = torch.device("cpu"), 5, 3, 8


@pytest.fixture(autouse=True)
def acting() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def made(**settings: Any) -> TransformerTrajEncoder:
    encoder = TransformerTrajEncoder(
        DIM, WINDOW, d_model=32, d_ff=24, n_layers=2, **{**recommended(8), **settings}
    ).eval()
    for weights in encoder.parameters():
        weights.add_(0.1 * torch.randn_like(weights))
    return encoder


def played(encoder: TransformerTrajEncoder, steps: int = 20, first: int = 0) -> Tensor:
    """Outputs of some steps; the episode of one env ends in the middle."""
    state = encoder.init_hidden_state(ENVS, CPU)
    generator, outputs = torch.Generator().manual_seed(1), []
    times = torch.full((ENVS, 1, 1), first)
    for t in range(steps):
        if t == steps // 2:
            ended = torch.tensor([False, True, False])
            state, times = encoder.reset_hidden_state(state, ended), times.clone()
            times[1] = 0
        seq = torch.randn(ENVS, 1, DIM, generator=generator)
        y, state = encoder(seq, times, state)
        outputs.append(y[:, 0])
        times = times + 1
    return torch.stack(outputs)


def played_in_general(encoder: TransformerTrajEncoder, **kwargs: int) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "IS_ON", False)
        return played(encoder, **kwargs)


@pytest.mark.kernels
@pytest.mark.parametrize("heads", ["rotary", HEADS[8], (*HEADS[4], *["alibi"] * 4)], ids=str)
@pytest.mark.parametrize("first", [0, 300, 16_380])
def test_the_fast_step_equals_the_general_one(heads: Any, first: int) -> None:
    encoder = made(heads=heads)
    assert encoder._fast_step is not None
    expected = played_in_general(encoder, first=first)
    torch.testing.assert_close(played(encoder, first=first), expected, rtol=1e-5, atol=1e-5)


def _trained(encoder: TransformerTrajEncoder) -> None:
    for weights in encoder.parameters():
        weights.grad = torch.randn_like(weights)
    torch.optim.SGD(encoder.parameters(), lr=0.1).step()


def _trained_by_a_fused_optimizer(encoder: TransformerTrajEncoder) -> None:
    encoder.train()
    for weights in encoder.parameters():
        weights.grad = torch.randn_like(weights)
    torch.optim.AdamW(encoder.parameters(), lr=0.1, fused=True).step()
    encoder.eval()  # rollouts do the same


def _replaced(encoder: TransformerTrajEncoder) -> None:
    encoder.layers[1].k_norm.weight = torch.nn.Parameter(2.0 * encoder.layers[1].k_norm.weight)
    encoder.layers[0].up.weight = torch.nn.Parameter(2.0 * encoder.layers[0].up.weight)


def _written_behind_the_scenes(encoder: TransformerTrajEncoder) -> None:
    for weights in encoder.parameters():
        weights.data *= 1.5
    encoder.eval()  # rollouts do the same


WRITES = {
    "optimizer": _trained,
    "fused optimizer": _trained_by_a_fused_optimizer,
    "loading": lambda encoder: encoder.load_state_dict(made().state_dict()),
    "replacing": _replaced,
    "data": _written_behind_the_scenes,
}


@pytest.mark.parametrize("write", WRITES)
def test_the_fast_step_uses_the_current_weights(write: str) -> None:
    encoder = made()
    before = played(encoder)
    WRITES[write](encoder)
    after = played(encoder)
    assert not torch.allclose(before, after, atol=0.01)
    torch.testing.assert_close(after, played_in_general(encoder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"pos_emb": "learned"},
        {"heads": "plain"},
        {"qk_norm": False},
        {"norm": "rmsnorm"},
        {"attention_sink": True},
        {"head_scaling": True},
        {"glu": True},
        {"gating": "gru"},
        {"normformer_norms": True},
        {"sigma_reparam": True},
    ],
)
def test_the_fast_step_is_not_used_for_settings_that_it_does_not_support(settings: dict[str, Any]) -> None:
    assert made(**settings)._fast_step is None


def test_hooks_are_called() -> None:
    encoder, called = made(), []
    encoder.layers[0].up.register_forward_hook(lambda *args: called.append(args))
    played(encoder.eval(), steps=2)
    assert len(called) == 2


def test_the_fast_step_is_used_for_acting_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Tensor:
        raise AssertionError("taken")

    encoder = made()
    monkeypatch.setattr(TransformerStep, "__call__", refuse)
    with pytest.raises(AssertionError, match="taken"):
        played(encoder)
    with torch.enable_grad():
        assert played(encoder).requires_grad
    played(encoder.train())
    with torch.autocast("cpu", torch.bfloat16):
        played(encoder.eval())
    played_in_general(encoder)


def test_the_general_step_serves_weights_without_version_counters() -> None:
    with torch.inference_mode():
        encoder = made()
        torch.testing.assert_close(played(encoder), played_in_general(encoder), rtol=0, atol=0)
