"""Pre-training on demonstrations, and its cache."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.agents import Agent, PPOAgent, RewardNormalizer
from loxodon.data import DiskTrajDataset, MemoryTrajDataset
from loxodon.experiment.ppo import PPOLearner
from loxodon.nets import PolicyHead

from .demonstrations import (
    ENCODER,
    STEPS,
    demonstration,
    demos,
    make_ppo,
    pretrained,
    records,
    same,
    stage,
    weights_of,
)
from .fakes import make_experiment, run


@pytest.mark.parametrize(
    ("kind", "agent"),
    [
        ("discrete", PPOAgent),
        ("discrete", partial(PPOAgent, share_encoder=False, value_norm="popart")),
        ("box", PPOAgent),
        ("multi", partial(PPOAgent, value_norm="running")),
    ],
)
def test_an_imitating_agent_is_good_before_ppo_begins_and_ppo_goes_on(
    tmp_path: Path, kind: str, agent: Any
) -> None:
    made = stage(demos(kind), num_batches=300)
    exp = run(make_ppo(tmp_path, kind, agent_type=agent, callbacks=[made], epochs=2))
    first = next(row["val/return"] for row in records(exp) if "val/return" in row)
    assert first > 0.9 * STEPS
    figures = next(row for row in records(exp) if "pretrain/loss" in row)
    assert figures["pretrain/loss"] < figures["pretrain/first_loss"]
    assert exp.learner.gradient_steps == 4  # those of PPO alone
    assert all(int(state["step"]) == 4 for state in exp.optimizer.state.values())
    untrained = run(make_ppo(tmp_path / "other", kind, agent_type=agent))
    assert records(untrained)[0]["val/return"] < 0.7 * STEPS


def test_values_become_the_returns_of_the_demonstrations(tmp_path: Path) -> None:
    exp = make_ppo(tmp_path, callbacks=[stage(num_batches=400)], tstep_encoder_type=ENCODER)
    run(exp)
    rows = [row for row in records(exp) if "pretrain-update/value" in row]
    # 8 rewards of 1 each, discounted: the mean of sum_k 0.99^k over what is left of an episode
    expected = np.mean([sum(0.99**k for k in range(left)) for left in range(1, STEPS + 1)])
    assert abs(rows[0]["pretrain-update/value"] - expected) > 1.0
    assert abs(rows[-1]["pretrain-update/value"] - expected) < 0.7
    assert abs(rows[-1]["pretrain-update/return"] - expected) < 0.7


def test_a_resumed_run_does_not_pretrain_again(tmp_path: Path) -> None:
    run(make_ppo(tmp_path, callbacks=[stage()]))
    again = make_ppo(tmp_path, callbacks=[stage()], epochs=2)
    again.start()
    again.load_checkpoint()
    assert again.hooks.callbacks[0].is_done
    again.learn()
    again.close()
    assert sum("pretrain/loss" in row for row in records(again)) == 1


def test_a_stop_keeps_nothing_half_done_and_resuming_gives_the_same_run(tmp_path: Path) -> None:
    whole = run(make_ppo(tmp_path / "whole", callbacks=[stage(num_batches=40, cache_dir=str(tmp_path))]))
    stopped = make_ppo(tmp_path / "parts", callbacks=[stage(num_batches=40, cache_dir=str(tmp_path / "c"))])
    stopped.start()
    before = weights_of(stopped)
    real, count = stopped.log, 0

    def log(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        real(*args, **kwargs)

    stopped.log = log  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        stopped.learn()
    assert same(before, weights_of(stopped))
    assert not (tmp_path / "c").exists()
    resumed = make_ppo(tmp_path / "parts", callbacks=[stage(num_batches=40)])
    resumed.start()
    resumed.load_checkpoint()
    assert not resumed.hooks.callbacks[0].is_done
    resumed.learn()
    resumed.close()
    assert same(weights_of(whole), weights_of(resumed))


@pytest.mark.parametrize("method", ["bc", "off_policy"])
def test_a_cached_result_is_the_one_that_training_gave(tmp_path: Path, method: str, caplog: Any) -> None:
    cache = str(tmp_path / "cache")
    small = {"num_batches": 5, "method": method, "cache_dir": cache}
    first = pretrained(make_ppo(tmp_path / "a", callbacks=[stage(**small)]))
    exp = make_ppo(tmp_path / "b", callbacks=[stage(**small)], epochs=2)
    second = pretrained(exp)
    assert same(first, second)
    assert not any("pretrain/loss" in row for row in records(exp))
    (file,) = Path(cache).iterdir()
    for changes in ({"seed": 8}, {"callbacks": [stage(demos(count=19), **small)]}):
        other = make_ppo(tmp_path / "c", **{"callbacks": [stage(**small)], **changes})
        assert not same(first, pretrained(other))
        assert any("pretrain/loss" in row for row in records(other))
    assert len(list(Path(cache).iterdir())) == 3
    file.write_bytes(file.read_bytes()[:100])  # half a file
    assert same(first, pretrained(make_ppo(tmp_path / "d", callbacks=[stage(**small)])))
    assert "cannot be used and is made anew" in caplog.text


def test_off_policy_training_hands_over_encoders_and_a_policy_of_the_same_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loxodon")
    plain = make_ppo(tmp_path / "a", callbacks=[stage(num_batches=5, method="off_policy")])
    plain.start()
    before = weights_of(plain)
    plain.close()
    after = pretrained(make_ppo(tmp_path / "b", callbacks=[stage(num_batches=5, method="off_policy")]))
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"tstep_encoder"}  # the identity has no weights, and the heads differ
    assert "hands over" in caplog.text
    assert "policy_head (4)" in caplog.text.partition("not loaded")[2]
    head = partial(PolicyHead, n_layers=2, activation="leaky_relu")
    caplog.clear()
    made = stage(
        num_batches=200,
        method="off_policy",
        agent_type=partial(Agent, fake_filter=True, online_coeff=0.0, offline_coeff=1.0),
    )
    exp = run(make_ppo(tmp_path / "c", agent_type=partial(PPOAgent, policy_head_type=head), callbacks=[made]))
    assert "policy_head (6)" in caplog.text.partition("not loaded")[0]
    assert next(row["val/return"] for row in records(exp) if "val/return" in row) > 0.9 * STEPS
    # Only the run's own model is left, whose optimizer Accelerate does not hold without a loss scaler.
    assert [len(exp.accelerator._models), len(exp.accelerator._optimizers)] == [1, 0]


def test_a_test_run_pretrains_a_little_and_without_a_cache(tmp_path: Path) -> None:
    exp = run(make_ppo(tmp_path, test_run=True, callbacks=[stage(cache_dir=str(tmp_path / "cache"))]))
    assert [row["pretrain/updates"] for row in records(exp) if "pretrain/updates" in row] == [2]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bd"}, r"method is 'bd'.*Fix: set Pretraining.method"),
        ({"num_batches": 0}, r"num_batches is 0.*Fix:"),
        ({"learning_rate": 0.0}, r"learning_rate is 0.0.*Fix:"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(**changes)


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Pretraining.dataset is 'demos'.*Fix:"):
        stage("demos")


def test_an_empty_dataset_and_an_off_policy_agent_are_refused(tmp_path: Path) -> None:
    exp = make_ppo(tmp_path, callbacks=[stage(DiskTrajDataset(dset_name="nothing"))])
    exp.start()
    with pytest.raises(ValueError, match=r"not enough trajectories.*nothing.*Fix: name its folder"):
        exp.learn()
    exp.close()
    off_policy = make_experiment(tmp_path, callbacks=[stage()])
    with pytest.raises(ValueError, match=r"Pretraining is for on-policy agents, but TinyAgent.*Fix:"):
        off_policy.start()


def test_values_of_another_scale_are_refused(tmp_path: Path) -> None:
    learner = partial(PPOLearner, minibatches=2, reward_normalizer=RewardNormalizer)
    exp = make_ppo(tmp_path, on_policy_learner_type=learner, callbacks=[stage()])
    with pytest.raises(ValueError, match=r"value_coef is 0.5, but with PPOLearner.reward_normalizer.*Fix:"):
        exp.start()


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_weights(tmp_path: Path) -> None:
    bad = MemoryTrajDataset([demonstration(0)])
    bad._trajs[0].rews[:] = np.nan
    exp = make_ppo(tmp_path, callbacks=[stage(bad, num_batches=2)])
    exp.start()
    before = weights_of(exp)
    with pytest.raises(ValueError, match=r"loss of pre-training is nan.*Fix:"):
        exp.learn()
    assert same(before, weights_of(exp))
    exp.close()


def test_unknown_data_are_not_cached_and_own_ones_may_say_what_they_are(tmp_path: Path, caplog: Any) -> None:
    dataset = demos()
    dataset.relabeler = type("Same", (), {"apply": lambda self, traj, rng: traj})()
    small = {"num_batches": 1, "cache_dir": str(tmp_path / "cache")}
    run(make_ppo(tmp_path / "a", callbacks=[stage(dataset, **small)]))
    assert "does not say what its data are" in caplog.text
    assert not (tmp_path / "cache").exists()
    dataset.fingerprint = lambda: "mine"  # type: ignore[attr-defined]
    run(make_ppo(tmp_path / "b", callbacks=[stage(dataset, **small)]))
    assert len(list((tmp_path / "cache").iterdir())) == 1
