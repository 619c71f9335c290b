"""Evaluating a rollout reproduces acting, and advantages follow from the steps that were really taken."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import GAE, AdvantageNorm, PPOAgent, PPOLoss
from loxodon.data import Sink
from loxodon.envs import EnvSpec, make_vector_env
from loxodon.experiment.ppo import KLAdaptiveLR, RolloutBuffer, diagnostics, sequences
from loxodon.experiment.ppo.old_policy import old_policy_outputs
from loxodon.experiment.ppo.sequences import RolloutTensors
from loxodon.experiment.ppo.trainer import mean_kl
from loxodon.experiment.process.distributed import merged
from loxodon.nets import Categorical, PolicyHead, cpu

from ...rounding import assert_equal_but_for_rounding, rounding
from .rollouts import (
    CPU,
    RecordingEstimator,
    Witness,
    make_agent,
    make_collector,
    make_learner,
    no_advantage_norm,
    values_of,
)
from .whole_runs import ENCODERS

NUM_OPS = 256 * 4 * 8  # width and layers of the agent, timesteps of the context
VALUE_ROUNDING = rounding(1.0, NUM_OPS)


@pytest.mark.parametrize(  # episodes of 30 steps are longer than rollout and window
    ("encoder", "chunk_len", "longest", "context_mode", "share"),
    [
        ("identity", 8, 30, "episode", True),
        ("ff", 3, 4, "episode", False),
        ("gru", 3, 30, "episode", True),
        ("gru", 8, 4, "episode", False),
        ("gru", 4, 30, "burn-in", True),
        ("lstm", 3, 30, "episode", False),
        ("transformer", 8, 4, "episode", True),
        ("transformer", 3, 30, "episode", False),
        ("transformer", 8, 4, "segment", False),
        ("transformer", 3, 30, "segment", True),
    ],
)
def test_evaluating_a_rollout_reproduces_acting(
    encoder: str, chunk_len: int, longest: int, context_mode: str, share: bool
) -> None:
    agent = make_agent(ENCODERS[encoder], share_encoder=share)
    estimator = RecordingEstimator(GAE())
    has_burn_in = context_mode == "burn-in"
    learner = make_learner(
        agent,
        8,
        4,
        chunk_len=chunk_len,
        context_mode="segment" if has_burn_in else context_mode,
        burn_in=2 * has_burn_in,
        update_epochs=1,
        advantage_estimator=lambda: estimator,
    )
    witness = Witness()
    collector = make_collector(agent, learner, sinks=[witness], longest=longest)
    learner.learner.lr_scale = 0.0  # weights stay, so later rollouts continue from exact states
    rollouts: list[list[torch.Tensor]] = []
    for epoch in range(4):
        collector.collect(8)
        figures = learner.learn_from_rollout(epoch)
        assert figures["initial_logratio_abs_max"] < figures["initial_logratio_rounding_max"]
        assert figures["initial_value_diff_abs_max"] < VALUE_ROUNDING
        rollouts.append([x.clone() for x in estimator.calls[-1][1:4]])  # the next one overwrites some
    values, next_values, terminated = (torch.cat(x) for x in zip(*rollouts, strict=True))
    for n in range(4):
        expected = [values_of(agent, episode) for episode in witness.episodes[n]]
        now, following = ([expected[e][at + k] for e, at in witness.steps[n]] for k in (0, 1))
        assert_equal_but_for_rounding(values[:, n], torch.stack(now), NUM_OPS)
        goes_on = terminated[:, n] == 0
        assert_equal_but_for_rounding(next_values[goes_on, n], torch.stack(following)[goes_on], NUM_OPS)


def test_explained_variance() -> None:
    returns, mask = torch.randn(3, 2), torch.ones(3, 2, dtype=torch.bool)
    for values, expected in ((returns, 1.0), (0 * returns, 0.0)):
        metrics = diagnostics.value_fit_metrics(values, returns, returns, mask)
        assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-5)


def test_masked_actions_do_not_loosen_the_limit_of_rounding() -> None:
    logits = torch.randn(6, 4)
    limits = [
        diagnostics.max_rounding_error(
            Categorical,
            {"params": Categorical(logits).masked(allowed).params},
            torch.eye(4)[[0] * 6],
            torch.ones(3, 2, dtype=torch.bool),
            torch.float32,
        )
        for allowed in (torch.ones(4, dtype=torch.bool), torch.tensor([True, True, True, False]))
    ]
    assert 0.0 < limits[1] < 2.0 * limits[0] < 1e-3


@pytest.mark.parametrize(
    ("encoder", "context_mode", "share"),
    [("gru", "episode", True), ("transformer", "episode", True), ("transformer", "segment", False)],
)
def test_evaluating_reproduces_acting_even_if_weights_and_statistics_move(
    encoder: str, context_mode: str, share: bool
) -> None:
    agent = make_agent(ENCODERS[encoder], share_encoder=share, normalize_inputs=True)
    learner = make_learner(agent, 8, 4, chunk_len=4, context_mode=context_mode)
    collector = make_collector(agent, learner, longest=30)
    before = [p.detach().clone() for p in agent.parameters()]
    for epoch in range(4):
        collector.collect(8)
        figures = learner.learn_from_rollout(epoch)
        assert figures["initial_logratio_abs_max"] < figures["initial_logratio_rounding_max"]
        assert figures["initial_value_diff_abs_max"] < VALUE_ROUNDING
    assert not all(torch.equal(p, q) for p, q in zip(before, agent.parameters(), strict=True))


def test_continuous_actions_are_evaluated_before_they_are_clipped() -> None:
    agent = make_agent(is_discrete=False)
    learner = make_learner(agent, 8, 4)
    collector = make_collector(agent, learner)
    collector.collect(8)
    steps = learner.buffers[0].read().steps
    assert (np.abs(steps["samples"]) > 1.0).any()
    assert (np.abs(steps["actions"]) <= 1.0).all()
    figures = learner.learn_from_rollout(0)
    assert figures["initial_logratio_abs_max"] < figures["initial_logratio_rounding_max"]


@pytest.mark.parametrize(("encoder", "mode"), [("ff", "minibatch"), ("gru", "batch")])
def test_a_minibatch_in_parts_gives_the_update_of_the_whole(encoder: str, mode: str) -> None:
    weights = []
    for parts in (1, 3):
        agent = make_agent(ENCODERS[encoder], normalize_inputs=True, value_norm="popart")
        norm = partial(AdvantageNorm, mode=mode)
        learner = make_learner(agent, 8, 4, batches_per_update=parts, advantage_norm=norm)
        collector = make_collector(agent, learner)
        learner.learner.lr_scale = 0.1
        learner.learner.extra_loss_weights = {"size": 0.1}
        agent.extra_losses = lambda _, states: {"size": states[0].square()}  # type: ignore[method-assign]
        collector.restart(seed=3)
        torch.manual_seed(1)
        for epoch in range(2):
            collector.collect(8)
            figures = learner.learn_from_rollout(epoch)
        assert learner.learner.gradient_steps == figures["updates"] * 2 == 16
        assert figures["loss"] > figures["size_loss"] * 0.1 > 0.0
        weights.append(agent.state_dict())
    for name, value in weights[0].items():
        assert_equal_but_for_rounding(weights[1][name], value, 256 * 4 * 8 * 16, name)  # 16 updates


def test_a_process_with_too_few_sequences_evaluates_one_without_loss() -> None:
    agent = make_agent()
    learner = make_learner(agent, 8, 1, chunk_len=4)
    collector = make_collector(agent, learner, num_envs=1, longest=30)
    collector.collect(8)
    tensors = sequences.RolloutTensors(
        learner.buffers[0].read(), np.zeros((8, 1, 3), np.float32), torch.device("cpu")
    )
    pieces = learner._pieces(tensors.rollout)
    groups = sequences.shuffled_minibatches(pieces, len(pieces) + 2, np.random.default_rng(0))
    masks = [tensors.gather(tensors.indices(group), {}).mask for group in groups]
    assert [bool(mask.any()) for mask in masks] == [True] * len(pieces) + [False, False]
    assert sum(int(mask.sum()) for mask in masks) == 8
    with pytest.raises(ValueError, match="The rollout has no step"):
        sequences.shuffled_minibatches(pieces.take(np.arange(0)), 2, np.random.default_rng(0))


def test_metrics_of_updates_are_means_or_extremes() -> None:
    names = ("kl", "ratio_min", "ratio_max")
    updates = [{name: torch.tensor(value) for name in names} for value in (1.0, 4.0, 1.0)]
    updates.append({"kl": torch.tensor(6.0, dtype=torch.float64)})
    assert merged([(update, 1.0) for update in updates]) == {"kl": 3.0, "ratio_min": 1.0, "ratio_max": 4.0}
    sums = torch.tensor([[3.0, 3.0], [float("nan"), 5.0], [3.0, 1.0]])
    assert mean_kl(list(sums)) == 1.5
    assert mean_kl([]) == 0.0
    assert math.isnan(mean_kl([torch.tensor([torch.nan, 4.0])]))


def test_a_divergence_that_is_not_a_number_neither_passes_nor_adapts_anything() -> None:
    agent = make_agent(loss_type=lambda: PPOLoss(kind="kl_penalty"))
    learner = make_learner(agent, 8, 4, target_kl=0.02, lr_adapter=partial(KLAdaptiveLR, per="minibatch"))
    beta, found = float(agent.loss.beta), {"kl": torch.tensor(torch.nan)}
    assert not learner._may_step([found], [Mock(mask=torch.ones(2, 3, 1, dtype=torch.bool))])
    agent.after_rollout(mean_kl(learner._kls))
    assert learner.learner.lr_scale == 1.0
    assert float(agent.loss.beta) == beta


@pytest.mark.parametrize("order", [1, -1])
def test_values_of_steps_do_not_depend_on_the_order_of_sequences(order: int) -> None:
    """With burn-in, the timestep after a sequence has another memory as its tail than as a step."""
    agent = make_agent(max_seq_len=4)
    learner = make_learner(agent, 8, 4, chunk_len=4, burn_in=3)
    collector = make_collector(agent, learner, longest=14)
    collector.collect(8)
    learner.learn_from_rollout(0)
    collector.collect(8)
    rollout = learner.buffers[0].read()
    tensors = RolloutTensors(rollout, sequences.policy_actions(rollout.steps, agent.action_space), CPU)
    pieces = learner._pieces(rollout)
    together = [tensors.indices(pieces, tails=True)]
    alone = [tensors.indices(pieces.take(np.array([i])), tails=True) for i in range(len(pieces))]
    expected, found = (
        old_policy_outputs(agent, tensors, groups, nullcontext)[0]["values"]
        for groups in (together, alone[::order])
    )
    assert_equal_but_for_rounding(found, expected, NUM_OPS)


class LateStates(Sink):
    """Stores the hidden state after the step, which is a known bug elsewhere."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self.buffer = buffer

    def before_act(self, agent: Any, hidden_state: Any) -> Any:
        states, last = self.buffer._rollout.states, self.buffer._now - 1
        if last in states:
            states[last] = agent.export_hidden_state(hidden_state)
        return hidden_state


