"""Rewards as training sees them: what is stored, what stays as it was, and what a shaper may not return."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.agents import Agent
from loxodon.data import DiskTrajDataset, HindsightRelabeler, MixtureOfDatasets, load_trajectory
from loxodon.envs import EnvSpec, MazeRunner
from loxodon.experiment import Experiment, ScaleRewards
from loxodon.nets import FFTstepEncoder, IdentityTrajEncoder

from .fakes import make_experiment, run


def stored(exp: Experiment) -> list[Any]:
    folder = exp.run_dir / "buffer" / "fifo"
    return [load_trajectory(path) for path in sorted(folder.glob("*.npz"))]


def test_only_what_is_learned_from_changes(tmp_path: Path) -> None:
    plain = run(make_experiment(tmp_path / "plain", epochs=1))
    shaped = run(
        make_experiment(tmp_path / "shaped", epochs=1, **{"RewardShaping.shaper": ScaleRewards(2.0, 1.0)})
    )
    pairs = list(zip(stored(plain), stored(shaped), strict=True))
    assert pairs
    for one, other in pairs:
        np.testing.assert_allclose(other.rews, 2.0 * one.rews + 1.0, rtol=1e-6)
        np.testing.assert_array_equal(other.rl2s, one.rl2s)  # what the policy has seen
        np.testing.assert_array_equal(other.extras["raw_rewards"], one.rews)
    assert figures(plain)["collect/return"] == figures(shaped)["collect/return"]


def test_relabelled_goals_pay_what_real_ones_do(tmp_path: Path) -> None:
    """Shaped by progress too: the last epoch's shaping holds for all that is relabelled then."""
    dataset = DiskTrajDataset(relabeler=HindsightRelabeler(strategy="final"))
    maze = EnvSpec(MazeRunner, {"size": 5, "num_goals": 1, "time_limit": 8})
    exp = make_experiment(
        tmp_path,
        **{"RewardShaping.shaper": lambda rewards, progress: (0.1 + progress) * rewards - 0.01},
        dataset=MixtureOfDatasets([dataset], [1.0]),
        agent_type=Agent,
        tstep_encoder_type=partial(FFTstepEncoder, n_layers=1, d_hidden=8, d_output=8),
        traj_encoder_type=IdentityTrajEncoder,
        make_train_env=maze,
        val_timesteps_per_epoch=0,
        stagger_traj_file_lengths=False,
    )
    run(exp)
    windows = dataset.sample_windows(50, np.random.default_rng(0))
    reached = [window for window in windows if window.dones[-1]]
    relabelled = [window for window in reached if "raw_rewards" not in window.extras]
    assert 0 < len(relabelled) < len(reached)
    for window in relabelled:
        paid = window.rl2s[1:, :1]  # the last step reached the goal
        assert paid.sum() == paid[-1] == 1.0
        np.testing.assert_allclose(window.rews, 0.6 * paid - 0.01, rtol=1e-6)


def figures(exp: Experiment) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines():
        found = {**json.loads(line), **found}
    return found


def test_the_shaper_hears_of_progress_and_gets_a_copy(tmp_path: Path) -> None:
    seen: list[float] = []

    def shaper(rewards: np.ndarray, progress: float) -> np.ndarray:
        seen.append(progress)
        rewards[:] = 7.0
        return rewards

    exp = run(
        make_experiment(tmp_path, epochs=4, **{"RewardShaping.shaper": shaper}, val_timesteps_per_epoch=0)
    )
    assert sorted(set(seen)) == [0.0, 0.25, 0.5, 0.75]
    assert all((traj.rews == 7.0).all() for traj in stored(exp))
    assert figures(exp)["collect/return"] < 7.0


def test_scaling_then_clipping() -> None:
    rewards = np.array([-2.0, 0.0, 2.0], np.float32)
    shaped = ScaleRewards(2.0, 1.0, low=-1.0, high=4.0)(rewards, 0.0)
    assert shaped.dtype == np.float32
    assert shaped.tolist() == [-1.0, 1.0, 4.0]
    assert ScaleRewards(low=1.0)(rewards, 0.0).tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("shaper", "error", "words"),
    [
        (
            lambda r, p: r[:, None],
            ValueError,
            "returned shape (3, 1), but must return finite numbers of shape (3,)",
        ),
        (lambda r, p: r / 0.0, ValueError, "must return finite numbers"),
        (lambda r, p: None, TypeError, "returned NoneType"),
        (lambda r, p: r.astype(object), TypeError, "returned ndarray"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_a_shaper_may_not_return(
    tmp_path: Path, shaper: Any, error: type[Exception], words: str
) -> None:
    exp = make_experiment(tmp_path, **{"RewardShaping.shaper": shaper}, val_timesteps_per_epoch=0)
    exp.start()
    with pytest.raises(error, match=rf"RewardShaping.shaper \(<lambda>\).*{re.escape(words)}.*Fix"):
        exp.learn()
    exp.close()


def test_mistakes_before_the_start(tmp_path: Path) -> None:
    for wrong in (ScaleRewards, 3):
        with pytest.raises(TypeError, match=r"RewardShaping.shaper is .*parentheses"):
            make_experiment(tmp_path, **{"RewardShaping.shaper": wrong}).start()
    with pytest.raises(ValueError, match=r"ScaleRewards.low is 2.*high = 1.*Fix"):
        ScaleRewards(low=2.0, high=1.0)
