"""Running statistics: right values, deaf to padding, moved only by commit."""

from __future__ import annotations

import pytest
import torch

from loxodon.nets import PopArt, RunningNorm


def test_running_norm_equals_the_statistics_of_all_rows_and_moves_at_commit_only() -> None:
    torch.manual_seed(0)
    norm, chunks = RunningNorm(3), torch.randn(4, 5, 4, 3) * 7 + 2
    for one, two in chunks.view(2, 2, 5, 4, 3):
        norm.gather(one)
        before = norm(two)
        norm.gather(two)
        assert torch.equal(norm(two), before)
        norm.commit()
    rows = chunks.reshape(-1, 3)
    torch.testing.assert_close(norm.mean, rows.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.var, rows.var(0, unbiased=False), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm(rows).mean(0), torch.zeros(3), rtol=0, atol=1e-4)


def test_only_real_rows_reach_the_statistics() -> None:
    norm, x = RunningNorm(1), torch.tensor([[[1.0], [3.0], [1e6]]])
    norm.gather(x, torch.zeros(1, 3, 1, dtype=torch.bool))
    norm.commit()
    assert (norm.mean.item(), norm.count.item()) == (0.0, 0.0)
    norm.gather(x, torch.tensor([[[True], [True], [False]]]))
    norm.commit()
    assert (norm.mean.item(), norm.var.item(), norm.count.item()) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    "kwargs", [{"clip": 0.0}, {"min_std": 0.0}, {"stop_after": 0.0}, {"stop_after": 9.0, "window": 8.0}]
)
def test_impossible_settings_are_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"RunningNorm has .*Fix:"):
        RunningNorm(1, **kwargs)


def gathered(popart: PopArt, *values: float) -> None:
    targets = torch.tensor(values).view(1, -1, 1, 1)
    popart.gather(targets, torch.ones(1, len(values), 1, dtype=torch.bool))
    popart.commit()


def test_popart_first_statistics_are_those_of_the_first_targets() -> None:
    popart = PopArt([0.9], beta=0.1)
    gathered(popart, 1.0, 3.0)
    assert popart.mu.item() == 2.0
    torch.testing.assert_close(popart.sigma, torch.ones(1, 1))
    torch.testing.assert_close(popart.normalize(torch.full((1, 1), 3.0)), torch.ones(1, 1))


def test_popart_keeps_predicted_values_when_statistics_move() -> None:
    torch.manual_seed(0)
    popart, outputs = PopArt([0.5, 0.9], beta=0.3), torch.randn(4, 2, 1)
    popart.gather(torch.randn(1, 9, 2, 1), torch.ones(1, 9, 1, dtype=torch.bool))
    popart.commit()
    before = popart.value(outputs)
    popart.gather(torch.randn(1, 9, 2, 1) * 30 + 5, torch.ones(1, 9, 1, dtype=torch.bool))
    popart.commit()
    torch.testing.assert_close(popart.value(outputs), before)
    assert not torch.allclose(popart.mu, torch.zeros(2, 1), atol=0.5)


@pytest.mark.parametrize("places", [[0, 1], [1, 0]], ids=["ascending", "descending"])
def test_values_of_a_discount_add_to_those_of_the_one_below(places: list[int]) -> None:
    popart = PopArt(torch.tensor([0.5, 0.9])[places].tolist(), beta=0.1)
    targets = torch.tensor([[1.0, 10.0], [3.0, 50.0]])  # means 2 and 30, deviations 1 and 20
    popart.gather(targets[None, :, places, None], torch.ones(1, 2, 1, dtype=torch.bool))
    popart.commit()
    outputs = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0]])
    values = torch.tensor([[2.0, 30.0], [3.0, 51.0], [2.5, 30.5]])
    torch.testing.assert_close(popart.value(outputs[:, places, None]), values[:, places, None])


def test_popart_of_several_processes_begins_where_all_say_it_may() -> None:
    def after_one_update(*rewards_of_processes: list[float]) -> float:
        processes = [PopArt([0.9], beta=0.1) for _ in rewards_of_processes]
        for popart, rewards in zip(processes, rewards_of_processes, strict=True):
            r, mask = torch.tensor(rewards).view(1, -1, 1), torch.ones(1, len(rewards), 1, dtype=torch.bool)
            popart.gather_rewards(r, torch.zeros_like(mask), mask)
            popart.gather(r[..., None], mask)
        sums = torch.stack([popart.pending_sums() for popart in processes]).sum(0)
        for popart in processes:
            popart.set_pending_sums(sums)
            popart.commit()
        (found,) = {popart.origin.item() for popart in processes}
        return found

    assert after_one_update([-1.0, -2.0], [-1.0]) == pytest.approx(-10.0)
    assert after_one_update([-1.0, -2.0], [-3.0]) == pytest.approx(-20.0)  # a mean over processes
    assert after_one_update([-1.0, -2.0], [3.0, -3.0]) == pytest.approx(-0.75)  # the mean of targets


