"""Updates: one batch or several, parameter groups, frozen parameters, and gradients that are not finite."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from loxodon.agents import LossTerms
from loxodon.data import Batch, Trajectory, pack_batch, pad_batch
from loxodon.experiment import Callback, Experiment
from loxodon.experiment.learn.learner import masked_losses
from loxodon.experiment.optional.freezing import ParamFreezer

from ..rounding import assert_equal_but_for_rounding
from .fakes import Predicting, learning, make_experiment, metrics, run

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


class Picky(Experiment):
    """Masks that depend on the batch and on the losses, and remove more in some batches."""

    def edit_actor_mask(self, batch: Any, actor_loss: torch.Tensor, pad_mask: torch.Tensor) -> torch.Tensor:
        return pad_mask & (batch.time_idxs[:, :-1, None] < 2)

    def edit_critic_mask(self, batch: Any, critic_loss: torch.Tensor, pad_mask: torch.Tensor) -> torch.Tensor:
        return pad_mask & (critic_loss < 0.5)

    def edit_extra_mask(
        self, batch: Any, name: str, loss: torch.Tensor, pad_mask: torch.Tensor
    ) -> torch.Tensor:
        return pad_mask & (batch.time_idxs[:, :-1] > 0) if name == "next_obs" else pad_mask


WEIGHTS = {"next_obs": 0.5, "size": 0.25}
EXTRA = {"agent_type": Predicting, "extra_loss_weights": WEIGHTS}


@pytest.mark.parametrize(
    ("kind", "settings"), [(Experiment, {}), (Picky, {}), (Experiment, EXTRA), (Picky, EXTRA)]
)
def test_micro_batches_give_the_loss_and_the_gradients_of_one_batch(
    tmp_path: Path, kind: type[Experiment], settings: dict[str, Any]
) -> None:
    found, parts = (
        [],
        {
            "whole": [pad_batch(TRAJECTORIES)],
            "parts": [pad_batch([t]) for t in TRAJECTORIES],
            "padded": [pad_batch(TRAJECTORIES).padded(12)],
            "packed": [pack_batch(TRAJECTORIES[:2], 12), pack_batch(TRAJECTORIES[2:], 12)],
        },
    )
    for name, micro_batches in parts.items():
        exp = learning(tmp_path / name, kind, grad_clip=1e9, **settings)
        exp.optimizer.zero_grad = lambda: None
        figures = exp.train_step(micro_batches, log_step=True)
        assert figures["batch_timesteps"] == 17
        gradients = {name: p.grad for name, p in exp.policy.named_parameters() if p.grad is not None}
        assert ("predictor.weight" in gradients) == bool(settings)
        found.append({**gradients, **{name: figures[name] for name in ("Loss", *exp.learner.loss_weights)}})
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for name, value in found[0].items():
            assert_equal_but_for_rounding(other[name], value, NUM_OPS, name)


class Waits(TorchDispatchMode):
    """Counts operations whose result the host has to wait for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "unique_dim"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_waits_for_a_gpu_only_to_check_the_losses_that_it_logs(tmp_path: Path) -> None:
    exp, batch = learning(tmp_path), pad_batch(TRAJECTORIES)
    exp.train_step(batch)
    with Waits() as plain:
        exp.train_step(batch)
    with Waits() as logged:
        exp.train_step(batch, log_step=True)
    assert plain.found == []
    assert logged.found == ["aten._local_scalar_dense.default"]


def test_extra_losses_are_masked_and_weighted(tmp_path: Path) -> None:
    exp, batch = learning(tmp_path, **EXTRA), pad_batch(TRAJECTORIES)
    found, terms = exp.compute_loss(batch), exp.policy(batch)
    for name, loss in terms.extra.items():
        expected = loss[batch.mask[..., 0]].mean()
        assert_equal_but_for_rounding(found[f"{name}_loss"], expected, NUM_OPS, name)
    figures = exp.train_step(batch)
    total = figures["Actor Loss"] + 10.0 * figures["Critic Loss"]
    total = total + 0.5 * figures["next_obs_loss"] + 0.25 * figures["size_loss"]
    assert_equal_but_for_rounding(figures["Loss"], total, NUM_OPS)
    warm = learning(
        tmp_path / "warm", agent_type=functools.partial(Predicting, burn_in=2), extra_loss_weights=WEIGHTS
    )
    later = dataclasses.replace(batch, time_idxs=batch.time_idxs + 1)  # windows from within an episode
    found, terms = warm.compute_loss(later), warm.policy(later)
    counts = later.mask[..., 0].clone()
    counts[:, :2] = False
    for name, loss in terms.extra.items():
        assert_equal_but_for_rounding(found[f"{name}_loss"], loss[counts].mean(), NUM_OPS, name)


