"""Normalisation of advantages: which entries count, and which statistics are used."""

from __future__ import annotations

import json

import pytest
import torch

from loxodon.agents import AdvantageNorm

MASK = torch.tensor([[True, True, False], [True, True, False]])


def advantages(scale: float = 3.0, shift: float = 5.0) -> torch.Tensor:
    return torch.tensor([[-1.0, 0.0, torch.nan], [2.0, 1.0, 1e9]]) * scale + shift


@pytest.mark.parametrize("mode", ["batch", "minibatch", "ema"])
def test_only_masked_in_entries_count(mode: str) -> None:
    found = AdvantageNorm(mode=mode)(advantages(), MASK)
    raw = torch.tensor([-1.0, 0.0, 2.0, 1.0])
    assert torch.allclose(found[MASK], (raw - raw.mean()) / raw.std(), atol=1e-5)
    assert (found[~MASK] == 0).all()
    assert found.dtype == torch.float32


def test_mode_none_leaves_the_entries_that_count_unchanged() -> None:
    found = AdvantageNorm(mode="none")(advantages(), MASK)
    assert torch.equal(found[MASK], advantages()[MASK])
    assert (found[~MASK] == 0).all()


def test_only_minibatch_mode_normalises_minibatches() -> None:
    modes = {mode: AdvantageNorm(mode=mode).per_minibatch for mode in ("none", "batch", "minibatch", "ema")}
    assert modes == {"none": False, "batch": False, "minibatch": True, "ema": False}


def test_a_single_advantage_is_unchanged() -> None:
    mask = torch.tensor([True, False])
    assert AdvantageNorm()(torch.tensor([7.0, 3.0]), mask).tolist() == [7.0, 0.0]
    assert AdvantageNorm()(torch.tensor([7.0, 3.0]), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_equal_advantages_become_zero() -> None:
    assert AdvantageNorm()(torch.full((100,), 0.1), torch.ones(100, dtype=torch.bool)).abs().max() < 1e-6


def test_deviation_survives_a_large_mean() -> None:
    found = AdvantageNorm()(torch.tensor([1e6, 1e6 + 1]), torch.ones(2, dtype=torch.bool))
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-4)


def test_moving_averages_are_those_of_earlier_rollouts() -> None:
    norm, mask = AdvantageNorm(mode="ema", ema_alpha=0.25), torch.ones(2, dtype=torch.bool)
    norm(torch.tensor([-1.0, 1.0]), mask)  # mean 0, variance 2
    second = norm(torch.tensor([3.0, 5.0]), mask)
    assert second.tolist() == pytest.approx([3 / 2**0.5, 5 / 2**0.5], abs=1e-5)
    third = norm(torch.tensor([1.0, 1.0]), mask)  # mean 0.25 * 4, variance 2
    assert third.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)


def test_moving_averages_have_a_floor_and_a_limit() -> None:
    norm, mask = AdvantageNorm(mode="ema", ema_min_std=0.1, ema_clip=2.0), torch.ones(2, dtype=torch.bool)
    assert norm(torch.tensor([-0.01, 0.01]), mask).tolist() == pytest.approx([-0.1, 0.1], abs=1e-5)
    assert norm(torch.tensor([-9.0, 9.0]), mask).tolist() == [-2.0, 2.0]


def test_moving_averages_are_saved() -> None:
    norm, restored = AdvantageNorm(mode="ema"), AdvantageNorm(mode="ema")
    norm(advantages(), MASK)
    restored.load_state_dict(json.loads(json.dumps(norm.state_dict())))
    later = torch.tensor([[0.0, 10.0, 0.0], [2.0, 4.0, 0.0]])
    assert torch.equal(norm(later, MASK), restored(later, MASK))
    assert not torch.equal(AdvantageNorm(mode="ema")(later, MASK), restored(later, MASK))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"AdvantageNorm.mode is 'rollout'.*Fix"):
        AdvantageNorm(mode="rollout")
    with pytest.raises(ValueError, match=r"ema_alpha is 0.0.*Fix"):
        AdvantageNorm(ema_alpha=0.0)
