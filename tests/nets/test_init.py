"""The arguments listed by `loxodon.nets.init`: each scales exactly the initial weights that it names."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.nets import (
    DictTstepEncoder,
    FFTstepEncoder,
    GLATrajEncoder,
    GRUTrajEncoder,
    LSTMTrajEncoder,
    Mamba2TrajEncoder,
    MambaTrajEncoder,
    MinGRUTrajEncoder,
    MinLSTMTrajEncoder,
    MLSTMTrajEncoder,
    TransformerTrajEncoder,
)

from ..transformers import recommended

OBS = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
TRANSFORMER = partial(TransformerTrajEncoder, 6, 5, d_model=32, n_layers=1, **recommended(8))


def trunk(kind: Any, **settings: Any) -> Any:
    return partial(kind, 6, 5, d_model=16, n_layers=1, **settings)


def rnn(kind: Any) -> Any:
    return partial(kind, 6, 5, d_hidden=8, n_layers=1)


# network, argument, and the share of each parameter that it scales
SCALED: list[tuple[Any, str, dict[str, float]]] = [
    (partial(FFTstepEncoder, OBS, 3), "rl2_gain", {"mlp.hidden.0.weight": 1 / 2}),
    (partial(DictTstepEncoder, OBS, 3), "rl2_gain", {"mlp.hidden.0.weight": 1 / 2}),
    (rnn(GRUTrajEncoder), "gate_gain", {"rnn.weight_ih_l0": 1 / 2 * 1 / 3}),
    (rnn(LSTMTrajEncoder), "gate_gain", {"rnn.weight_ih_l0": 1 / 2 * 2 / 4}),
    (trunk(MinGRUTrajEncoder), "gate_gain", {"layers.0.mixer.inp.weight": 1 / 2}),
    (trunk(MinGRUTrajEncoder), "out_gain", {"layers.0.mixer.out.weight": 1}),
    (trunk(MinLSTMTrajEncoder), "gate_gain", {"layers.0.mixer.inp.weight": 2 / 3}),
    (trunk(MambaTrajEncoder), "select_gain", {"layers.0.mixer.select.weight": 1}),
    (trunk(MambaTrajEncoder), "gate_gain", {"layers.0.mixer.step_size.weight": 1}),
    (trunk(Mamba2TrajEncoder), "gate_gain", {"layers.0.mixer.inp.weight": 8 / (2 * 32 + 2 * 64 + 8)}),
    (trunk(GLATrajEncoder), "gate_gain", {"layers.0.mixer.write.weight": 1}),
    (trunk(MLSTMTrajEncoder), "gate_gain", {"layers.0.mixer.gates.weight": 1}),
    (TRANSFORMER, "qk_gain", {"layers.0.q_norm.weight": 1}),
    (TRANSFORMER, "fixed_content_gain", {"layers.0.qkv.weight": 2 / 3 * 2 / 8}),
]


@pytest.mark.parametrize(
    ("build", "argument", "shares"),
    SCALED,
    ids=[f"{build.func.__name__}.{name}" for build, name, _ in SCALED],
)
def test_a_gain_scales_the_weights_that_it_names(build: Any, argument: str, shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"\.{argument} is -1, but must be at least 0\. Fix: bind"):
        build(**{argument: -1})
    parameters = []
    for gain in (1.0, 3.0):
        torch.manual_seed(0)
        parameters.append(dict(build(**{argument: gain}).named_parameters()))
    found = {}
    for name, first in parameters[0].items():
        is_scaled = first != parameters[1][name]
        torch.testing.assert_close(parameters[1][name], torch.where(is_scaled, 3.0 * first, first))
        if is_scaled.any():
            found[name] = is_scaled.float().mean().item()
    assert found == pytest.approx(shares)


@pytest.mark.parametrize("kind", [MambaTrajEncoder, Mamba2TrajEncoder])
def test_step_sizes_of_mamba_start_at_their_bias(kind: Any) -> None:
    mixer = trunk(kind, step_bias=-2)().layers[0].mixer
    bias = mixer.step_size.bias if kind is MambaTrajEncoder else mixer.step_bias
    assert (bias == -2.0).all()


def test_weights_of_linear_layers_lie_input_by_input() -> None:
    """Copies and loading keep that order, so it lasts for a whole run."""
    for make in (TRANSFORMER, rnn(GRUTrajEncoder), trunk(MinGRUTrajEncoder)):
        encoder = copy.deepcopy(make())
        encoder.load_state_dict({name: x.contiguous() for name, x in encoder.state_dict().items()})
        weights = [x for name, x in encoder.named_parameters() if x.ndim > 1 and "conv" not in name]
        assert len(weights) > 2
        assert all(x.t().is_contiguous() for x in weights)
