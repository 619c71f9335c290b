"""Every timestep encoder, also those in docs/timestep_encoders.md: inputs, hiding, images, maps, text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data.spaces import Tokens
from loxodon.nets import (
    CNNTstepEncoder,
    DictTstepEncoder,
    DrQCNN,
    FFTstepEncoder,
    GridworldCNNTstepEncoder,
    IMPALAishCNN,
    TstepEncoder,
    default_tstep_encoder,
)
from loxodon.nets.images import random_shift
from loxodon.nets.log_once import log_once
from loxodon.nets.tstep_encoders import kind_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "timestep_encoders.md").read_text(encoding="utf-8")
OWN: dict[str, Any] = {"__name__": "my_encoders"}
for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
    with gin.unlock_config():
        exec(sample, OWN)

SPACE = spaces.Dict(
    {
        "position": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
        "room": spaces.Discrete(4),
        "dice": spaces.MultiDiscrete([2, 3]),
    }
)
NUMBERS = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Box(-1, 1, (3,), np.float64)})
GOALS = spaces.Dict({"goal": spaces.Box(-1, 1, (2, 3), np.float32), "mission": Tokens(["go", "red"], 5)})
EVERYTHING = spaces.Dict(
    {
        **SPACE.spaces,
        "camera": spaces.Box(0, 255, (40, 37, 3), np.uint8),
        "depth": spaces.Box(0.0, np.inf, (1, 20, 24), np.float32),
        "grey": spaces.Box(0, 255, (36, 36), np.uint8),
        "map": spaces.Box(0, 255, (7, 7, 3), np.uint8),
        "bits": spaces.MultiBinary((2, 2)),
        "mission": Tokens(["go", "to", "red"], 6),
    }
)


def image(*shape: int, dtype: Any = np.uint8, high: float = 255) -> spaces.Dict:
    return spaces.Dict({"observation": spaces.Box(0, high, shape, dtype)})


CASES: dict[str, tuple[Callable[..., TstepEncoder], spaces.Dict]] = {
    "flat": (partial(FFTstepEncoder, d_hidden=16, d_output=8), SPACE),
    "nature": (CNNTstepEncoder, image(84, 84, 3)),
    "impala": (partial(CNNTstepEncoder, cnn_type=IMPALAishCNN, img_features=8), image(3, 21, 17)),
    "drq": (partial(CNNTstepEncoder, cnn_type=DrQCNN), image(33, 31)),
    "own convolutions": (partial(CNNTstepEncoder, cnn_type=OWN["MyConvs"]), image(64, 64, 3)),
    "gridworld": (GridworldCNNTstepEncoder, image(7, 7, 3)),
    "dict": (partial(DictTstepEncoder, d_hidden=32, d_output=8, img_features=8), EVERYTHING),
    "goal": (partial(DictTstepEncoder, d_hidden=8, d_output=8, obs_kinds={"goal": "goal"}), GOALS),
    "own vectors": (OWN["MyVectors"], NUMBERS),
    "own images": (OWN["MyImages"], image(64, 64, 3)),
    "own maps": (OWN["MyMaps"], image(7, 7, 3)),
    "own dict": (OWN["MyDict"], GOALS),
}


def inputs(
    space: spaces.Dict = SPACE, batch: int = 2, length: int = 3
) -> tuple[dict[str, Any], torch.Tensor]:
    torch.manual_seed(0)
    space.seed(0)
    rows = [[space.sample() for _ in range(length)] for _ in range(batch)]
    obs = {key: torch.from_numpy(np.array([[one[key] for one in row] for row in rows])) for key in space}
    return obs, torch.randn(batch, length, 3)


def times(rl2s: torch.Tensor) -> torch.Tensor:
    """Time indices of timesteps in the middle of an episode."""
    return torch.arange(70, 70 + rl2s.shape[1])[None, :, None].expand(len(rl2s), -1, 1)


@pytest.mark.parametrize("case", CASES)
def test_the_contract_of_every_encoder(case: str) -> None:
    """The contract: shape, timesteps apart, hiding, gradients of all weights, and unchanged observations."""
    make, space = CASES[case]
    obs, rl2s = inputs(space)
    torch.manual_seed(0)
    encoder = make(space, 3)
    before = {key: value.clone() for key, value in obs.items()}
    mask = torch.ones(2, 3, 1, dtype=torch.bool)
    out = encoder.train()(obs, rl2s, times(rl2s), mask)
    assert (out.shape, out.dtype) == ((2, 3, encoder.emb_dim), torch.float32)
    (out * torch.randn_like(out)).sum().backward()
    for name, weight in encoder.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all() and weight.grad.any(), name  # noqa: PT018
    encoder.eval()
    out = encoder(obs, rl2s, times(rl2s))
    alone = encoder({key: x[1:, 2:] for key, x in obs.items()}, rl2s[1:, 2:], times(rl2s)[1:, 2:])
    torch.testing.assert_close(out[1:, 2:], alone, rtol=1e-4, atol=1e-5)
    assert all(
        torch.equal(obs[key], value) and obs[key].dtype == value.dtype for key, value in before.items()
    )
    reward, action = rl2s.clone(), rl2s.clone()
    reward[..., 0] += 1.0
    action[..., 1] += 1.0
    for hide, sees in (("hide_rl2s", (False, False)), ("hide_rewards", (False, True)), ("", (True, True))):
        torch.manual_seed(0)
        shown = make(space, 3, **({hide: True} if hide else {})).eval()
        base = shown(obs, rl2s, times(rl2s))
        others = [shown(obs, changed, times(rl2s)) for changed in (reward, action)]
        assert tuple(not torch.equal(base, other) for other in others) == sees
        assert torch.equal(base, shown(obs, rl2s, times(rl2s) + 1))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("own")])
def test_time_is_an_input_if_asked_for(case: str) -> None:
    """Time is visible if rewards and actions are hidden, in units of `time_scale`, at full-size weights."""
    make, space = CASES[case]
    obs, rl2s = inputs(space)
    torch.manual_seed(0)
    encoder = make(space, 3, hide_rl2s=True, time_scale=100).eval()
    if hasattr(encoder, "input_norm"):
        torch.manual_seed(0)
        small = make(space, 3, hide_rl2s=True, time_scale=100, rl2_gain=0.1).mlp.hidden[0].weight
        scales = (small / encoder.mlp.hidden[0].weight)[:, len(encoder.input_norm.mean) - 4 :][:, :4]
        torch.testing.assert_close(scales, torch.tensor([0.1, 0.1, 0.1, 1.0]).expand_as(scales))
    seen: list[torch.Tensor] = []
    encoder.inner_forward = lambda obs, rl2s, mask: seen.append(rl2s)  # type: ignore[method-assign]
    encoder(obs, rl2s, times(rl2s))
    assert torch.equal(
        seen[0], torch.tensor([[0, 0, 0, 0.7], [0, 0, 0, 0.71], [0, 0, 0, 0.72]]).expand(2, 3, 4)
    )
    del encoder.inner_forward
    assert not torch.equal(encoder(obs, rl2s, times(rl2s)), encoder(obs, rl2s, times(rl2s) + 50))


def test_flat_widths() -> None:
    encoder = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8)
    assert encoder.mlp.hidden[0].in_features == 6 + 4 + 5 + 3
    weight = FFTstepEncoder(SPACE, 3, d_hidden=16, d_output=8, init="orthogonal").mlp.out.weight
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(8), rtol=0, atol=1e-5)


def test_only_specified_observations_are_needed() -> None:
    encoder = DictTstepEncoder(EVERYTHING, 3, specify_obs_keys=["room", "map"], d_hidden=8, d_output=4)
    obs, rl2s = inputs(EVERYTHING)
    assert encoder({key: obs[key] for key in ("map", "room")}, rl2s, times(rl2s)).shape == (2, 3, 4)
    assert encoder.kinds == {"map": "map", "room": "flat"}


@pytest.mark.parametrize("kind", [FFTstepEncoder, DictTstepEncoder])
def test_statistics_follow_real_timesteps_in_training_only(kind: Any) -> None:
    space = spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float32)})
    encoder = kind(space, 2, d_hidden=8, d_output=4, hide_rl2s=True)
    obs, rl2s = {"x": torch.tensor([[[1.0], [3.0], [500.0]]])}, torch.ones(1, 3, 2)
    mask = torch.tensor([[[True], [True], [False]]])
    encoder.eval()(obs, rl2s, times(rl2s), mask)
    encoder.input_norm.commit()
    assert encoder.input_norm.count == 0
    encoder.train()(obs, rl2s, times(rl2s), mask)
    encoder.input_norm.commit()
    assert encoder.input_norm.mean.tolist() == [2.0, 0.0, 0.0]
    other = kind(space, 2, d_hidden=8, d_output=4, hide_rl2s=True)
    other.gather_statistics(obs, rl2s, times(rl2s), mask)
    other.input_norm.commit()
    assert torch.equal(other.input_norm.mean, encoder.input_norm.mean)


# ---- images ----


def test_channel_order_is_detected_and_reported_once(caplog: Any) -> None:
    """Both channel orders of one image give the same vectors."""
    with caplog.at_level(logging.INFO, "loxodon"):
        made = []
        for shape in ((38, 40, 3), (3, 38, 40), (38, 40, 3)):
            torch.manual_seed(0)
            made.append(CNNTstepEncoder(image(*shape), 3).eval())
    assert [record.getMessage() for record in caplog.records] == [
        "Observation 'observation' (38, 40, 3) is read as 38 x 40 with 3 channels on its last axis.",
        "Observation 'observation' (3, 38, 40) is read as 38 x 40 with 3 channels on its first axis.",
    ]
    obs, rl2s = inputs(image(38, 40, 3))
    last = made[0](obs, rl2s, times(rl2s))
    moved = {"observation": obs["observation"].movedim(-1, -3)}
    torch.testing.assert_close(made[1](moved, rl2s, times(rl2s)), last)
    told = CNNTstepEncoder(image(38, 40, 3), 3, channels_first=True, cnn_type=IMPALAishCNN)
    assert told.images[0].channels == 38


@pytest.mark.parametrize(
    ("space", "low", "high"),
    [
        (image(36, 36), -1.0, 1.0),
        (image(36, 36, high=1), -1.0, 1.0),
        (image(36, 36, dtype=np.float32, high=4.0), -1.0, 1.0),
        (image(36, 36, dtype=np.float32, high=np.inf), 0.0, 3.0),  # unbounded floats stay as they are
    ],
)
def test_bounds_are_scaled_to_one(space: spaces.Dict, low: float, high: float) -> None:
    seen: list[torch.Tensor] = []
    encoder = CNNTstepEncoder(space, 3)
    encoder.images[0].cnn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    box = space["observation"]
    top = 3.0 if np.isinf(box.high.max()) else box.high.max()
    values = torch.tensor([0, top]).to(torch.from_numpy(box.low).dtype)
    images, rl2s = values[:, None, None, None].expand(2, 1, 36, 36), torch.zeros(2, 1, 3)
    encoder({"observation": images}, rl2s, times(rl2s))
    assert (seen[0].dtype, seen[0][0].unique().tolist(), seen[0][1].unique().tolist()) == (
        torch.float32,
        [low],
        [high],
    )


def test_random_shifts_are_one_per_sequence_and_in_training_only() -> None:
    torch.manual_seed(0)
    first = torch.randint(0, 255, (64, 1, 3, 20, 17), dtype=torch.uint8)
    images = first.expand(-1, 5, -1, -1, -1)
    moved = random_shift(images, share=0.75)
    assert (moved.shape, moved.dtype) == (images.shape, torch.uint8)
    assert torch.equal(moved, moved[:, :1].expand_as(moved))
    is_moved = (moved != images).flatten(1).any(1)
    assert 0.6 < is_moved.float().mean() < 0.9
    padded = torch.nn.functional.pad(first[:, 0].float(), (4, 4, 4, 4), mode="replicate")
    windows = padded.unfold(2, 20, 1).unfold(3, 17, 1)  # every shift of every image: (64, 3, 9, 9, 20, 17)
    matches = (windows == moved[:, 0, :, None, None].float()).all(dim=(1, 4, 5))  # (64, 9, 9)
    assert matches.flatten(1).any(1).all()
    assert len(matches.nonzero()[:, 1:].unique(dim=0)) > 25

    obs, rl2s = inputs(image(40, 40, 3))
    encoder = CNNTstepEncoder(image(40, 40, 3), 3, drqv2_aug=True, aug_pct_of_batch=1.0)
    given = obs, rl2s, times(rl2s)
    assert torch.equal(encoder.eval()(*given), encoder(*given))
    assert not torch.equal(encoder.train()(*given), encoder(*given))


# ---- maps and text ----


def test_ids_of_different_channels_have_nothing_in_common() -> None:
    space = image(4, 4, 2, high=5)
    encoder = GridworldCNNTstepEncoder(space, 3, img_features=8).eval()
    cells = torch.zeros(1, 1, 4, 4, 2, dtype=torch.uint8)
    swapped = cells.clone()
    cells[..., 0, 0, 0], swapped[..., 0, 0, 1] = 3, 3
    rl2s = torch.zeros(1, 1, 3)
    out = encoder({"observation": cells}, rl2s, times(rl2s))
    assert not torch.equal(out, encoder({"observation": swapped}, rl2s, times(rl2s)))
    cells[..., 0, 0, 0] = 200  # an id outside the bounds becomes the nearest one
    assert encoder({"observation": cells}, rl2s, times(rl2s)).isfinite().all()


def test_repeated_texts_are_read_once_with_the_same_result() -> None:
    encoder = DictTstepEncoder(GOALS, 3, d_hidden=8, d_output=8).eval()
    obs, rl2s = inputs(GOALS, batch=3, length=40)
    time = times(rl2s)
    parts = [
        encoder({k: x[i : i + 1] for k, x in obs.items()}, rl2s[i : i + 1], time[i : i + 1]) for i in range(3)
    ]
    torch.testing.assert_close(encoder(obs, rl2s, time), torch.cat(parts), rtol=1e-4, atol=1e-5)


# ---- kinds of observations, and what is refused ----


def test_kinds_of_observations_follow_from_their_spaces() -> None:
    kinds = {key: kind_of(space) for key, space in EVERYTHING.spaces.items()}
    expected = {"camera": "image", "depth": "image", "grey": "image", "map": "map", "mission": "tokens"}
    assert kinds == {key: expected.get(key, "flat") for key in kinds}
    assert kind_of(spaces.Box(0, 70_000, (8, 8), np.int32)) == "flat"
    assert kind_of(spaces.Box(0, 1, (30, 30), np.float32)) == "flat"  # a table is as likely as an image
    assert kind_of(spaces.Box(0, 255, (30, 30, 3), np.int64)) == "image"  # not a map of 256 ids
    assert default_tstep_encoder(SPACE) is FFTstepEncoder
    assert default_tstep_encoder(EVERYTHING) is DictTstepEncoder


@pytest.mark.parametrize(
    ("shape", "dtype", "advice"),
    [
        ((40, 40, 3), np.uint8, "remove Experiment.tstep_encoder_type"),
        ((30, 30), np.float32, r"DictTstepEncoder.obs_kinds = \{'seen': 'image'\}"),
        ((4, 40, 40, 3), np.uint8, "stack them along the channel axis"),
        ((40, 2), np.float32, None),
    ],
)
def test_a_flattened_image_is_warned_about_once(
    shape: tuple[int, ...], dtype: Any, advice: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    for _ in range(2):
        FFTstepEncoder(spaces.Dict(seen=spaces.Box(0, 1, shape, dtype), x=spaces.Box(0, 1, (3,))), 3)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (advice is not None)
    assert advice is None or re.search(rf"flattens observation 'seen' .*Fix: .*{advice}", told[0])


IDS = image(7, 7, 3, high=2000, dtype=np.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FFTstepEncoder(SPACE, 3, specify_obs_keys=["colour"]),
            r"\['colour'\].*offers \['dice', 'pos",
        ),
        (
            lambda: CNNTstepEncoder(SPACE, 3, specify_obs_keys=["x"]),
            r"\['x'\].*CNNTstepEncoder.specify_obs_keys",
        ),
        (
            lambda: FFTstepEncoder(SPACE, 3, d_hidden=0),
            "FFTstepEncoder.d_hidden is 0, but must be at least 1",
        ),
        (lambda: FFTstepEncoder(SPACE, 3, d_output=0), "FFTstepEncoder.d_output is 0"),
        (lambda: FFTstepEncoder(SPACE, 3, n_layers=0), "FFTstepEncoder.n_layers is 0"),
        (lambda: CNNTstepEncoder(image(64, 64, 3), 3, time_scale=0), "CNNTstepEncoder.time_scale is 0"),
        (lambda: CNNTstepEncoder(image(64, 64, 3), 3, img_features=0), "CNNTstepEncoder.img_features is 0"),
        (lambda: FFTstepEncoder(spaces.Dict({"note": spaces.Text(5)}), 3), r"'note' is a Text.*vocabulary"),
        (lambda: CNNTstepEncoder(SPACE, 3), r"\['dice', 'room'\].*DictTstepEncoder"),
        (
            lambda: CNNTstepEncoder(image(20, 20, 3), 3),
            "NatureishCNN does not take .*20 x 20.*@IMPALAishCNN",
        ),
        (lambda: CNNTstepEncoder(image(40, 64, 40), 3), "may be the first or the last.*channels_first"),
        (lambda: CNNTstepEncoder(image(64, 64), 3, aug_pct_of_batch=2.0), r"aug_pct_of_batch is 2.0"),
        (lambda: GridworldCNNTstepEncoder(image(3, 3, 2), 3), "GridworldCNN does not take .* 3 x 3"),
        (lambda: GridworldCNNTstepEncoder(IDS, 3), "at most 1,024 differ"),
        (lambda: DictTstepEncoder(SPACE, 3, obs_kinds={"room": "image"}), "obs_kinds sets 'room'"),
        (lambda: DictTstepEncoder(SPACE, 3, obs_kinds={"x": "flat"}), "obs_kinds sets 'x'"),
    ],
)
def test_observations_that_do_not_fit_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){message}") as caught:
        make()
    assert "Fix:" in str(caught.value)


def test_the_gin_samples_of_the_page_name_existing_settings() -> None:
    with gin.unlock_config():
        gin.parse_config(
            "import loxodon.experiment\n" + "\n".join(re.findall(r"```gin\n(.*?)```", PAGE, flags=re.DOTALL))
        )
    encoder = gin.query_parameter("Experiment.tstep_encoder_type").scoped_configurable_fn
    made = encoder(image(20, 20, 3), 3)
    assert len(made.images[0].cnn.first) == 2
    assert made.images[0].shifted_share == 0.75
    gin.clear_config()
