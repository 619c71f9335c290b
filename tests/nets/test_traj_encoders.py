"""The contract of every trajectory encoder.

It is causal and resettable, gives the same results step by step and at once, and continues exactly from an
exported state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import pytest
import torch
from torch import Tensor, nn

from loxodon import nets
from loxodon.nets import (
    FFTrajEncoder,
    GLATrajEncoder,
    GRUTrajEncoder,
    HybridTrajEncoder,
    LRUTrajEncoder,
    LSTMTrajEncoder,
    MambaTrajEncoder,
    MinGRUTrajEncoder,
    MLSTMTrajEncoder,
    S5TrajEncoder,
    TrajEncoder,
    TransformerTrajEncoder,
    recurrent,
)
from loxodon.nets.attention import sdpa
from loxodon.nets.mixers import mamba
from loxodon.nets.sigma_reparam import SigmaReparamLinear
from loxodon.nets.timeline import Timeline

from ..rounding import assert_equal_but_for_rounding
from ..transformers import recommended
from .encoders import DIM, ENCODERS, MEMORYLESS, WINDOW, episode_times, make_encoder, transformer

BASES = {"TrajEncoder", "MixerTrajEncoder"}
NAMES = {name for name in nets.__all__ if name.endswith("TrajEncoder")} - BASES
REMEMBERING = NAMES - {"FFTrajEncoder", "IdentityTrajEncoder"}
CPU, NUM_ENVS = torch.device("cpu"), 4
NUM_OPS = 32 * 3 * 128  # width and layers of the largest encoder, timesteps


@pytest.fixture(params=sorted(ENCODERS))
def encoder(request: pytest.FixtureRequest) -> TrajEncoder:
    return make_encoder(request.param)


@torch.no_grad()
def act(encoder: TrajEncoder, seq: Tensor, times: Tensor, resets: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Outputs (N, L, D) of acting step by step from `state`, and the final state."""
    outputs = [torch.empty(len(seq), 0, encoder.emb_dim)]
    for t in range(seq.shape[1]):
        state = encoder.reset_hidden_state(state, resets[:, t])
        out, state = encoder(seq[:, t : t + 1], times[:, t : t + 1], state)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def act_from_the_start(
    encoder: TrajEncoder, seq: Tensor, times: Tensor, resets: Tensor
) -> tuple[Tensor, Any]:
    return act(encoder, seq, times, resets, encoder.init_hidden_state(len(seq), CPU))


