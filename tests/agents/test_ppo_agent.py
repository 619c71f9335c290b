"""The PPO agent: acting, evaluating what was acted, losses, statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from loxodon.agents import ActOutput, Agent, LossTerms, PPOAgent, PPOLoss
from loxodon.data import RolloutBatch
from loxodon.experiment.learner import LossWeights, combine_losses
from loxodon.nets import Categorical, Gaussian, RunningNorm, TanhGaussian

from .rollouts import BOX, DISCRETE, ENCODERS, OBS, collect, evaluated, make_agent, stacked, tstep

SEPARATE = {"share_encoder": False}
ASYMMETRIC = {"share_encoder": False, "actor_obs_keys": ["observation"]}


def total_loss(terms: LossTerms, batch: RolloutBatch) -> Tensor:
    count = batch.mask.sum()
    return combine_losses(terms, LossWeights(batch.mask, batch.mask, count, count), 0.5).total


# --- acting and evaluating -----------------------------------------------------------------------------


@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("kwargs", [{}, SEPARATE, ASYMMETRIC], ids=["shared", "separate", "asymmetric"])
@pytest.mark.parametrize("encoder", sorted(ENCODERS))
def test_evaluating_reproduces_acting(encoder: str, kwargs: dict[str, Any], space: Any) -> None:
    """From the beginning, and going on from an exported state; episode borders inside both."""
    agent = make_agent(space, encoder, **kwargs)
    batch, steps = collect(agent)
    later, later_steps = collect(agent, after=steps[-1], seed=3)
    assert later.start is not None
    for rollout, acted in ((batch, steps), (later, later_steps)):
        found = agent.evaluate(rollout)
        assert torch.allclose(found.log_probs, stacked(acted, "log_probs"), atol=1e-5)
        assert torch.allclose(found.values, stacked(acted, "values"), atol=1e-5)
        assert found.entropy.shape == (3, 6, 1)
        assert found.params.shape[:2] == (3, 6)


def test_history_matters_to_a_recurrent_agent() -> None:
    """So that the test above says something of `start` and `resets`."""
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


def test_hidden_state_survives_export_and_import() -> None:
    for kwargs in ({}, SEPARATE):
        agent = make_agent(**kwargs)
        _, steps = collect(agent)
        rows = agent.export_hidden_state(steps[-1].hidden_state)
        assert all(row.shape[0] == 3 for row in rows.values())
        again = agent.export_hidden_state(agent.import_hidden_state(rows))
        assert rows.keys() == again.keys()
        assert all(torch.equal(rows[name], again[name]) for name in rows)


def test_context_is_the_longest_of_both_encoders() -> None:
    assert make_agent(encoder="ff", **SEPARATE).context_len == 0
    assert make_agent(encoder="gru", **SEPARATE).context_len is None
    agent = make_agent(encoder="ff", **SEPARATE)
    agent.critic_traj_encoder = make_agent(encoder="transformer").traj_encoder
    assert agent.context_len == agent.critic_traj_encoder.context_len > 0  # type: ignore[operator]
    agent.critic_traj_encoder = make_agent(encoder="gru").traj_encoder
    assert agent.context_len is None


def test_box_actions_are_clipped_samples() -> None:
    batch, steps = collect(make_agent(BOX), rows=50)
    samples, actions = stacked(steps, "samples"), torch.stack([step.actions for step in steps], dim=1)
    assert samples.abs().max() > 1
    assert torch.equal(actions, samples.clamp(-1, 1))
    assert torch.equal(batch.actions, samples)


def test_squashed_actions_are_the_samples() -> None:
    agent = make_agent(BOX, distribution_type="TanhGaussian")
    batch, steps = collect(agent)
    assert isinstance(agent.policy(torch.zeros(1, 16)), TanhGaussian)
    assert steps[0].extras.keys() == {"log_probs", "values"}
    assert torch.allclose(agent.evaluate(batch).log_probs, stacked(steps, "log_probs"), atol=1e-4)


def test_distributions_by_space() -> None:
    state = torch.zeros(1, 16)
    assert isinstance(make_agent(DISCRETE).policy(state), Categorical)
    assert isinstance(make_agent(BOX).policy(state), Gaussian)
    assert isinstance(make_agent(BOX, distribution_type=TanhGaussian).policy(state), TanhGaussian)


@pytest.mark.parametrize("kwargs", [{}, SEPARATE], ids=["shared", "separate"])
def test_actions_without_values_are_the_same(kwargs: dict[str, Any]) -> None:
    """`get_actions` serves evaluation and loaded policies."""
    for space in (DISCRETE, BOX):
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


class Curious(PPOAgent):
    """Reports one more figure per step."""

    def act(self, *args: Any, **kwargs: Any) -> ActOutput:
        out = super().act(*args, **kwargs)
        return replace(out, extras={**out.extras, "novelty": out.extras["values"].square()})


def test_a_subclass_adds_to_what_is_kept() -> None:
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


def test_encoders_of_the_off_policy_agent_fit() -> None:
    other, agent = Agent(OBS, DISCRETE, tstep, ENCODERS["gru"], 16), make_agent(**SEPARATE)
    weights = {k: v for k, v in other.state_dict().items() if "_encoder." in k}
    missing, unexpected = agent.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert not [name for name in missing if name.startswith(("tstep_encoder", "traj_encoder"))]


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, SEPARATE], ids=["shared", "separate"])
def test_compiled_acting_keeps_its_results(kwargs: dict[str, Any]) -> None:
    agent = make_agent(encoder="transformer", **kwargs)
    _, expected = collect(agent, length=3)
    agent.compile_acting(backend="eager")
    torch.manual_seed(0)
    batch, steps = collect(agent, length=3)
    assert torch.allclose(stacked(steps, "values"), stacked(expected, "values"), atol=1e-5)
    assert torch.allclose(agent.evaluate(batch).log_probs, stacked(steps, "log_probs"), atol=1e-5)


# --- losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("kind", ["clip", "kl_penalty"])
def test_untouched_weights_have_ratio_one(space: Any, kind: str) -> None:
    agent = make_agent(space, loss_type=lambda: PPOLoss(kind=kind))
    batch = evaluated(agent, collect(agent)[0])
    terms = agent(batch, with_metrics=True)
    assert terms.actor.shape == (3, 6, 1, 1)
    assert terms.critic.shape == (3, 6, 1, 1, 1)
    assert batch.advantages is not None
    assert torch.allclose(terms.actor[:, :, 0], -batch.advantages, atol=1e-4)
    metrics = {name: float(value) for name, value in terms.metrics.items()}
    for name in ("kl", "kl_k1", "kl_exact", "clip_fraction"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-5)
    for name in ("ratio_min", "ratio_max", "effective_sample_size"):
        assert metrics[name] == pytest.approx(1.0, abs=1e-4)
    assert {"entropy", "value", "explained_variance", "value_loss"} <= metrics.keys()


def test_kl_is_told_without_other_metrics_and_grows() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent, rows=200)[0])
    with torch.no_grad():
        agent.policy_head.mlp.out.weight.neg_()  # type: ignore[union-attr,operator]
    terms = agent(batch)
    assert terms.metrics.keys() == {"kl"}
    metrics = agent(batch, with_metrics=True).metrics
    assert float(metrics["kl"]) == pytest.approx(float(metrics["kl_exact"]), rel=0.3)
    assert float(metrics["kl"]) == pytest.approx(float(metrics["kl_k1"]), rel=0.5)
    assert float(metrics["kl_exact"]) > 0.01
    assert 0 < float(metrics["effective_sample_size"]) < 1
    assert float(metrics["clip_fraction"]) > 0
    assert float(metrics["ratio_min"]) < 1 < float(metrics["ratio_max"])


def test_explained_variance() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent)[0])
    assert batch.returns is not None
    perfect = agent(replace(batch, values=batch.returns), with_metrics=True).metrics
    constant = agent(replace(batch, values=0 * batch.returns), with_metrics=True).metrics
    assert float(perfect["explained_variance"]) == pytest.approx(1.0)
    assert float(constant["explained_variance"]) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("encoder", sorted(ENCODERS))
def test_padding_changes_no_loss_and_no_gradient(encoder: str) -> None:
    agent = make_agent(encoder=encoder, loss_type=lambda: PPOLoss(kind="kl_penalty", entropy_coef=0.1))
    whole = evaluated(agent, collect(agent, length=8)[0])
    mask = whole.mask.clone()
    mask[:, 5:] = False

    def outcome(noise: float) -> list[Tensor]:
        batch = replace(whole, mask=mask)
        for name in ("log_probs", "values", "params", "advantages", "returns", "rl2s"):
            x = getattr(batch, name).clone()
            x[:, 5:] = torch.nan if noise and name != "rl2s" else noise
            batch = replace(batch, **{name: x})
        agent.zero_grad()
        terms = agent(batch, with_metrics=True)
        loss = total_loss(terms, batch)
        loss.backward()
        grads = [p.grad for p in agent.parameters() if p.grad is not None]
        return [loss.detach(), *terms.metrics.values(), *grads]

    for a, b in zip(outcome(0.0), outcome(3.0), strict=True):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, atol=1e-6)


def test_losses_ask_for_an_evaluated_batch() -> None:
    agent = make_agent()
    with pytest.raises(ValueError, match=r"has no log_probs.*Fix"):
        agent(collect(agent)[0])


def test_figures_are_float32_in_mixed_precision() -> None:
    for space in (DISCRETE, BOX):
        agent = make_agent(space, "ff")
        batch = evaluated(agent, collect(agent)[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert agent.policy_head.mlp(torch.zeros(1, 16)).dtype == torch.bfloat16  # type: ignore[union-attr,operator]
            found, terms = agent.evaluate(batch), agent(batch, with_metrics=True)
            acted = collect(agent)[1][0].extras
        tensors = [*vars(found).values(), terms.actor, terms.critic, *terms.metrics.values(), *acted.values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_an_update_raises_what_was_better_than_expected() -> None:
    agent = make_agent()
    batch = evaluated(agent, collect(agent, rows=20)[0])
    optimizer = torch.optim.Adam(agent.trainable_params(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        total_loss(agent(batch), batch).backward()
        optimizer.step()
    assert batch.log_probs is not None
    assert batch.advantages is not None
    gain = (agent.evaluate(batch).log_probs - batch.log_probs) * batch.advantages
    assert gain.mean() > 0


def test_progress_reaches_the_schedules() -> None:
    agent = make_agent(loss_type=lambda: PPOLoss(clip_eps=lambda progress: 0.3 - 0.2 * progress))
    agent.set_progress(0.5)
    assert agent.loss.clip_eps == pytest.approx(0.2)


# --- statistics ----------------------------------------------------------------------------------------


def norms(agent: PPOAgent) -> list[RunningNorm]:
    return [m for m in agent.modules() if isinstance(m, RunningNorm) and m is not agent.value_norm]


def test_input_statistics_move_after_the_rollout_only() -> None:
    agent = make_agent(**ASYMMETRIC).train()
    batch = evaluated(agent, collect(agent)[0])
    before = agent.evaluate(batch).params
    agent.gather_statistics(batch)
    agent(batch)
    agent.after_update()
    assert torch.equal(agent.evaluate(batch).params, before)
    agent.after_rollout(0.0)
    assert [float(norm.count) for norm in norms(agent)] == [18.0, 18.0]
    assert torch.allclose(norms(agent)[0].mean[:3], batch.obs["observation"].mean((0, 1)), atol=1e-5)
    assert not torch.allclose(agent.evaluate(batch).params, before, atol=1e-4)


def test_only_steps_enter_the_input_statistics() -> None:
    agent = make_agent()
    batch, _ = collect(agent)
    mask = batch.mask.clone()
    mask[:, 4:] = False
    agent.gather_statistics(replace(batch, mask=mask))
    agent.after_rollout(0.0)
    assert float(norms(agent)[0].count) == 12.0
    assert torch.allclose(norms(agent)[0].mean[:3], batch.obs["observation"][:, :4].mean((0, 1)), atol=1e-5)


def test_divergence_reaches_beta() -> None:
    agent = make_agent(loss_type=lambda: PPOLoss(kind="kl_penalty"))
    agent.after_rollout(1.0)
    assert agent.loss.beta == 2.0
    assert agent.state_dict()["loss.beta"] == 2.0


def test_popart_keeps_values_and_running_does_not() -> None:
    for value_norm, is_kept in (("popart", True), ("running", False), ("none", True)):
        agent = make_agent(value_norm=value_norm)
        batch = evaluated(agent, collect(agent)[0])
        assert batch.returns is not None
        for returns in (batch.returns * 100 + 50, batch.returns - 7):
            before = agent.evaluate(batch).values
            agent.update_values_statistics(returns, batch.mask)
            after = agent.evaluate(batch).values
            assert torch.allclose(before, after, rtol=1e-4, atol=1e-3) is is_kept


@pytest.mark.parametrize("value_norm", ["popart", "running"])
def test_value_losses_are_in_normalised_units(value_norm: str) -> None:
    agent = make_agent(value_norm=value_norm)
    batch = evaluated(agent, collect(agent)[0])
    assert batch.returns is not None
    batch = replace(batch, returns=batch.returns * 1000)
    agent.update_values_statistics(batch.returns, batch.mask)
    found = agent(batch).critic[:, :, 0, 0]
    values = agent.evaluate(batch).values
    std = batch.returns.std(unbiased=False)
    assert torch.allclose(found, ((values - batch.returns) / std).square(), rtol=1e-3, atol=1e-4)
    assert torch.allclose(agent.value_norm.mean, batch.returns.mean(), rtol=1e-4)


def test_only_steps_enter_the_value_statistics() -> None:
    agent = make_agent(value_norm="running")
    returns, mask = torch.tensor([1.0, 3.0, torch.nan])[None, :, None], torch.tensor([True, True, False])
    agent.update_values_statistics(returns, mask[None, :, None])
    assert float(agent.value_norm.mean) == 2.0
    assert float(agent.value_norm.std) == 1.0


def test_value_statistics_fade_beyond_the_window() -> None:
    agent = make_agent(value_norm="running", value_norm_window=1.0)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    for value in (0.0, 0.0, 0.0, 8.0):
        agent.update_values_statistics(torch.full((1, 1, 1), value), mask)
    assert float(agent.value_norm.mean) == 4.0


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


def test_several_discrete_choices_at_once() -> None:
    try:
        agent = make_agent(spaces.MultiDiscrete(np.array([2, 3])))
    except ValueError:
        pytest.skip("needs MultiDiscrete action spaces")
    _, steps = collect_multi(agent)
    assert steps.actions.shape == (3, 2)


def collect_multi(agent: PPOAgent) -> tuple[None, ActOutput]:
    hidden = agent.init_hidden_state(3, torch.device("cpu"))
    obs = {key: torch.zeros(3, *OBS[key].shape) for key in OBS}
    return None, agent.act(obs, torch.zeros(3, 6), torch.zeros(3, 1, dtype=torch.int64), hidden, True)
