"""The samples of docs/scaling.md: commands parse, settings exist, figures are those of the preset."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import gin
import pytest

from loxodon.experiment import launch
from loxodon.experiment.cli import overrides, parse
from loxodon.experiment.config import load_config

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0] for line in re.findall(r"python (?:examples/run\.py|-m loxodon.*launch) .*", PAGE)
]
COMMANDS = [command.split("`")[0] for command in COMMANDS if "..." not in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_understood(command: str) -> None:
    words = shlex.split(command)[2:]
    if "launch" in command:
        args, words = launch.parser().parse_known_args(shlex.split(command)[3:])
        words += ["--actors", str(args.actors)]
    parsed = parse(words)
    try:
        assert load_config(parsed.config, overrides(parsed)).source.warnings == []
    finally:
        gin.clear_config()


def test_the_gin_sample_can_be_read() -> None:
    (sample,) = re.findall(r"```gin\n(.*?)```", PAGE, flags=re.DOTALL)
    try:
        gin.parse_config(sample, skip_unknown=False)
        assert gin.query_parameter("Experiment.replay_ratio") == 0.1
        assert gin.query_parameter("ReplayRatio.tolerance") == 0.2
    finally:
        gin.clear_config()


def test_the_pace_of_the_preset_is_as_the_page_says() -> None:
    try:
        load_config(["tmaze"])
        names = ("parallel_actors", "train_timesteps_per_epoch", "train_batches_per_epoch")
        actors, timesteps, updates = (gin.query_parameter(f"Experiment.{name}") for name in names)
    finally:
        gin.clear_config()
    assert (
        f"{updates} updates / ({actors} x {timesteps} env steps) = {updates / (actors * timesteps):.4f}"
        in PAGE
    )
