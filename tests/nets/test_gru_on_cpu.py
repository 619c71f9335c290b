"""The hand-written backward pass of recurrent layers on the CPU, against torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loxodon.nets import GRUTrajEncoder, recurrent
from loxodon.nets.cpu.gru import is_faster_for, run_gru


def layers(**kwargs: int) -> nn.GRU:
    torch.manual_seed(0)
    return nn.GRU(3, 5, batch_first=True, dtype=torch.float64, **kwargs)


def gradients(parts: Sequence[Tensor], factors: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    loss = torch.stack([(part * factor).sum() for part, factor in zip(parts, factors, strict=True)]).sum()
    return list(torch.autograd.grad(loss, list(inputs)))


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)


def by_timestep(rnn: nn.GRU, seq: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's own layer; its state is reset where `resets` (B, L) is True."""
    parts = []
    for x, forgets in zip(seq.split(1, dim=1), resets.unbind(1), strict=True):
        y, state = rnn(x, state.masked_fill(forgets[:, None], 0.0))
        parts.append(y)
    return torch.cat(parts, dim=1), state


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("num_layers", "is_shut", "has_resets"), [(1, False, False), (3, False, True), (1, True, False)]
)
def test_results_and_gradients_are_those_of_torch(num_layers: int, is_shut: bool, has_resets: bool) -> None:
    """Gradients are those of outputs and last state by inputs, first state and all weights.

    Nothing is divided by a gate, so a gate of exactly 0 or 1 is harmless.
    """
    rnn = layers(num_layers=num_layers)
    if is_shut:
        with torch.no_grad():
            rnn.bias_ih_l0[:5], rnn.bias_ih_l0[5:10] = -2000.0, 2000.0
    seq = torch.randn(4, 7, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(num_layers, 4, 5, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(4, 7, dtype=torch.bool)
    if has_resets:
        resets[1, 0] = resets[0, 3] = resets[2, 3] = resets[2, 4] = resets[3, 6] = True
    ours = run_gru(seq, state, rnn.all_weights, resets if has_resets else None)
    theirs = by_timestep(rnn, seq, state, resets)
    weights = [torch.randn_like(part) for part in theirs]
    inputs = [seq, state, *rnn.parameters()]
    assert_same(ours, theirs)
    assert_same(gradients(ours, weights, inputs), gradients(theirs, weights, inputs))


def test_second_derivatives_are_refused() -> None:
    rnn = layers()
    seq = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    y, _ = run_gru(seq, torch.zeros(1, 2, 5, dtype=torch.float64), rnn.all_weights)
    (first,) = torch.autograd.grad(y.square().sum(), seq, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_torch_is_used_where_it_is_faster_or_mixes_precisions() -> None:
    seq = torch.zeros(1, 2, 3)
    assert is_faster_for(seq, 64)
    assert not is_faster_for(seq.to("meta"), 64)
    assert not is_faster_for(torch.zeros(64, 2, 3), 256)
    with torch.no_grad():
        assert not is_faster_for(seq, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_faster_for(seq, 64)


@pytest.mark.kernels
def test_an_encoder_trains_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights of the encoder are frozen, and episodes begin inside."""
    encoder = GRUTrajEncoder(3, 8, d_hidden=5, d_output=4, n_layers=2)
    encoder.rnn.weight_hh_l0.requires_grad_(False)
    seq, time_idxs = torch.randn(2, 6, 3), torch.arange(6)[None, :, None].expand(2, 6, 1)
    resets = torch.zeros(2, 6, dtype=torch.bool)
    resets[1, 3] = True
    lengths = []

    def counted(seq: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        lengths.append(seq.shape[1])
        return run_gru(seq, *args)

    monkeypatch.setattr(recurrent, "run_gru", counted)
    y, _ = encoder(seq, time_idxs, resets=resets)
    assert lengths == [6]
    y.square().sum().backward()
    assert encoder.rnn.weight_hh_l0.grad is None
    assert encoder.rnn.weight_ih_l0.grad is not None
    with torch.no_grad():
        assert torch.allclose(encoder(seq, time_idxs, resets=resets)[0], y, atol=1e-6)
    assert lengths == [6]
