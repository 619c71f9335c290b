"""Pitfalls of training with memory: leaks that must not happen, and mistakes that must be reported."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from loxodon.nets import IdentityTrajEncoder, TransformerTrajEncoder

from ...transformers import recommended
from .rollouts import make_agent, make_collector, make_learner
from .whole_runs import ENCODERS

NUM_OPS = 256 * 4 * 8  # width and layers of the agent, timesteps of the context
MEMORIES = ["gru", "lstm", "transformer"]
DROPPING = partial(
    TransformerTrajEncoder, d_model=8, d_ff=16, n_layers=2, dropout_ff=0.5, dropout_emb=0.5, **recommended(2)
)


def batches_of(learner: Any, epoch: int = 0) -> list[Any]:
    """The minibatches that the learner trains on; the weights stay."""
    seen: list[Any] = []
    update = learner.learner.update

    def watching(batches: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(batches)
        return update(batches, *args, **kwargs)

    learner.learner.update, learner.learner.lr_scale = watching, 0.0
    learner.learn_from_rollout(epoch)
    learner.learner.update = update
    return seen


@pytest.mark.parametrize(
    ("encoder", "context_mode"), [("gru", "segment"), ("lstm", "episode"), ("transformer", "episode")]
)
def test_a_truncation_within_a_chunk_begins_a_new_sequence(encoder: str, context_mode: str) -> None:
    agent = make_agent(ENCODERS[encoder])
    learner = make_learner(agent, 8, 4, context_mode=context_mode)
    collector = make_collector(agent, learner, longest=5)
    collector.collect(8)
    rollout = learner.buffers[0].read()
    truncated = rollout.steps["ended"] & ~rollout.steps["terminated"]
    assert truncated[:-1].any()  # truncations inside the chunk
    for batch in batches_of(learner):
        assert batch.resets is None or not batch.resets[:, 1:].any()
        for mask, time_idxs in zip(batch.mask[..., 0], batch.time_idxs[..., 0], strict=True):
            assert (time_idxs[mask].diff() == 1).all()


@pytest.mark.parametrize(
    ("encoder", "share"), [("gru", False), ("lstm", True), ("transformer", True), ("transformer", False)]
)
def test_no_sequence_depends_on_another_episode(encoder: str, share: bool) -> None:
    agent = make_agent(ENCODERS[encoder], share_encoder=share)
    learner = make_learner(agent, 8, 4, context_mode="segment")
    collector = make_collector(agent, learner, longest=5)
    collector.collect(8)
    learner.learner.lr_scale = 0.0
    learner.learn_from_rollout(0)
    collector.collect(8)  # continues in the middle of episodes
    for given in batches_of(learner, 1):
        obs = given.obs["observation"].clone().requires_grad_()
        judged = agent.evaluate(dataclasses.replace(given, obs={"observation": obs}))
        target = int(given.mask[:, 0].nonzero()[0, 0])
        (judged.log_probs + judged.values)[target][given.mask[target]].sum().backward()
        assert obs.grad is not None
        touched = obs.grad.abs().sum((1, 2)) > 0
        assert touched[target]
        assert int(touched.sum()) == 1
        padding = ~given.mask[target, :, 0]
        assert not obs.grad[target][padding].any()


@pytest.mark.parametrize("encoder", MEMORIES)
def test_no_gradient_reaches_the_state_that_a_sequence_continues_from(encoder: str) -> None:
    agent = make_agent(ENCODERS[encoder])
    learner = make_learner(agent, 8, 4, chunk_len=4, context_mode="segment")
    collector = make_collector(agent, learner, longest=30)
    collector.collect(8)
    batches = [batch for batch in batches_of(learner) if batch.start]
    assert batches
    for batch in batches:
        assert all(not rows.requires_grad for rows in batch.start.values())
        rows = {name: row.clone() for name, row in batch.start.items()}
        for row in rows.values():
            if row.is_floating_point():
                row.requires_grad_()

        terms = agent(dataclasses.replace(batch, start=rows))
        (terms.actor.sum() + terms.critic.sum()).backward()
        assert all(row.grad is None or not row.grad.any() for row in rows.values())


def test_default_dropout_is_off_in_updates(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(partial(TransformerTrajEncoder, d_model=8, d_ff=16, n_layers=2, **recommended(2)))
    learner = make_learner(agent, 8, 4)
    collector = make_collector(agent, learner, longest=30)
    collector.collect(8)
    figures = learner.learn_from_rollout(0)
    learner.check_consistency(figures)
    assert figures["initial_kl"] < 1e-10
    assert not caplog.records


class NoisyUpdates(IdentityTrajEncoder):
    """Dropout in updates only, in any mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, state = super().forward(*args, **kwargs)
        return nn.functional.dropout(y, 0.1, training=torch.is_grad_enabled()), state


def test_noise_in_updates_triggers_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(NoisyUpdates)
    learner = make_learner(agent, 8, 4)
    collector = make_collector(agent, learner)
    collector.collect(8)
    figures = learner.learn_from_rollout(0)
    assert figures["initial_logratio_abs_max"] < 1e-4
    learner.check_consistency(figures)
    assert "log-probabilities of a rollout differ" in caplog.text


def test_acting_in_training_mode_triggers_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    for is_right in (True, False):
        agent = make_agent(DROPPING)
        learner = make_learner(agent, 8, 4)
        collector = make_collector(agent, learner, longest=30)
        agent.train(not is_right)
        collector.collect(8)
        with caplog.at_level(logging.WARNING, logger="loxodon"):
            learner.check_consistency(learner.learn_from_rollout(0))
        assert ("log-probabilities of a rollout differ" in caplog.text) is not is_right
