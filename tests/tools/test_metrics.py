"""Every logged metric is explained, and every explained one is logged."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.agents import Agent, BCAgent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder
from loxodon.tools.metrics import METRICS, SAME_METRICS, describe, main, page

from ..experiment.demonstrations import make_ppo, stage
from ..experiment.fakes import make_experiment, metrics, run
from ..experiment.ppo.whole_runs import ppo_experiment

AXES = {"epoch", "env_steps", "gradient_steps"}
AGENTS = (Agent, BCAgent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent)
# Figures that only some environments, agents, settings or processes have.
CONDITIONAL = {
    *("attempts", "return_attempt_<i>", "success_attempt_<i>", "<dataset>/weight", "<dataset>/<any>"),
    *("reward/<name>", "<metric>", "metric/<metric>"),
    *("<name>_loss", "skipped_updates", "normalized_reward", "replay_ratio", "loss_weight"),
    *("acting_discount", "novelty"),
    *("version", "age_s", "versions_behind", "newest_age_s", "wait_for_learner_s", "wait_for_actors_s"),
}


def names(run_dir: Path) -> set[str]:
    return {name for record in metrics(run_dir, with_time=True) for name in record} - AXES


def unexplained(found: set[str]) -> set[str]:
    """Names without an explanation, and names that only an environment could explain."""
    return {name for name in found if (about := describe(name)) is None or "info['metric/" in about}


def off_policy(folder: Path, kind: Any) -> Any:
    settings = {} if kind is BCAgent else {"training_discounts": (0.9,)}
    return make_experiment(
        folder,
        epochs=1,
        agent_type=partial(kind, **settings),
        tstep_encoder_type=partial(FFTstepEncoder, d_hidden=16, d_output=8),
        traj_encoder_type=partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        **{"FinalTest.timesteps": 12},
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, set[str]]:
    """Names of the figures of a run of each kind."""
    makers = {kind: partial(off_policy, kind=kind) for kind in AGENTS} | {
        "ppo": partial(ppo_experiment, epochs=2),
        "pretraining": partial(make_ppo, callbacks=[stage(num_batches=2)]),
    }
    found = {}
    for kind, make in makers.items():
        gin.clear_config()
        found[kind] = names(run(make(tmp_path_factory.mktemp("run"))).run_dir)
    gin.clear_config()
    return found


def test_the_page_matches_the_code() -> None:
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    fix = "Fix: python -m loxodon.tools.metrics > docs/metrics.md"
    assert path.read_text(encoding="utf-8") == page(), fix


@pytest.mark.parametrize(
    ("typed", "meant"), [("val/sucess", "val/success"), ("sucess", "success"), ("ppo/kll", "ppo/kl")]
)
def test_an_unknown_name_is_an_error_with_similar_names(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["metrics", meant, typed])
    assert main() == 1
    printed = capsys.readouterr()
    assert f"{meant}: " in printed.out
    assert f"no metric has the name {typed!r}. Did you mean {meant!r}" in printed.err


@pytest.mark.parametrize("kind", AGENTS)
def test_every_metric_of_an_off_policy_run_is_explained(logged: dict[Any, set[str]], kind: Any) -> None:
    found = logged[kind]
    assert unexplained(found) == set()
    assert {name.partition("/")[0] for name in found} == {
        "collect",
        "dataset",
        "test",
        "time",
        "train",
        "train-update",
        "val",
    }
    assert kind is BCAgent or "train-update/q/0.9" in found


@pytest.mark.parametrize("kind", ["ppo", "pretraining"])
def test_every_metric_of_an_on_policy_run_is_explained(logged: dict[Any, set[str]], kind: str) -> None:
    assert unexplained(logged[kind]) == set()


def test_every_explained_metric_is_logged(logged: dict[Any, set[str]]) -> None:
    groups = {name: name.partition("/")[0] for name in set().union(*logged.values())}
    found = {(SAME_METRICS.get(group, group), describe(name)) for name, group in groups.items()}
    missing = {
        f"{group}/{figure}"
        for group, (_, known) in METRICS.items()
        for figure, about in known.items()
        if (group, about) not in found and figure not in CONDITIONAL
    }
    assert missing == set()


def test_an_unknown_metric_has_no_explanation() -> None:
    assert describe("train/foo") is None
    assert describe("foo") is None
    assert describe("train-update/q/0.95") == describe("train-update/td_target/0.5")
    assert describe("test/return") == describe("val/return")
    assert describe("pretrain-update/loss") == describe("pretrain/loss") != describe("train/loss")
    about = describe("collect/reward/energy") or ""
    assert "term `<name>` of the reward" in about
    assert describe("collect/reward/energy/Maze") == describe("val/return/Maze")