@pytest.mark.parametrize("is_fresh", [False, True], ids=["distinct policy", "policy of a new agent"])
def test_storing_the_state_after_the_step_triggers_the_warning(
    caplog: pytest.LogCaptureFixture, is_fresh: bool
) -> None:
    for is_right in (True, False):
        agent = make_agent()
        if is_fresh:  # almost the same in all states, so wrong ones make little difference
            agent.policy_head = PolicyHead(agent.traj_encoder.emb_dim, agent.action_dim, agent.distribution)
        learner = make_learner(agent, 8, 4, chunk_len=4)
        collector = make_collector(agent, learner, longest=30)
        if not is_right:
            collector.groups[0].sinks = [*learner.buffers, LateStates(learner.buffers[0])]
        collector.collect(8)
        figures = learner.learn_from_rollout(0)
        learner.check_consistency(figures)
        rounding_max = figures["initial_logratio_rounding_max"]
        assert (figures["initial_logratio_abs_max"] < rounding_max < 1e-3) is is_right
        assert ("log-probabilities of a rollout differ" in caplog.text) is not is_right


class ValueIsObservation(PPOAgent):
    """Its value of a timestep is the observation."""

    def evaluate(self, batch: Any) -> Any:
        found = super().evaluate(batch)
        return type(found)(found.log_probs, batch.obs["observation"].float(), found.entropy, found.params)