def test_a_hook_can_add_a_loss_to_any_agent(tmp_path: Path) -> None:
    class Small(Experiment):
        def compute_loss(self, batch: Any, log_step: bool = False) -> dict[str, Any]:
            found = super().compute_loss(batch, log_step)
            return {**found, "small_loss": self.policy.actor.weight.square().sum()}

    exp = make_experiment(tmp_path, Small, extra_loss_weights={"small": 3.0}, train_timesteps_per_epoch=0)
    exp.start()
    figures = exp.train_step([pad_batch([t]) for t in TRAJECTORIES])
    total = figures["Actor Loss"] + 10.0 * figures["Critic Loss"] + 3.0 * figures["small_loss"]
    assert_equal_but_for_rounding(figures["Loss"], total, NUM_OPS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, r"extra loss 'next_obs', but Experiment.extra_loss_weights is \{\}. Fix: .*\{'next_obs': 1.0, "),
        ({"size": 0.5, "nxt": 2.0}, r"Fix: set .* = \{'size': 0.5, 'next_obs': 1.0\}"),
        (
            {**WEIGHTS, "nxt": 1.0},
            r"names 'nxt', but the extra losses of the agent are \['next_obs', 'size'\]",
        ),
        ({**WEIGHTS, "size": -1.0}, r"extra_loss_weights\['size'\] is -1.0.*at least 0.*Fix:"),
        ({"value": 1.0}, r"names 'value', but the logs have another value_loss. Fix:"),
    ],
)
def test_weights_of_extra_losses_fit_the_terms(tmp_path: Path, weights: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):  # noqa: PT012 - some are refused in the constructor
        exp = learning(tmp_path, agent_type=Predicting, extra_loss_weights=weights)
        exp.train_step(pad_batch(TRAJECTORIES))


def test_the_command_of_a_run_that_an_impossible_setting_ended_does_not_continue_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Experiment):
        def edit_actor_mask(self, batch: Any, actor_loss: Any, pad_mask: torch.Tensor) -> torch.Tensor:
            return pad_mask[:, :1]

    with pytest.raises(ValueError, match=r"edit_actor_mask returned"):
        run(make_experiment(tmp_path, Wrong))
    said = " ".join(capsys.readouterr().out.split())
    assert "To continue, correct the error, then run the same command with --resume." in said


def test_an_extra_loss_is_not_a_mean(tmp_path: Path) -> None:
    terms = LossTerms(torch.zeros(4, 8, 1, 1), torch.zeros(4, 8, 1, 1, 1), extra={"mean": torch.zeros(4)})
    with pytest.raises(
        ValueError, match=r"extra\['mean'\] has the shape \(4,\), .*\(4, 8\), the sequences.*Fix:"
    ):
        masked_losses(pad_batch(TRAJECTORIES), terms)


def test_compute_loss_returns_the_sizes_of_a_batch_and_updates_log_theirs(tmp_path: Path) -> None:
    exp, batch = learning(tmp_path, Picky), pad_batch(TRAJECTORIES)
    for log_step in (False, True):
        found = exp.compute_loss(batch, log_step=log_step)
        assert found["Sequence Length"] == 8
        assert found["Batch Size (in Timesteps)"] == 32
        assert found["Unmasked Batch Size (in Timesteps)"] == 17  # regardless of hooks
    figures = exp.train_step([pad_batch(TRAJECTORIES[:1]), batch], log_step=True)
    names = ("sequence_length", "batch_places", "batch_timesteps", "batch_padded_share")
    assert [float(figures[name]) for name in names] == pytest.approx([8, 35, 20, 15 / 35])
    assert not [name for name in figures if "(in Timesteps)" in name]


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


