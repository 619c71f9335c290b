from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.data import Batch, Trajectory, pad_batch
from loxodon.experiment import Experiment
from loxodon.experiment.learn.optimizer import warmup_factor

from ..rounding import assert_equal_but_for_rounding
from .fakes import make_experiment

NUM_OPS = 8 * 2 * 17  # width, updates, timesteps


def make_trajectory(length: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        obs={"observation": rng.standard_normal((length + 1, 2)).astype(np.float32)},
        rl2s=rng.standard_normal((length + 1, 4)).astype(np.float32),
        time_idxs=np.arange(length + 1)[:, None],
        actions=rng.integers(3, size=(length, 1)),
        rews=rng.standard_normal((length, 1)).astype(np.float32),
        dones=np.zeros((length, 1), dtype=bool),
    )


TRAJECTORIES = [make_trajectory(length, seed) for seed, length in enumerate([3, 8, 1, 5])]


def make_learning(folder: Path, **changes: Any) -> Experiment:
    exp = make_experiment(folder, val_timesteps_per_epoch=0, train_timesteps_per_epoch=0, **changes)
    exp.start()
    return exp


def weights_after(exp: Experiment, micro_batches: list[Batch], updates: int = 2) -> list[torch.Tensor]:
    for _ in range(updates):
        exp.train_step(micro_batches)
    return [p.detach().clone() for p in exp.policy.trainable_params()]


def test_four_micro_batches_of_unequal_length_equal_one_batch_of_four(tmp_path: Path) -> None:
    whole = weights_after(make_learning(tmp_path / "a"), [pad_batch(TRAJECTORIES)])
    parts = weights_after(make_learning(tmp_path / "b"), [pad_batch([t]) for t in TRAJECTORIES])
    for one, other in zip(whole, parts, strict=True):
        assert_equal_but_for_rounding(one, other, NUM_OPS)


def test_accumulated_gradients_equal_those_of_one_batch_before_clipping(tmp_path: Path) -> None:
    exp = make_learning(tmp_path, grad_clip=1e9)
    gradients = []
    exp.optimizer.zero_grad = lambda: None
    for batches in ([pad_batch(TRAJECTORIES)], [pad_batch([t]) for t in TRAJECTORIES]):
        for p in exp.policy.parameters():
            p.grad = None
        start = [p.detach().clone() for p in exp.policy.parameters()]
        exp.train_step(batches)
        gradients.append([p.grad.clone() for p in exp.policy.trainable_params() if p.grad is not None])
        with torch.no_grad():
            for p, old in zip(exp.policy.parameters(), start, strict=True):
                p.copy_(old)
    assert len(gradients[0]) == 4
    for one, other in zip(*gradients, strict=True):
        assert_equal_but_for_rounding(one, other, NUM_OPS)


def test_the_reported_loss_is_the_one_of_the_whole_update(tmp_path: Path) -> None:
    exp = make_learning(tmp_path)
    whole = exp.compute_loss(pad_batch(TRAJECTORIES))
    metrics = exp.train_step([pad_batch([t]) for t in TRAJECTORIES], log_step=True)
    torch.testing.assert_close(metrics["Loss"], (whole["Actor Loss"] + 10.0 * whole["Critic Loss"]).detach())
    assert metrics["batch_timesteps"] == 17


def test_the_first_update_is_not_a_no_op(tmp_path: Path) -> None:
    exp = make_learning(tmp_path)
    before = [p.detach().clone() for p in exp.policy.trainable_params()]
    after = weights_after(exp, [pad_batch(TRAJECTORIES)], updates=1)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert exp.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)


def test_warm_up_is_linear_from_one_share_to_all() -> None:
    assert [warmup_factor(n, 4) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


def test_only_parameters_of_the_optimizer_are_clipped(tmp_path: Path) -> None:
    exp = make_learning(tmp_path, grad_clip=1e-3)
    norms = []
    step = exp.optimizer.step

    def spy() -> None:
        params = exp.policy.trainable_params()
        norms.append(torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm().item())
        step()

    exp.optimizer.step = spy
    for _ in range(3):  # the frozen parameter's gradient is never cleared and grows
        exp.train_step([pad_batch(TRAJECTORIES)])
    assert exp.policy.frozen.grad.abs().sum() > 0
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)


def test_no_limit_of_the_gradient_is_a_limit_that_is_never_reached(tmp_path: Path) -> None:
    found = []
    for i, limit in enumerate([1e9, 0.0, -1.0, 1e-3]):
        exp = make_learning(tmp_path / str(i), grad_clip=limit, **{"AdamW.eps": 1e-3})
        metrics = exp.train_step(pad_batch(TRAJECTORIES), log_step=True)
        found.append((float(metrics["grad_norm"]), [p.tolist() for p in exp.policy.trainable_params()]))
    assert found[0] == found[1] == found[2]
    assert found[3][0] == found[0][0] > 1e-3
    assert found[3] != found[0]


def test_targets_follow_after_every_optimizer_step(tmp_path: Path) -> None:
    exp = make_learning(tmp_path)
    order: list[str] = []
    step, after = exp.optimizer.step, exp.policy.after_update
    exp.optimizer.step = lambda: (order.append("step"), step())
    exp.policy.after_update = lambda: (order.append("targets"), after())
    exp.train_step([pad_batch([t]) for t in TRAJECTORIES])
    assert order == ["step", "targets"]
    assert exp.learner.gradient_steps == 1


def test_a_skipped_step_moves_neither_targets_nor_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = make_learning(tmp_path)
    monkeypatch.setattr(exp.optimizer, "step_was_skipped", True, raising=False)  # as Accelerate's says
    exp.train_step([pad_batch(TRAJECTORIES)])
    assert exp.learner.gradient_steps == 0
    assert exp.policy.num_after_update == 0


def test_bfloat16_forward_gives_float32_losses(tmp_path: Path) -> None:
    exp = make_learning(tmp_path, mixed_precision="bf16")
    metrics = exp.train_step([pad_batch(TRAJECTORIES)])
    assert metrics["Loss"].dtype == torch.float32
    assert torch.isfinite(metrics["Loss"])
