"""The pure parts of the objective, against their definitions and small hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loxodon.agents import binary_filter, exp_filter, leaky_relu_filter, masked_mean, n_step_targets

DISCOUNTS = torch.tensor([[0.5], [0.9]])


def steps(*values: float) -> Tensor:
    """A sequence of values, (1, L, 1, 1) float."""
    return torch.tensor(values).view(1, -1, 1, 1)


def targets(rewards: Tensor, done: list[int], real: list[int], values: Tensor, n_step: int) -> Tensor:
    flags = [torch.tensor(x, dtype=torch.bool).view(1, -1, 1, 1) for x in (done, real)]
    return n_step_targets(rewards, *flags, values.expand(1, -1, 2, 1), DISCOUNTS, n_step=n_step)


def test_one_step_target_bootstraps_unless_terminated() -> None:
    y = targets(steps(1, 2), [0, 1], [1, 1], steps(10, 20), n_step=1)
    torch.testing.assert_close(y[0, :, :, 0], torch.tensor([[6.0, 10.0], [2.0, 2.0]]))


def test_several_steps_by_hand() -> None:
    # t=0: 1 + .5*2 + .25*4 + .125*40 = 8
    # t=1 reaches the end of the data after 3 steps: 2 + .5*4 + .25*8 + .125*50
    y = targets(steps(1, 2, 4, 8), [0, 0, 0, 0], [1, 1, 1, 1], steps(20, 30, 40, 50), n_step=3)[0, :, 0, 0]
    torch.testing.assert_close(y, torch.tensor([8.0, 12.25, 20.5, 33.0]))
    y = targets(steps(1, 2, 4), [0, 1, 0], [1, 1, 1], steps(20, 30, 40), n_step=3)[0, :, 0, 0]
    torch.testing.assert_close(y, torch.tensor([1 + 0.5 * 2, 2.0, 4 + 0.5 * 40]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_n_step_target_equals_its_defining_sum(length: int, n_step: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(1, length, 1, 1, generator=g), torch.randn(1, length, 2, 1, generator=g)
    done = torch.rand(1, length, 1, 1, generator=g) < 0.2
    num_real = int(torch.randint(1, length + 1, (), generator=g))
    mask = (torch.arange(length) < num_real).view(1, -1, 1, 1)
    y = n_step_targets(rewards, done, mask, values, DISCOUNTS, n_step=n_step)
    for t in range(num_real):
        for i, discount in enumerate(DISCOUNTS[:, 0].tolist()):
            total, k = 0.0, 0
            while True:
                total += discount**k * rewards[0, t + k].item()
                k += 1
                if done[0, t + k - 1] or k == n_step or t + k == num_real:
                    break
            if not done[0, t + k - 1]:
                total += discount**k * values[0, t + k - 1, i].item()
            assert abs(total - y[0, t, i].item()) < 1e-4


def test_masked_mean_ignores_nan_under_false_and_counts_broadcast_entries() -> None:
    x = torch.tensor([[1.0, 3.0, math.nan]])
    assert masked_mean(x, torch.tensor([[True, True, False]])).item() == 2.0
    assert masked_mean(torch.ones(2, 3, 4), torch.ones(2, 3, 1, dtype=torch.bool)).item() == 1.0
    assert masked_mean(x, torch.zeros(1, 3, dtype=torch.bool)).item() == 0.0


def test_filters_by_hand() -> None:
    a = torch.tensor([-1.0, 0.0, 2.0])
    assert binary_filter(a).tolist() == [0.0, 0.0, 1.0]
    torch.testing.assert_close(exp_filter(a), torch.tensor([math.exp(-1), 1.0, math.exp(2)]))
    assert exp_filter(torch.tensor([1e9])).item() == 10.0
    assert exp_filter(a, beta=0.5)[2].item() == pytest.approx(math.e)


def test_the_leaky_filter_is_the_binary_one_plus_a_ramp() -> None:
    """At an advantage of 1 it is 1 + 0.01025 + 0.99 / 2; below tau, the slope is a twentieth."""
    found = leaky_relu_filter(torch.tensor([-1.0, 0.0, 0.01, 1.0, 5.0, 100.0]))
    expected = torch.tensor([1e-7, 0.01, 1.01025, 1.50525, 3.50525, 11.0])
    torch.testing.assert_close(found, expected)
    below = leaky_relu_filter(torch.tensor([-0.2]))  # 0.01025 + 0.05 (-0.21 / 2)
    assert below.item() == pytest.approx(0.005)
    later = leaky_relu_filter(torch.tensor([0.5, 1.5]), beta=1.0, tau=0.5)
    torch.testing.assert_close(later, torch.tensor([1.035, 2.035]))
