"""The scripts in examples/ run unchanged, with tiny settings, and each fits on a screen."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import gin
import pytest

from loxodon.experiment import load_policy
from loxodon.tools.run import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DOCS = EXAMPLES.with_name("docs")
TINY = [
    f"Experiment.{setting}"
    for setting in (
        "epochs=1",
        "train_batches_per_epoch=1",
        "parallel_actors=2",
        "start_learning_at_epoch=0",
        "train_timesteps_per_epoch=22",
        "val_timesteps_per_epoch=22",
        "stop_at_val_return=None",
        "verbose=False",
    )
] + ["MetricLogger.tensorboard=False"]
PPO = [*TINY, "PPOLearner.minibatches=1", "Experiment.max_seq_len=22"]
OFFLINE = [*TINY, "Experiment.train_timesteps_per_epoch=0", "Experiment.val_timesteps_per_epoch=500"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.parametrize(
    ("name", "words", "run"),
    [
        ("own_env", TINY, "own-env"),
        ("own_encoder", TINY, "own-encoder"),
        ("own_memory", PPO, "own-memory"),
        ("own_agent", TINY, "own-agent"),
        ("own_sampler", TINY, "own-sampler"),
        ("next_observation", TINY, "next-observation"),
        ("offline", OFFLINE, "offline"),
        ("from_python", ["1"], "from-python"),
        ("act", ["runs/base"], "base"),
        ("run", ["--config", "tmaze", "HORIZON=10", *TINY], "tmaze"),
    ],
)
def test_an_example_runs(name: str, words: list[str], run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "act":
        assert main(["--config", "ppo/cartpole", "--run-name", "base", *PPO]) == 0
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *words])
    ends = (
        contextlib.nullcontext()
        if name in ("act", "from_python")
        else pytest.raises(SystemExit, match=r"^0$")
    )
    with gin.unlock_config(), ends:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert Path(f"runs/{run}/ckpts/latest/policy.safetensors").exists()
    if name == "next_observation":
        assert '"train-update/next_obs_loss"' in Path(f"runs/{run}/logs/metrics.jsonl").read_text("utf-8")
        # the discounts that the preset gives to Agent
        assert len(load_policy(f"runs/{run}").agent.discounts) == 4


def test_pages_show_the_examples_as_they_are() -> None:
    embed = runpy.run_path(str(DOCS / "embed.py"))
    pages = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    shown = {name for text in pages.values() for name, _ in embed["BLOCK"].findall(text)}
    assert shown == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")} - {"examples/run.py"}
    stale = [name for name, text in pages.items() if embed["embedded"](text) != text]
    assert stale == [], "Fix: python docs/embed.py"
    assert [name for name, text in pages.items() if "--8<--" in text] == []


def test_all_examples_are_tested_and_short() -> None:
    (mark,) = [mark for mark in test_an_example_runs.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    lines = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in EXAMPLES.glob("*.py")}
    assert set(lines) == {name for name, *_ in mark.args[1]}
    assert [name for name, text in lines.items() if len([line for line in text if line.strip()]) >= 40] == []