def make_history(length: int, episodes: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Random timesteps of envs whose episodes have different ages: seq, times, resets.

    Row 0 never resets after its start, rows 1 and 2 do now and then, row 3 often.
    """
    resets = torch.zeros(NUM_ENVS, length, dtype=torch.bool)
    resets[:, :1] = True
    if episodes:
        resets[1, 5::9] = resets[2, 2::7] = resets[3, 1::2] = True
    return torch.randn(NUM_ENVS, length, DIM), episode_times(resets), resets


def exported_after(encoder: TrajEncoder, length: int) -> dict[str, Tensor]:
    return encoder.export_hidden_state(act_from_the_start(encoder, *make_history(length))[1])


@pytest.mark.parametrize(
    ("before", "length"),
    [
        *((0, 1), (0, 2), (1, 3), (3, 1), (WINDOW, 17)),
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in ((0, 67), (26, 12))),
    ],
)
def test_acting_encoding_and_continuing_give_the_same(encoder: TrajEncoder, before: int, length: int) -> None:
    history = make_history(before + length)
    old, new = ([x[:, part] for x in history] for part in (slice(None, before), slice(before, None)))
    seq, times, resets = new
    _, state = act_from_the_start(encoder, *old)
    rows = encoder.export_hidden_state(state)
    with torch.no_grad():
        full, _ = encoder(*history[:2], resets=history[2])
        encoded = encoder.encode_from(seq, times, rows, resets)
        imported, _ = encoder(seq, times, encoder.import_hidden_state(rows), resets)
    assert full.shape == (NUM_ENVS, before + length, encoder.emb_dim)
    for found in (act(encoder, *new, state)[0], encoded, imported):
        assert_equal_but_for_rounding(found, full[:, before:], NUM_OPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta", "gla", "lru", "mlstm"])  # one per kind of recurrence
def test_hundreds_of_timesteps_are_the_same_at_once_and_one_by_one(name: str) -> None:
    encoder, history = make_encoder(name), make_history(512)
    with torch.no_grad():
        full, _ = encoder(*history[:2], resets=history[2])
    torch.testing.assert_close(act_from_the_start(encoder, *history)[0], full, rtol=0, atol=1e-4)


@pytest.mark.kernels
def test_resets_count_in_every_chunk_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba scans chunks of timesteps; here chunks have the smallest size, eight."""
    monkeypatch.setitem(mamba.SCAN_BYTES, "cpu", 1)
    encoder, history = make_encoder("mamba"), make_history(35)
    seq = history[0].requires_grad_()
    chunked, _ = encoder(seq, *history[1:2], resets=history[2])
    assert_equal_but_for_rounding(act_from_the_start(encoder, *history)[0], chunked.detach(), NUM_OPS)
    monkeypatch.setitem(mamba.SCAN_BYTES, "cpu", 2**30)
    whole, _ = encoder(seq, *history[1:2], resets=history[2])
    felt = [torch.autograd.grad(out.square().sum(), seq)[0] for out in (chunked, whole)]
    torch.testing.assert_close(*felt, rtol=1e-4, atol=1e-5)


def test_resets_are_not_needed_if_no_episode_ends(encoder: TrajEncoder) -> None:
    """Episodes differ in age, so an env's row alone determines what it may see."""
    seq, times, resets = make_history(9)
    _, state = act_from_the_start(encoder, seq, times, resets)
    rows = encoder.export_hidden_state(state)
    new, new_times = torch.randn(NUM_ENVS, 12, DIM), times[:, -1:] + torch.arange(1, 13)[:, None]
    with torch.no_grad():
        expected, _ = encoder(new, new_times, state)
        imported, _ = encoder(new, new_times, encoder.import_hidden_state(rows))
        encoded = encoder.encode_from(new, new_times, rows)
    assert_equal_but_for_rounding(encoded, expected, NUM_OPS)
    assert_equal_but_for_rounding(imported, expected, NUM_OPS)


@pytest.mark.kernels
def test_rows_of_different_exports_can_be_mixed(encoder: TrajEncoder) -> None:
    seq, times, resets = make_history(30)
    state, at, exports = encoder.init_hidden_state(NUM_ENVS, CPU), [0, 2, 9, 23], []
    for begin, end in zip([0, *at], at, strict=False):
        _, state = act(encoder, seq[:, begin:end], times[:, begin:end], resets[:, begin:end], state)
        exports.append(encoder.export_hidden_state(state))
    full, _ = act_from_the_start(encoder, seq, times, resets)
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


@pytest.mark.parametrize("before", [0, 26])
def test_an_imported_state_acts_on_and_exports_the_same_to_the_last_bit(
    encoder: TrajEncoder, before: int
) -> None:
    seq, times, resets = make_history(before + 12)
    _, state = act_from_the_start(encoder, seq[:, :before], times[:, :before], resets[:, :before])
    rows = encoder.export_hidden_state(state)
    imported = encoder.import_hidden_state(rows)
    again, fresh = encoder.export_hidden_state(imported), exported_after(encoder, 0)
    for name, part in rows.items():
        assert torch.equal(part, again[name]), name
        # the shape never depends on time
        assert (part.shape, part.dtype) == (fresh[name].shape, fresh[name].dtype), name
        assert part.shape[0] == NUM_ENVS
    new = (seq[:, before:], times[:, before:], resets[:, before:])
    assert torch.equal(*(act(encoder, *new, one)[0] for one in (state, imported)))


@pytest.mark.parametrize("num_envs", [1, NUM_ENVS])  # for a single env, a copy could be skipped
def test_exported_rows_and_states_are_copies(encoder: TrajEncoder, num_envs: int) -> None:
    seq, times, resets = (x[:num_envs] for x in make_history(9))
    _, state = act_from_the_start(encoder, seq, times, resets)
    rows = encoder.export_hidden_state(state)
    kept = {name: part.clone() for name, part in rows.items()}
    for live in (state, encoder.import_hidden_state(rows)):
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
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert new.grad is not None
    felt = new.grad.abs().sum((0, 2)) > 0
    assert felt.all() if encoder.context_len != 0 else felt[-1]


@pytest.mark.kernels
def test_autocast_follows_the_exact_result(encoder: TrajEncoder) -> None:
    """Acting, encoding and continuing from a state in bfloat16, with a reset of one env in the middle."""
    rows, (seq, times, resets) = exported_after(encoder, 8), make_history(12)
    fresh = encoder.init_hidden_state(NUM_ENVS, CPU)
    with torch.no_grad():
        exact = [encoder(seq, times, resets=resets)[0], encoder.encode_from(seq, times + 8, rows)]
        with torch.autocast("cpu", torch.bfloat16):
            found = [encoder(seq, times, resets=resets)[0], encoder.encode_from(seq, times + 8, rows)]
            steps, _ = encoder(seq, times, fresh, resets)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=0.2)
    torch.testing.assert_close(steps.float(), found[0].float(), rtol=0, atol=0.1)


