"""Returns over a sequence, against the sums that define them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loxodon.agents import lambda_returns, n_step_targets, retrace_targets

DISCOUNTS = torch.tensor([[0.5], [0.9]])


def steps(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Rewards, terminations, mask and next values of one sequence, and its number of real steps."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(1, length, 1, 1, generator=g), torch.randn(1, length, 2, 1, generator=g)
    done = torch.rand(1, length, 1, 1, generator=g) < 0.2
    num_real = int(torch.randint(1, length + 1, (), generator=g))
    mask = (torch.arange(length) < num_real).view(1, -1, 1, 1)
    rewards, values = rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.nan)
    return rewards, done, mask, values, num_real


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.sampled_from([0.0, 0.4, 0.95, 1.0]), st.integers(0, 99))
def test_lambda_returns_are_the_weighted_mean_of_all_n_step_targets(
    length: int, decay: float, seed: int
) -> None:
    *given_steps, num_real = steps(length, seed)
    n_step = [n_step_targets(*given_steps, DISCOUNTS, n_step=n) for n in range(1, length + 2)]
    expected = sum((1 - decay) * decay**i * y for i, y in enumerate(n_step[:-1])) + decay**length * n_step[-1]
    y = lambda_returns(*given_steps, DISCOUNTS, trace_decay=decay)
    torch.testing.assert_close(y[:, :num_real], expected[:, :num_real])  # type: ignore[index]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99))
def test_retrace_is_a_value_and_the_sum_of_traced_errors(length: int, seed: int) -> None:
    rewards, done, mask, values, num_real = steps(length, seed)
    q, c = torch.randn(1, length + 1, 2, 1), torch.rand(1, length + 1, 2, 1)  # at t = 0, 1, ...
    y = retrace_targets(rewards, done, mask, values, DISCOUNTS, next_q=q[:, 1:], next_traces=c[:, 1:])
    for g, discount in enumerate(DISCOUNTS[:, 0].tolist()):
        r, v, q_g, c_g = rewards[0, :, 0, 0], values[0, :, g, 0], q[0, :, g, 0], c[0, :, g, 0]
        over = done[0, :, 0, 0]
        for t in range(num_real):
            total, weight = q_g[t], 1.0
            for k in range(t, num_real):
                total = total + weight * (r[k] + discount * v[k] * ~over[k] - q_g[k])
                if over[k] or k + 1 == num_real:
                    break
                weight = weight * discount * c_g[k + 1]
            torch.testing.assert_close(y[0, t, g, 0], total)


def test_traces_of_zero_and_lambda_of_zero_are_one_step_targets() -> None:
    rewards, done, mask, values, num_real = steps(5, 3)
    one = n_step_targets(rewards, done, mask, values, DISCOUNTS, n_step=1)[:, :num_real]
    zeros = torch.zeros(1, 5, 2, 1)
    none = retrace_targets(rewards, done, mask, values, DISCOUNTS, next_q=zeros + 9, next_traces=zeros)
    torch.testing.assert_close(none[:, :num_real], one)


def test_sequences_that_share_a_row_do_not_influence_each_other() -> None:
    rewards, _, _, values, _ = (x.nan_to_num() if isinstance(x, Tensor) else x for x in steps(40, 4))
    done = torch.zeros(1, 40, 1, 1, dtype=torch.bool)
    mask, q, c = ~done, values.flip(1), values.sigmoid()
    mask[:, [17, 39]] = False
    given = [x.masked_fill(~mask, torch.nan) for x in (rewards, values, q, c)]

    def both(part: slice) -> Tensor:
        r, v, next_q, traces = (x[:, part] for x in given)
        known = (r, done[:, part], mask[:, part], v, DISCOUNTS)
        return torch.cat(
            [
                lambda_returns(*known, trace_decay=0.9),
                retrace_targets(*known, next_q=next_q, next_traces=traces),
            ]
        )

    alone = torch.cat([both(slice(18)), both(slice(18, 40))], dim=1)
    real = mask[0, :, 0, 0]
    assert alone[:, real].isfinite().all()
    torch.testing.assert_close(both(slice(40))[:, real], alone[:, real])


@pytest.mark.parametrize("function", ["lambda", "retrace"])
def test_returns_by_hand(function: str) -> None:
    """Rewards 1, 2, 4 and next values 10, 20, 30; the window ends without termination."""
    rewards, values = (torch.tensor(x).view(1, 3, 1, 1) for x in ([1.0, 2.0, 4.0], [10.0, 20.0, 30.0]))
    real, half = torch.ones(1, 3, 1, 1, dtype=torch.bool), torch.tensor([[0.5]])
    if function == "lambda":  # 4 + 15 = 19; 2 + .5 (.5 * 20 + .5 * 19) = 11.75; 1 + .5 (5 + 5.875) = 6.4375
        y, expected = (
            lambda_returns(rewards, ~real, real, values, half, trace_decay=0.5),
            [6.4375, 11.75, 19.0],
        )
    else:  # 19; 2 + .5 (20 + .5 (19 - 18)) = 12.25; 1 + .5 (10 + .5 (12.25 - 8)) = 7.0625
        q = torch.tensor([8.0, 18.0, 99.0]).view(1, 3, 1, 1)
        c = torch.full((1, 3, 1, 1), 0.5)
        y = retrace_targets(rewards, ~real, real, values, half, next_q=q, next_traces=c)
        expected = [7.0625, 12.25, 19.0]
    assert y.flatten().tolist() == expected
