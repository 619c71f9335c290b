"""Learning rates by module, epsilon, frozen parameters, and updates whose gradient is not finite."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loxodon.agents import Agent
from loxodon.data import Batch, pad_batch
from loxodon.experiment import Experiment
from loxodon.experiment.freezing import ParamFreezer
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from .fakes import make_experiment, run
from .test_learner import TRAJECTORIES
from .test_resume import metrics


def learning(folder: Path, **changes: Any) -> Experiment:
    """A real agent of several modules, and no environments."""
    settings: dict[str, Any] = {
        "agent_type": partial(Agent, num_critics=2, tau=0.1),
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=8, d_output=8),
        "traj_encoder_type": partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        "val_timesteps_per_epoch": 0,
        "train_timesteps_per_epoch": 0,
    }
    exp = make_experiment(folder, **{**settings, **changes})
    exp.start()
    return exp


def batches() -> list[Batch]:
    return [pad_batch(TRAJECTORIES)]


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


def test_the_longest_prefix_decides_the_learning_rate_and_warm_up_multiplies_each(tmp_path: Path) -> None:
    names = [n for n, _ in learning(tmp_path / "a").policy.traj_encoder.named_parameters()]
    inner = sorted(names)[0]
    multipliers = {"actor": 0.1, "traj_encoder": 2.0, f"traj_encoder.{inner}": 3.0}
    exp = learning(
        tmp_path / "b", **{"AdamW.lr_multipliers": multipliers}, learning_rate=1e-2, lr_warmup_steps=4
    )
    exp.train_step(batches())
    names_of = {id(p): name for name, p in exp.policy.named_parameters()}
    rates = {names_of[id(p)]: g["lr"] for g in exp.optimizer.param_groups for p in g["params"]}
    assert set(rates) == {names_of[id(p)] for p in exp.policy.trainable_params()}
    for name, rate in rates.items():
        factor = 3.0 if name == f"traj_encoder.{inner}" else 2.0 if name.startswith("traj_encoder.") else 1.0
        factor = 0.1 if name.startswith("actor.") else factor
        assert rate == pytest.approx(1e-2 * factor / 4), name


def test_a_multiplier_moves_a_module_so_much_further(tmp_path: Path) -> None:
    moved = []
    for i, factor in enumerate((1.0, 0.5)):
        exp = learning(
            tmp_path / str(i), **{"AdamW.lr_multipliers": {"actor": factor}}, l2_coeff=0.0, lr_warmup_steps=0
        )
        before = snapshot(exp)
        exp.train_step(batches())
        moved.append({name: after - before[name] for name, after in snapshot(exp).items() if name in before})
    for name, whole in moved[0].items():
        if name.startswith("actor."):
            torch.testing.assert_close(moved[1][name], 0.5 * whole, rtol=1e-3, atol=1e-7)
        elif name.startswith("critics."):
            assert torch.equal(moved[1][name], whole)


@pytest.mark.parametrize("prefix", ["acter", "act", "target_actor"])
def test_an_unknown_module_is_refused_with_the_nearest_names(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match=rf"lr_multipliers names '{prefix}'.*actor.*Fix:"):
        learning(tmp_path, **{"AdamW.lr_multipliers": {prefix: 0.5}})


@pytest.mark.parametrize(("factor", "kind"), [(0.0, ValueError), ("x", TypeError)])
def test_a_multiplier_must_be_a_positive_number(tmp_path: Path, factor: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"lr_multipliers\['actor'\] is .*above 0.*Fix:"):
        learning(tmp_path, **{"AdamW.lr_multipliers": {"actor": factor}})


def test_epsilon_reaches_the_optimizer_and_is_a_setting_of_this_run(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"AdamW.eps": 1e-5})
    assert {g["eps"] for g in exp.optimizer.param_groups} == {1e-5}
    exp.train_step(batches())
    other = learning(tmp_path, **{"AdamW.eps": 1e-3})
    other.learner.load_state_dict(exp.learner.state_dict())
    assert {g["eps"] for g in other.optimizer.param_groups} == {1e-3}


def test_a_resumed_run_may_change_multipliers_but_not_the_groups(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"AdamW.lr_multipliers": {"actor": 0.1}})
    exp.train_step(batches())
    exp.save_checkpoint()
    again = learning(tmp_path, **{"AdamW.lr_multipliers": {"actor": 0.7}}, learning_rate=1e-2)
    again.load_checkpoint()
    assert [g["initial_lr"] for g in again.optimizer.param_groups] == pytest.approx([1e-2, 7e-3])
    assert changed(snapshot(exp), snapshot(again)) == set()
    regrouped = learning(tmp_path, **{"AdamW.lr_multipliers": {"critics": 0.1}})
    with pytest.raises(ValueError, match=r"groups of parameters .*actor: \d+, this run has .*critics.*Fix:"):
        regrouped.load_checkpoint()


# --- freezing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"start": 2, "stop": 5}, [2, 3, 4]),
        ({"start": 1, "period": 3, "on_for": 1}, [1, 4, 7]),
        ({"stop": 5, "period": 4, "on_for": 3}, [0, 1, 2, 4]),
    ],
)
def test_schedules(settings: dict[str, int], frozen: list[int]) -> None:
    freezer = ParamFreezer(**settings)
    assert [epoch for epoch in range(8) if freezer.is_frozen(epoch)] == frozen


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"prefixes": ()}, "prefixes is empty"),
        ({"start": 3, "stop": 3}, "stop is 3"),
        ({"start": -1}, "start is -1"),
        ({"period": 3}, "on_for is None"),
        ({"period": 3, "on_for": 3}, "on_for is 3"),
        ({"period": 3, "on_for": 0}, "on_for is 0"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}.*Fix:"):
        ParamFreezer(**settings)


def test_frozen_parameters_and_their_moments_stay_to_the_bit_and_move_afterwards(tmp_path: Path) -> None:
    prefixes = ("tstep_encoder", "critics")
    exp = learning(tmp_path, callbacks=[lambda: ParamFreezer(prefixes, start=1, stop=2)], l2_coeff=0.1)
    parameters = {name for name, _ in exp.policy.named_parameters()}
    frozen = {name for name in parameters if name.startswith(("tstep_encoder.", "critics."))}
    for epoch in range(3):
        exp.epoch = epoch
        before = snapshot(exp)
        exp.train_step(batches())
        moved = changed(before, snapshot(exp))
        still = {name for name in before if name.split("/")[0] in frozen}
        if epoch == 1:
            assert moved & still == set()
            assert any(name.startswith("actor.") for name in moved)
            assert "tstep_encoder.input_norm.count" in moved  # statistics are no parameters
        else:
            assert frozen & moved


def test_frozen_gradients_are_no_part_of_the_norm(tmp_path: Path) -> None:
    norms = []
    for i, callbacks in enumerate(([], [lambda: ParamFreezer(("critics", "traj_encoder"))])):
        exp = learning(tmp_path / str(i), callbacks=callbacks, grad_clip=1e9)
        norms.append(exp.train_step(batches(), log_step=True)["grad_norm"].item())
    assert norms[1] < 0.9 * norms[0]


def test_freezing_names_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ParamFreezer.prefixes names 'critic'.*critics.*Fix:"):
        learning(tmp_path, callbacks=[lambda: ParamFreezer(("critic",))])
    everything = ("tstep_encoder", "traj_encoder", "actor", "critics")
    with pytest.raises(ValueError, match=r"freezes every trainable parameter.*Fix:"):
        learning(tmp_path, callbacks=[lambda: ParamFreezer(everything)])


# --- gradients that are not finite ----------------------------------------------------------------------


def spoil(exp: Experiment, value: float = float("nan")) -> None:
    """Make the next losses yield such a gradient."""
    compute_loss = exp.learner.compute_loss

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        first = next(exp.policy.actor.parameters())
        return {**found, "Actor Loss": found["Actor Loss"] + value * first.sum()}

    exp.learner.compute_loss = spoilt


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_update_changes_nothing(tmp_path: Path, value: float) -> None:
    exp = learning(tmp_path, **{"Learner.bad_grad": "skip"})
    exp.train_step(batches())
    before, compute_loss = snapshot(exp), exp.learner.compute_loss
    spoil(exp, value)
    exp.train_step(batches())
    assert changed(before, snapshot(exp)) == set()
    assert (exp.learner.skipped_updates, exp.learner.gradient_steps) == (1, 1)
    assert all(p.grad is None for p in exp.policy.trainable_params())
    exp.learner.compute_loss = compute_loss
    exp.train_step(batches())
    after = snapshot(exp)
    assert changed(before, after)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert exp.learner.gradient_steps == 2


def test_statistics_of_a_skipped_update_are_dropped(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"Learner.bad_grad": "skip"})
    spoil(exp)
    exp.train_step(batches())
    assert exp.policy.tstep_encoder.input_norm.pending_count == 0


def test_raise_names_the_parameter(tmp_path: Path) -> None:
    exp = learning(tmp_path, **{"Learner.bad_grad": "raise"})
    exp.train_step(batches())
    before = snapshot(exp)
    spoil(exp)
    name = next(name for name, _ in exp.policy.named_parameters() if name.startswith("actor."))
    with pytest.raises(FloatingPointError, match=rf"gradient of '{name}' is not finite.*Fix:"):
        exp.train_step(batches())
    assert changed(before, snapshot(exp)) == set()


def test_a_run_counts_what_it_skipped_and_goes_on(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, **{"Learner.bad_grad": "skip"}, epochs=2)

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


def test_the_choice_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad_grad is 'skp'.*Fix: set Learner.bad_grad = 'skip'"):
        learning(tmp_path, **{"Learner.bad_grad": "skp"})