@pytest.mark.kernels
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("name", ["transformer_all_kinds", "transformer_alibi", "transformer_recommended"])
def test_a_transformer_acts_on_narrow_keys_and_values_as_on_wide_ones(name: str, is_cast: bool) -> None:
    """Rings are narrow if they began under autocast on a GPU; a CPU may continue from them."""
    encoder = make_encoder(name)
    seq, times, resets = make_history(WINDOW + 8)
    exact, _ = act_from_the_start(encoder, seq, times, resets)
    state = [
        {name: x.bfloat16() if name in ("keys", "values") else x for name, x in layer.items()}
        for layer in encoder.init_hidden_state(NUM_ENVS, CPU)
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        found, after = act(encoder, seq, times, resets, state)
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=0.2)
    assert {after[-1][name].dtype for name in ("keys", "values")} == {torch.bfloat16}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_encoder_trains_under_autocast_on_any_processor(
    encoder: TrajEncoder, dtype: torch.dtype
) -> None:
    seq, times, resets = make_history(12)
    with torch.autocast("cpu", dtype):
        outputs, _ = encoder.train()(seq.requires_grad_(), times, resets=resets)
    outputs.float().square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_an_lstm_stays_in_float32_where_the_processor_has_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder, (seq, times, resets) = make_encoder("lstm"), make_history(12)
    assert isinstance(encoder, LSTMTrajEncoder)
    encoder.out = encoder.out_norm = nn.Identity()  # type: ignore[assignment]
    monkeypatch.setattr(recurrent, "_cpu_has_lstm", lambda dtype: False)
    exact, _ = encoder(seq, times, resets=resets)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = encoder(seq, times, resets=resets)
    assert torch.equal(found, exact)


def test_attention_on_a_cpu_stays_in_float32_under_autocast() -> None:
    """Its gradient in bfloat16 is slow there."""
    q, k, v = torch.randn(3, 2, 4, 6, 8).bfloat16().unbind()
    with torch.autocast("cpu", torch.bfloat16):
        found = sdpa(q, k, v, None, 0.0)
    assert torch.equal(found, sdpa(q.float(), k.float(), v.float(), None, 0.0))


@pytest.mark.kernels
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_nothing_is_carried_from_one_episode_to_the_next(name: str) -> None:
    encoder, (seq, times, resets) = make_encoder(name), make_history(16, episodes=False)
    changed = seq.clone()
    changed[:, :3] += 1.0
    new_at = torch.tensor([3, 4, 7, 40])  # rows 0 to 2 begin an episode there, row 3 none
    resets[torch.arange(3), new_at[:3]] = True
    times = episode_times(resets)
    outputs = []
    for x in (seq, changed):
        rows = encoder.export_hidden_state(
            act_from_the_start(encoder, x[:, :4], times[:, :4], resets[:, :4])[1]
        )
        with torch.no_grad():
            outputs.append(encoder.encode_from(x[:, 4:], times[:, 4:], rows, resets[:, 4:]))
    differs = (outputs[0] != outputs[1]).any(-1)
    for row, begin in enumerate(new_at.tolist()):
        assert not differs[row, max(begin - 4, 0) :].any()
    assert differs[2, :2].all() == differs[3, :2].all() == (name not in MEMORYLESS)


def test_a_window_of_one_timestep_has_no_history() -> None:
    encoder = TransformerTrajEncoder(DIM, 4, windows=[1, 1], d_model=16, d_ff=32, **recommended(2)).eval()
    assert encoder.context_len == 0
    seq, times, resets = make_history(6)
    rows = encoder.export_hidden_state(act_from_the_start(encoder, seq, times, resets)[1])
    with torch.no_grad():
        encoded = encoder.encode_from(seq, times, rows, resets)
        acted, _ = encoder(seq, times, encoder.import_hidden_state(rows), resets)
        alone, _ = encoder(seq.flatten(0, 1)[:, None], times.flatten(0, 1)[:, None])
    assert_equal_but_for_rounding(encoded, acted, NUM_OPS)
    assert_equal_but_for_rounding(encoded, alone.view(*encoded.shape), NUM_OPS)


