"""The bonus for new observations: what counts as new, what training and metrics see, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.data import load_trajectory
from loxodon.experiment import NoveltyBonus, ScaleRewards

from .fakes import make_experiment, metrics, run


def test_the_bonus_falls_with_the_root_of_the_count_and_its_mean_is_zero() -> None:
    bonus, novelty = NoveltyBonus(scale=0.5), 1 / np.sqrt([3, 3, 1, 3])
    given = bonus({"grid": np.array([[1, 2], [1, 2], [3, 4], [1, 2]])})
    np.testing.assert_allclose(given, 0.5 * (novelty - novelty.mean()), rtol=1e-6)
    mean = (novelty.sum() + 0.5**0.5) / 5
    np.testing.assert_allclose(bonus({"grid": np.array([[3, 4]])}), [0.5 * (0.5**0.5 - mean)], rtol=1e-6)
    assert bonus.metrics() == {"collect/novelty": pytest.approx(mean)}
    assert bonus.metrics() == {}


def test_numbers_close_to_each_other_are_of_one_kind_whatever_their_unit() -> None:
    rng = np.random.default_rng(0)
    for unit in (1e-3, 1e3):
        bonus = NoveltyBonus(bits=12)
        places = rng.standard_normal((200, 3)).astype(np.float32)
        bonus({"x": unit * places})
        around = places[0] + 1e-4 * rng.standard_normal((50, 3)).astype(np.float32)
        near = np.median(bonus({"x": unit * around}))
        assert near < 0.1 / np.sqrt(25) - 0.1 * bonus.metrics()["collect/novelty"]
        far = 3 * rng.standard_normal((50, 3)).astype(np.float32)
        assert bonus({"x": unit * far}).mean() > near + 0.02


def test_all_parts_of_an_observation_count() -> None:
    bonus = NoveltyBonus(scale=1.0)
    image, step = np.zeros((4, 2, 2), np.uint8), np.array([[0.0], [0.0], [9.0], [9.0]], np.float32)
    image[1::2, 0, 0] = 1
    bonus({"image": image, "step": step})
    assert bonus.metrics() == {"collect/novelty": 1.0}  # all four are of different kinds
    bonus({"image": image[:1], "step": step[:1]})
    assert bonus.metrics()["collect/novelty"] < 1.0


def test_training_sees_the_bonus_and_metrics_do_not(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "val_timesteps_per_epoch": 0}
    plain = run(make_experiment(tmp_path / "plain", **settings))
    settings |= {"RewardShaping.shaper": ScaleRewards(2.0), "RewardShaping.bonus": NoveltyBonus()}
    shaped = run(make_experiment(tmp_path / "shaped", **settings))
    bonuses = []
    for path in sorted((shaped.run_dir / "buffer" / "fifo").glob("*.npz")):
        traj = load_trajectory(path)
        np.testing.assert_array_equal(traj.extras["raw_rewards"], traj.rl2s[1:, :1])
        bonuses.append(traj.rews - 2 * traj.extras["raw_rewards"])
    given = np.concatenate(bonuses)
    assert abs(given.mean()) < given.std() < 0.1
    returns = [
        [one["collect/return"] for one in metrics(exp.run_dir) if "collect/return" in one]
        for exp in (plain, shaped)
    ]
    assert returns[0] == returns[1]
    assert any("collect/novelty" in one for one in metrics(shaped.run_dir))


def test_a_resumed_run_continues_counting(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_timesteps_per_epoch": 0, "ckpt_interval": 1}
    first = run(make_experiment(tmp_path, epochs=1, **settings, **{"RewardShaping.bonus": NoveltyBonus()}))
    again = make_experiment(tmp_path, epochs=2, **settings, **{"RewardShaping.bonus": NoveltyBonus()})
    again.start(resume=True)
    saved = first.reward_shaping.state_dict()
    assert saved["counts"].sum() > 0
    loaded = again.reward_shaping.state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in ("counts", "mean", "variance"))
    again.close()
    with pytest.raises(ValueError, match=r"NoveltyBonus.bits = 8 has 256. Fix: resume with .* = 16"):
        NoveltyBonus(bits=8).load_state_dict(saved)


@pytest.mark.parametrize("setting", [{"scale": 0}, {"bits": 0}, {"bits": 30}])
def test_impossible_settings_of_the_bonus_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"NoveltyBonus.{next(iter(setting))} is .*Fix"):
        NoveltyBonus(**setting)


def test_another_kind_of_bonus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"RewardShaping.bonus is .*parentheses"):
        make_experiment(tmp_path, **{"RewardShaping.bonus": NoveltyBonus}).start()
