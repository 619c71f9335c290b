"""The PPO objective, against numbers computed by hand, and each of its settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loxodon.agents import LinearSchedule, PPOLoss

ZERO = torch.zeros(4, 1)
# Ratios 2 and 0.5, each with a good and a bad action.
RATIOS = torch.tensor([2.0, 2.0, 0.5, 0.5])[:, None]
ADVANTAGES = torch.tensor([3.0, -3.0, 3.0, -3.0])[:, None]


def actor(loss: PPOLoss, entropy: Tensor = ZERO, kl: Tensor | None = None) -> list[float]:
    found: list[float] = loss.actor(RATIOS.log() - 1.0, ZERO - 1.0, ADVANTAGES, entropy, kl)[:, 0].tolist()
    return found


def critic(**kwargs: object) -> list[float]:
    """Values 1 and 5, old values 0 and 0, returns 3 and 4."""
    values, returns = torch.tensor([[1.0], [5.0]]), torch.tensor([[3.0], [4.0]])
    found: list[float] = PPOLoss(**kwargs).critic(values, ZERO[:2], returns)[:, 0].tolist()  # type: ignore[arg-type]
    return found


def test_the_objective_is_clipped() -> None:
    # min(A rho, A clip(rho)): 3 * 1.2, -3 * 2, 3 * 0.5, -3 * 0.8
    assert actor(PPOLoss()) == pytest.approx([-3.6, 6.0, -1.5, 2.4])
    assert actor(PPOLoss(clip_eps=0.4)) == pytest.approx([-4.2, 6.0, -1.5, 1.8])


def test_clipped_steps_have_no_gradient() -> None:
    log_probs = RATIOS.log().requires_grad_()
    PPOLoss().actor(log_probs, ZERO, ADVANTAGES, ZERO).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[:, 0].tolist() == pytest.approx([0.0, 6.0, -1.5, 0.0])


def test_the_kl_penalty_is_added_to_the_loss() -> None:
    kl = torch.full((4, 1), 0.5)
    loss = PPOLoss(kind="kl_penalty", kl_beta=4.0)
    assert actor(loss, kl=kl) == pytest.approx([-4.0, 8.0, 0.5, 3.5])  # -A rho + 4 * 0.5
    with pytest.raises(ValueError, match=r"No KL divergence was given.*Fix"):
        actor(loss)


def test_entropy_is_a_bonus() -> None:
    entropy = torch.full((4, 1), 2.0)
    assert actor(PPOLoss(entropy_coef=0.1), entropy) == pytest.approx([-3.8, 5.8, -1.7, 2.2])


def test_schedules_follow_the_progress() -> None:
    loss = PPOLoss(clip_eps=LinearSchedule(0.2, 0.1), entropy_coef=LinearSchedule(0.1, 0.0))
    loss.set_progress(0.5)
    assert (loss.clip_eps, loss.entropy_coef) == pytest.approx((0.15, 0.05))
    loss = PPOLoss(clip_eps=LinearSchedule(0.2, 0.0))
    loss.set_progress(1.0)  # the ratio is then clipped to 1
    assert actor(loss) == pytest.approx([-3.0, 6.0, -1.5, 3.0])
    with pytest.raises(ValueError, match=r"PPOLoss\.clip_eps is -0\.1.*Fix"):
        PPOLoss(clip_eps=LinearSchedule(0.2, -0.1))


def test_log_ratios_are_limited() -> None:
    far = torch.full((1, 1), 1000.0)
    one = torch.ones(1, 1)
    assert PPOLoss(log_ratio_limit=2.0).actor(far, 0 * far, -one, 0 * one).item() == pytest.approx(math.e**2)
    assert torch.isfinite(PPOLoss().actor(far, -far, -one, 0 * one)).all()


def test_value_losses() -> None:
    assert critic() == pytest.approx([4.0, 1.0])
    assert critic(value_loss="huber") == pytest.approx([1.5, 0.5])
    assert critic(value_loss="l1") == pytest.approx([2.0, 1.0])


def test_values_are_clipped() -> None:
    # Values move by at most 0.5 from 0, so the losses are (0.5 - 3)^2 and (0.5 - 4)^2.
    assert critic(value_clip=0.5) == pytest.approx([6.25, 12.25])
    assert critic(value_clip=0.5, value_clip_mode="only") == pytest.approx([6.25, 12.25])
    # Values move by at most 4; the second exceeds that, in the direction of its return.
    assert critic(value_clip=4.0) == pytest.approx([4.0, 1.0])
    assert critic(value_clip=4.0, value_clip_mode="only") == pytest.approx([4.0, 0.0])


def test_only_the_max_form_pulls_back_values_outside_the_band() -> None:
    def gradient(mode: str) -> float:
        value = torch.tensor([[5.0]], requires_grad=True)
        loss = PPOLoss(value_clip=4.5, value_clip_mode=mode)
        loss.critic(value, torch.zeros(1, 1), torch.tensor([[4.0]])).sum().backward()
        assert value.grad is not None
        return value.grad.item()

    assert (gradient("max"), gradient("only")) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.016, 4.0), (0.014, 2.0), (0.007, 2.0), (0.006, 1.0)], ids=str
)
def test_beta_follows_the_kl_divergence(kl: float, expected: float) -> None:
    loss = PPOLoss(kind="kl_penalty", kl_target=0.01, kl_beta=2.0)
    loss.after_rollout(kl)
    assert loss.beta.item() == expected
    fresh = PPOLoss(kind="kl_penalty")
    fresh.load_state_dict(loss.state_dict())
    assert fresh.beta.item() == expected


def test_beta_changes_by_the_bound_factors_and_not_when_clipping() -> None:
    for kind, expected in (("kl_penalty", [3.0, 0.75]), ("clip", [1.0, 1.0])):
        loss = PPOLoss(kind=kind, kl_increase=3.0, kl_decrease=0.25)
        for kl, beta in zip((1.0, 0.0), expected, strict=True):
            loss.after_rollout(kl)
            assert loss.beta.item() == beta


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({name: "x"}, rf"PPOLoss\.{name} is 'x'") for name in ("kind", "value_clip_mode", "value_loss")),
        *(
            ({name: -1.0}, rf"PPOLoss\.{name} is -1\.0")
            for name in ("kl_target", "kl_beta", "log_ratio_limit", "clip_eps", "value_clip")
        ),
        ({"kl_decrease": 2.0}, r"PPOLoss\.kl_decrease is 2\.0"),
        ({"kl_band": 0.5}, r"PPOLoss\.kl_band is 0\.5"),
        ({"kl_band": math.nan}, r"PPOLoss\.kl_band is nan"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words + ".*Fix"):
        PPOLoss(**settings)
