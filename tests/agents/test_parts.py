"""Each part of off-policy agents: its equation, its errors, and that gin can choose it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.agents import (
    Agent,
    FixedUnits,
    LambdaReturns,
    NStep,
    PlainValues,
    PopArt,
    RandomSubset,
    Retrace,
    SummedValues,
    WeighByAdvantage,
)
from loxodon.agents.parts import ValueScale
from loxodon.nets import CriticEnsemble, FFTstepEncoder, GRUTrajEncoder

OBS = spaces.Dict({"observation": spaces.Box(-1, 1, (3,), np.float32)})
make_agent = partial(
    Agent,
    OBS,
    spaces.Discrete(2),
    partial(FFTstepEncoder, n_layers=1, d_hidden=4, d_output=4),
    partial(GRUTrajEncoder, n_layers=1, d_hidden=4, d_output=4),
    8,
)


def built(part: Any, *discounts: float) -> Any:
    part.build(discounts or (0.9,))
    return part


def gather(values: ValueScale, *targets: float) -> None:
    values.gather(torch.tensor(targets).view(1, -1, 1, 1), torch.ones(1, len(targets), 1, dtype=torch.bool))


def update(values: ValueScale, *targets: float) -> None:
    gather(values, *targets)
    values.commit()


# --- choosing parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "name", "part_setting", "value"),
    [
        ("returns", "NStep", "n", 3),
        ("returns", "LambdaReturns", "trace_decay", 0.5),
        ("returns", "Retrace", "trace_decay", 0.5),
        ("critic_subset", "RandomSubset", "per", "update"),
        ("values", "PlainValues", None, None),
        ("values", "PopArt", "beta", 0.25),
        ("values", "FixedUnits", "floor", 0.5),
        ("values", "SummedValues", "floor", 0.5),
        ("loss_weights", "WeighByAdvantage", "rare", 5.0),
    ],
)
def test_gin_chooses_parts_and_their_settings(
    setting: str, name: str, part_setting: str | None, value: Any
) -> None:
    gin.parse_config(f"Agent.{setting} = @{name}()")
    if part_setting is not None:
        gin.parse_config(f"{name}.{part_setting} = {value!r}")
    try:
        part = getattr(make_agent(), setting)
    finally:
        gin.clear_config()
    assert type(part).__name__ == name
    if part_setting is not None:
        assert getattr(part, part_setting) == value


@pytest.mark.parametrize(
    ("setting", "wrong", "example"),
    [
        ("returns", "retrace", "NStep"),
        ("returns", Retrace, "NStep"),
        ("critic_subset", "element", "RandomSubset"),
        ("critic_subset", RandomSubset, "RandomSubset"),
        ("values", False, "PopArt"),
        ("values", SummedValues, "PopArt"),
        ("loss_weights", True, "WeighByAdvantage"),
        ("loss_weights", WeighByAdvantage, "WeighByAdvantage"),
    ],
)
def test_a_value_that_is_not_a_part_is_refused_with_a_fix(setting: str, wrong: Any, example: str) -> None:
    words = rf"Agent.{setting} is .*with parentheses\). Fix: bind Agent.{setting} = @{example}\(\)"
    with pytest.raises(TypeError, match=words):
        make_agent(**{setting: wrong})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NStep(0), "NStep.n is 0"),
        (lambda: NStep(math.nan), "NStep.n is nan"),  # type: ignore[arg-type]
        (lambda: make_agent(online_coeff=math.nan), "Agent.online_coeff is nan"),
        (lambda: make_agent(offline_coeff=math.nan), "Agent.offline_coeff is nan"),
        (lambda: make_agent(entropy_coeff=math.nan), "Agent.entropy_coeff is nan"),
        (lambda: LambdaReturns(2.0), "LambdaReturns.trace_decay is 2.0"),
        (lambda: Retrace(-0.1), "Retrace.trace_decay is -0.1"),
        (lambda: RandomSubset(size=0), "RandomSubset.size is 0"),
        (lambda: RandomSubset(per="batch"), "RandomSubset.per is 'batch'"),
        (lambda: RandomSubset(reduce="max"), "RandomSubset.reduce is 'max'"),
        (lambda: PopArt(beta=0.0), "PopArt.beta is 0.0"),
        (lambda: PopArt(init_nu=-1), "PopArt.init_nu is -1"),
        (lambda: WeighByAdvantage(rare=-1.0), "WeighByAdvantage.rare is -1.0"),
        (lambda: WeighByAdvantage(beta=5.0), "WeighByAdvantage.beta is 5.0"),
        (lambda: FixedUnits(floor=0.0), "FixedUnits.floor is 0.0"),
        (lambda: SummedValues(floor=2.0), "SummedValues.floor is 2.0"),
    ],
)
def test_impossible_settings_of_parts_are_explained(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{words}.*Fix: (bind|set)"):
        make()


# --- critic_subset ---------------------------------------------------------------------------------------


def drawn(**settings: Any) -> Tensor:
    """Reduced values (40, 9, 3, 1) of four critics that value everything at 0, 1, 2 and 3."""
    critics = CriticEnsemble(5, 2, 3, True, num_critics=4)
    torch.nn.init.zeros_(critics.out.weight)
    with torch.no_grad():
        critics.out.bias.copy_(torch.arange(4.0)[:, None, None])
    torch.manual_seed(0)
    of_drawn, reduced = RandomSubset(**settings).draw(critics, (40, 9), 3, torch.device("cpu"))
    values = of_drawn(torch.randn(40, 9, 5))[..., :1]
    low: Tensor = reduced(values)
    torch.testing.assert_close(reduced(values + 1.0), low + 1.0)  # the draw is made once
    return low


@pytest.mark.parametrize(
    ("replace", "reduce", "found"),
    [
        (True, "min", [0, 1, 2, 3]),
        (False, "min", [0, 1, 2]),
        (True, "mean", [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        (False, "mean", [0.5, 1, 1.5, 2, 2.5]),
    ],
)
def test_a_subset_is_drawn_for_each_element_or_once_per_update(
    replace: bool, reduce: str, found: list[float]
) -> None:
    low = drawn(per="element", replace=replace, reduce=reduce)
    assert low.shape == (40, 9, 3, 1)
    assert low.unique().tolist() == found
    once = drawn(per="update", replace=replace, reduce=reduce).unique()
    assert len(once) == 1
    assert once.item() in found


# --- values ----------------------------------------------------------------------------------------------


def test_plain_values_are_the_outputs_for_any_targets() -> None:
    plain, x = built(PlainValues()), torch.randn(3, 1, 1)
    update(plain, 5.0, 9.0)
    assert torch.equal(plain.value(x), x)
    assert torch.equal(plain.normalize(x), x)
    assert plain.sigma.item() == 1.0


def test_popart_statistics_move_before_the_loss_and_keep_all_values() -> None:
    torch.manual_seed(0)
    popart, outputs = built(PopArt(beta=0.5), 0.5, 0.9), torch.randn(4, 2, 1)
    before = popart.value(outputs)
    torch.testing.assert_close(before, 10.0 * outputs)  # the square root of init_nu
    popart.gather(torch.tensor([2.0, 6.0]).view(1, 2, 1, 1).expand(-1, -1, 2, -1), torch.ones(1, 2, 1) > 0)
    # The start counts as one update, so the rate is 0.5 / (1 - 0.5^2) = 2/3.
    mu, nu = 2 / 3 * 4.0, 100.0 + 2 / 3 * (20.0 - 100.0)
    for _ in range(2):
        torch.testing.assert_close(popart.mu, torch.full((2, 1), mu))
        torch.testing.assert_close(popart.sigma, torch.full((2, 1), (nu - mu**2) ** 0.5))
        torch.testing.assert_close(popart.normalize(before), (before - mu) / (nu - mu**2) ** 0.5)
        torch.testing.assert_close(popart.value(outputs), before)
        popart.commit()  # a commit does not change losses
    assert popart.updates.item() == 2


def test_values_in_fixed_units_take_the_unit_from_the_first_targets_that_are_not_0() -> None:
    values, one = built(FixedUnits(beta=1.0)), torch.ones(1, 1, 1)
    assert values.value(one).item() == 0.0
    update(values, 0.0, 0.0)
    update(values, 2.0, 6.0)
    assert values.value(one).item() == 6.0  # mean 4, deviation 2
    update(values, 0.0, 100.0)
    assert values.value(one).item() == 6.0


@pytest.mark.parametrize("kind", [FixedUnits, SummedValues])
@pytest.mark.parametrize("beta", [5e-4, 1e-3, 5e-3, 7e-3, 0.03, 0.3, 1.0])  # rounding differs
def test_a_first_reward_sets_the_same_unit_however_late_it_comes(kind: type[FixedUnits], beta: float) -> None:
    at_once, late = built(kind(beta=beta)), built(kind(beta=beta))
    for _ in range(1_000):
        update(late, 0.0, 0.0)
    assert late.value(torch.ones(1, 1, 1)).item() == 0.0  # so targets without rewards stay exactly 0
    for values in (at_once, late):
        update(values, 0.0, 0.0, 0.0, 10.0)
    assert late.unit.item() == at_once.unit.item() > 1.0
    assert late.origin.item() == at_once.origin.item() == 2.5


def test_the_scale_in_fixed_units_follows_the_targets_down_to_a_floor() -> None:
    # The rate is beta / (1 - (1 - beta)^2) = 2/3, so mu = 1 + 2/3 (4 - 1) and nu = 2 + 2/3 (20 - 2).
    values = built(FixedUnits(beta=0.5))
    update(values, 0.0, 2.0)
    update(values, 2.0, 6.0)
    moments = [values.mu.item(), values.nu.item(), values.sigma.item()]
    assert moments == pytest.approx([3.0, 14.0, 5.0**0.5])
    for floor, sigma in ((0.1, 10.0), (0.001, 0.5)):
        values = built(FixedUnits(floor=floor))
        update(values, 99.5, 100.5)
        assert values.sigma.item() == pytest.approx(sigma, rel=1e-2)


@pytest.mark.parametrize("places", [[0, 1], [1, 0]], ids=["ascending", "descending"])
def test_summed_values_of_a_discount_add_to_those_of_the_next_smaller_one(places: list[int]) -> None:
    values = built(SummedValues(), *torch.tensor([0.5, 0.9])[places].tolist())
    targets = torch.tensor([[1.0, 10.0], [3.0, 50.0]])  # means 2 and 30, deviations 1 and 20
    values.gather(targets[None, :, places, None], torch.ones(1, 2, 1, dtype=torch.bool))
    values.commit()
    outputs = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0]])
    expected = torch.tensor([[2.0, 30.0], [3.0, 51.0], [2.5, 30.5]])
    torch.testing.assert_close(values.value(outputs[:, places, None]), expected[:, places, None])


@pytest.mark.parametrize("kind", [PopArt, FixedUnits, SummedValues])
def test_statistics_ignore_padding_and_are_summed_over_processes(kind: Any) -> None:
    whole, first, second = (built(kind(beta=0.5)) for _ in range(3))
    gather(whole, 1.0, 3.0, 8.0)
    gather(first, 1.0, 3.0)
    second.gather(torch.tensor([8.0, 99.0]).view(1, 2, 1, 1), torch.tensor([[[True], [False]]]))
    second.set_pending_sums(first.pending_sums() + second.pending_sums())
    for values in (whole, second):
        values.commit()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value)


# --- loss_weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_until_critics_know_actions_losses_are_weighted_by_the_rewards_that_returns_contain(
    unit: float,
) -> None:
    def roots(rewards: Tensor, **settings: float) -> list[float]:
        first, second = (built(WeighByAdvantage(beta=0.5, **settings), 0.5, 0.99, 0.9999) for _ in range(2))
        for _ in range(2):
            mask = torch.arange(1_010)[None, :, None] < 1_000
            given = torch.cat([unit * rewards, torch.full((10,), 1e9)])[None, :, None, None]
            advantages = torch.zeros(1, 1_010, 2, 3, 1)
            first.gather(given[:, :300], advantages[:, :300], mask[:, :300])
            second.gather(given[:, 300:], advantages[:, 300:], mask[:, 300:])
            sums = first.pending_sums() + second.pending_sums()
            for part in (first, second):
                part.set_pending_sums(sums)
                part.commit()
        return second.weights(torch.ones(3, 1)).sqrt()[:, 0].tolist()

    alone = torch.zeros(1_000)
    alone[7] = -1.0
    # Horizons are at most 1,000 timesteps, and the largest weight is 1.
    assert roots(torch.ones(1_000)) == pytest.approx([1.0, 0.02, 0.002], rel=1e-4)
    assert roots(torch.zeros(1_000)) == pytest.approx([1.0, 0.02, 0.002], rel=1e-4)
    two = alone.roll(3) + alone  # p is 0.02, ten times larger
    assert roots(two) == pytest.approx([1.0, 0.5, 0.05], rel=1e-4)
    assert roots(two, rare=torch.inf) == pytest.approx([1.0, 0.02, 0.002], rel=1e-4)


def test_losses_are_weighted_by_the_variance_that_actions_explain() -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.randn(4, 500, 1, 1, 1, generator=generator).sign() * torch.tensor([1.0, 0.3])[:, None]
    errors = torch.randn(4, 500, 4, 2, 1, generator=generator)
    mask = (torch.arange(500) < 400).expand(4, 500)[..., None]
    rewards = torch.ones(4, 500, 1, 1)

    def weights(*updates: Tensor, beta: float = 1.0) -> list[float]:
        part = built(WeighByAdvantage(enough=0.2, beta=beta), 0.5, 0.99)
        for advantages in updates:
            part.gather(rewards, torch.where(mask[..., None, None], advantages, 1e6), mask)
            part.commit()
        return part.weights(torch.tensor([[1.0], [10.0]]))[:, 0].tolist()

    agreed = known.expand(4, 500, 4, 2, 1)
    # 0.3^2 / 0.2, whether critics agree exactly or also have errors of their own.
    assert weights(agreed) == pytest.approx([1.0, 0.45], rel=1e-4)
    assert weights(known + 0.1 * errors) == pytest.approx([1.0, 0.45], abs=0.01)
    assert weights(3.0 * agreed) == [1.0, 1.0]
    # Averages begin at 0.
    assert weights(agreed, agreed, beta=0.5) == pytest.approx([1.0, 0.75 * 0.45], rel=1e-4)
    # Critics that only contradict each other, and a single critic, leave the weights to the rewards, which
    # are 1 at every timestep: k is 1 and 0.02, times sigma. What was known before keeps its weight.
    opposite = known * torch.tensor([1.0, -1.0])[:, None, None]
    for advantages in (opposite, known):
        assert weights(advantages) == pytest.approx([1.0, 0.04], rel=1e-4)
        assert weights(agreed, advantages) == pytest.approx([1.0, 0.45], rel=1e-4)