@pytest.mark.kernels
def test_no_output_depends_on_the_future(encoder: TrajEncoder) -> None:
    """This holds for a whole sequence and for one that continues from a state."""
    rows, seq, cut = exported_after(encoder, 11), torch.randn(NUM_ENVS, 12, DIM), 7
    times, changed = torch.arange(11, 23).expand(NUM_ENVS, 12)[..., None], seq.clone()
    changed[:, cut:] += 1.0
    with torch.no_grad():
        pairs = [
            [encoder(x, times)[0] for x in (seq, changed)],
            [encoder.encode_from(x, times, rows) for x in (seq, changed)],
        ]
    for one, other in pairs:
        assert torch.equal(one[:, :cut], other[:, :cut])
        assert (one[:, cut:] != other[:, cut:]).any(-1).all()


def test_context_len_is_how_far_outputs_look_back(encoder: TrajEncoder) -> None:
    length = 30
    seq = torch.randn(1, length, DIM, requires_grad=True)
    out, _ = encoder(seq, torch.arange(length).view(1, -1, 1))
    (grad,) = torch.autograd.grad(out[0, -1].square().sum(), seq)
    felt = grad[0].abs().sum(-1) > 0
    reach = length - 1 if encoder.context_len is None else encoder.context_len
    assert felt.tolist() == [length - 1 - t <= reach for t in range(length)]


def test_encoders_without_the_on_policy_part_still_act_and_report_what_is_missing() -> None:
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


# --- single encoders -----------------------------------------------------------------------------------


def test_rotary_positions_depend_on_time_differences_only() -> None:
    encoder, seq = make_encoder("transformer_rotary"), torch.randn(1, 4, DIM)
    times = torch.arange(4).view(1, -1, 1)
    with torch.no_grad():
        assert_equal_but_for_rounding(encoder(seq, times)[0], encoder(seq, times + 70)[0], NUM_OPS)


def test_timesteps_after_the_last_learned_position_share_it() -> None:
    encoder, seq = (
        transformer(heads="plain", pos_emb="learned", max_time_idx=3).eval(),
        torch.randn(1, 1, DIM),
    )
    two, last, later = (encoder(seq, torch.tensor([[[t]]]))[0] for t in (2, 3, 4))
    assert torch.equal(last, later)
    assert not torch.equal(two, last)


def test_query_gain_sharpens_attention_at_the_start() -> None:
    torch.manual_seed(0)
    queries = {}
    for gain in (1.0, 3.0):
        encoder = transformer(n_layers=1, qk_gain=gain)
        q, k, _ = encoder.layers[0].queries_keys_values(torch.randn(2, WINDOW, 32), None)
        queries[gain] = q.square().mean(-1).sqrt().mean()
        assert abs(k.square().mean(-1).sqrt().mean() - 1.0) < 0.01
    assert abs(queries[3.0] / queries[1.0] - 3.0) < 0.01


def test_keys_of_fixed_heads_differ_between_positions_at_the_start() -> None:
    torch.manual_seed(0)
    encoder = TransformerTrajEncoder(DIM, 100, n_layers=1, **recommended(8))
    places = encoder.head_positions(torch.arange(100).view(1, -1, 1), torch.float32)
    keys = encoder.layers[0].queries_keys_values(torch.randn(4, 100, 128), places)[1][:, :2]
    same_place = torch.cosine_similarity(keys[:1], keys[1:], dim=-1).mean()
    half_a_window_apart = torch.cosine_similarity(keys[..., :50, :], keys[..., 50:, :], dim=-1).mean()
    assert same_place > 0.7  # content has little influence
    assert half_a_window_apart < 0.15


