"""Every logged metric is explained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loxodon.agents import Agent, BCAgent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder
from loxodon.tools.metrics import METRICS, describe, page

from ..experiment.fakes import make_experiment, metrics, run
from ..experiment.ppo.whole_runs import ppo_experiment

AXES = {"epoch", "env_steps", "gradient_steps"}
AGENTS = (Agent, BCAgent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent)


def names(run_dir: Path) -> set[str]:
    return {name for record in metrics(run_dir, with_time=True) for name in record} - AXES


def unexplained(found: set[str]) -> set[str]:
    """Names without an explanation, and names that only an environment could explain."""
    return {name for name in found if (about := describe(name)) is None or "info['metric/" in about}


def test_the_page_matches_the_code() -> None:
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    fix = "Fix: python -m loxodon.tools.metrics > docs/metrics.md"
    assert path.read_text(encoding="utf-8") == page(), fix


@pytest.mark.parametrize("kind", AGENTS)
def test_every_metric_of_an_off_policy_run_is_explained(tmp_path: Path, kind: Any) -> None:
    settings = {} if kind is BCAgent else {"training_discounts": (0.9,)}
    exp = run(
        make_experiment(
            tmp_path,
            epochs=1,
            agent_type=partial(kind, **settings),
            tstep_encoder_type=partial(FFTstepEncoder, d_hidden=16, d_output=8),
            traj_encoder_type=partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        )
    )
    found = names(exp.run_dir)
    assert unexplained(found) == set()
    assert {name.partition("/")[0] for name in found} == {
        "collect",
        "dataset",
        "time",
        "train",
        "train-update",
        "val",
    }
    assert kind is BCAgent or "train-update/q/0.9" in found


def test_every_metric_of_an_on_policy_run_is_explained(tmp_path: Path) -> None:
    exp = run(ppo_experiment(tmp_path, epochs=2))
    found = names(exp.run_dir)
    assert unexplained(found) == set()
    assert len([name for name in found if name.startswith("ppo/")]) > len(METRICS["ppo"][1]) / 2


def test_an_unknown_metric_has_no_explanation() -> None:
    assert describe("train/foo") is None
    assert describe("foo") is None
    assert describe("train-update/q/0.95") == describe("train-update/td_target/0.5")