def test_popart_remembers_how_often_episodes_end() -> None:
    popart, mask = PopArt([0.0, 1.0], beta=0.5), torch.ones(1, 2, 1, dtype=torch.bool)
    for ends in ([False, True], [False, False]):
        popart.gather_rewards(torch.ones(1, 2, 1), torch.tensor(ends).view(1, 2, 1), mask)
        popart.gather(torch.ones(1, 2, 2, 1), mask)
        popart.commit()
    # shares of 1/2 and 1, the newer one at a rate of 2/3
    assert popart.going_on.item() == pytest.approx(5 / 6)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_popart_divides_returns_by_the_rewards_they_hold(unit: float) -> None:
    def per_reward(rewards: torch.Tensor) -> list[float]:
        popart, mask = PopArt([0.5, 0.99, 0.9999], beta=0.5), torch.ones(1, 1_000, 1, dtype=torch.bool)
        for _ in range(2):
            popart.gather_rewards(unit * rewards.view(1, -1, 1), torch.zeros_like(mask), mask)
            popart.gather(torch.ones(1, 1_000, 3, 1), mask)
            popart.commit()
        return popart.per_reward[:, 0].tolist()

    alone = torch.zeros(1_000)
    alone[7] = -1.0
    longest = 0.001  # horizons are of 1,000 timesteps at most
    assert per_reward(torch.ones(1_000)) == pytest.approx([0.5, 0.01, longest], rel=1e-5)
    two = alone.roll(3) + alone  # times ten: p is 0.02
    assert per_reward(two) == pytest.approx([1.0, 0.5, 0.05], rel=1e-5)
    assert per_reward(torch.zeros(1_000)) == pytest.approx([0.5, 0.01, 0.001], rel=1e-5)


def test_popart_takes_its_units_from_the_first_targets_that_vary() -> None:
    popart, one = PopArt([0.9], beta=1.0), torch.ones(1, 1, 1)
    gathered(popart, 0.0, 0.0)
    gathered(popart, 2.0, 6.0)
    assert popart.value(one).item() == 6.0  # mean 4, deviation 2
    gathered(popart, 0.0, 100.0)
    assert popart.value(one).item() == 6.0


def test_popart_second_update_by_hand() -> None:
    # rate = beta / (1 - (1 - beta)^2) = 0.5 / 0.75 = 2/3; mu = 1 + 2/3 (4 - 1); nu = 2 + 2/3 (20 - 2)
    popart = PopArt([0.9], beta=0.5)
    gathered(popart, 0.0, 2.0)
    gathered(popart, 2.0, 6.0)
    assert abs(popart.mu.item() - 3.0) < 1e-5
    assert abs(popart.nu.item() - 14.0) < 1e-5
    assert abs(popart.sigma.item() - 5.0**0.5) < 1e-5


@pytest.mark.parametrize(("floor", "sigma"), [(0.0, 0.5), (0.1, 100.0)])
def test_popart_without_a_floor_reaches_the_spread_of_targets_far_from_zero(
    floor: float, sigma: float
) -> None:
    popart = PopArt([0.9], beta=0.05, floor=floor)
    for _ in range(60):
        gathered(popart, 999.5, 1000.5)
    torch.testing.assert_close(popart.sigma.item(), sigma, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(popart.scale, torch.full((1, 1), sigma), rtol=1e-3, atol=0.0)
    values = popart.value(torch.tensor([[[-1.0]], [[2.0]]]))
    assert values.dtype == popart.normalize(values).dtype == torch.float32
    targets = torch.tensor([[[1000.5]], [[999.5]]])
    torch.testing.assert_close(
        popart.normalize(targets).flatten(), torch.tensor([0.5, -0.5]) / sigma, rtol=1e-3, atol=1e-3
    )


def test_popart_ignores_masked_targets_and_disabled_is_identity() -> None:
    popart = PopArt([0.9], beta=0.5)
    popart.gather(torch.tensor([1.0, 99.0]).view(1, 2, 1, 1), torch.tensor([[[True], [False]]]))
    popart.commit()
    assert popart.mu.item() == 1.0
    off, x = PopArt([0.9], beta=0.5, enabled=False), torch.randn(3, 1, 1)
    gathered(off, 5.0, 9.0)
    for same in (off.normalize(x), off.value(x)):
        torch.testing.assert_close(same, x)


def test_sums_of_two_processes_are_the_statistics_of_all_rows() -> None:
    torch.manual_seed(0)
    rows = 1000.0 + torch.randn(60, 2) * torch.tensor([1e-1, 3.0])  # far from 0, where float32 would not do
    whole, parts = RunningNorm(2), [RunningNorm(2) for _ in range(3)]
    whole.gather(rows)
    for part, share in zip(parts, rows.split([40, 20, 0]), strict=True):
        part.gather(share)
    parts[2].set_pending_sums(sum(part.pending_sums() for part in parts))
    whole.commit()
    parts[2].commit()
    assert parts[2].count.item() == 60
    torch.testing.assert_close(parts[2].mean, whole.mean)
    torch.testing.assert_close(parts[2].var, whole.var, rtol=1e-3, atol=0)
