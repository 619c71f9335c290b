"""The contract every trajectory encoder keeps: causal, resettable, and step by step the same as at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loxodon.nets import (
    FFTrajEncoder,
    GRUTrajEncoder,
    LSTMTrajEncoder,
    TrajEncoder,
    TransformerTrajEncoder,
)

from ..rounding import assert_equal_but_for_rounding
from .encoders import DIM, ENCODERS, MEMORYLESS, WINDOW, episode_times, make_encoder, transformer

NUM_OPS = 32 * 3 * 90  # width and layers of the largest encoder, timesteps


@pytest.fixture(params=sorted(ENCODERS))
def encoder(request: pytest.FixtureRequest) -> TrajEncoder:
    return make_encoder(request.param)


@pytest.mark.parametrize("length", [3, WINDOW, 90])
def test_step_by_step_equals_the_full_sequence(encoder: TrajEncoder, length: int) -> None:
    batch = 4
    seq, resets = torch.randn(batch, length, DIM), torch.rand(batch, length) < 0.1
    resets[:, 0] = True
    resets[3, 1:] = False  # one row keeps its memory to the end
    times = episode_times(resets)
    with torch.no_grad():
        full, _ = encoder(seq, times, resets=resets)
        state = encoder.init_hidden_state(batch, seq.device)
        steps = []
        for t in range(length):
            state = encoder.reset_hidden_state(state, resets[:, t])
            out, state = encoder(seq[:, t : t + 1], times[:, t : t + 1], state)
            steps.append(out)
        in_one_call, _ = encoder(seq, times, encoder.init_hidden_state(batch, seq.device), resets)
    assert full.shape == (batch, length, encoder.emb_dim)
    assert_equal_but_for_rounding(torch.cat(steps, dim=1), full, NUM_OPS)
    assert_equal_but_for_rounding(in_one_call, full, NUM_OPS)


def test_no_output_depends_on_the_future(encoder: TrajEncoder) -> None:
    x, cut = torch.randn(2, 12, DIM), 7
    times = torch.arange(12).expand(2, 12)[..., None]
    y = x.clone()
    y[:, cut:] += 1.0
    with torch.no_grad():
        before, after = encoder(x, times)[0], encoder(y, times)[0]
    assert_equal_but_for_rounding(before[:, :cut], after[:, :cut], NUM_OPS)
    assert not torch.allclose(before[:, cut:], after[:, cut:])


def test_memory_reaches_back_inside_an_episode_and_never_across_a_reset() -> None:
    for name in ENCODERS:
        encoder = make_encoder(name)
        x = torch.randn(1, WINDOW, DIM)
        y = x.clone()
        y[:, 0] += 1.0
        no_reset, reset = torch.zeros(1, WINDOW, dtype=torch.bool), torch.zeros(1, WINDOW, dtype=torch.bool)
        reset[:, 2] = True
        times = torch.arange(WINDOW).view(1, -1, 1)
        with torch.no_grad():
            without = encoder(x, times, resets=no_reset)[0] - encoder(y, times, resets=no_reset)[0]
            across = encoder(x, times, resets=reset)[0] - encoder(y, times, resets=reset)[0]
        moved, leaked = without[:, -1].abs().max(), across[:, 2:].abs().max()
        assert leaked == 0, name
        assert (moved > 1e-4) == (name not in MEMORYLESS), name


def test_each_transformer_layer_sees_exactly_the_window() -> None:
    torch.manual_seed(0)
    encoder = transformer(n_layers=1).eval()
    x = torch.randn(1, 12, DIM, requires_grad=True)
    out, _ = encoder(x, torch.arange(12).view(1, -1, 1))
    (grad,) = torch.autograd.grad(out[0, 9].square().sum(), x)
    felt = grad[0].abs().sum(-1) > 0
    assert felt.tolist() == [9 - WINDOW < t <= 9 for t in range(12)]


def test_rotary_positions_depend_on_time_differences_only() -> None:
    torch.manual_seed(0)
    encoder = transformer().eval()
    seq, times = torch.randn(1, 4, DIM), torch.arange(4).view(1, -1, 1)
    with torch.no_grad():
        assert_equal_but_for_rounding(encoder(seq, times)[0], encoder(seq, times + 70)[0], NUM_OPS)


def test_learned_positions_name_the_limit_they_hit() -> None:
    encoder = transformer(pos_emb="learned", max_time_idx=3)
    with pytest.raises(ValueError, match=r"timestep 4, but learned positions end at 3.*max_time_idx"):
        encoder(torch.randn(1, 1, DIM), torch.tensor([[[4]]]))


def test_impossible_head_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"d_model 16 and n_heads 3.*Fix: choose"):
        transformer(n_heads=3)
    with pytest.raises(ValueError, match=r"pos_emb is 'sine'.*Fix"):
        transformer(pos_emb="sine")


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (GRUTrajEncoder, "d_hidden"),
        (GRUTrajEncoder, "n_layers"),
        (GRUTrajEncoder, "d_output"),
        (LSTMTrajEncoder, "d_hidden"),
        (LSTMTrajEncoder, "n_layers"),
        (LSTMTrajEncoder, "d_output"),
        (FFTrajEncoder, "d_model"),
        (FFTrajEncoder, "d_ff"),
        (FFTrajEncoder, "n_layers"),
        (TransformerTrajEncoder, "d_model"),
        (TransformerTrajEncoder, "n_heads"),
        (TransformerTrajEncoder, "d_ff"),
        (TransformerTrajEncoder, "n_layers"),
    ],
)
@pytest.mark.parametrize("value", [0, -8])
def test_sizes_below_one_are_refused(build: Callable[..., TrajEncoder], size: str, value: int) -> None:
    setting = f"{build.__name__}.{size}"
    expected = rf"{setting} is {value}, but must be at least 1. Fix: bind {setting}"
    with pytest.raises(ValueError, match=expected):
        build(DIM, WINDOW, **{size: value})


def test_resetting_one_env_leaves_the_others_untouched(encoder: TrajEncoder) -> None:
    seq, times = torch.randn(2, 4, DIM), torch.arange(4).expand(2, 4)[..., None]
    with torch.no_grad():
        full, _ = encoder(seq, times)
        _, state = encoder(seq[:, :3], times[:, :3], encoder.init_hidden_state(2, seq.device))
        state = encoder.reset_hidden_state(state, torch.tensor([True, False]))
        last, _ = encoder(seq[:, 3:], times[:, 3:], state)
        fresh, _ = encoder(seq[:1, 3:], times[:1, 3:])
    assert_equal_but_for_rounding(last[1], full[1, 3:], NUM_OPS)
    assert_equal_but_for_rounding(last[0], fresh[0], NUM_OPS)


def test_query_gain_sharpens_attention_at_the_start() -> None:
    torch.manual_seed(0)
    queries = {}
    for gain in (1.0, 3.0):
        encoder = transformer(n_layers=1, qk_gain=gain)
        q, k, _ = encoder.layers[0].queries_keys_values(torch.randn(2, WINDOW, 16), None)
        queries[gain] = q.square().mean(-1).sqrt().mean()
        assert abs(k.square().mean(-1).sqrt().mean() - 1.0) < 0.01
    assert abs(queries[3.0] / queries[1.0] - 3.0) < 0.01


@pytest.mark.parametrize("resets_at", [{}, {0: [3, 9, 50], 1: [4, 51], 2: [52]}])
def test_attention_reads_no_more_than_the_longest_running_episode(resets_at: dict[int, list[int]]) -> None:
    encoder = transformer(n_layers=1).eval()
    state = encoder.init_hidden_state(3, torch.device("cpu"))
    ages = torch.zeros(3, dtype=torch.int64)
    for t in range(200):
        ended = torch.tensor([t in resets_at.get(row, []) for row in range(3)])
        if ended.any():
            state = encoder.reset_hidden_state(state, ended)
        ages = torch.where(ended, 0, ages) + 1
        bias, entry = state.advance(), torch.zeros(3, 2, 8)
        length = state.store(0, entry, entry)[0].shape[2]
        assert length == min(int(ages.max()), WINDOW)
        visible = torch.ones(3, length) if bias is None else (bias[:, 0, 0] == 0).float()
        assert visible.sum(-1).tolist() == ages.clamp(max=WINDOW).tolist()
        assert (bias is None) == (int(ages.min()) >= length)


def test_acting_under_autocast_follows_the_full_sequence(encoder: TrajEncoder) -> None:
    """In bfloat16, with a reset of one env in the middle, so that the envs' ages differ."""
    seq, length = torch.randn(2, 12, DIM), 12
    resets = torch.zeros(2, length, dtype=torch.bool)
    resets[0, 0] = resets[1, 0] = resets[1, 5] = True
    times = episode_times(resets)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        full, _ = encoder(seq, times, resets=resets)
        steps, _ = encoder(seq, times, encoder.init_hidden_state(2, seq.device), resets)
    with torch.no_grad():
        exact, _ = encoder(seq, times, resets=resets)
    torch.testing.assert_close(steps.float(), full.float(), rtol=0, atol=0.1)
    torch.testing.assert_close(full.float(), exact, rtol=0, atol=0.2)


def test_lstm_starts_with_open_forget_gates_and_an_orthogonal_recurrence() -> None:
    rnn = LSTMTrajEncoder(DIM, WINDOW, d_hidden=4, n_layers=2).rnn
    for layer in range(2):
        weight, *biases = (getattr(rnn, f"{kind}_l{layer}") for kind in ("weight_hh", "bias_ih", "bias_hh"))
        forget = sum(bias.view(4, 4)[1] for bias in biases)  # gates: input, forget, cell, output
        assert forget.tolist() == [1.0] * 4
        for gate in weight.view(4, 4, 4):
            assert_equal_but_for_rounding(gate @ gate.T, torch.eye(4), NUM_OPS)


def test_initial_weights_can_be_orthogonal() -> None:
    encoder = FFTrajEncoder(DIM, WINDOW, d_model=8, init="orthogonal")
    weight = encoder.ups[0].weight  # (32, 8): columns of squared length 2
    assert_equal_but_for_rounding(weight.T @ weight, 2.0 * torch.eye(8), NUM_OPS)
    with pytest.raises(ValueError, match=r"init is 'zeros', allowed are 'default', 'orthogonal'. Fix: bind"):
        FFTrajEncoder(DIM, WINDOW, init="zeros")