def test_no_gradient_limit_equals_a_limit_that_is_never_reached(tmp_path: Path) -> None:
    found = []
    for i, limit in enumerate([1e9, 0.0, 1e-3]):
        exp = make_learning(tmp_path / str(i), grad_clip=limit, **{"AdamW.eps": 1e-3})
        metrics = exp.train_step(pad_batch(TRAJECTORIES), log_step=True)
        parts = [float(value) for name, value in metrics.items() if name.startswith("grad_norm/")]
        assert math.hypot(*parts) == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
        assert len(parts) == 2
        found.append((float(metrics["grad_norm"]), [p.tolist() for p in exp.policy.trainable_params()]))
    assert found[0] == found[1] != found[2]
    assert found[2][0] == found[0][0] > 1e-3


def test_targets_follow_after_every_optimizer_step(tmp_path: Path) -> None:
    exp = make_learning(tmp_path)
    order: list[str] = []
    step, after = exp.optimizer.step, exp.policy.after_update
    exp.optimizer.step = lambda: (order.append("step"), step())
    exp.policy.after_update = lambda: (order.append("targets"), after())
    exp.train_step([pad_batch([t]) for t in TRAJECTORIES])
    assert order == ["step", "targets"]
    assert exp.learner.gradient_steps == 1


def test_bfloat16_forward_gives_float32_losses(tmp_path: Path) -> None:
    exp = make_learning(tmp_path, mixed_precision="bf16")
    metrics = exp.train_step([pad_batch(TRAJECTORIES)])
    assert metrics["Loss"].dtype == torch.float32
    assert torch.isfinite(metrics["Loss"])


def snapshot(exp: Experiment) -> dict[str, torch.Tensor]:
    """Weights, targets, statistics and moments, by name."""
    found = {name: value.clone() for name, value in exp.policy.state_dict().items()}
    names = {id(p): name for name, p in exp.policy.named_parameters()}
    for param, state in exp.optimizer.state.items():
        found |= {f"{names[id(param)]}/{key}": value.clone() for key, value in state.items()}
    return found


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


# --- groups of parameters -------------------------------------------------------------------------------


def test_the_longest_prefix_determines_the_learning_rate_and_warm_up_multiplies_each(tmp_path: Path) -> None:
    names = [n for n, _ in learning(tmp_path / "a").policy.traj_encoder.named_parameters()]
    inner = sorted(names)[0]
    multipliers = {"actor": 0.1, "traj_encoder": 2.0, f"traj_encoder.{inner}": 3.0}
    exp = learning(
        tmp_path / "b", **{"AdamW.lr_multipliers": multipliers}, learning_rate=1e-2, lr_warmup_steps=4
    )
    exp.train_step(pad_batch(TRAJECTORIES))
    names_of = {id(p): name for name, p in exp.policy.named_parameters()}
    rates = {names_of[id(p)]: g["lr"] for g in exp.optimizer.param_groups for p in g["params"]}
    assert set(rates) == {names_of[id(p)] for p in exp.policy.trainable_params()}
    for name, rate in rates.items():
        factor = 3.0 if name == f"traj_encoder.{inner}" else 2.0 if name.startswith("traj_encoder.") else 1.0
        factor = 0.1 if name.startswith("actor.") else factor
        assert rate == pytest.approx(1e-2 * factor / 4), name


@pytest.mark.parametrize(
    ("multipliers", "kind", "words"),
    [
        ({"acter": 0.5}, ValueError, "lr_multipliers names 'acter'.*actor.*Fix:"),
        ({"target_actor": 0.5}, ValueError, "lr_multipliers names 'target_actor'.*actor.*Fix:"),
        ({"actor": 0.0}, ValueError, r"lr_multipliers\['actor'\] is .*above 0.*Fix:"),
        ({"actor": "x"}, TypeError, r"lr_multipliers\['actor'\] is .*above 0.*Fix:"),
    ],
)
def test_impossible_multipliers_are_refused(
    tmp_path: Path, multipliers: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        learning(tmp_path, **{"AdamW.lr_multipliers": multipliers})


@pytest.mark.parametrize("beta2", [-0.1, 1.0, float("nan")])
def test_an_impossible_decay_of_the_second_moment_is_refused(tmp_path: Path, beta2: float) -> None:
    with pytest.raises(ValueError, match=r"AdamW\.beta2 is .*Fix:"):
        learning(tmp_path, **{"AdamW.beta2": beta2})


def test_a_resumed_run_may_change_multipliers_but_not_the_groups(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"AdamW.lr_multipliers": {"actor": 0.1}})
    exp.train_step(pad_batch(TRAJECTORIES))
    exp.save_checkpoint()
    changes = {"AdamW.lr_multipliers": {"actor": 0.7}, "AdamW.eps": 1e-3, "AdamW.beta2": 0.9}
    again = learning(tmp_path, **changes, learning_rate=1e-2)
    again.load_checkpoint()
    assert {(g["eps"], *g["betas"]) for g in again.optimizer.param_groups} == {(1e-3, 0.9, 0.9)}
    assert [g["initial_lr"] for g in again.optimizer.param_groups] == pytest.approx([1e-2, 7e-3])
    assert changed(snapshot(exp), snapshot(again)) == set()
    regrouped = learning(tmp_path, **{"AdamW.lr_multipliers": {"critics": 0.1}})
    with pytest.raises(
        ValueError, match=r"parameter groups .*actor: \d+.*, but this run has .*critics.*Fix:"
    ):
        regrouped.load_checkpoint()