def test_content_heads_start_by_attending_to_what_resembles_the_present_at_any_distance() -> None:
    torch.manual_seed(0)
    encoder = TransformerTrajEncoder(DIM, 100, n_layers=1, **recommended(8))
    x = torch.randn(1, 100, 128)
    x[:, 99] = x[:, 17] + 0.3 * torch.randn(128)  # the last timestep resembles timestep 17
    queries, keys, _ = encoder.layers[0].queries_keys_values(
        x, encoder.head_positions(torch.arange(100).view(1, -1, 1), torch.float32)
    )
    found = torch.cosine_similarity(queries[:, :, 99:], keys[:, :, :99], dim=-1)[0]
    assert found[6:].argmax(-1).tolist() == [17, 17]
    assert found[2:6].argmax(-1).tolist() != [17] * 4  # heads with positions do not find it


def test_acting_on_a_cpu_reads_whole_blocks_up_to_the_longest_running_episode() -> None:
    resets_at, window = {0: [3, 9, 50], 1: [4, 51], 2: [52]}, 70
    layer = transformer(n_layers=1).layers[0]
    layer.ring.window = window
    state, ages = layer.begin(3, CPU), torch.zeros(3, dtype=torch.int64)
    for t in range(140):
        ended = torch.tensor([t in resets_at[row] for row in range(3)])
        state, ages = layer.forget(state, ended), torch.where(ended, 0, ages) + 1
        entry, timeline = torch.full((3, 8, 1, 4), float(t)), Timeline(ages[:, None], None)
        keys, values, sight, state = layer.ring.extend(entry, entry, timeline, state)
        longest = int(ages.max())
        assert (
            keys.shape[2] == values.shape[2] == next(n for n in (32, 64, 70) if longest <= n or n == window)
        )
        is_seen = sight.is_seen()[:, 0, 0]
        for row, age in enumerate(ages.clamp(max=window).tolist()):
            seen = [float(x) for x in range(t + 1 - age, t + 1)]
            assert sorted(keys[row, 0, is_seen[row], 0].tolist()) == seen
            assert sorted(values[row, 0, is_seen[row], 0].tolist()) == seen


@pytest.mark.parametrize("kind", [GRUTrajEncoder, LSTMTrajEncoder])
def test_half_of_a_recurrent_layer_starts_with_memories_of_all_lengths(kind: Any) -> None:
    rnn = kind(DIM, 64, d_hidden=8, n_layers=2).rnn
    for layer in range(2):
        weight, *biases = (getattr(rnn, f"{name}_l{layer}") for name in ("weight_hh", "bias_ih", "bias_hh"))
        keeps = sum(bias.view(-1, 8)[1] for bias in biases).sigmoid()
        assert_equal_but_for_rounding(
            keeps[:4], 1 - 1 / torch.logspace(1, 6, 4, base=2), 8
        )  # memories of 2 to 64 timesteps
        assert keeps[4:].max() < 1 - 1 / 4
        for gate in weight.view(-1, 8, 8):
            assert_equal_but_for_rounding(gate @ gate.T, torch.eye(8), NUM_OPS)
    rnn = kind(DIM, 64, d_hidden=8, lasting_share=0).rnn
    assert max(weight.abs().max() for name, weight in rnn.named_parameters() if "hh" not in name) < 8**-0.5


@pytest.mark.parametrize("name", sorted(REMEMBERING))
def test_a_cue_of_a_hundred_timesteps_ago_still_counts_at_the_start(name: str) -> None:
    """Otherwise there is nothing to learn from: no encoder learned a T-maze where this was 0.002."""
    felt = []
    for seed in range(3):
        torch.manual_seed(seed)
        encoder = getattr(nets, name)(64, 101)
        seq = torch.randn(64).expand(2, 101, -1).clone()
        seq[:, 0] = torch.randn(2, 64)
        with torch.no_grad():
            one, other = encoder.eval()(seq, torch.arange(101).view(1, -1, 1).expand(2, -1, -1))[0][:, -1]
        felt.append(float((one - other).norm() / one.norm()))
    assert sorted(felt)[1] > 0.012  # the median of the seeds


