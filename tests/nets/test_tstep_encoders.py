"""The feed-forward timestep encoder: inputs, hiding, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.nets import FFTstepEncoder

SPACE = spaces.Dict(
    {
        "position": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
        "room": spaces.Discrete(4, start=2),
        "dice": spaces.MultiDiscrete([2, 3]),
    }
)


def inputs(batch: int = 2, length: int = 5) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    obs = {
        "position": torch.randn(batch, length, 2, 3),
        "room": torch.randint(2, 6, (batch, length)),
        "dice": torch.zeros(batch, length, 2, dtype=torch.int64),
    }
    return obs, torch.randn(batch, length, 3)


def test_all_kinds_of_observation_become_one_vector() -> None:
    encoder = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8)
    obs, rl2s = inputs()
    assert encoder(obs, rl2s).shape == (2, 5, 8)
    assert encoder.mlp.hidden[0].in_features == 6 + 4 + 5 + 3


def test_timesteps_do_not_mix() -> None:
    encoder = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8).eval()
    obs, rl2s = inputs()
    alone = encoder({key: x[:, 2:3] for key, x in obs.items()}, rl2s[:, 2:3])
    torch.testing.assert_close(encoder(obs, rl2s)[:, 2:3], alone)


@pytest.mark.parametrize(("hide", "column_felt"), [("hide_rl2s", False), ("hide_rewards", True)])
def test_hiding_rewards_and_actions(hide: str, column_felt: bool) -> None:
    encoder = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8, **{hide: True}).eval()
    obs, rl2s = inputs()
    changed_reward, changed_action = rl2s.clone(), rl2s.clone()
    changed_reward[..., 0] += 1.0
    changed_action[..., 1] += 1.0
    base = encoder(obs, rl2s)
    assert torch.equal(base, encoder(obs, changed_reward))
    assert torch.equal(base, encoder(obs, changed_action)) != column_felt


def test_statistics_follow_real_timesteps_in_training_only() -> None:
    space = spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float32)})
    encoder = FFTstepEncoder(space, 2, d_hidden=8, d_output=4)
    obs, rl2s = {"x": torch.tensor([[[1.0], [3.0], [500.0]]])}, torch.zeros(1, 3, 2)
    mask = torch.tensor([[[True], [True], [False]]])
    encoder.eval()(obs, rl2s, mask)
    encoder.input_norm.commit()
    assert encoder.input_norm.count == 0
    encoder.train()(obs, rl2s, mask)
    encoder.input_norm.commit()
    assert encoder.input_norm.mean[0] == 2.0


def test_unknown_observation_names_are_listed() -> None:
    with pytest.raises(ValueError, match=r"\['colour'\].*offers \['dice', 'position', 'room'\].*Fix"):
        FFTstepEncoder(SPACE, 3, specify_obs_keys=["colour"])


def test_encoders_can_start_orthogonal() -> None:
    weight = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8, init="orthogonal").mlp.out.weight
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(8), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", ["n_layers", "d_hidden", "d_output"])
def test_sizes_below_one_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"FFTstepEncoder.{size} is 0, but must be at least 1. Fix: bind"):
        FFTstepEncoder(SPACE, 3, **{size: 0})


def test_unflattenable_spaces_are_named() -> None:
    with pytest.raises(ValueError, match=r"'note' is a Text.*Fix"):
        FFTstepEncoder(spaces.Dict({"note": spaces.Text(5)}), 3)
