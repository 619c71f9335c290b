"""The off-policy agent: where gradients flow, how targets are made, and that it can learn."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import one_hot

from loxodon.agents import (
    Agent,
    FixedUnits,
    NStep,
    PlainValues,
    SummedValues,
    WeighByAdvantage,
    masked_mean,
)
from loxodon.data import Batch
from loxodon.nets import (
    Actor,
    Bernoulli,
    Categorical,
    CriticEnsemble,
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    MultiCategorical,
)

from .recommended import all_of, recommended
from .sign_task import after_learning

OBS = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
MULTI = spaces.MultiDiscrete([2, 3])
Space = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


def tstep(obs_space: spaces.Dict, rl2_dim: int, time_scale: int | None = None) -> FFTstepEncoder:
    return FFTstepEncoder(obs_space, rl2_dim, n_layers=1, d_hidden=16, d_output=16, time_scale=time_scale)


def gru(tstep_dim: int, max_seq_len: int) -> GRUTrajEncoder:
    return GRUTrajEncoder(tstep_dim, max_seq_len, n_layers=1, d_hidden=16, d_output=16)


def make_agent(space: Space = DISCRETE, time_scale: int | None = None, **kwargs: object) -> Agent:
    torch.manual_seed(0)
    agent = Agent(OBS, space, partial(tstep, time_scale=time_scale), gru, 8, **kwargs)  # type: ignore[arg-type]
    if isinstance(agent.values, FixedUnits):
        agent.values.unit.fill_(1.0)  # until targets arrive, all values are 0 and equal
    return agent


def make_batch(
    space: Space = DISCRETE, rows: int = 3, length: int = 5, lengths: list[int] | None = None
) -> Batch:
    g = torch.Generator().manual_seed(1)
    if isinstance(space, spaces.Box):
        actions = torch.rand(rows, length, 2, generator=g) * 2 - 1
    else:
        nvec = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [4]
        indices = [torch.randint(0, n, (rows, length), generator=g) for n in nvec]
        actions = torch.cat([one_hot(i, n) for i, n in zip(indices, nvec, strict=True)], dim=-1).float()
    real = torch.arange(length)[None, :] < torch.tensor(lengths or [length] * rows)[:, None]
    return Batch(
        obs={"observation": torch.randn(rows, length + 1, 3, generator=g)},
        rl2s=torch.randn(rows, length + 1, 1 + actions.shape[-1], generator=g),
        time_idxs=torch.arange(length + 1).expand(rows, -1)[..., None],
        actions=actions,
        rews=torch.randn(rows, length, 1, generator=g),
        dones=torch.rand(rows, length, 1, generator=g) < 0.2,
        mask=real[..., None],
    )


@pytest.fixture(params=[DISCRETE, MULTI, BOX], ids=["discrete", "multi", "box"])
def space(request: pytest.FixtureRequest) -> Space:
    chosen: Space = request.param
    return chosen


def grad_norm(module: torch.nn.Module) -> float:
    return float(sum(p.grad.abs().sum() for p in module.parameters() if p.grad is not None))


def test_loss_shapes_and_metrics(space: Space) -> None:
    out = make_agent(space)(make_batch(space), with_metrics=True)
    assert out.actor.shape == (3, 5, 7, 1)
    assert out.critic.shape == (3, 5, 4, 7, 1)
    assert all(x.ndim == 0 and torch.isfinite(x) for x in out.metrics.values())
    assert {"q", "td_target", "policy_entropy", "filter_approved"} <= set(out.metrics)
    for name in ("q", "td_target", "advantage", "policy_entropy", "target_mu", "target_sigma"):
        assert {f"{name}/0.1", f"{name}/0.995"} <= out.metrics.keys()
        assert out.metrics[f"{name}/0.999"] == out.metrics[name]  # the acting discount
    assert 0 <= out.metrics["dead_units/actor"] < 1


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("space", "actor", "critic"),
    [(DISCRETE, 0.564858, 3.297999), (MULTI, 0.557681, 2.759514), (BOX, 2357.965, 1.293038)],
)
def test_losses_of_the_third_update_stay_the_same(space: Space, actor: float, critic: float) -> None:
    settings = recommended(returns=NStep(), loss_weights=None)
    agent = make_agent(space, training_discounts=[], gamma=0.9, tau=0.003, **settings)
    batch = make_batch(space, lengths=[5, 3, 1])
    with torch.no_grad():
        for i, weights in enumerate(agent.parameters()):  # fixed weights, so initialisation does not matter
            weights.copy_(0.2 * torch.sin(torch.arange(weights.numel()) + i).view_as(weights))
    optimizer = torch.optim.AdamW(agent.trainable_params(), lr=1e-3)
    agent.values.unit.zero_()  # as in a run
    for _ in range(3):
        out = agent(batch, with_metrics=True)
        (out.actor.mean() + 10 * out.critic.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.after_update()
    found = out.actor.mean().item(), out.critic.mean().item()
    assert found == pytest.approx((actor, critic), rel=1e-3)


def test_discounts_are_weighted_by_how_much_their_mean_rewards_vary(space: Space) -> None:
    settings = {"values": SummedValues(), "training_discounts": (0.0, 0.9), "gamma": 1.0}
    found = []
    for loss_weights in (WeighByAdvantage(), None):
        agent = make_agent(space, loss_weights=loss_weights, **settings)
        assert isinstance(agent.values, SummedValues)
        agent.values.nu.copy_(torch.tensor([[1.25], [104.0], [1000.0]]))  # mean squares
        agent.values.mu.copy_(torch.tensor([[0.5], [2.0], [0.0]]))
        torch.manual_seed(1)
        found.append(agent(make_batch(space), with_metrics=True))
    # The deviations are 1, 10 and 31.6; the factors are 1, 0.1 and 0.001 (at most 1,000 timesteps count).
    weights = torch.tensor([[1.0], [1.0], [0.001]])
    weighed, plain = found
    logged = {name: float(x) for name, x in weighed.metrics.items() if name.startswith("loss_weight")}
    expected = {"loss_weight": 0.001, "loss_weight/0": 1.0, "loss_weight/0.9": 1.0, "loss_weight/1": 0.001}
    assert logged == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weighed.actor, plain.actor * weights)
    torch.testing.assert_close(weighed.critic, plain.critic * weights)


def test_gradients_flow_where_they_should_and_nowhere_else(space: Space) -> None:
    agent, batch = make_agent(space), make_batch(space)
    agent(batch).actor.mean().backward()
    assert grad_norm(agent.critics) == 0
    assert grad_norm(agent.actor) > 0
    assert grad_norm(agent.traj_encoder) > 0
    agent.zero_grad()
    agent(batch).critic.mean().backward()
    assert grad_norm(agent.actor) == 0
    assert grad_norm(agent.critics) > 0
    targets = [p for m in (agent.target_actor, agent.target_critics) for p in m.parameters()]
    assert all(p.grad is None for p in targets)
    assert not {id(p) for p in agent.trainable_params()} & {id(p) for p in targets}


def test_online_term_reaches_the_encoder_only_through_the_policy(space: Space) -> None:
    agent = make_agent(space, offline_coeff=0.0)
    with torch.no_grad():
        agent.actor.mlp.out.weight.zero_()  # now the policy does not depend on the state
    agent(make_batch(space)).actor.mean().backward()
    assert grad_norm(agent.traj_encoder) == 0
    assert grad_norm(agent.actor.mlp.out) > 0


def test_padding_never_reaches_losses_or_statistics(space: Space) -> None:
    clean = make_batch(space, lengths=[5, 3, 1])
    settings = recommended(returns=NStep(3))
    agent, other = make_agent(space, **settings), make_agent(space, **settings)
    pad, pad_t = ~clean.mask, ~clean.timestep_mask
    dirty = Batch(
        obs={"observation": clean.obs["observation"].masked_fill(pad_t, 77.0)},
        rl2s=clean.rl2s.masked_fill(pad_t, -55.0),
        time_idxs=clean.time_idxs,
        actions=clean.actions,
        rews=clean.rews.masked_fill(pad, 1e4),
        dones=clean.dones | pad,
        mask=clean.mask,
    )
    losses = []
    for batch, a in ((clean, agent), (dirty, other)):
        torch.manual_seed(3)
        out = a(batch)
        mask = batch.mask[..., None]
        losses.append(masked_mean(out.actor, mask) + masked_mean(out.critic, mask[..., None]))
        a.after_update()
    torch.testing.assert_close(losses[0], losses[1])
    for name, value in agent.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=name)


def make_agent_by_hand(**kwargs: object) -> Agent:
    """Two critics, one discount; all values are 0 and the policy is uniform."""
    settings = {
        "num_critics": 2,
        "training_discounts": [],
        "gamma": 0.5,
        "values": PlainValues(),
        "critic_subset": all_of(2),
        "offline_coeff": 0.0,
    }
    agent = make_agent(**{**settings, **kwargs})
    for layer in (
        agent.critics.out,
        agent.target_critics.out,
        agent.actor.mlp.out,
        agent.target_actor.mlp.out,
    ):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return agent


def easy_batch(reward: float) -> Batch:
    """No episode ends, and every step gives the same reward."""
    batch = make_batch()
    return replace(batch, rews=torch.full_like(batch.rews, reward), dones=torch.zeros_like(batch.dones))


def test_targets_are_made_of_the_target_critics() -> None:
    agent = make_agent_by_hand(reward_multiplier=2.0)
    torch.nn.init.constant_(agent.target_critics.out.bias, 6.0)
    losses = agent(easy_batch(reward=1.5)).critic  # y = 2 * 1.5 + 0.5 * 6; critics predict 0
    torch.testing.assert_close(losses, torch.full_like(losses, 36.0))


@pytest.mark.parametrize(("is_used", "expected"), [(True, 9.0), (False, 1.0)])
def test_the_next_action_comes_from_the_target_actor_if_it_is_used(is_used: bool, expected: float) -> None:
    agent = make_agent_by_hand(use_target_actor=is_used)
    with torch.no_grad():
        agent.target_critics.out.bias.copy_(torch.tensor([2.0, 6.0, 0.0, 0.0]))
        agent.actor.mlp.out.bias[0] = agent.target_actor.mlp.out.bias[1] = 99.0
    losses = agent(easy_batch(reward=0.0)).critic
    torch.testing.assert_close(losses, torch.full_like(losses, expected))


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_rewards_are_multiplied_in_targets_but_not_in_metrics(multiplier: float) -> None:
    agent = make_agent_by_hand(reward_multiplier=multiplier, gamma=0.0)
    out = agent(easy_batch(reward=2.0), with_metrics=True)
    torch.testing.assert_close(out.critic, torch.full_like(out.critic, (2.0 * multiplier) ** 2))
    assert out.metrics["td_target"] == 2.0


def test_the_online_term_follows_the_most_pessimistic_critic() -> None:
    agent = make_agent_by_hand(online_coeff=2.0)
    with torch.no_grad():
        agent.critics.out.bias.copy_(torch.tensor([3.0, 7.0])[:, None, None])
    losses = agent(easy_batch(reward=0.0)).actor
    torch.testing.assert_close(losses, torch.full_like(losses, -2.0 * 3.0))


def test_the_entropy_bonus_is_scaled_by_its_coefficient() -> None:
    losses = make_agent_by_hand(entropy_coeff=0.5)(easy_batch(reward=0.0)).actor
    torch.testing.assert_close(losses, torch.full_like(losses, -0.5 * math.log(4)))


def test_each_discount_judges_its_own_continuous_action() -> None:
    agent = make_agent(BOX, training_discounts=[0.5], gamma=0.9, num_critics=2)
    state = torch.randn(2, 3, 16)
    policy = agent.actor(state)
    torch.manual_seed(5)
    values = agent.policy_values(agent.critics, state, policy)
    torch.manual_seed(5)
    actions = policy.sample()
    for g in range(2):
        alone = agent.values.value(agent.critics(state, actions[:, :, g : g + 1]))[:, :, 0, :, g]
        torch.testing.assert_close(values[:, :, :, g], alone)


def test_learning_at_one_discount_changes_the_values_of_all_larger_ones(space: Space) -> None:
    settings = {"values": SummedValues(), "critic_type": CriticEnsemble, "training_discounts": (0.9, 0.1)}
    agent = make_agent(space, gamma=0.5, **settings)
    batch = make_batch(space)
    transitions, found = agent.transitions(batch), []
    for discount in range(3):
        before = agent.recorded_values(agent.critics, transitions.current.state, transitions.recorded)
        with torch.no_grad():
            agent.critics.out.bias.unflatten(-1, (3, -1))[:, :, discount] += 1.0
        after = agent.recorded_values(agent.critics, transitions.current.state, transitions.recorded)
        found.append((after - before).mean((0, 1, 2, 4)).round().tolist())
    assert found == [[1, 0, 0], [1, 1, 1], [1, 0, 1]]  # columns: discounts 0.9, 0.1, 0.5


def test_values_of_actions_for_their_own_discount_are_among_those_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(BOX, training_discounts=(0.9, 0.1))
    state, actions = torch.randn(3, 5, agent.state_dim), torch.rand(2, 3, 5, 3, 2) * 2 - 1  # 2 samples
    own = agent.values_of_own_discount(agent.critics, state, actions)
    assert own.shape == (3, 5, 4, 3, 1)
    monkeypatch.setattr(type(agent.values), "mixes_discounts", True)
    torch.testing.assert_close(agent.values_of_own_discount(agent.critics, state, actions), own)


def test_target_networks_follow_after_the_step_at_rate_tau() -> None:
    agent = make_agent(tau=0.25)
    before = agent.target_critics.out.weight.clone()
    with torch.no_grad():
        agent.critics.out.weight.add_(1.0)
    agent.after_update()
    torch.testing.assert_close(agent.target_critics.out.weight, before + 0.25)


def test_filters_see_advantages_in_environment_units() -> None:
    seen: list[torch.Tensor] = []

    def all_pass(advantages: torch.Tensor) -> torch.Tensor:
        seen.append(advantages)
        return torch.ones_like(advantages)

    agent = make_agent(fbc_filter_func=all_pass).eval()
    transitions = agent.transitions(make_batch(DISCRETE))
    agent.losses(transitions, with_metrics=False)
    q, v = agent.action_values(transitions, agent.policies(agent.actor, transitions.current))
    torch.testing.assert_close(seen[0], (q - v).mean(2).detach() / 10.0)  # the reward multiplier


@pytest.mark.kernels
@pytest.mark.parametrize("settings", [{}, {"pass_timestep_to_heads": True}, {"time_scale": 4}])
def test_acting_equals_the_training_forward(space: Space, settings: dict[str, Any]) -> None:
    agent, batch = make_agent(space, **settings).eval(), make_batch(space)
    with torch.no_grad():
        expected = agent.policy(agent.encode(batch)).mode()
        state, done = agent.init_hidden_state(3, torch.device("cpu")), []
        for t in range(6):
            obs = {key: x[:, t] for key, x in batch.obs.items()}
            rl2s, time_idxs = batch.rl2s[:, t], batch.time_idxs[:, t]
            action, state = agent.get_actions(obs, rl2s, time_idxs, state, sample=False)
            done.append(action)
    actions = torch.stack(done, dim=1)
    if isinstance(space, spaces.MultiDiscrete):
        expected = torch.stack([part.argmax(-1) for part in expected.split([2, 3], dim=-1)], dim=-1)
    torch.testing.assert_close(actions, expected.argmax(-1) if space is DISCRETE else expected)


@pytest.mark.parametrize("sees_timestep", [False, True])
def test_heads_see_the_timestep_even_if_the_memory_is_zero_when_asked_to(sees_timestep: bool) -> None:
    agent, batch = make_agent(pass_timestep_to_heads=sees_timestep).eval(), make_batch()
    with torch.no_grad():
        for weights in agent.traj_encoder.parameters():
            weights.zero_()
        probs = agent.policy(agent.encode(batch)).probs
    assert torch.allclose(probs, probs[:1, :1]) != sees_timestep


def test_impossible_settings_are_explained() -> None:
    with pytest.raises(ValueError, match=r"size is 5, .*Agent has only 4 critics.*Fix: .*Agent.num_critics"):
        make_agent(critic_subset=all_of(5))
    with pytest.raises(ValueError, match=r"Discounts are \[1.5, 0.9\].*Fix"):
        make_agent(training_discounts=[1.5], gamma=0.9)
    for wrong, words in (
        ({"burn_in": -1}, r"burn_in is -1.*Fix"),
        ({"burn_in": 8}, r"burn_in is 8, but windows have 8 transitions.*Fix"),
        (
            {"distribution_type": "Beta"},
            r"is Beta, which does not fit actions in Discrete\(4\).*'Categorical'",
        ),
        ({"distribution_type": Bernoulli}, r"is Bernoulli, which does not fit.*bind one of 'Categorical'"),
        ({"distribution_type": 0}, r"is 0, which does not fit.*bind one of 'Categorical'"),
        ({"action_mask_key": "x"}, r"action_mask_key is 'x', which is not an observation of.*4 entries.*Fix"),
        ({"pass_obs_keys_to_actor": ["x"]}, r"pass_obs_keys_to_actor names \['x'\].*Fix"),
    ):
        with pytest.raises(ValueError, match=words):
            make_agent(**wrong)  # type: ignore[arg-type]
    for wrong, words in (
        ({"action_mask_key": "observation"}, r"cannot be masked one by one. Fix: remove"),
        ({"distribution_type": "GaussianMixture"}, r"carry no gradient.*Fix: .*Agent.online_coeff = 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make_agent(BOX, **wrong)  # type: ignore[arg-type]
    for own in (Categorical, Bernoulli):
        with pytest.raises(ValueError, match=rf"is {own.__name__}, which.*bind one of 'MultiCategorical'"):
            make_agent(MULTI, distribution_type=own)
    make_agent(MULTI, distribution_type=MultiCategorical)  # the class means the same as its name
    with pytest.raises(ValueError, match=r"action space is MultiBinary.*SequenceEnv"):
        Agent(OBS, spaces.MultiBinary(3), tstep, gru, 8)  # type: ignore[arg-type]


@pytest.mark.learning
def test_agent_finds_the_rewarded_action() -> None:
    torch.manual_seed(0)
    space = spaces.Box(-1, 1, (1,), np.float32)
    memoryless = partial(FFTrajEncoder, d_model=16)
    heads = {"actor_type": partial(Actor, d_hidden=64), "critic_type": partial(CriticEnsemble, d_hidden=64)}
    agent = Agent(OBS, space, tstep, memoryless, 1, tau=0.05, **heads)

    def draw(right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = torch.rand(64, 1, 1) * 2 - 1
        return actions, -(actions - (right - 0.5)).abs()

    action, right = after_learning(agent, 1e-2, draw, num_batches=100)
    assert (action - (right - 0.5)).abs().mean() < 0.15