# --- freezing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"start": 2, "stop": 5}, [2, 3, 4]),
    ],
)
def test_parameters_are_frozen_on_schedule(settings: dict[str, int], frozen: list[int]) -> None:
    freezer = ParamFreezer(**settings)
    assert [epoch for epoch in range(8) if freezer.is_frozen(epoch)] == frozen


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"prefixes": ()}, "prefixes is empty"),
        ({"start": 3, "stop": 3}, "stop is 3"),
        ({"start": -1}, "start is -1"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}.*Fix:"):
        ParamFreezer(**settings)


def test_frozen_parameters_and_their_moments_stay_bit_equal_and_move_afterwards(tmp_path: Path) -> None:
    prefixes = ("tstep_encoder", "critics")
    exp = learning(tmp_path, callbacks=[lambda: ParamFreezer(prefixes, start=1, stop=2)], l2_coeff=0.1)
    parameters = {name for name, _ in exp.policy.named_parameters()}
    frozen = {name for name in parameters if name.startswith(("tstep_encoder.", "critics."))}
    for epoch in range(3):
        exp.epoch = epoch
        before = snapshot(exp)
        exp.train_step(pad_batch(TRAJECTORIES))
        moved = changed(before, snapshot(exp))
        still = {name for name in before if name.split("/")[0] in frozen}
        if epoch == 1:
            assert moved & still == set()
            assert any(name.startswith("actor.") for name in moved)
            assert "tstep_encoder.input_norm.count" in moved  # statistics are not parameters
        else:
            assert frozen & moved


def test_frozen_gradients_do_not_count_towards_the_norm(tmp_path: Path) -> None:
    norms = []
    for i, callbacks in enumerate(([], [lambda: ParamFreezer(("critics", "traj_encoder"))])):
        exp = learning(tmp_path / str(i), callbacks=callbacks, grad_clip=1e9)
        norms.append(exp.train_step(pad_batch(TRAJECTORIES), log_step=True)["grad_norm"].item())
    assert norms[1] < 0.9 * norms[0]


def test_names_to_freeze_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ParamFreezer.prefixes names 'critic'.*critics.*Fix:"):
        learning(tmp_path, callbacks=[lambda: ParamFreezer(("critic",))])
    everything = ("tstep_encoder", "traj_encoder", "actor", "critics")
    with pytest.raises(ValueError, match=r"freezes every trainable parameter.*Fix:"):
        learning(tmp_path, callbacks=[lambda: ParamFreezer(everything)])


# --- losses and gradients that are not finite -----------------------------------------------------------


def with_nan(field: str, *place: int) -> Batch:
    """A batch with NaN at one place of a field or of the observation."""
    batch = pad_batch(TRAJECTORIES)
    values = batch.obs["observation"] if field == "observation" else getattr(batch, field)
    values[place] = torch.nan
    return batch