def test_initial_weights_can_be_orthogonal() -> None:
    weight = FFTrajEncoder(DIM, WINDOW, d_model=8, init="orthogonal").ups[0].weight
    assert_equal_but_for_rounding(weight.T @ weight, 2.0 * torch.eye(8), NUM_OPS)  # (32, 8)
    with pytest.raises(
        ValueError, match=r"init is 'zeros'; allowed are 'default' and 'orthogonal'. Fix: bind"
    ):
        FFTrajEncoder(DIM, WINDOW, init="zeros")


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (GRUTrajEncoder, ["d_hidden", "n_layers", "d_output"]),
        (LSTMTrajEncoder, ["d_hidden", "n_layers", "d_output"]),
        (FFTrajEncoder, ["d_model", "d_ff", "n_layers"]),
        (TransformerTrajEncoder, ["d_model", "n_heads", "d_ff", "n_layers"]),
    ],
)
def test_impossible_sizes_are_refused(build: Any, sizes: list[str]) -> None:
    for size in sizes:
        setting = f"{build.__name__}.{size}"
        with pytest.raises(ValueError, match=rf"{setting} is 0, but must be at least 1. Fix: bind {setting}"):
            build(DIM, WINDOW, **{size: 0})


@pytest.mark.parametrize(
    ("build", "settings", "error"),
    [
        (TransformerTrajEncoder, {"d_model": 16, "n_heads": 3}, "d_model is 16 and n_heads is 3"),
        (
            TransformerTrajEncoder,
            {"pos_emb": "rope+fixed"},
            r"(?=.*TransformerTrajEncoder.heads = 'rotary')pos_emb is 'rope\+fixed'",
        ),
        (TransformerTrajEncoder, {"heads": "rope"}, "heads names 'rope', but the kinds .*'rotary'"),
        (TransformerTrajEncoder, {"heads": ["fixed"] * 3}, "the kinds of 3 heads, but there are 8"),
        (
            HybridTrajEncoder,
            {"mixer_settings": {"attention": {"heads": ["rotary"] * 4}}},
            r"HybridTrajEncoder.mixer_settings\['attention'\]\['heads'\] names the kinds of 4",
        ),
        (GRUTrajEncoder, {"lasting_share": 2}, r"GRUTrajEncoder.lasting_share is 2, .* \[0, 1\]"),
        (TransformerTrajEncoder, {"attention_type": "flash"}, "attention_type is 'flash'"),
        (
            TransformerTrajEncoder,
            {"windows": [WINDOW, 0, 1]},
            r"windows is \[5, 0, 1\], but must hold 2 numbers",
        ),
        (TransformerTrajEncoder, {"gating": "lstm"}, "gating is 'lstm'"),
        (GLATrajEncoder, {"decay": "none"}, "decay is 'none'"),
        (MLSTMTrajEncoder, {"n_heads": 3}, "MLSTMTrajEncoder.n_heads is 3, which does not divide"),
        (MLSTMTrajEncoder, {"expand_k": 0.001}, "MLSTMTrajEncoder.expand_k is 0.001, .*d_model is 128"),
        (GLATrajEncoder, {"expand_k": 0.0}, "GLATrajEncoder.expand_k is 0.0, .*d_model is 128"),
        (MinGRUTrajEncoder, {"expand": 0}, "MinGRUTrajEncoder.expand is 0, but must be at least 1"),
        (MinGRUTrajEncoder, {"dropout_emb": 1.0}, "MinGRUTrajEncoder.dropout_emb is 1.0, .*below 1"),
        (
            TransformerTrajEncoder,
            {"dropout_attn": -1},
            "TransformerTrajEncoder.dropout_attn is -1, .*below 1",
        ),
        (LRUTrajEncoder, {"r_max": 1.0}, "r_max 1.0, but 0 <= r_min < r_max < 1"),
        (S5TrajEncoder, {"min_step": 1.0}, "max_step 0.1, but 0 < min_step <= max_step"),
        (HybridTrajEncoder, {"mixers": ["gru"]}, r"mixers names \['gru'\], .*'attention'.*'lru'"),
        (HybridTrajEncoder, {"mixers": ()}, "HybridTrajEncoder.mixers names nothing"),
        (HybridTrajEncoder, {"mixer_settings": {"lru": {}}}, r"settings of \['lru'\], .*only .*'attention'"),
        (HybridTrajEncoder, {"dropout_ff": 1.5}, "HybridTrajEncoder.dropout_ff is 1.5"),
        (
            HybridTrajEncoder,
            {"mixer_settings": {"attention": {"dropout_qkv": 1.5}}},
            r"\['attention'\].dropout_qkv is 1.5",
        ),
        (
            HybridTrajEncoder,
            {"mixer_settings": {"attention": {"window": 0}}},
            r"\['attention'\].window is 0, but must be at least 1",
        ),
        (
            HybridTrajEncoder,
            {"mixer_settings": {"attention": {"qk_gain": -1}}},
            r"\['attention'\].qk_gain is -1, but must be at least 0",
        ),
        (TransformerTrajEncoder, {"max_time_idx": -1}, "TransformerTrajEncoder.max_time_idx is -1"),
        (
            HybridTrajEncoder,
            {"mixers": ["mamba"], "mixer_settings": {"mamba": {"d_state": 0}}},
            r"HybridTrajEncoder.mixer_settings\['mamba'\].d_state is 0, but must be at least 1",
        ),
    ],
)
def test_impossible_settings_are_refused(build: Any, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"{error}.*Fix: "):
        build(DIM, WINDOW, **settings)


