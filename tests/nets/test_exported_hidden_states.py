"""What on-policy training asks of every trajectory encoder: to go on from where acting stood, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loxodon.nets import TrajEncoder, TransformerTrajEncoder

from ..rounding import assert_equal_but_for_rounding
from .encoders import DIM, ENCODERS, MEMORYLESS, WINDOW, episode_times, make_encoder

CPU, NUM_ENVS = torch.device("cpu"), 4
NUM_OPS = 32 * 3 * 84  # width and layers of the largest encoder, timesteps


@pytest.fixture(params=sorted(ENCODERS))
def encoder(request: pytest.FixtureRequest) -> TrajEncoder:
    return make_encoder(request.param)


@torch.no_grad()
def act(encoder: TrajEncoder, seq: Tensor, times: Tensor, resets: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Outputs (N, L, D) of acting step by step from `state`, and the state after it."""
    outputs = [torch.empty(len(seq), 0, encoder.emb_dim)]
    for t in range(seq.shape[1]):
        state = encoder.reset_hidden_state(state, resets[:, t])
        out, state = encoder(seq[:, t : t + 1], times[:, t : t + 1], state)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def make_history(length: int, episodes: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Random timesteps of envs whose episodes have different ages: seq, times, resets.

    Row 0 never resets after its start, row 1 and 2 do now and then, row 3 often.
    """
    resets = torch.zeros(NUM_ENVS, length, dtype=torch.bool)
    resets[:, :1] = True
    if episodes:
        resets[1, 5::9] = resets[2, 2::7] = resets[3, 1::2] = True
    return torch.randn(NUM_ENVS, length, DIM), episode_times(resets), resets


def state_after(encoder: TrajEncoder, length: int) -> Any:
    return act(encoder, *make_history(length), encoder.init_hidden_state(NUM_ENVS, CPU))[1]


@pytest.mark.parametrize("before", [0, 1, 3, WINDOW, 60])
@pytest.mark.parametrize("length", [1, 3, 24])
def test_encoding_on_equals_acting_on(encoder: TrajEncoder, before: int, length: int) -> None:
    seq, times, resets = make_history(before + length)
    old, new = slice(None, before), slice(before, None)
    start = encoder.init_hidden_state(NUM_ENVS, CPU)
    _, state = act(encoder, seq[:, old], times[:, old], resets[:, old], start)
    rows = encoder.export_hidden_state(state)
    expected, _ = act(encoder, seq[:, new], times[:, new], resets[:, new], state)
    with torch.no_grad():
        encoded = encoder.encode_from(seq[:, new], times[:, new], rows, resets[:, new])
        imported, _ = encoder(seq[:, new], times[:, new], encoder.import_hidden_state(rows), resets[:, new])
    assert_equal_but_for_rounding(encoded, expected, NUM_OPS)
    assert_equal_but_for_rounding(imported, expected, NUM_OPS)


def test_episodes_that_all_run_on_need_no_resets(encoder: TrajEncoder) -> None:
    """Of different ages, so that what each env may see is known from its row alone."""
    seq, times, resets = make_history(9)
    _, state = act(encoder, seq, times, resets, encoder.init_hidden_state(NUM_ENVS, CPU))
    rows = encoder.export_hidden_state(state)
    new, new_times = torch.randn(NUM_ENVS, 12, DIM), times[:, -1:] + torch.arange(1, 13)[:, None]
    with torch.no_grad():
        expected, _ = encoder(new, new_times, state)
        imported, _ = encoder(new, new_times, encoder.import_hidden_state(rows))
        encoded = encoder.encode_from(new, new_times, rows)
    assert_equal_but_for_rounding(encoded, expected, NUM_OPS)
    assert_equal_but_for_rounding(imported, expected, NUM_OPS)


def test_rows_of_different_exports_can_be_mixed(encoder: TrajEncoder) -> None:
    seq, times, resets = make_history(30)
    state, at, exports = encoder.init_hidden_state(NUM_ENVS, CPU), [0, 2, 9, 23], []
    for begin, end in zip([0, *at], at, strict=False):
        _, state = act(encoder, seq[:, begin:end], times[:, begin:end], resets[:, begin:end], state)
        exports.append(encoder.export_hidden_state(state))
    full, _ = act(encoder, seq, times, resets, encoder.init_hidden_state(NUM_ENVS, CPU))
    stacked = {name: torch.stack([rows[name] for rows in exports]) for name in exports[0]}  # (time, N, ...)
    which, env, length = torch.tensor([3, 0, 1, 2, 2]), torch.tensor([0, 0, 2, 1, 3]), 6
    columns = torch.tensor(at)[which][:, None] + torch.arange(length)
    pick = (env[:, None], columns)
    with torch.no_grad():
        rows = {name: part[which, env] for name, part in stacked.items()}
        encoded = encoder.encode_from(seq[pick], times[pick], rows, resets[pick])
        acted, _ = encoder(seq[pick], times[pick], encoder.import_hidden_state(rows), resets[pick])
    assert_equal_but_for_rounding(encoded, full[pick], NUM_OPS)
    assert_equal_but_for_rounding(acted, full[pick], NUM_OPS)


@pytest.mark.parametrize("before", [0, 1, 3, WINDOW, 60])
def test_an_imported_state_exports_the_same(encoder: TrajEncoder, before: int) -> None:
    rows = encoder.export_hidden_state(state_after(encoder, before))
    again = encoder.export_hidden_state(encoder.import_hidden_state(rows))
    assert rows.keys() == again.keys()
    for name, part in rows.items():
        assert part.shape[0] == NUM_ENVS
        assert torch.equal(part, again[name]), name


@pytest.mark.parametrize("before", [1, WINDOW, 60])
def test_acting_on_from_an_imported_state_is_the_same_to_the_last_bit(
    encoder: TrajEncoder, before: int
) -> None:
    seq, times, resets = make_history(before + 60)
    old, new = slice(None, before), slice(before, None)
    fresh = encoder.init_hidden_state(NUM_ENVS, CPU)
    _, state = act(encoder, seq[:, old], times[:, old], resets[:, old], fresh)
    imported = encoder.import_hidden_state(encoder.export_hidden_state(state))
    outputs = [act(encoder, seq[:, new], times[:, new], resets[:, new], one)[0] for one in (state, imported)]
    assert torch.equal(*outputs)


def test_exports_have_the_same_shapes_at_any_time(encoder: TrajEncoder) -> None:
    shapes = [
        {name: (part.shape, part.dtype) for name, part in rows.items()}
        for rows in (encoder.export_hidden_state(state_after(encoder, n)) for n in (0, 2, 50))
    ]
    assert shapes[0] == shapes[1] == shapes[2]


def test_exported_rows_and_states_are_copies(encoder: TrajEncoder) -> None:
    """Of one env and many, as a copy of one env may go unmade where dimensions are only swapped."""
    for num_envs in (1, NUM_ENVS):
        seq, times, resets = (x[:num_envs] for x in make_history(9))
        _, state = act(encoder, seq, times, resets, encoder.init_hidden_state(num_envs, CPU))
        rows = encoder.export_hidden_state(state)
        kept = {name: part.clone() for name, part in rows.items()}
        imported = encoder.import_hidden_state(rows)
        for live in (state, imported):
            _, later = act(encoder, seq, times, resets, live)
            encoder.reset_hidden_state(later, torch.ones(num_envs, dtype=torch.bool))
            assert all(torch.equal(part, kept[name]) for name, part in rows.items())
        imported = encoder.import_hidden_state(rows)
        for part in rows.values():
            part.zero_()
        for name, part in encoder.export_hidden_state(imported).items():
            assert torch.equal(part, kept[name]), name


def test_no_gradient_flows_into_the_rows(encoder: TrajEncoder) -> None:
    start, (seq, times, resets) = encoder.init_hidden_state(NUM_ENVS, CPU), make_history(3, episodes=False)
    _, with_graph = encoder(seq, times, start, resets)
    rows = encoder.export_hidden_state(with_graph)
    assert not any(part.requires_grad for part in rows.values())
    for part in rows.values():
        part.requires_grad_(part.is_floating_point())
    new = torch.randn(NUM_ENVS, 4, DIM, requires_grad=True)
    encoded = encoder.encode_from(new, times[:, :1] + 3 + torch.arange(4)[:, None], rows)
    encoded[:, -1].square().sum().backward()
    assert all(part.grad is None for part in rows.values())
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert new.grad is not None
    felt = new.grad.abs().sum((0, 2)) > 0
    assert felt.all() if type(encoder).__name__.startswith(("GRU", "LSTM", "Tr")) else felt[-1]


def test_encoding_on_under_autocast_follows_the_exact_result(encoder: TrajEncoder) -> None:
    rows = encoder.export_hidden_state(state_after(encoder, 8))
    seq, times = torch.randn(NUM_ENVS, 6, DIM), torch.arange(8, 14).expand(NUM_ENVS, 6)[..., None]
    with torch.no_grad():
        exact = encoder.encode_from(seq, times, rows)
        with torch.autocast("cpu", torch.bfloat16):
            encoded = encoder.encode_from(seq, times, rows)
    torch.testing.assert_close(encoded.float(), exact, rtol=0, atol=0.2)


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_nothing_is_carried_from_one_episode_to_the_next(name: str) -> None:
    encoder, (seq, times, resets) = make_encoder(name), make_history(16, episodes=False)
    changed = seq.clone()
    changed[:, :3] += 1.0
    new_at = torch.tensor([3, 4, 7, 40])  # rows 0 to 2 begin an episode there, row 3 none
    resets[torch.arange(3), new_at[:3]] = True
    times = episode_times(resets)
    outputs, start = [], encoder.init_hidden_state(NUM_ENVS, CPU)
    for x in (seq, changed):
        fresh = encoder.reset_hidden_state(start, torch.ones(NUM_ENVS, dtype=torch.bool))
        _, state = act(encoder, x[:, :4], times[:, :4], resets[:, :4], fresh)
        rows = encoder.export_hidden_state(state)
        with torch.no_grad():
            outputs.append(encoder.encode_from(x[:, 4:], times[:, 4:], rows, resets[:, 4:]))
    differs = (outputs[0] != outputs[1]).any(-1)
    for row, begin in enumerate(new_at.tolist()):
        assert not differs[row, max(begin - 4, 0) :].any()
    assert differs[2, :2].all() == differs[3, :2].all() == (name not in MEMORYLESS)


@pytest.mark.parametrize("static_shapes", [False, True])
def test_a_window_of_one_timestep_has_no_history(static_shapes: bool) -> None:
    encoder = TransformerTrajEncoder(DIM, 1, d_model=16, n_heads=2, d_ff=32).eval()
    if static_shapes:
        encoder.use_static_shapes()
    assert encoder.context_len == 0
    seq, times, resets = make_history(6)
    rows = encoder.export_hidden_state(act(encoder, seq, times, resets, encoder.init_hidden_state(4, CPU))[1])
    with torch.no_grad():
        encoded = encoder.encode_from(seq, times, rows, resets)
        acted, _ = encoder(seq, times, encoder.import_hidden_state(rows), resets)
        alone, _ = encoder(seq.flatten(0, 1)[:, None], times.flatten(0, 1)[:, None])
    assert_equal_but_for_rounding(encoded, acted, NUM_OPS)
    assert_equal_but_for_rounding(encoded, alone.view(*encoded.shape), NUM_OPS)


def test_no_encoding_depends_on_the_future(encoder: TrajEncoder) -> None:
    rows = encoder.export_hidden_state(state_after(encoder, 11))
    seq, cut, times = torch.randn(NUM_ENVS, 12, DIM), 7, torch.arange(11, 23).expand(NUM_ENVS, 12)[..., None]
    changed = seq.clone()
    changed[:, cut:] += 1.0
    with torch.no_grad():
        one, other = (encoder.encode_from(x, times, rows) for x in (seq, changed))
    assert_equal_but_for_rounding(one[:, :cut], other[:, :cut], NUM_OPS)
    assert (one[:, cut:] != other[:, cut:]).any(-1).all()


def test_context_len_is_how_far_outputs_look_back(encoder: TrajEncoder) -> None:
    length = 30
    seq = torch.randn(1, length, DIM, requires_grad=True)
    out, _ = encoder(seq, torch.arange(length).view(1, -1, 1))
    (grad,) = torch.autograd.grad(out[0, -1].square().sum(), seq)
    lags = (length - 1 - torch.nonzero(grad[0].abs().sum(-1)).flatten()).tolist()
    context = encoder.context_len
    assert max(lags) == (length - 1 if context is None else context)


def test_encoders_without_the_on_policy_part_still_act_and_say_what_is_missing() -> None:
    class Own(TrajEncoder):
        emb_dim = DIM

        def init_hidden_state(self, num_envs: int, device: torch.device) -> None: ...

        def reset_hidden_state(self, hidden_state: None, ended: Tensor) -> None: ...

        def forward(
            self, seq: Tensor, time_idxs: Tensor, hidden_state: None = None, resets: Tensor | None = None
        ) -> tuple[Tensor, None]:
            return seq, None

    encoder, seq, times = Own(DIM, WINDOW), torch.randn(2, 3, DIM), torch.arange(3).expand(2, 3)[..., None]
    assert torch.equal(encoder(seq, times)[0], seq)
    calls = {
        "context_len": lambda: encoder.context_len,
        "export_hidden_state": lambda: encoder.export_hidden_state(None),
        "import_hidden_state": lambda: encoder.encode_from(seq, times, {}),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=rf"Own has no {name}, .* Fix: implement Own.{name}"):
            call()