class GoldenEnv(gym.Env[np.ndarray, int]):
    """Observes the values of the golden case; the first episode is truncated after three steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)
    EPISODES = ([5.0, 4.8, 4.6, 4.4], [9.0, 8.8, 8.6, 8.4])

    def __init__(self, terminates: bool = False) -> None:
        self.terminates, self.episode = terminates, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.episode, self.t = (self.episode + 1) % 2, 0
        return np.float32([self.EPISODES[self.episode][0]]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == 3 and self.episode == 0
        obs = np.float32([self.EPISODES[self.episode][self.t]])
        return obs, 1.0, over and self.terminates, over and not self.terminates, {}


def golden_vector_env(mode: str, terminates: bool) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.vector.SyncVectorEnv([lambda: GoldenEnv(terminates)], autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
@pytest.mark.parametrize(
    ("terminates", "expected"),
    [
        (False, [2.1298, 1.4650, 0.7560, 2.0168, 1.3874, 0.7160]),
        (True, [-1.7232, -2.6318, -3.6000, 2.0168, 1.3874, 0.7160]),
    ],
)
def test_golden_advantages_in_every_autoreset_mode(
    mode: str, terminates: bool, expected: list[float]
) -> None:
    spec = EnvSpec(golden_vector_env, {"mode": mode, "terminates": terminates})
    envs = make_vector_env([spec], "already_vectorized")
    torch.manual_seed(0)
    agent = ValueIsObservation(
        envs.single_observation_space,
        envs.single_action_space,
        make_agent().tstep_encoder.__class__,
        ENCODERS["gru"],
        8,
    )
    num_steps = 7 if mode == "NextStep" else 6  # one row is only a reset
    estimator = RecordingEstimator(GAE(gamma=0.99, lam=0.95))
    learner = make_learner(
        agent,
        num_steps,
        1,
        minibatches=1,
        advantage_estimator=lambda: estimator,
        advantage_norm=no_advantage_norm,
    )
    collector = make_collector(agent, learner, envs=envs)
    collector.collect(num_steps)
    learner.learn_from_rollout(0)
    mask = estimator.calls[0][-1]
    assert int(mask.sum()) == 6
    found = estimator.results[0][0][mask]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)


def test_two_buffers_give_the_same_as_one() -> None:
    figures = []
    for num_parts in (1, 2):
        envs = [make_vector_env([EnvSpec(GoldenEnv)] * (4 // num_parts), "sync") for _ in range(num_parts)]
        agent = ValueIsObservation(
            envs[0].single_observation_space,
            envs[0].single_action_space,
            make_agent().tstep_encoder.__class__,
            ENCODERS["gru"],
            8,
        )
        torch.manual_seed(3)
        for name, parameter in agent.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1) if "norm" not in name else None
        learner = make_learner(agent, 3, 4, chunk_len=2, minibatches=1, update_epochs=2)
        learner.learner.optimizer.param_groups[0]["eps"] = 1e-3  # otherwise Adam amplifies rounding
        for part in envs:
            collector = make_collector(agent, learner, envs=part)
            collector.sample = False
            collector.collect(3)
        learner.learn_from_rollout(0)
        figures.append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    assert_equal_but_for_rounding(figures[0], figures[1], NUM_OPS * 4)  # four updates


class Waits(TorchDispatchMode):
    """Counts operations that wait for the results of others on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        waiting = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        self.count += by_mask or func.overloadpacket in waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("encoder", ["ff", "transformer", "gru"])
def test_a_rollout_waits_for_a_gpu_less_than_ten_times_however_many_updates_it_takes(
    encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "serves", lambda x: False)  # kernels for the CPU may look at values
    agent = make_agent(ENCODERS[encoder])
    norm = partial(AdvantageNorm, mode="minibatch")
    learner = make_learner(agent, 8, 4, update_epochs=6, advantage_norm=norm)
    make_collector(agent, learner).collect(8)
    with Waits() as waits:
        figures = learner.learn_from_rollout(0)
    assert figures["updates"] == 12
    assert waits.count < 10
