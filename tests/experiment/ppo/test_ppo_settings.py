"""Every setting that docs/ppo_from_skrl.md names exists, and changing it changes the trained weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import gin
import pytest
import torch

from loxodon.agents import LinearSchedule
from loxodon.experiment.config.registry import find
from loxodon.experiment.ppo import PPOLearner
from loxodon.experiment.settings import fields_with

from .rollouts import make_agent, make_collector, make_learner
from .whole_runs import ppo_experiment, weights

DOC = Path(__file__).parents[3] / "docs" / "ppo_from_skrl.md"
SMALL = {"PPOLearner.minibatches": 2, "PPOLearner.update_epochs": 2}
BURN_IN = {"PPOLearner.chunk_len": 4, "PPOLearner.burn_in": 2}
ADAPTER = {"PPOLearner.lr_adapter": "@KLAdaptiveLR"}
NORMALIZER = {"PPOLearner.reward_normalizer": "@RewardNormalizer"}
PENALTY = {"PPOLoss.kind": "'kl_penalty'"}
CLIPPED = {"PPOLoss.value_clip": 0.01}
# The setting, a value other than the default, and the bindings that it needs to have an effect.
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("PPOLearner.update_epochs", 3, {}),
    ("PPOLearner.minibatches", 4, {}),
    ("PPOLearner.chunk_len", 3, {}),
    ("PPOLearner.burn_in", 2, {"PPOLearner.chunk_len": 4}),
    ("PPOLearner.context_mode", "'segment'", {"PPOLearner.chunk_len": 4, "encoder": "transformer"}),
    ("PPOLearner.target_kl", 1e-7, {}),
    ("PPOLearner.recompute_old", False, BURN_IN),
    ("PPOLearner.reward_normalizer", "@RewardNormalizer", {}),
    ("PPOLearner.lr_adapter", "@KLAdaptiveLR", {}),
    ("RewardNormalizer.gamma", 0.5, NORMALIZER),
    ("RewardNormalizer.clip", 0.1, NORMALIZER),
    ("KLAdaptiveLR.kl_threshold", 1e-7, ADAPTER),
    ("KLAdaptiveLR.factor", 3.0, ADAPTER),
    ("KLAdaptiveLR.band", 1e9, {**ADAPTER, "KLAdaptiveLR.kl_threshold": 1e-7}),
    ("KLAdaptiveLR.min_lr", 9.9e-3, {**ADAPTER, "KLAdaptiveLR.kl_threshold": 1e-7}),
    ("KLAdaptiveLR.max_lr", 1.0, {**ADAPTER, "KLAdaptiveLR.kl_threshold": 1.0}),
    ("KLAdaptiveLR.per", "'minibatch'", {**ADAPTER, "KLAdaptiveLR.kl_threshold": 1e-7}),
    ("GAE.gamma", 0.5, {}),
    ("GAE.lam", 0.5, {}),
    ("GAE.time_limit_bootstrap", False, {}),
    ("AdvantageNorm.mode", "'none'", {}),
    ("AdvantageNorm.mode", "'minibatch'", {}),
    ("AdvantageNorm.mode", "'ema'", {}),
    ("PPOLoss.kind", "'kl_penalty'", {}),
    ("PPOLoss.clip_eps", 1e-3, {}),
    ("PPOLoss.value_clip", 0.01, {}),
    ("PPOLoss.value_clip_mode", "'only'", CLIPPED),
    ("PPOLoss.value_loss", "'huber'", {}),
    ("PPOLoss.value_loss", "'l1'", {}),
    ("PPOLoss.entropy_coef", 0.1, {}),
    ("PPOLoss.kl_target", 1e-9, {**PENALTY, "PPOLoss.kl_beta": 100.0}),
    ("PPOLoss.kl_beta", 9.0, PENALTY),
    ("PPOLoss.kl_increase", 9.0, {**PENALTY, "PPOLoss.kl_target": 1e-9}),
    ("PPOLoss.kl_decrease", 0.1, {**PENALTY, "PPOLoss.kl_target": 10.0}),
    ("PPOLoss.log_ratio_limit", 1e-4, {}),
    ("PPOAgent.share_encoder", False, {}),
    ("PPOAgent.value_norm", "'running'", {}),
    ("PPOAgent.value_norm", "'popart'", {"PPOAgent.value_norm": "'running'"}),
    ("PPOAgent.value_norm_window", 1.0, {"PPOAgent.value_norm": "'running'"}),
    ("ValueNorm.min_std", 9.0, {"PPOAgent.value_norm": "'running'"}),
    ("FFTstepEncoder.normalize_inputs", False, {}),
    ("RunningNorm.window", 1.0, {}),
    ("RunningNorm.clip", 0.1, {}),
    ("RunningNorm.min_std", 9.0, {}),
    ("RunningNorm.stop_after", 1.0, {}),
    ("Experiment.train_timesteps_per_epoch", 9, {}),
    ("Experiment.parallel_actors", 4, {}),
    ("Experiment.learning_rate", 3e-3, {}),
    ("Experiment.lr_schedule", LinearSchedule(1.0, 0.0), {}),
    ("Experiment.lr_warmup_steps", 4, {}),
    ("Experiment.l2_coeff", 0.5, {}),
    ("AdamW.beta2", 0.5, {}),
    ("AdamW.eps", 1e-3, {}),
    ("AdamW.lr_multipliers", {"value_head": 0.1}, {}),
    ("Experiment.grad_clip", 1e-3, {"AdamW.eps": 1e-3}),
    ("Experiment.grad_clip", 0.0, {"AdamW.eps": 1e-3, "Experiment.grad_clip": 1e-3}),
    ("Experiment.start_learning_at_epoch", 1, {}),
    ("Experiment.critic_loss_weight", 2.5, {}),
    ("RewardShaping.shaper", "@ScaleRewards()", {"ScaleRewards.scale": 0.1}),
    ("Experiment.mixed_precision", "bf16", {}),
    ("Experiment.max_seq_len", 4, {}),
    ("Experiment.seed", 8, {}),
]


@pytest.fixture(scope="module")
def base_runs() -> dict[str, list[dict[str, torch.Tensor]]]:
    """Weights of the runs that cases are compared with; the keys are their bindings."""
    return {}


def short_run(folder: Path, settings: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Weights after each of two epochs without checkpoints. Settings outside Experiment are bound in gin."""
    own = {key.split(".")[1]: value for key, value in settings.items() if key.startswith("Experiment.")}
    gin.clear_config()
    bound = {k: v for k, v in {**SMALL, **settings}.items() if "." in k and not k.startswith("Experiment.")}
    gin.parse_config([f"{name} = {value}" for name, value in bound.items()])
    exp = ppo_experiment(
        folder,
        settings.get("encoder", "gru"),
        **{"on_policy_learner_type": PPOLearner, "ckpt_interval": None, "epochs": 3, **own},
    )
    exp.start()
    with closing(exp.learn_iter()) as epochs, closing(exp):  # type: ignore[type-var]  # it is a generator
        yield from (weights(exp) for _ in islice(epochs, 2))