def test_the_error_names_losses_and_field_and_saves_the_batch(tmp_path: Path) -> None:
    exp = learning(tmp_path, **EXTRA)
    before, batch = snapshot(exp), with_nan("observation", 3, 2, 1)
    words = (
        r"Update 0 of epoch 0 cannot be applied: in micro-batch 1 the actor loss is nan \(first at "
        r"sequence 3, timestep 2, discounts 0.9, 0.999; .*the critic loss is nan .*the next_obs loss is nan "
        r".*the size loss is nan .*the batch's obs\['observation'\] is not finite \(first at sequence 3, "
        r"timestep 2\); "
        r"the weights are finite. The batch is saved: torch.load\(.*, weights_only=True\). Fix: correct"
    )
    with pytest.raises(FloatingPointError, match=words):
        exp.train_step([pad_batch(TRAJECTORIES[:1]), batch], log_step=True)
    assert changed(before, snapshot(exp)) == set()
    path = exp.run_dir / "not_finite" / "update_0.pt"
    saved = [Batch(**fields) for fields in torch.load(path, weights_only=True)]
    assert [len(one.mask) for one in saved] == [1, 4]
    torch.testing.assert_close(vars(saved[1]), vars(batch), equal_nan=True)


def test_a_nan_reward_is_reported_as_a_loss_of_the_critics(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"Learner.on_nan": "stop_at_once"})
    words = (
        r"applied: the critic loss is nan \(first at sequence 1, timestep \d, .*batch's rews .* timestep 4\)"
    )
    with pytest.raises(FloatingPointError, match=words):
        exp.train_step(with_nan("rews", 1, 4))


def test_the_discount_of_a_bad_loss_is_named(tmp_path: Path) -> None:
    exp = learning(tmp_path)
    losses = exp.policy.losses

    def spoilt(*args: Any) -> LossTerms:
        terms = losses(*args)
        terms.critic.data[2, 0, :, 0] = torch.inf
        return terms

    exp.policy.losses = spoilt
    words = (
        r"applied: the critic loss is inf \(first at sequence 2, timestep 0, discounts 0.9; 3 of 192 "
        r"values\); the batch is finite; the weights are finite.*Fix: lower"
    )
    with pytest.raises(FloatingPointError, match=words):
        exp.train_step(pad_batch(TRAJECTORIES), log_step=True)


def test_weights_and_gradients_that_are_not_finite_are_named(tmp_path: Path) -> None:
    exp, batch = learning(tmp_path), pad_batch(TRAJECTORIES)
    name, first = next((n, p) for n, p in exp.policy.named_parameters() if n.startswith("actor."))
    handle = first.register_hook(lambda gradient: gradient * torch.nan)
    words = f"applied: the losses are finite, but not the gradient of '{name}'; the batch is finite"
    with pytest.raises(FloatingPointError, match=words):
        exp.train_step(batch, log_step=True)
    handle.remove()
    torch.nn.init.constant_(first, torch.nan)
    words = f"the weights '{name}' are not finite.*Fix: run again, .*'stop_at_once'.* lower"
    with pytest.raises(FloatingPointError, match=words):
        exp.train_step(batch, log_step=True)
    exp.train_step(batch)  # this update is not checked
    bad = {"loss": math.nan, "actor_loss": math.nan, "critic_loss": 1.0}
    words = r"loss of epoch 0 is nan \(actor nan, .*; the weights '.*' and \d+ others are not finite.*Fix:"
    with pytest.raises(FloatingPointError, match=words):
        exp.learner.check_epoch(bad, num_updates=4, num_skipped=0)


def spoil(exp: Experiment) -> None:
    """Make the next losses have a NaN gradient."""
    compute_loss = exp.learner.compute_loss

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        first = next(exp.policy.actor.parameters())
        return {**found, "Actor Loss": found["Actor Loss"] + torch.nan * first.sum()}

    exp.learner.compute_loss = spoilt


def test_a_skipped_update_changes_nothing(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"Learner.on_nan": "skip"})
    exp.train_step(pad_batch(TRAJECTORIES))
    before, compute_loss = snapshot(exp), exp.learner.compute_loss
    spoil(exp)
    exp.train_step(pad_batch(TRAJECTORIES))
    assert changed(before, snapshot(exp)) == set()
    assert (exp.learner.skipped_updates, exp.learner.gradient_steps) == (1, 1)
    assert all(p.grad is None for p in exp.policy.trainable_params())
    exp.learner.compute_loss = compute_loss
    exp.train_step(pad_batch(TRAJECTORIES))
    after = snapshot(exp)
    assert changed(before, after)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert exp.learner.gradient_steps == 2


