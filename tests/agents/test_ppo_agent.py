"""The PPO agent: acting, evaluating the recorded actions, settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import nn

from loxodon.agents import ActOutput, PPOAgent
from loxodon.nets import Categorical, Gaussian, TanhGaussian

from ..rounding import assert_equal_but_for_rounding
from .rollouts import BOX, DISCRETE, ENCODERS, MULTI, OBS, collect, make_agent, stacked, tstep

NUM_OPS = 256 * 4 * 16  # width and layers of the agent, timesteps of its context
SEPARATE = {"share_encoder": False}
ASYMMETRIC = {"share_encoder": False, "actor_obs_keys": ["observation"]}


# --- acting and evaluating -----------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("encoder", "space", "kwargs"),
    [
        ("ff", MULTI, SEPARATE),
        ("gru", DISCRETE, {}),
        ("gru", BOX, ASYMMETRIC),
        ("gru", BOX, {"distribution_type": "TanhGaussian"}),
        ("transformer", MULTI, {}),
        ("transformer", DISCRETE, SEPARATE),
    ],
)
def test_evaluating_reproduces_acting(encoder: str, space: Any, kwargs: dict[str, Any]) -> None:
    """Both from the beginning and from an exported state, with episode borders inside."""
    agent = make_agent(space, encoder, **kwargs)
    batch, steps = collect(agent)
    rows = agent.export_hidden_state(steps[-1].hidden_state)
    assert all(row.shape[0] == 3 for row in rows.values())
    imported = replace(steps[-1], hidden_state=agent.import_hidden_state(rows))
    later, later_steps = collect(agent, after=imported, seed=3)
    assert later.start is not None
    for rollout, acted in ((batch, steps), (later, later_steps)):
        found = agent.evaluate(rollout)
        assert_equal_but_for_rounding(found.log_probs, stacked(acted, "log_probs"), NUM_OPS)
        assert_equal_but_for_rounding(found.values, stacked(acted, "values"), NUM_OPS)
        assert found.entropy.shape == (3, 6, 1)
        assert found.params.shape[:2] == (3, 6)


@pytest.mark.kernels
@pytest.mark.parametrize("kwargs", [{}, SEPARATE], ids=["shared", "separate"])
@pytest.mark.parametrize("space", [DISCRETE, MULTI], ids=["discrete", "factors"])
def test_evaluating_masks_the_actions_that_acting_masked(space: Any, kwargs: dict[str, Any]) -> None:
    obs_space = spaces.Dict({**OBS, "allowed": spaces.MultiBinary(5 if space is MULTI else 4)})
    agent = PPOAgent(obs_space, space, tstep, ENCODERS["gru"], 16, action_mask_key="allowed", **kwargs)
    batch, steps = collect(agent.eval(), rows=20)
    found = agent.evaluate(batch)
    assert_equal_but_for_rounding(found.log_probs, stacked(steps, "log_probs"), NUM_OPS)
    unmasked = agent.evaluate(
        replace(batch, obs={**batch.obs, "allowed": torch.ones_like(batch.obs["allowed"])})
    )
    assert (found.entropy < unmasked.entropy - 0.1).float().mean() > 0.5


def test_history_matters_to_a_recurrent_agent() -> None:
    """Without this, the test above would not show that `start` and `resets` matter."""
    agent = make_agent()
    _, steps = collect(agent)
    later, _ = collect(agent, after=steps[-1], seed=3)
    values = agent.evaluate(later).values
    assert not torch.allclose(values, agent.evaluate(replace(later, start=None)).values, atol=1e-3)
    without = replace(later, resets=torch.zeros_like(later.resets))
    assert not torch.allclose(values, agent.evaluate(without).values, atol=1e-3)


def test_evaluating_is_in_evaluation_mode_and_restores_the_mode() -> None:
    agent = make_agent()
    batch, _ = collect(agent)
    before = agent.evaluate(batch).values
    agent.train()
    agent.value_head = nn.Sequential(agent.value_head, nn.Dropout(0.9)).train()
    assert torch.equal(agent.evaluate(batch).values, before)
    assert agent.training


def test_context_is_the_longest_of_both_encoders() -> None:
    assert make_agent(encoder="ff", **SEPARATE).context_len == 0
    assert make_agent(encoder="gru", **SEPARATE).context_len is None
    agent, longer = make_agent(encoder="ff", **SEPARATE), make_agent(encoder="transformer")
    agent.sequence_models["critic."] = longer.sequence_models[""]
    assert agent.context_len == longer.context_len > 0  # type: ignore[operator]
    agent.sequence_models["critic."] = make_agent(encoder="gru").sequence_models[""]
    assert agent.context_len is None


def test_box_actions_are_clipped_samples() -> None:
    batch, steps = collect(make_agent(BOX), rows=50)
    samples, actions = stacked(steps, "samples"), torch.stack([step.actions for step in steps], dim=1)
    assert samples.abs().max() > 1
    assert torch.equal(actions, samples.clamp(-1, 1))
    assert torch.equal(batch.actions, samples)


def test_other_actions_are_the_samples() -> None:
    for space, kwargs in ((BOX, {"distribution_type": "TanhGaussian"}), (MULTI, {}), (DISCRETE, {})):
        agent = make_agent(space, **kwargs)
        _, steps = collect(agent, rows=50)
        assert steps[0].extras.keys() == {"log_probs", "values"}
    actions = torch.stack([step.actions for step in collect(make_agent(MULTI), rows=50)[1]])
    assert actions.dtype == torch.int64
    assert actions.amax((0, 1)).tolist() == [1, 2]


def test_the_default_distribution_depends_on_the_space() -> None:
    state = torch.zeros(1, 16)
    assert isinstance(make_agent(DISCRETE).policy(state), Categorical)
    assert isinstance(make_agent(BOX).policy(state), Gaussian)
    for named in (TanhGaussian, "TanhGaussian"):
        assert isinstance(make_agent(BOX, distribution_type=named).policy(state), TanhGaussian)


@pytest.mark.parametrize("kwargs", [{}, SEPARATE], ids=["shared", "separate"])
def test_actions_without_values_are_the_same(kwargs: dict[str, Any]) -> None:
    """Evaluation and loaded policies use `get_actions`."""
    for space in (DISCRETE, MULTI, BOX):
        agent = make_agent(space, **kwargs)
        batch, _ = collect(agent, length=1)
        hidden = agent.init_hidden_state(3, torch.device("cpu"))
        given = ({k: x[:, 0] for k, x in batch.obs.items()}, batch.rl2s[:, 0], batch.time_idxs[:, 0])
        with torch.no_grad():
            for sample in (True, False):
                torch.manual_seed(5)
                actions, state = agent.get_actions(*given, hidden, sample)
                torch.manual_seed(5)
                full = agent.act(*given, hidden, sample)
                assert torch.equal(actions, full.actions)
                agent.get_actions(*given, state, sample)


@pytest.mark.parametrize(
    ("encoder", "kwargs", "has_values"),
    [("ff", SEPARATE, False), ("ff", {}, True), ("gru", SEPARATE, True)],
    ids=["separate without memory", "shared", "separate with memory"],
)
def test_values_that_nobody_reads_are_skipped_if_they_cost_an_encoder(
    encoder: str, kwargs: dict[str, Any], has_values: bool
) -> None:
    """Nothing else changes, and evaluating gives the same values."""
    expected_batch, expected = collect(make_agent(encoder=encoder, **kwargs))
    agent = make_agent(encoder=encoder, **kwargs)
    agent.values_when_acting = False
    batch, steps = collect(agent)
    assert ("values" in steps[0].extras) is has_values
    assert torch.equal(stacked(steps, "log_probs"), stacked(expected, "log_probs"))
    assert torch.equal(batch.actions, expected_batch.actions)
    assert_equal_but_for_rounding(agent.evaluate(batch).values, stacked(expected, "values"), NUM_OPS)


class Curious(PPOAgent):
    """Reports one more metric per step."""

    def act(self, *args: Any, **kwargs: Any) -> ActOutput:
        out = super().act(*args, **kwargs)
        return replace(out, extras={**out.extras, "novelty": out.extras["values"].square()})


def test_a_subclass_can_store_more_per_step() -> None:
    agent = Curious(OBS, DISCRETE, tstep, ENCODERS["gru"], 16)
    _, steps = collect(agent)
    assert steps[0].extras["novelty"].shape == (3, 1)
    assert steps[0].extras["log_probs"].shape == (3, 1)


def test_asymmetric_value_function_sees_what_the_policy_does_not() -> None:
    agent = make_agent(encoder="gru", **ASYMMETRIC)
    batch, _ = collect(agent)
    changed = replace(batch, obs={**batch.obs, "secret": batch.obs["secret"] + 1.0})
    before, after = agent.evaluate(batch), agent.evaluate(changed)
    assert torch.equal(before.params, after.params)
    assert not torch.allclose(before.values, after.values, atol=1e-3)
    blind = make_agent(share_encoder=False, critic_obs_keys=["observation"])
    assert torch.equal(blind.evaluate(batch).values, blind.evaluate(changed).values)
    assert not torch.allclose(blind.evaluate(batch).params, blind.evaluate(changed).params, atol=1e-3)


@pytest.mark.slow
def test_compiled_acting_keeps_its_results() -> None:
    agent = make_agent(encoder="transformer", **SEPARATE)
    _, expected = collect(agent, length=3)
    agent.compile_acting(backend="eager")
    torch.manual_seed(0)
    batch, steps = collect(agent, length=3)
    assert_equal_but_for_rounding(stacked(steps, "values"), stacked(expected, "values"), NUM_OPS)
    assert_equal_but_for_rounding(agent.evaluate(batch).log_probs, stacked(steps, "log_probs"), NUM_OPS)


# --- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"critic_obs_keys": ["secret"]}, r"share_encoder is True.*Fix"),
        ({"actor_obs_keys": ["secret"]}, r"share_encoder is True.*Fix"),
        ({**SEPARATE, "critic_obs_keys": ["x"]}, r"critic_obs_keys names \['x'\].*Fix"),
        ({**SEPARATE, "actor_obs_keys": []}, r"actor_obs_keys names nothing.*Fix"),
        ({"value_norm": "x"}, r"value_norm is 'x'.*Fix"),
        ({"distribution_type": "x"}, r"distribution_type is 'x'.*Fix"),
        ({"distribution_type": "Gaussian"}, r"is Gaussian, which does not fit.*Fix"),
        ({"value_norm": "popart", "value_head_type": lambda d: nn.Linear(d, 2)}, r"Linear does not end.*Fix"),
    ],
)
def test_settings_that_do_not_fit_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PPOAgent(OBS, DISCRETE, tstep, ENCODERS["gru"], 16, **kwargs)
