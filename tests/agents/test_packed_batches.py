"""Every agent learns from windows that share rows as if each had a row of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.agents import (
    GAE,
    Agent,
    BCAgent,
    Demonstrations,
    DQNAgent,
    IQLAgent,
    LambdaReturns,
    MultiTaskAgent,
    NStep,
    PPOAgent,
    SACAgent,
)
from loxodon.data import Batch, Trajectory, pack_batch, pad_batch
from loxodon.experiment.learn.learner import sequence_priorities
from loxodon.nets import (
    FFTstepEncoder,
    GatedDeltaNetTrajEncoder,
    GLATrajEncoder,
    GRUTrajEncoder,
    HybridTrajEncoder,
    LSTMTrajEncoder,
    Mamba2TrajEncoder,
    TransformerTrajEncoder,
)
from loxodon.nets.attention import sdpa

from .. import transformers
from .recommended import all_of, recommended

MAX_SEQ_LEN = 12
DISCRETE, BOX = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)
OBS = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=16, d_output=16)
gru = partial(GRUTrajEncoder, n_layers=2, d_hidden=16, d_output=16)
lstm = partial(LSTMTrajEncoder, n_layers=1, d_hidden=16, d_output=16)
transformer = partial(
    TransformerTrajEncoder,
    n_layers=2,
    d_model=16,
    d_ff=32,
    dropout_ff=0.0,
    dropout_emb=0.0,
    **transformers.recommended(8),
)
SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 16, "d_ff": 16, "n_heads": 8}
TWO_CRITICS = {"num_critics": 2, "critic_subset": all_of(2), "training_discounts": (0.5,)}
CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "actor-critic, GRU": (
        Agent,
        DISCRETE,
        gru,
        recommended(**TWO_CRITICS, burn_in=2),
    ),
    "dqn, Transformer": (DQNAgent, DISCRETE, transformer, {"returns": NStep(3), "burn_in": 3}),
    "sac, gated delta": (
        SACAgent,
        DISCRETE,
        partial(GatedDeltaNetTrajEncoder, **SIZES),
        {**TWO_CRITICS, "returns": LambdaReturns()},
    ),
    "iql, GLA": (
        IQLAgent,
        BOX,
        partial(GLATrajEncoder, **SIZES),
        {**TWO_CRITICS, "returns": NStep(3), "distribution_type": "Gaussian"},
    ),
    "multi-task, Mamba": (
        MultiTaskAgent,
        DISCRETE,
        partial(Mamba2TrajEncoder, **SIZES),
        {**TWO_CRITICS, "num_actions_for_value_in_critic_loss": 2},
    ),
    "bc, LSTM": (BCAgent, BOX, lstm, {"distribution_type": "Gaussian"}),
    "imitation, Transformer": (
        PPOAgent,
        DISCRETE,
        partial(transformer, heads="plain", pos_emb="learned"),
        {},
    ),
}


def window(length: int, number: int) -> Trajectory:
    """A window of random data. Every third one begins its episode; a fifth of transitions are terminal."""
    rng = np.random.default_rng(number)
    return Trajectory(
        obs={"observation": rng.standard_normal((length + 1, 3)).astype(np.float32)},
        rl2s=rng.standard_normal((length + 1, 3 if number >= 100 else 4)).astype(np.float32),
        time_idxs=np.arange(length + 1)[:, None] + number % 3,
        actions=rng.random((length, 2)).astype(np.float32)
        if number >= 100
        else rng.integers(3, size=(length, 1)),
        rews=rng.standard_normal((length, 1)).astype(np.float32),
        dones=rng.random((length, 1)) < 0.2,
        priority_slot=number,
    )


def windows(space: Any) -> list[Trajectory]:
    lengths = [4, 12, 1, 3, 6, 2, 5, 1, 8]
    return [window(length, i + 100 * (space is BOX)) for i, length in enumerate(lengths)]


def of_windows(values: Tensor, batch: Batch) -> Tensor:
    """Values (B, L, ...) of the real transitions, window by window in the order of their numbers."""
    assert batch.priority_slots is not None
    parts = torch.split(values[batch.mask[..., 0]], batch.lengths.tolist())
    return torch.cat([parts[i] for i in batch.priority_slots.argsort().tolist()])


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_packed_windows_have_the_losses_gradients_and_statistics_of_padded_ones(case: str) -> None:
    kind, space, encoder, settings = CASES[case]
    trajs, found = windows(space), []
    for batch in (pad_batch(trajs), pack_batch(trajs, MAX_SEQ_LEN)):
        torch.manual_seed(0)
        agent = kind(OBS, space, tstep, encoder, MAX_SEQ_LEN, **settings).train()
        is_on_policy = isinstance(agent, PPOAgent)
        terms = agent(Demonstrations(batch, GAE()) if is_on_policy else batch, with_metrics=True)
        actor, critic = of_windows(terms.actor, batch), of_windows(terms.critic, batch)
        (actor.mean() + critic.mean()).backward()
        mask = batch.mask[..., None, None].expand_as(terms.critic)
        assert batch.priority_slots is not None
        priorities, _ = sequence_priorities(terms.critic, mask, batch.window_idxs[:, :-1], len(trajs))
        results = {"actor": actor, "critic": critic, "priorities": priorities[batch.priority_slots.argsort()]}
        agent.after_update()
        results |= {f"metric {name}": value for name, value in terms.metrics.items()}
        results |= {f"buffer {name}": value for name, value in agent.named_buffers()}
        results |= {f"gradient {name}": p.grad for name, p in agent.named_parameters() if p.grad is not None}
        found.append(results)
    padded, packed = found
    assert packed.keys() == padded.keys()
    assert padded["actor"].abs().sum() + padded["critic"].abs().sum() > 0
    for name, expected in padded.items():
        torch.testing.assert_close(
            packed[name], expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_packed_batch_holds_every_window_once_and_records_its_place() -> None:
    trajs = windows(DISCRETE)
    batch = pack_batch(trajs, MAX_SEQ_LEN)
    assert batch.resets is not None
    assert batch.priority_slots is not None
    assert batch.mask.shape == (4, MAX_SEQ_LEN, 1)  # 51 timesteps in 52 places
    assert batch.lengths.tolist() == [len(trajs[i]) for i in batch.priority_slots]
    assert sorted(batch.priority_slots.tolist()) == list(range(len(trajs)))
    assert int(batch.timestep_mask.sum()) == sum(len(traj) + 1 for traj in trajs)
    for k, number in enumerate(batch.priority_slots.tolist()):
        traj, places = trajs[number], (batch.window_idxs == k) & batch.timestep_mask[..., 0]
        assert batch.resets[places].tolist() == [True] + [False] * len(traj)
        assert torch.equal(batch.obs["observation"][places], torch.from_numpy(traj.obs["observation"]))
        steps = places[:, :-1] & batch.mask[..., 0]
        for name in ("actions", "rews", "dones"):
            expected = torch.from_numpy(getattr(traj, name))
            assert torch.equal(getattr(batch, name)[steps], expected.to(getattr(batch, name).dtype))
    assert not batch.rews[~batch.mask].any()
    assert not batch.obs["observation"][~batch.timestep_mask[..., 0]].any()
    assert pack_batch([trajs[1], trajs[8]], MAX_SEQ_LEN).resets is None  # no two fit into one row
    with pytest.raises(ValueError, match=r"'resets' begins with \(4, 12\).*Fix:"):
        Batch(**{**vars(batch), "resets": batch.resets[:, 1:]})
    with pytest.raises(ValueError, match="at least one"):
        pack_batch([], MAX_SEQ_LEN)


HYBRID = {"mixers": ["attention", "min_gru", "attention"], "d_model": 16, "n_heads": 8, "d_ff": 16}


@pytest.mark.parametrize("collate", [pad_batch, partial(pack_batch, max_seq_len=MAX_SEQ_LEN)])
@pytest.mark.parametrize("kind", ["transformer", "hybrid"])
def test_full_windows_need_no_mask_in_any_layer(kind: str, collate: Any) -> None:
    """A full window needs only a causal mask, which kernels apply without a mask tensor."""
    masks: list[Tensor | None] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        masks.append(mask)
        return sdpa(q, k, v, mask, dropout)

    encoder = {
        "transformer": partial(transformer, n_layers=3, attention_type=attend),
        "hybrid": partial(HybridTrajEncoder, **HYBRID, mixer_settings={"attention": {"attention": attend}}),
    }[kind]
    agent = Agent(OBS, DISCRETE, tstep, encoder, MAX_SEQ_LEN)
    agent.encode(collate([window(MAX_SEQ_LEN, i) for i in range(3)]))
    assert len(masks) >= 2
    assert masks == [None] * len(masks)
    agent.encode(collate([window(3, 0), window(MAX_SEQ_LEN, 1), window(5, 2)]))
    assert any(mask is not None for mask in masks) == (collate is not pad_batch)  # only shared rows need one