def are_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=1e-7) for k in one)


@pytest.mark.parametrize(
    ("name", "value", "needs"), CASES, ids=[f"{case[0]}={case[1]}".split(" object at ")[0] for case in CASES]
)
def test_changing_a_setting_changes_the_trained_weights(
    tmp_path_factory: pytest.TempPathFactory,
    base_runs: dict[str, list[dict[str, torch.Tensor]]],
    name: str,
    value: Any,
    needs: dict[str, Any],
) -> None:
    if (key := str(needs)) not in base_runs:
        base_runs[key] = list(short_run(tmp_path_factory.mktemp("base"), needs))
    with closing(short_run(tmp_path_factory.mktemp("changed"), {**needs, name: value})) as changed:
        assert not all(map(are_close, base_runs[key], changed))  # most differ after the first epoch


@pytest.mark.parametrize(("scope", "expected"), [("batch", 2), ("epoch", 1), ("update", 1)])
def test_the_scope_of_a_stop_says_which_updates_are_skipped(scope: str, expected: int) -> None:
    agent = make_agent()
    learner = make_learner(agent, 8, 4, update_epochs=2, target_kl=0.02, stop_scope=scope)
    distances, compute_loss = iter([0.0, 0.03, 0.03, 0.0]), learner.learner.compute_loss

    def lying(batch: Any, log_step: bool) -> Any:
        return {**compute_loss(batch, log_step=log_step), "kl": torch.tensor(next(distances))}

    learner.learner.compute_loss = lying
    make_collector(agent, learner).collect(8)
    assert learner.learn_from_rollout(0)["updates"] == expected


# These settings are named on the page and tested elsewhere: output folders, schedules, privileged inputs ...
ELSEWHERE = {
    "CheckpointManager.best_by",
    "Experiment.batches_per_update",
    "Experiment.ckpt_base_dir",
    "Experiment.ckpt_interval",
    "Experiment.epochs",
    "Experiment.log_to_wandb",
    "Experiment.run_name",
    "Experiment.wandb_entity",
    "Experiment.wandb_group_name",
    "Experiment.wandb_project",
    "LinearSchedule.end",
    "LinearSchedule.start",
    "LinearSchedule.until",
    "PPOAgent.actor_obs_keys",
    "PPOAgent.critic_obs_keys",
    "PPOAgent.distribution_type",
    "PPOLearner.stop_scope",
    "TorchSchedule.num_steps",
    "TorchSchedule.scheduler",
    "TorchSchedule.settings",
}


def mentioned() -> set[str]:
    """Settings that the page names. `.x` belongs to the class before it; settings of skrl are skipped."""
    found: set[str] = set()
    for line in DOC.read_text().splitlines():
        owner = ""
        # the first columns of the table are skrl's
        for text in re.findall(r"`([^`]+)`", line.split("|", 3)[-1]):
            for class_name, name in re.findall(r"(?:^|[\s@,])([A-Z]\w*)?\.([a-z]\w*)", " " + text):
                owner = class_name or owner
                if owner:
                    found.add(f"{owner}.{name}")
    return found


def test_every_setting_that_the_page_names_exists_and_is_tested() -> None:
    names = mentioned()
    assert {"GAE.lam", "KLAdaptiveLR.per", "Experiment.wandb_entity", "PPOLoss.clip_eps"} <= names
    for full_name in sorted(names):
        owner, name = full_name.split(".")
        (configurable,) = find(owner)
        assert configurable.can_set(name), full_name
    assert names - {case[0] for case in CASES} - ELSEWHERE == set()
    assert not names & {f"Experiment.{name}" for name in fields_with("on_policy")}


def test_every_class_that_the_page_names_exists() -> None:
    for name in set(re.findall(r"@(\w+)", DOC.read_text())):
        assert len(find(name)) == 1, name