def test_a_loss_scaler_lowers_its_scale_when_an_update_is_skipped(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"Learner.on_nan": "skip"})
    optimizer = torch.optim.AdamW(exp.policy.trainable_params())  # not fused, as with fp16
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    exp.accelerator.scaler = scaler
    exp.accelerator.unscale_gradients = lambda: scaler.unscale_(optimizer)
    exp.learner.optimizer = AcceleratedOptimizer(optimizer, scaler=scaler)
    for group in optimizer.param_groups:
        group["initial_lr"] = 1e-3
    before, compute_loss = snapshot(exp), exp.learner.compute_loss
    spoil(exp)
    for scale in (4.0, 2.0):
        exp.train_step(pad_batch(TRAJECTORIES))
        assert scaler.get_scale() == scale
    assert changed(before, snapshot(exp)) == set()
    exp.learner.compute_loss = compute_loss
    exp.train_step(pad_batch(TRAJECTORIES))
    assert (exp.learner.skipped_updates, exp.learner.gradient_steps) == (2, 1)
    assert all(torch.isfinite(value).all() for value in snapshot(exp).values())


def test_a_run_counts_skipped_updates_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exp = make_experiment(tmp_path, **{"Learner.on_nan": "skip"}, epochs=2)

    def spoil_once(exp: Experiment) -> None:
        compute_loss, calls = exp.learner.compute_loss, iter(range(100))

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            found = compute_loss(*args, **kwargs)
            return {**found, "Actor Loss": found["Actor Loss"] * (float("nan") if next(calls) == 1 else 1.0)}

        exp.learner.compute_loss = sometimes

    run(exp, spoil_once)
    records = [r for r in metrics(exp.run_dir) if "train/skipped_updates" in r]
    assert [r["train/skipped_updates"] for r in records] == [1, 0]
    assert all(r["train/loss"] == r["train/loss"] for r in records)
    skipped = "1 of 4 updates were skipped because their gradients were not finite"
    assert [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()] == [f"Epoch 0: {skipped}."]


def test_a_run_that_skips_all_updates_of_an_epoch_ends(tmp_path: Path) -> None:
    words = r"All 4 updates of epoch 0 were skipped .*Fix: run again.*'stop_at_once'"
    with pytest.raises(FloatingPointError, match=words):
        run(exp := make_experiment(tmp_path, **{"Learner.on_nan": "skip"}), spoil)
    (record,) = (r for r in metrics(exp.run_dir) if "train/skipped_updates" in r)
    assert record["train/skipped_updates"] == 4
    assert "train/loss" not in record


@pytest.mark.parametrize("hook", ["after_train", "on_epoch_end"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, hook: str) -> None:
    class Spoiling(Callback):
        pass

    def put_nan(self: Callback, run: Experiment, *_: Any) -> None:
        torch.nn.init.constant_(run.policy.actor.weight, torch.nan)

    setattr(Spoiling, hook, put_nan)
    exp = make_experiment(
        tmp_path, **{"Learner.on_nan": "skip"}, callbacks=[Spoiling], ckpt_interval=1, val_interval=None
    )
    with pytest.raises(FloatingPointError, match=r"weights 'actor.weight' are not finite.*Fix: run again"):
        run(exp)
    assert exp.checkpoints.complete_epochs() == []


def test_neither_weights_nor_statistics_that_are_not_finite_are_published(tmp_path: Path) -> None:
    exp = learning(tmp_path)
    exp.policy.register_buffer("causal", torch.full((2, 2), -torch.inf).triu(1))  # an intended infinity
    exp.write_latest_policy()
    published = exp.checkpoints.latest_path.read_bytes()
    for name, spoilt in (("values.mu", torch.inf), ("actor.mlp.out.weight", torch.nan)):
        before = exp.policy.state_dict(keep_vars=True)[name].detach().clone()
        exp.policy.state_dict()[name].fill_(spoilt)
        with pytest.raises(FloatingPointError, match=f"'{name}' are not finite.*nor published. Fix:"):
            exp.write_latest_policy()
        with pytest.raises(FloatingPointError):
            exp.log({"val/return": 1e9})  # the best so far
        exp.policy.state_dict()[name].copy_(before)
    assert exp.checkpoints.latest_path.read_bytes() == published
    assert not exp.checkpoints.best_path.exists()
