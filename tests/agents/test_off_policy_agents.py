"""Every off-policy agent: sound updates on all supported action spaces, formulas, and learning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot

from loxodon.agents import (
    GAE,
    ActOutput,
    Agent,
    BCAgent,
    Demonstrations,
    DQNAgent,
    FixedUnits,
    IQLAgent,
    LambdaReturns,
    MultiTaskAgent,
    NStep,
    OffPolicyAgent,
    PlainValues,
    PPOAgent,
    RandomSubset,
    Retrace,
    SACAgent,
    lambda_returns,
    n_step_targets,
)
from loxodon.agents.parts import Returns
from loxodon.data import Batch
from loxodon.nets import (
    Actor,
    BinnedCriticEnsemble,
    CriticEnsemble,
    DuelingCriticEnsemble,
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    ValueBins,
)

from .recommended import all_of, recommended
from .sign_task import after_learning

DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
MULTI, BITS = spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 2])
ONE_BOX, TWO = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
Case = tuple[Any, Any, dict[str, Any]]

tstep = partial(FFTstepEncoder, n_layers=1, d_hidden=16, d_output=16)
gru = partial(GRUTrajEncoder, n_layers=1, d_hidden=16, d_output=16)
SMALL_CRITICS: dict[Any, Any] = {MultiTaskAgent: BinnedCriticEnsemble, DQNAgent: DuelingCriticEnsemble}


def obs_space(mask_width: int = 0) -> spaces.Dict:
    parts: dict[str, Any] = {"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    return spaces.Dict(parts | ({"allowed": spaces.MultiBinary(mask_width)} if mask_width else {}))


def make(kind: Any, space: Any, mask_width: int = 0, encoder: Any = gru, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    if mask_width:
        kwargs["action_mask_key"] = "allowed"
    agent = kind(obs_space(mask_width), space, tstep, encoder, 8, **kwargs)
    if isinstance(agent, OffPolicyAgent) and isinstance(agent.values, FixedUnits):
        agent.values.unit.fill_(1.0)  # until targets arrive, all values are 0 and equal
    return agent


def random_actions(space: Any, rows: int, length: int) -> Tensor:
    if isinstance(space, spaces.Box):
        return torch.rand(rows, length, *space.shape) * 2 - 1
    nvec = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [int(space.n)]
    return torch.cat([one_hot(torch.randint(0, n, (rows, length)), n).float() for n in nvec], dim=-1)


def make_batch(space: Any, rows: int = 3, length: int = 5, lengths: tuple[int, ...] = (5, 3, 1)) -> Batch:
    torch.manual_seed(1)
    actions = random_actions(space, rows, length)
    return Batch(
        obs={"observation": torch.randn(rows, length + 1, 3)},
        rl2s=torch.randn(rows, length + 1, 1 + actions.shape[-1]),
        time_idxs=torch.arange(length + 1).expand(rows, -1)[..., None],
        actions=actions,
        rews=torch.randn(rows, length, 1),
        dones=torch.rand(rows, length, 1) < 0.2,
        mask=(torch.arange(length)[None] < torch.tensor(lengths)[:, None])[..., None],
    )


CASES: dict[str, Case] = {
    "multi-task discrete": (MultiTaskAgent, DISCRETE, {}),
    "multi-task sampled discrete": (
        MultiTaskAgent,
        DISCRETE,
        {"training_discounts": (), "entropy_coeff": 0.1},
    ),
    "multi-task factors": (MultiTaskAgent, MULTI, {"critic_subset": all_of(4)}),
    "multi-task box": (MultiTaskAgent, BOX, {"distribution_type": "GaussianMixture"}),
    "bc discrete": (BCAgent, DISCRETE, {"entropy_coeff": 0.1, "pass_timestep_to_heads": True}),
    "bc bits": (BCAgent, BITS, {"distribution_type": "Bernoulli"}),
    "bc box": (BCAgent, BOX, {"distribution_type": "Beta", "pass_obs_keys_to_actor": ["observation"]}),
    "dqn": (DQNAgent, DISCRETE, {"returns": NStep(3), "burn_in": 2}),
    "dqn plain": (
        DQNAgent,
        DISCRETE,
        {"critic_type": CriticEnsemble, "double_q": False, **recommended(critic_subset=RandomSubset(1))},
    ),
    "sac discrete": (
        SACAgent,
        DISCRETE,
        {"returns": LambdaReturns()},
    ),
    "sac factors": (SACAgent, MULTI, recommended(learn_alpha=False)),
    "sac box": (
        SACAgent,
        BOX,
        {
            "num_actions_for_value_in_critic_loss": 2,
            "num_actions_for_value_in_actor_loss": 3,
            "pass_timestep_to_heads": True,
        },
    ),
    "iql discrete": (IQLAgent, DISCRETE, recommended(returns=LambdaReturns())),
    "iql factors": (IQLAgent, MULTI, {"values": PlainValues()}),
    "iql box": (IQLAgent, BOX, {"distribution_type": "Gaussian", "pass_timestep_to_heads": True}),
    "actor-critic beta": (
        Agent,
        BOX,
        {"distribution_type": "Beta", "pass_obs_keys_to_actor": ["observation"]},
    ),
    "actor-critic gaussian": (Agent, BOX, {"distribution_type": "Gaussian", "values": FixedUnits()}),
    "actor-critic bits": (Agent, BITS, recommended(distribution_type="Bernoulli")),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_change_what_they_should_and_ignore_padding(case: str) -> None:
    kind, space, kwargs = CASES[case]
    losses = []
    for fill in (0.0, 55.0):
        agent, batch = make(kind, space, **kwargs), make_batch(space)
        before = {name: p.clone() for name, p in agent.named_parameters()}
        pad = ~batch.mask
        batch = replace(
            batch,
            obs={"observation": batch.obs["observation"].masked_fill(~batch.timestep_mask, fill)},
            rews=batch.rews.masked_fill(pad, fill),
            dones=batch.dones | (pad if fill else False),
        )
        optimizer = torch.optim.AdamW(agent.trainable_params(), lr=1e-2)
        torch.manual_seed(2)
        for _ in range(2):
            out = agent(batch, with_metrics=True)
            mask = batch.mask[..., None]
            loss = out.actor.where(mask, 0.0).sum() + out.critic.where(mask[..., None], 0.0).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            agent.after_update()
        losses.append(loss.detach())
        assert all(x.ndim == 0 and torch.isfinite(x) for x in out.metrics.values()), out.metrics
        for name, p in agent.named_parameters():
            moved = not torch.equal(p, before[name])
            assert moved == (p.requires_grad or name.startswith("target_")), name
    if kwargs.get("distribution_type") != "Beta":  # Beta uses a varying number of random numbers per sample
        torch.testing.assert_close(losses[0], losses[1])
    assert torch.isfinite(losses[0])


BINS = partial(ValueBins, num_bins=32, low=-20.0, high=20.0)
LEARN: dict[str, Case] = {
    "multi-task box": (MultiTaskAgent, ONE_BOX, {"bins_type": BINS}),
    "dqn": (DQNAgent, TWO, {}),
    "sac discrete": (SACAgent, TWO, {"alpha": 0.1}),
    "sac box": (SACAgent, ONE_BOX, {"alpha": 0.1}),
    "iql box": (IQLAgent, ONE_BOX, {"beta": 10.0, "expectile": 0.9}),
    "bc": (BCAgent, TWO, {}),
}


@pytest.mark.learning
@pytest.mark.parametrize("case", LEARN)
def test_the_rewarded_action_is_found(case: str) -> None:
    kind, space, kwargs = LEARN[case]
    if kind is not DQNAgent:
        kwargs = {"actor_type": partial(Actor, d_hidden=32), **kwargs}
    if kind is not BCAgent:
        critics = partial(SMALL_CRITICS.get(kind, CriticEnsemble), d_hidden=64)
        kwargs = {"training_discounts": (), "gamma": 0.9, "tau": 0.05, "critic_type": critics, **kwargs}
        kwargs |= {"num_critics": 2, "critic_subset": RandomSubset(1)}
    agent = make(kind, space, encoder=partial(FFTrajEncoder, d_model=16), **kwargs)

    def draw(right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = random_actions(space, 64, 1)
        if kind is BCAgent:
            actions = one_hot(right[..., 0].long(), 2).float()
        distance = (actions - (right - 0.5)).abs()
        return actions, -distance if space is ONE_BOX else (actions[..., 1:] == right).float()

    action, right = after_learning(agent, 5e-3, draw, num_batches=150 if space is ONE_BOX else 80)
    if space is ONE_BOX:
        assert (action - (right - 0.5)).abs().mean() < 0.2
    else:
        assert (action == right).float().mean() > 0.9


# --- formulas by hand: critics and policies are constant ------------------------------------------------


def by_hand(kind: Any, space: Any = DISCRETE, **kwargs: Any) -> Any:
    """One discount of 0.5, two critics, plain values; all values are 0 and the policy is uniform."""
    settings = {"training_discounts": (), "gamma": 0.5, "num_critics": 2, "reward_multiplier": 2.0, **kwargs}
    values = {} if kind is MultiTaskAgent else {"values": PlainValues()}
    agent = make(kind, space, critic_subset=all_of(2), **values, **settings)
    heads = [agent.critics.out, agent.target_critics.out]
    heads += [module.mlp.out for module in (getattr(agent, "actor", None),) if module is not None]
    heads += [agent.target_actor.mlp.out] if agent.has_target_actor else []
    heads += [agent.value_function.out] if kind is IQLAgent else []
    for layer in heads:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return agent


def paid(reward: float, space: Any = DISCRETE) -> Batch:
    """No episode ends, and every step gives the same reward."""
    batch = make_batch(space, lengths=(5, 5, 5))
    return replace(batch, rews=torch.full_like(batch.rews, reward), dones=torch.zeros_like(batch.dones))


def same(losses: Tensor, value: float) -> None:
    torch.testing.assert_close(losses, torch.full_like(losses, value))


def test_sac_adds_entropy_to_values_and_steers_its_temperature() -> None:
    agent = by_hand(SACAgent, alpha=0.5, target_entropy=1.0)
    torch.nn.init.constant_(agent.target_critics.out.bias, 6.0)
    torch.nn.init.constant_(agent.critics.out.bias, 3.0)
    out, h = agent(paid(1.5)), math.log(4)
    same(out.critic, (2 * 1.5 + 0.5 * (6.0 + 0.5 * h) - 3.0) ** 2)
    same(out.actor, -(3.0 + 0.5 * h) + math.log(0.5) * (h - 1.0))
    out.actor.mean().backward()
    assert agent.log_alpha.grad.item() == pytest.approx(h - 1.0, rel=1e-5)
    assert agent.critics.out.weight.grad is None
    assert [make(SACAgent, s).target_entropy for s in (BOX, MULTI)] == [
        -2.0,
        pytest.approx(0.3 * math.log(6)),
    ]


@pytest.mark.parametrize("returns", [NStep(), NStep(3), LambdaReturns(), Retrace()])
def test_sac_adds_the_entropy_of_every_timestep_that_a_target_covers(returns: Returns) -> None:
    # Without rewards, a uniform policy has the value g alpha h / (1 - g), which every target keeps.
    h, g, alpha = math.log(4), 0.5, 0.5
    agent = by_hand(SACAgent, alpha=alpha, returns=returns)
    fixed_point = g * alpha * h / (1 - g)
    torch.nn.init.constant_(agent.target_critics.out.bias, fixed_point)
    torch.nn.init.constant_(agent.critics.out.bias, fixed_point)
    same(agent(paid(0.0)).critic, 0.0)


def test_iql_follows_an_expectile_and_weights_by_advantage() -> None:
    agent = by_hand(IQLAgent, expectile=0.7, beta=3.0, max_weight=10.0)
    for bias, value_loss, weight in (
        (0.5, 0.7 * 0.25, math.exp(1.5)),
        (2.0, 0.7 * 4, 10.0),
        (-1.0, 0.3, math.exp(-3)),
    ):
        torch.nn.init.constant_(agent.target_critics.out.bias, bias)
        out = agent(paid(1.5))
        same(out.critic[:, :, :2], 9.0)  # y = 2 * 1.5 + 0.5 * V; critics predict 0
        same(out.critic[:, :, 2:], value_loss)
        same(out.actor, weight * math.log(4))
    torch.nn.init.constant_(agent.value_function.out.bias, 4.0)
    same(agent(paid(1.5)).critic[:, :, :2], 25.0)


def test_multi_task_critics_classify_and_the_actor_imitates_what_is_better() -> None:
    bins = partial(ValueBins, num_bins=5, low=-2.0, high=2.0, spacing="linear")
    agent = by_hand(MultiTaskAgent, bins_type=bins, fake_filter=True, training_discounts=(0.25, 0.75))
    with torch.no_grad():
        # bin 3 has probability 1, so the value is 1
        agent.target_critics.out.bias.view(2, 3, 5)[:, :, 3] = 50.0
    out = agent(paid(0.25))  # with a discount of 0.5, y = 2 * 0.25 + 0.5 * 1
    same(out.critic, math.log(5))
    same(out.actor, math.log(4))
    with torch.no_grad():
        agent.critics.out.bias.view(2, 3, 5)[:, :, 3] = 50.0
    same(agent(paid(0.25)).critic[:, :, :, 2], 0.0)
    agent.fake_filter = False
    same(agent(paid(0.25)).actor, 0.0)  # no recorded action is better than the policy


def test_multi_task_advantages_over_all_actions_equal_those_over_their_probabilities() -> None:
    agent = make(MultiTaskAgent, DISCRETE)
    batch = make_batch(DISCRETE)
    transitions = agent.transitions(batch)
    policy = agent.policies(agent.actor, transitions.current)
    logits = agent.critics(transitions.current.state, transitions.recorded).squeeze(2)
    q, advantages = agent._advantages(transitions, policy, logits)
    v = agent._expected(agent.critics, transitions.current.state, policy, num_samples=1)
    torch.testing.assert_close(advantages, (q - v).mean(2) / agent.reward_multiplier, atol=1e-5, rtol=1e-4)


def test_dqn_chooses_by_its_critics_and_evaluates_with_the_target_critics() -> None:
    for double_q, expected in ((True, 1.0), (False, 16.0)):
        agent = by_hand(DQNAgent, double_q=double_q, critic_type=CriticEnsemble)
        with torch.no_grad():
            agent.critics.out.bias[..., 1] = 3.0
            agent.target_critics.out.bias.copy_(torch.tensor([8.0, 2.0, 0.0, 0.0]))
        batch = paid(0.0)
        out = agent(replace(batch, actions=one_hot(torch.zeros(3, 5, dtype=torch.int64), 4).float()))
        same(out.critic, expected)
        state = agent.init_hidden_state(3, torch.device("cpu"))
        obs = {"observation": batch.obs["observation"][:, 0]}
        for sample in (True, False):  # exploration is handled elsewhere
            action, _ = agent.get_actions(obs, batch.rl2s[:, 0], batch.time_idxs[:, 0], state, sample)
            assert action.tolist() == [1, 1, 1]


def test_losses_leave_out_a_burn_in_unless_it_begins_an_episode() -> None:
    agent, batch = make(DQNAgent, DISCRETE, burn_in=2), make_batch(DISCRETE, lengths=(5, 5, 5))
    batch = replace(batch, time_idxs=batch.time_idxs + torch.tensor([0, 7, 1])[:, None, None])
    counts = agent(batch).mask
    assert counts is not None
    assert counts[..., 0].tolist() == [[True] * 5, [False] * 2 + [True] * 3, [False] * 2 + [True] * 3]


def test_target_networks_have_the_buffers_of_the_online_ones() -> None:
    class Counting(CriticEnsemble):
        def __init__(self, *given: Any, **settings: Any) -> None:
            super().__init__(*given, **settings)
            self.register_buffer("count", torch.zeros(()))

    agent = make(Agent, DISCRETE, critic_type=Counting)
    agent.critics.count.fill_(5.0)
    agent.after_update()
    assert agent.target_critics.count.item() == 5.0


def test_an_agent_that_overrides_act_is_asked_in_evaluations_too() -> None:
    class Stubborn(Agent):
        def act(self, *given: Any) -> ActOutput:
            out = super().act(*given)
            return replace(out, actions=torch.full_like(out.actions, 3))

    for returns in (NStep(), Retrace()):
        agent, batch = make(Stubborn, DISCRETE, returns=returns), make_batch(DISCRETE)
        state = agent.init_hidden_state(3, torch.device("cpu"))
        obs = {"observation": batch.obs["observation"][:, 0]}
        actions, _ = agent.get_actions(obs, batch.rl2s[:, 0], batch.time_idxs[:, 0], state, sample=True)
        assert actions.tolist() == [3, 3, 3]


def test_retrace_leaves_continuous_actions_to_returns_without_probabilities() -> None:
    assert make(Agent, BOX, returns=Retrace(continuous=NStep(3))).returns == NStep(3)
    assert make(Agent, BOX, returns=NStep(2)).returns == NStep(2)
    assert make(Agent, DISCRETE, returns=Retrace(0.5)).returns == Retrace(0.5)
    with pytest.raises(ValueError, match=r"Retrace.continuous is Retrace.*Fix: bind Retrace.continuous = "):
        Retrace(continuous=Retrace())


@pytest.mark.parametrize("returns", [NStep(2), LambdaReturns(0.8)], ids=repr)
def test_the_agents_targets_are_those_of_the_functions(returns: Returns) -> None:
    agent = make(Agent, DISCRETE, returns=returns, critic_subset=all_of(4))
    batch = make_batch(DISCRETE)
    transitions = agent.transitions(batch)
    policy = agent.policies(agent.actor, transitions.following)
    q = agent.values.value(agent.target_critics(transitions.following.state))
    rewards, done, mask = 10.0 * batch.rews[..., None], batch.dones[..., None], batch.mask[..., None]
    values = (q * policy.probs[:, :, None]).sum(-1, keepdim=True)
    steps = (rewards, done, mask, values.amin(2), agent.discounts)
    is_n_step = isinstance(returns, NStep)
    expected = n_step_targets(*steps, n_step=2) if is_n_step else lambda_returns(*steps, trace_decay=0.8)
    torch.testing.assert_close(
        agent.policy_targets(transitions, policy)[batch.mask[..., 0]], expected[batch.mask[..., 0]]
    )


def test_actions_of_unknown_probability_are_treated_as_certain() -> None:
    agent = make(Agent, DISCRETE, returns=Retrace(0.8), critic_subset=all_of(4))
    batch = make_batch(DISCRETE)
    transitions = agent.transitions(batch)
    policy = agent.policies(agent.actor, transitions.following)

    def targets(log_probs: Tensor | None) -> Tensor:
        known = replace(transitions, batch=replace(batch, log_probs=log_probs))
        return agent.policy_targets(known, policy)[batch.mask[..., 0]]

    certain = targets(torch.zeros_like(batch.rews))
    torch.testing.assert_close(targets(None), certain)
    torch.testing.assert_close(targets(torch.full_like(batch.rews, torch.nan)), certain)


def test_a_trace_is_cut_by_the_probability_of_the_action_taken() -> None:
    """Probabilities differ from step to step; a plain recursion computes the targets of each critic."""
    agent = make(Agent, DISCRETE, returns=Retrace(0.8), critic_subset=all_of(4))
    batch = make_batch(DISCRETE)
    taken = torch.linspace(0.1, 0.9, batch.rews.numel()).view(3, 5)[:, torch.tensor([2, 0, 4, 1, 3])]
    transitions = agent.transitions(replace(batch, log_probs=taken.log()[..., None]))
    policy = agent.policies(agent.actor, transitions.following)
    values = agent.values.value(agent.target_critics(transitions.following.state))  # (B, L, C, G, A)
    targets = agent.policy_targets(transitions, policy)
    for row, length in enumerate(batch.mask[..., 0].sum(1).tolist()):
        following = None
        for t in reversed(range(length)):
            reward, going = 10.0 * batch.rews[row, t, 0], ~batch.dones[row, t, 0]
            value = (values[row, t] * policy.probs[row, t]).sum(-1)  # (C, G)
            if following is not None:
                action = int(batch.actions[row, t + 1].argmax())
                trace = 0.8 * (policy.probs[row, t, :, action] / taken[row, t + 1]).clamp(max=1.0)
                value = value + trace * (following - values[row, t, ..., action])
            following = reward + agent.discounts[:, 0] * going * value
            torch.testing.assert_close(targets[row, t, :, 0], following.amin(0))


# --- values of stored transitions ------------------------------------------------------------------------


OFF_POLICY = {name: case for name, case in CASES.items() if issubclass(case[0], OffPolicyAgent)}


@pytest.mark.parametrize("case", OFF_POLICY)
def test_values_of_stored_transitions_have_one_entry_per_discount_and_change_nothing(case: str) -> None:
    kind, space, kwargs = OFF_POLICY[case]
    agent, batch = make(kind, space, **kwargs).train(), make_batch(space)
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    torch.manual_seed(2)
    found = agent.get_values(batch)
    parts = [found.q, found.v, found.advantages, found.q_std]
    parts += [] if found.filter_weights is None else [found.filter_weights]
    for part in parts:
        assert part.shape == (3, 5, len(agent.discounts), 1)
        assert torch.isfinite(part).all()
        assert not part.requires_grad
    assert (found.filter_weights is None) == (kind in (SACAgent, DQNAgent))
    assert found.discounts.shape == (len(agent.discounts), 1)
    assert torch.equal(found.mask, batch.mask)
    assert agent.training
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())
    if kind is not IQLAgent:
        torch.testing.assert_close(found.advantages, found.q - found.v, rtol=1e-4, atol=1e-4)
    torch.manual_seed(2)
    torch.testing.assert_close(agent.eval().get_values(batch).q, found.q)
    assert not agent.training


def test_values_are_in_environment_units() -> None:
    """The two critics value action a at 2 a and 4 a, rewards are doubled, and the policy is uniform."""
    batch = make_batch(DISCRETE)
    taken = batch.actions.argmax(-1).float()[..., None, None]
    expected = {Agent: 2.25, SACAgent: 2.25, DQNAgent: 4.5}
    for kind, value in expected.items():
        settings = {"critic_type": CriticEnsemble} if kind is DQNAgent else {}
        agent = by_hand(kind, **settings)
        with torch.no_grad():
            agent.critics.out.bias.copy_(torch.tensor([[2.0], [4.0]])[..., None] * torch.arange(4.0))
        found = agent.get_values(batch)
        torch.testing.assert_close(found.q, 1.5 * taken)
        torch.testing.assert_close(found.v, torch.full_like(found.q, value))
        torch.testing.assert_close(found.advantages, 1.5 * taken - value)
        torch.testing.assert_close(found.q_std, taken / 2**0.5)
        if found.filter_weights is not None:
            assert torch.equal(found.filter_weights, (taken >= 2).float())
    agent = by_hand(IQLAgent, beta=3.0)
    torch.nn.init.constant_(agent.critics.out.bias, 6.0)
    torch.nn.init.constant_(agent.value_function.out.bias, 4.0)
    with torch.no_grad():
        agent.target_critics.out.bias.copy_(torch.tensor([5.0, 7.0])[:, None, None])
    found = agent.get_values(batch)
    same(found.q, 3.0)
    same(found.v, 2.0)
    same(found.advantages, 0.5)  # by the smaller target critic
    same(found.filter_weights, math.exp(3.0 * 1.0))


@pytest.mark.parametrize("kind", [Agent, SACAgent, MultiTaskAgent])
def test_targets_and_the_actor_loss_use_different_numbers_of_sampled_actions(kind: Any) -> None:
    numbers = {"num_actions_for_value_in_critic_loss": 2, "num_actions_for_value_in_actor_loss": 4}
    agent, drawn = make(kind, BOX, **numbers), []
    draw = agent.draw
    agent.draw = lambda policy, num_samples: drawn.append(num_samples) or draw(policy, num_samples)
    agent(make_batch(BOX))
    assert drawn == [2, 4]
    usual = make(kind, BOX)
    assert usual.num_actions_for_value_in_critic_loss == 1
    assert usual.num_actions_for_value_in_actor_loss == (3 if kind is MultiTaskAgent else 1)
    for name in numbers:
        with pytest.raises(ValueError, match=rf"{name} is 0, .*at least 1.*Fix: bind {kind.__name__}.{name}"):
            make(kind, BOX, **{name: 0})


def test_each_discount_is_trained_once() -> None:
    agent = make(Agent, DISCRETE, training_discounts=(0.5, 0.99, 0.9), gamma=0.99)
    assert agent.discounts[:, 0].tolist() == pytest.approx([0.5, 0.9, 0.99])
    with pytest.raises(ValueError, match=r"Agent.training_discounts names a discount twice: \[0.5, 0.5\]"):
        make(Agent, DISCRETE, training_discounts=(0.5, 0.5))


def test_continuous_actions_may_have_returns_of_their_own() -> None:
    for space in (BOX, DISCRETE, MULTI):
        agent = make(Agent, space, **recommended(training_discounts=(0.5, 0.9), gamma=0.99))
        assert agent.discounts[:, 0].tolist() == pytest.approx([0.5, 0.9, 0.99])
        assert agent.returns == (LambdaReturns() if space is BOX else Retrace())
    assert make(Agent, BOX, returns=NStep(2)).returns == NStep(2)
    with pytest.raises(ValueError, match=r"Discounts are \[1.5, .*training_discounts"):
        make(Agent, BOX, training_discounts=(1.5,))


# --- masks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Agent, MultiTaskAgent, BCAgent, DQNAgent, SACAgent, IQLAgent, PPOAgent])
@pytest.mark.parametrize("space", [DISCRETE, MULTI], ids=["discrete", "factors"])
def test_disallowed_actions_are_never_taken(kind: Any, space: Any) -> None:
    if kind is DQNAgent and space is MULTI:
        return
    allowed = torch.tensor([1, 0, 1, 0] if space is DISCRETE else [0, 1, 1, 1, 0])
    agent = make(kind, space, len(allowed), encoder=partial(FFTrajEncoder, d_model=16)).eval()
    n = 20_000
    obs = {"observation": torch.randn(n, 3), "allowed": allowed.expand(n, -1).to(torch.int8)}
    inputs = (torch.zeros(n, 1 + agent.action_dim), torch.zeros(n, 1, dtype=torch.int64))
    with torch.no_grad():
        for sample in (True, False):
            action, _ = agent.get_actions(
                obs, *inputs, agent.init_hidden_state(n, torch.device("cpu")), sample
            )
            if space is DISCRETE:
                assert set(action.tolist()) <= {0, 2}
            else:
                assert set(action[:, 0].tolist()) == {1}
                assert set(action[:, 1].tolist()) <= {0, 1}


@pytest.mark.parametrize("kind", [Agent, MultiTaskAgent, BCAgent, IQLAgent])
def test_recorded_actions_that_the_mask_forbids_are_not_imitated(kind: Any) -> None:
    batch = make_batch(DISCRETE)
    batch.obs["allowed"] = 1 - torch.nn.functional.pad(batch.actions, (0, 0, 0, 1)).to(torch.int8)
    agent = make(kind, DISCRETE, 4)
    terms = agent(batch, with_metrics=True)
    assert terms.actor.abs().max() < 1e3
    assert terms.metrics["action_log_prob"] == 0.0
    batch.obs["allowed"][:] = 1
    assert agent(batch, with_metrics=True).metrics["action_log_prob"] < 0.0


def test_ppo_does_not_imitate_recorded_actions_that_the_mask_forbids() -> None:
    batch = make_batch(DISCRETE)
    batch.obs["allowed"] = 1 - torch.nn.functional.pad(batch.actions, (0, 0, 0, 1)).to(torch.int8)
    terms = make(PPOAgent, DISCRETE, 4)(Demonstrations(batch, GAE()))
    assert (terms.actor == 0).all()


@pytest.mark.parametrize("kind", [Agent, DQNAgent, SACAgent])
@pytest.mark.parametrize("where", ["critics", "target_critics"])
def test_disallowed_actions_are_not_bootstrapped_from(kind: Any, where: str) -> None:
    """Their values can be anything."""
    losses = []
    for value in (0.0, 1e6):
        agent = make(kind, DISCRETE, 4, critic_type=CriticEnsemble)
        with torch.no_grad():
            out = getattr(agent, where).out.bias.view(agent.critics.num_critics, -1, 4)
            out[..., 1] = value
        batch = make_batch(DISCRETE)
        allowed = torch.tensor([1, 0, 1, 1], dtype=torch.int8).expand(3, 6, -1)
        actions = one_hot(batch.actions.argmax(-1).masked_fill(batch.actions[..., 1] > 0, 2), 4).float()
        batch = replace(batch, obs={**batch.obs, "allowed": allowed}, actions=actions)
        torch.manual_seed(3)
        terms = agent(batch)
        losses.append((terms.actor * batch.mask[..., None], terms.critic * batch.mask[..., None, None]))
    torch.testing.assert_close(losses[0], losses[1])


def test_if_nothing_is_allowed_everything_is() -> None:
    agent = make(BCAgent, MULTI, 5)
    like = torch.zeros(2, 7, 5)
    mask = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0]])
    allowed = agent.allowed_actions({"allowed": mask}, like)
    assert allowed.shape == (2, 1, 5)
    assert allowed[:, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]


@pytest.mark.parametrize(("kind", "space"), [(Agent, BOX), (DQNAgent, DISCRETE)])
def test_the_policy_of_another_discount_can_act(kind: Any, space: Any) -> None:
    agent = make(kind, space, training_discounts=(0.5, 0.9), gamma=0.99)
    state = torch.randn(2, 3, agent.state_dim)
    params = [agent.policy(state).params.clone()]
    for discount in (0.5, 0.99):
        agent.act_for(discount)
        params.append(agent.policy(state).params.clone())
    assert torch.equal(params[0], params[2])
    assert not torch.equal(params[0], params[1])
    with pytest.raises(ValueError, match=r"discount 0.95 is not trained.*\[0.5, 0.9, 0.99\]. Fix:"):
        agent.act_for(0.95)
