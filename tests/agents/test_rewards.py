"""Normalisation of rewards: accumulators, statistics, and what resets them."""

from __future__ import annotations

import json

import pytest
import torch

from loxodon.agents import RewardNormalizer

ALL = torch.ones(4, 1, dtype=torch.bool)
NEVER = ~ALL


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


@pytest.mark.parametrize(
    ("ended", "sums"),
    [
        ([False, False, False, False], [1.0, 2.5, 1.25, -0.375]),
        ([False, True, False, False], [1.0, 2.5, 0.0, -1.0]),  # restarts after every end
    ],
)
def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum(
    ended: list[bool], sums: list[float]
) -> None:
    rewards = column(1.0, 2.0, 0.0, -1.0)
    found = RewardNormalizer(gamma=0.5)(rewards, torch.tensor(ended)[:, None], ALL)
    assert torch.allclose(found, rewards / torch.tensor(sums).std(unbiased=False))
    assert torch.equal(rewards, column(1.0, 2.0, 0.0, -1.0))  # the caller's array is unchanged


def test_accumulators_continue_in_the_next_rollout_and_statistics_merge() -> None:
    rewards = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    ended = torch.rand(8, 3, generator=torch.Generator().manual_seed(1)) < 0.2
    everywhere = torch.ones(8, 3, dtype=torch.bool)
    whole, parts = RewardNormalizer(), RewardNormalizer()
    expected = whole(rewards, ended, everywhere)
    parts(rewards[:5], ended[:5], everywhere[:5])
    assert torch.allclose(parts(rewards[5:], ended[5:], everywhere[5:]), expected[5:], atol=1e-6)


def test_entries_without_a_step_do_not_count() -> None:
    rewards, mask = column(1.0, torch.nan, 2.0, -1.0), torch.tensor([True, False, True, True])[:, None]
    found = RewardNormalizer()(rewards, NEVER, mask)
    dense = RewardNormalizer()(column(1.0, 2.0, -1.0), NEVER[:3], ALL[:3])
    assert torch.allclose(found[mask], dense[:, 0])
    assert found[1] == 0


def test_restart_forgets_the_running_episodes_only() -> None:
    normalizers = [RewardNormalizer() for _ in range(3)]
    for normalizer in normalizers:
        normalizer(column(1.0, 2.0, 0.0, 5.0), NEVER, ALL)
    normalizers[1].restart()
    normalizers[2](column(0.0), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool))
    later = [normalizer(column(1.0, 2.0, 0.0, 5.0), NEVER, ALL) for normalizer in normalizers]
    assert not torch.allclose(later[0], later[1])
    assert torch.allclose(later[1], later[2])


def test_results_are_clipped_and_finite() -> None:
    rewards = torch.zeros(1000, 1)
    rewards[-1] = 1e6
    everywhere = torch.ones(1000, 1, dtype=torch.bool)
    assert RewardNormalizer(clip=3.0)(rewards, ~everywhere, everywhere).max() == 3.0
    assert (RewardNormalizer()(torch.zeros(1000, 1), ~everywhere, everywhere) == 0).all()


def test_state_is_saved_as_plain_numbers() -> None:
    normalizer, restored = RewardNormalizer(), RewardNormalizer()
    normalizer(column(1.0, 2.0, 0.0, 5.0), NEVER, ALL)
    restored.load_state_dict(json.loads(json.dumps(normalizer.state_dict())))
    later = column(3.0, -2.0, 0.5, 1.0)
    assert torch.equal(normalizer(later, NEVER, ALL), restored(later, NEVER, ALL))


def test_another_number_of_envs_starts_anew() -> None:
    normalizer = RewardNormalizer()
    normalizer(column(1.0, 2.0, 0.0, 5.0), NEVER, ALL)
    assert normalizer(torch.ones(4, 2), NEVER.expand(4, 2), ALL.expand(4, 2)).shape == (4, 2)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"RewardNormalizer.gamma is 2.*Fix"):
        RewardNormalizer(gamma=2)
