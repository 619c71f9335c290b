"""The samples of docs/on_policy.md run; its tables are those of the code."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.agents import GAE, AdvantageNorm, PPOAgent, PPOLoss, RewardNormalizer
from loxodon.data import load_trajectory
from loxodon.experiment import Experiment
from loxodon.experiment.cli import overrides, parse
from loxodon.experiment.config import load_config
from loxodon.experiment.plots import PANELS
from loxodon.experiment.ppo import KLAdaptiveLR, PPOLearner
from loxodon.nets import RunningNorm

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "on_policy.md").read_text(encoding="utf-8")
TYPES = (PPOLearner, PPOAgent, PPOLoss, GAE, AdvantageNorm, RewardNormalizer, KLAdaptiveLR, RunningNorm)
TINY = (
    "Experiment.epochs = 1\nExperiment.train_timesteps_per_epoch = 16\n"
    "Experiment.val_timesteps_per_epoch = 0\n"
    "Experiment.parallel_actors = 4\nExperiment.max_seq_len = 8\nMetricLogger.tensorboard = False\n"
    "Experiment.verbose = False\nExperiment.torch_threads = 1\nExperiment.evaluate_at_end = False\n"
)


def samples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def _no_config_left() -> Iterator[None]:
    yield
    gin.clear_config()


def figures_of(run_dir: Path, *texts: str) -> dict[str, Any]:
    """Run a tiny PPO with some gin text on top; what it logged."""
    extra = run_dir / "extra.gin"
    extra.write_text("\n".join([*texts, TINY, f"Experiment.ckpt_base_dir = '{run_dir}'"]), encoding="utf-8")
    load_config(["ppo/cartpole", str(extra)])
    exp = Experiment()
    exp.start()
    exp.learn()
    lines = (exp.run_dir / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key: value for line in lines for key, value in json.loads(line).items()}


def test_the_table_of_settings_is_that_of_the_code() -> None:
    expected = {
        f"{kind.__name__}.{p.name}": getattr(p.default, "__name__", repr(p.default))
        for kind in TYPES
        for p in inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert dict(re.findall(r"^\| `(\w+\.\w+)` \| `([^`]+)` \|", PAGE, flags=re.MULTILINE)) == expected


def test_the_table_of_figures_is_what_a_run_logs(tmp_path: Path) -> None:
    found = figures_of(tmp_path, samples("gin")[0], "PPOAgent.share_encoder = True")
    drawn = {name for _, _, names in PANELS for name in names if name.startswith("ppo/")}
    assert drawn <= found.keys()
    rows = re.findall(r"^\| (`ppo/.*?) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(ppo/\w+)`", row)}
    assert {name for name in found if name.startswith("ppo/")} == named


def test_commands_are_understood() -> None:
    commands = re.findall(r"^python examples/run\.py .*$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        parsed = parse(shlex.split(command)[2:])
        load_config(parsed.config, overrides(parsed))  # refuses unknown names and files
        assert gin.query_parameter("Experiment.agent_type").selector == "PPOAgent"
        gin.clear_config()


def test_partial_observations_with_memory_agree_in_acting_and_training(tmp_path: Path) -> None:
    found = figures_of(tmp_path, samples("gin")[2])
    assert found["ppo/initial_logratio_abs_max"] < found["ppo/initial_logratio_rounding_max"]


def test_no_update_is_made_on_random_steps(tmp_path: Path) -> None:
    assert figures_of(tmp_path, samples("gin")[1])["ppo/updates"] == 0


def test_asymmetric_sample_names_settings() -> None:
    gin.parse_config(samples("gin")[3])
    assert gin.query_parameter("PPOAgent.critic_obs_keys") == ["observation", "secret"]


def test_trajectories_are_kept_with_an_output_of_its_own(tmp_path: Path) -> None:
    with gin.unlock_config():
        exec(samples("python")[0], {"__name__": "on_policy_sample"})
    figures_of(tmp_path, samples("gin")[4], "Experiment.agent_type = @SurprisedPPOAgent")
    files = [path for path in tmp_path.rglob("*.npz") if "ckpt" not in str(path)]
    assert files
    assert {"log_probs", "values", "surprise"} <= set(load_trajectory(files[0]).extras)


def test_two_rulers_of_the_learning_rate_are_refused(tmp_path: Path) -> None:
    schedule = "Experiment.lr_schedule = @ConstantSchedule()\nConstantSchedule.value = 0.5"
    with pytest.raises(ValueError, match=r"lr_schedule and PPOLearner\.lr_adapter.*Fix: set Experiment"):
        figures_of(tmp_path, schedule, "PPOLearner.lr_adapter = @KLAdaptiveLR")


def test_left_out_updates_are_counted(tmp_path: Path) -> None:
    assert figures_of(tmp_path, "Learner.bad_grad = 'skip'")["ppo/skipped_updates"] == 0