@pytest.mark.parametrize("n_heads", [1, 2, 4, 16])
def test_a_hybrid_of_any_number_of_heads_has_a_quarter_of_content_heads(n_heads: int) -> None:
    layer: Any = HybridTrajEncoder(DIM, WINDOW, mixers=["mamba2", "attention"], n_heads=n_heads).layers[1]
    kinds = [kind.name for kind in layer.heads.kinds]
    assert kinds.count("content") == n_heads // 4
    assert kinds.count("rotary") == n_heads - n_heads // 4


def test_settings_of_mixers_are_bound_in_gin_by_the_name_of_the_encoder() -> None:
    try:
        gin.parse_config(["MambaTrajEncoder.d_state = 3", "MambaTrajEncoder.n_layers = 1"])
        assert MambaTrajEncoder(DIM, WINDOW).init_hidden_state(2, CPU)[0]["h"].shape == (2, 256, 3)
        gin.parse_config(["MambaTrajEncoder.d_stat = 3"])
        with pytest.raises(TypeError, match=r"no setting \['d_stat'\].*'d_state', 'd_conv', 'expand'.*Fix"):
            MambaTrajEncoder(DIM, WINDOW)
        with pytest.raises(TypeError, match=r"\['attention'\] has no setting \['windo'\].*'window'.*Fix"):
            HybridTrajEncoder(DIM, WINDOW, mixer_settings={"attention": {"windo": 3}})
    finally:
        gin.clear_config()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_encoder_can_be_built_from_two_numbers(name: str) -> None:
    encoder = getattr(nets, name)(DIM, 40)
    out, _ = encoder(torch.randn(1, 3, DIM), torch.arange(3).view(1, -1, 1))
    assert out.shape == (1, 3, encoder.emb_dim)


def test_the_spectral_norm_of_reparametrised_layers_is_their_gain() -> None:
    torch.manual_seed(0)
    layer, x = SigmaReparamLinear(5, 4).eval(), torch.randn(3, 5)  # PPO trains in evaluation mode
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 5))
        layer.gain.fill_(1.7)
        before = layer(x)
    assert torch.equal(layer(x), before)  # the first pass over untouched weights
    for _ in range(100):
        layer(x)
    weight = layer(torch.eye(5)).T
    assert_equal_but_for_rounding(torch.linalg.matrix_norm(weight, 2), 1.7, NUM_OPS)


@pytest.mark.parametrize("kinds", ["fixed", "content"])
def test_heads_that_change_their_initial_weights_have_the_spectral_norm_1(kinds: str) -> None:
    settings: dict[str, Any] = {"n_layers": 1, "n_heads": 4, "heads": kinds, "sigma_reparam": True}
    encoder = TransformerTrajEncoder(DIM, WINDOW, **settings)
    layer = next(one for one in encoder.modules() if isinstance(one, SigmaReparamLinear))
    with torch.no_grad():
        weight = layer(torch.eye(layer.weight.shape[1])).T
    assert_equal_but_for_rounding(torch.linalg.matrix_norm(weight, 2), 1.0, NUM_OPS)


def test_the_mixer_in_the_docs_obeys_the_contract() -> None:
    script = (Path(__file__).parents[2] / "examples" / "own_memory.py").read_text(encoding="utf-8")
    own: dict[str, Any] = {"__name__": "own_memory"}
    # the name in the example is already registered in gin
    exec(script.replace("MyMemory", "ShownMemory"), own)
    encoder = own["ShownMemory"](DIM, WINDOW, d_model=16, n_layers=2).eval()
    seq, times, resets = make_history(20)
    with torch.no_grad():
        full, _ = encoder(seq, times, resets=resets)
    assert_equal_but_for_rounding(act_from_the_start(encoder, seq, times, resets)[0], full, NUM_OPS)
