"""Chunked recurrences agree with the plain loop, including its gradients, with resets anywhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

import pytest
import torch
from torch import Tensor

from loxodon.nets import kernels
from loxodon.nets import recurrence as R
from loxodon.nets.short_conv import ShortConv

from .triton_on_cpu import interpret

B, H, K, V = 3, 2, 4, 5
LENGTHS = [1, 2, 17, 64, 150]


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def diagonal(length: int) -> tuple[Tensor, ...]:
    return draw(0, B, length, K).sigmoid(), draw(1, B, length, K), draw(2, B, K)


def rotating(length: int) -> tuple[Tensor, ...]:
    return draw(0, K).sigmoid(), draw(1, K) * 3, draw(2, B, length, 2, K), draw(3, B, 2, K)


def matrix(length: int, decay_width: int = 1, strength: float = 1.0) -> tuple[Tensor, ...]:
    log_decay = (-strength * draw(3, B, length, H, decay_width).abs()).clamp(min=R.MIN_LOG_DECAY)
    q, k, v = (draw(i, B, length, H, width) for i, width in enumerate((K, K, V)))
    return q, k, v, log_decay, draw(4, B, H, K, V)


def shared(length: int) -> tuple[Tensor, ...]:
    q, k, *others = matrix(length)
    return q[:, :, :1], k[:, :, :1], *others


def delta(length: int) -> tuple[Tensor, ...]:
    q, k, v, log_decay, state = matrix(length)
    return q, k / k.norm(dim=-1, keepdim=True), v, draw(5, B, length, H, 1).sigmoid(), log_decay, state


def convolution(length: int) -> tuple[Tensor, ...]:
    return draw(0, B, length, K), draw(1, 3, K), draw(2, K), draw(3, B, 2, K)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, resets: Tensor | None = None) -> Tensor:
    parameters = {"weight": weight, "bias": bias}
    y, _ = torch.func.functional_call(ShortConv(K, len(weight)), parameters, (x, resets, kept))
    return cast("Tensor", y)


def loop_convolution(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, resets: Tensor) -> Tensor:
    outputs = []
    for t in range(x.shape[1]):
        kept = torch.cat([kept * ~resets[:, t, None, None], x[:, t : t + 1]], dim=1)
        outputs.append((kept * weight).sum(1) + bias)
        kept = kept[:, 1:]
    return torch.stack(outputs, dim=1)


def loop_diagonal(decay: Tensor, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:
    outputs = []
    for t in range(inputs.shape[1]):
        state = decay[:, t] * state * ~resets[:, t, None] + inputs[:, t]
        outputs.append(state)
    return torch.stack(outputs, dim=1)


def loop_rotating(decay: Tensor, angle: Tensor, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:
    factor, value, outputs = torch.polar(decay, angle), torch.complex(*state.unbind(1)), []
    for t in range(inputs.shape[1]):
        value = factor * value * ~resets[:, t, None] + torch.complex(*inputs[:, t].unbind(1))
        outputs.append(torch.view_as_real(value).mT)
    return torch.stack(outputs, dim=1)


def loop_matrix(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        old = log_decay[:, t, :, :, None].exp() * state * ~resets[:, t, None, None, None]
        state = old + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def loop_delta(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        old = log_decay[:, t, :, :, None].exp() * state * ~resets[:, t, None, None, None]
        wrong = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], old)
        state = old + torch.einsum("bhk,bhv->bhkv", rate[:, t] * k[:, t], wrong)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


KINDS: dict[str, tuple[Callable[..., object], Callable[..., object], Callable[[int], tuple[Tensor, ...]]]] = {
    "convolution": (convolved, loop_convolution, convolution),
    "diagonal": (R.linear_recurrence, loop_diagonal, diagonal),
    "rotating": (R.rotating_recurrence, loop_rotating, rotating),
    "matrix": (R.matrix_recurrence, loop_matrix, matrix),
    "matrix_per_key": (R.matrix_recurrence, loop_matrix, lambda n: matrix(n, K)),
    "matrix_shared_keys": (R.matrix_recurrence, loop_matrix, shared),
    "delta": (R.delta_recurrence, loop_delta, delta),
}


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


@pytest.mark.kernels
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_give_the_results_and_gradients_of_the_loop(kind: str, length: int) -> None:
    chunked, loop, make = KINDS[kind]
    args = [x.detach().requires_grad_() for x in make(length)]
    resets = draw(9, B, length) > 1.0
    resets[0] = False  # one row without a reset
    found, expected = tensors(chunked(*args, resets)), tensors(loop(*args, resets))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = [draw(20 + i, *x.shape) for i, x in enumerate(expected)]
    grads = [
        torch.autograd.grad(
            [(x * w).sum() for x, w in zip(xs, weights, strict=True)], args, allow_unused=True
        )
        for xs in (found, expected)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    without = tensors(loop(*args, torch.zeros_like(resets)))
    torch.testing.assert_close(tensors(chunked(*args)), without, rtol=1e-9, atol=1e-9)


def test_running_sums_are_matrix_products_if_they_must_be_deterministic() -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        found = R.running_sum(x)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, x.cumsum(1))
    assert torch.equal(R.running_sum(x), x.cumsum(1))


def test_a_reversed_recurrence_is_the_loop_from_the_last_timestep() -> None:
    """In float32, with decays of 0 and 1, which are ends of episodes and steps without discount."""
    decay, inputs, state = diagonal(2048)
    decay[0], decay[1, ::700] = 1.0, 0.0
    decay, inputs, never = decay.float(), inputs.float(), torch.zeros(B, 2048, dtype=torch.bool)
    reversed_ = (x.flip(1).double() for x in (decay, inputs))
    expected = loop_diagonal(*reversed_, torch.zeros_like(state), never).flip(1)
    found = R.reverse_recurrence(decay, inputs)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def kernel_device() -> torch.device:
    """The device of the kernels: a GPU, or Triton's interpreter if there is none."""
    if find_spec(kernels.PACKAGE) is None:
        pytest.skip("needs flash-linear-attention: pip install 'loxodon[kernels]'")
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpret()
    return torch.device("cpu")


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("kind", ["diagonal", "delta", "matrix", "matrix_per_key", "matrix_shared_keys"])
def test_installed_kernels_give_the_results_and_gradients_of_the_loop(
    kind: str, has_resets: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    kernel = kernels._kernel
    monkeypatch.setattr(kernels, "runs_kernels", lambda _: True)
    monkeypatch.setattr(kernels, "_kernel", lambda *names: ran.append(names[1]) or kernel(*names))
    chunked, loop, make = KINDS[kind]
    resets = draw(9, B, 80) > 1.0 if has_resets else torch.zeros(B, 80, dtype=torch.bool)
    args = [x.detach().to(kernel_device, torch.float32).requires_grad_() for x in make(80)]
    wide = [x.detach().double().cpu().requires_grad_() for x in args]
    on_device = resets.to(kernel_device) if has_resets else None
    found, expected = tensors(chunked(*args, on_device)), tensors(loop(*wide, resets))
    assert ran
    weights = [draw(20 + i, *x.shape) for i, x in enumerate(expected)]
    of_loop = torch.autograd.grad(sum((x * w).sum() for x, w in zip(expected, weights, strict=True)), wide)
    of_kernel = torch.autograd.grad(
        sum((x * w.to(x)).sum() for x, w in zip(found, weights, strict=True)), args
    )
    close = 1e-4 if kernel_device.type == "cpu" else 1e-2  # a GPU rounds factors to TF32
    for one, other in zip([*found, *of_kernel], [*expected, *of_loop], strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=close, atol=close)


@pytest.mark.kernels
@pytest.mark.parametrize("strength", [1e-4, 1e3])
@pytest.mark.parametrize("kind", ["matrix", "matrix_per_key"])
def test_neither_strong_nor_absent_decay_overflows(kind: str, strength: float) -> None:
    q, k, v, log_decay, state = matrix(150, 1 if kind == "matrix" else K, strength)
    if kind == "matrix":
        log_decay = -strength * draw(3, B, 150, H, 1).abs()  # unbounded
    resets = draw(9, B, 150) > 1.5
    found = R.matrix_recurrence(*(x.float() for x in (q, k, v, log_decay, state)), resets)
    for one, other in zip(found, loop_matrix(q, k, v, log_decay, state, resets), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
def test_one_step_is_a_sequence_of_one() -> None:
    for sequence, step, args in (
        (R.matrix_recurrence, R.matrix_step, matrix(1)),
        (R.matrix_recurrence, R.matrix_step, matrix(1, K)),
        (R.delta_recurrence, R.delta_step, delta(1)),
    ):
        y, state = sequence(*args)
        torch.testing.assert_close(step(*(x[:, 0] for x in args[:-1]), args[-1]), (y[:, 0], state))
