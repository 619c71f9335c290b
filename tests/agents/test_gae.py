"""Advantages of rollouts: golden numbers, the defining equation, cuts and gaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loxodon.agents import GAE, gae

VALUES = torch.tensor([5.0, 4.8, 4.6, 9.0, 8.8, 8.6])[:, None]
NEXT_VALUES = torch.tensor([4.8, 4.6, 4.4, 8.8, 8.6, 8.4])[:, None]  # 4.4: the final observation before a cut
ENDED = torch.tensor([False, False, True, False, False, False])[:, None]
TRUNCATED = torch.zeros_like(ENDED)  # same shape and type as `terminated`
AFTER = [2.0168, 1.3874, 0.7160]


def golden(terminated: Tensor, **kwargs: bool) -> list[float]:
    advantages, returns = GAE(**kwargs)(torch.ones(6, 1), VALUES, NEXT_VALUES, terminated, ENDED)  # type: ignore[arg-type]
    assert torch.allclose(returns, advantages + VALUES)
    found: list[float] = advantages[:, 0].tolist()
    return found


def test_advantages_have_the_golden_numbers() -> None:
    terminated = pytest.approx([-1.7232, -2.6318, -3.6000, *AFTER], abs=1e-4)
    assert golden(TRUNCATED) == pytest.approx([2.1298, 1.4650, 0.7560, *AFTER], abs=1e-4)
    assert golden(ENDED) == terminated
    assert golden(TRUNCATED, time_limit_bootstrap=False) == terminated


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Tensor, ...]:
    steps, envs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards, values, next_values = torch.randn(3, steps, envs, generator=g).unbind()
    terminated, truncated = (torch.rand(2, steps, envs, generator=g) < 0.2).unbind()
    mask = torch.rand(steps, envs, generator=g) < draw(st.sampled_from([0.7, 1.0]))
    return rewards, values, next_values, terminated, terminated | truncated, mask


@settings(max_examples=50, deadline=None)
@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_advantages_satisfy_the_defining_equation(
    rollout: tuple[Tensor, ...], discount: float, lam: float
) -> None:
    rewards, values, next_values, terminated, ended, mask = rollout
    poisoned = [x.masked_fill(~mask, torch.nan) for x in (rewards, values, next_values)]
    poisoned[2] = poisoned[2].masked_fill(terminated, torch.nan)  # these values are not read
    advantages, returns = gae(*poisoned, terminated, ended, mask, discount=discount, lam=lam)
    for t in range(len(rewards)):
        for n in range(rewards.shape[1]):
            expected = 0.0
            if mask[t, n]:
                following = 0.0 if terminated[t, n] else float(next_values[t, n])
                expected = float(rewards[t, n]) + discount * following - float(values[t, n])
                if t + 1 < len(rewards) and not ended[t, n]:
                    expected += discount * lam * float(advantages[t + 1, n])
            assert float(advantages[t, n]) == pytest.approx(expected, abs=1e-4)
    assert torch.allclose(returns, torch.where(mask, advantages + values, 0.0))


def test_lam_of_one_gives_monte_carlo_returns() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None]
    ended = torch.tensor([False, True, False, False])[:, None]
    everything = torch.randn(5, 1, generator=torch.Generator().manual_seed(0))
    values, next_values = everything[:4], everything[1:]
    _, returns = gae(rewards, values, next_values, ended, ended, discount=0.5, lam=1.0)
    last = 8.0 + 0.5 * float(next_values[-1])
    assert returns[:, 0].tolist() == pytest.approx([2.0, 2.0, 4.0 + 0.5 * last, last], abs=1e-5)


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"GAE\.{name} is 1\.5.*Fix"):
        GAE(**{name: 1.5})  # type: ignore[arg-type]
