"""The samples of docs/lifecycle.md run, and it names every hook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.experiment import Callback, Experiment
from loxodon.experiment.callbacks import HOOKS, CallbackList

from .fakes import make_experiment, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")


def samples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def callback_type() -> Any:
    """What the Python sample defines; gin takes a name only once."""
    defined: dict[str, Any] = {"__name__": "lifecycle_sample"}
    (code,) = samples("python")
    with gin.unlock_config():
        exec(code, defined)
    return defined["StopWhenSolved"]


@pytest.fixture(autouse=True)
def _no_config_left() -> Iterator[None]:
    yield
    gin.clear_config()


def test_the_callback_of_the_page_stops_a_run_and_keeps_its_state(tmp_path: Path, callback_type: Any) -> None:
    made = callback_type(success=-1e9, times=2)
    exp = run(make_experiment(tmp_path, epochs=9, callbacks=[made]))
    assert (exp.epoch, exp.is_finished, made.in_a_row) == (2, False, 2)
    other = callback_type()
    again = make_experiment(tmp_path, epochs=9, callbacks=[other])
    again.start()
    again.load_checkpoint()
    assert other.in_a_row == 2
    again.close()


def test_the_gin_of_the_page_is_understood(tmp_path: Path, callback_type: Any) -> None:
    assert issubclass(callback_type, Callback)
    with gin.unlock_config():
        gin.parse_config("\n".join(samples("gin")))
    makers, shaper = map(gin.query_parameter, ("Experiment.callbacks", "RewardShaping.shaper"))
    exp = make_experiment(tmp_path)
    stop, curriculum = CallbackList(exp, [maker.scoped_configurable_fn for maker in makers]).callbacks
    assert isinstance(exp, Experiment)
    assert (vars(stop)["times"], vars(curriculum)["end"]) == (2, 500)
    assert vars(shaper.scoped_configurable_fn())["high"] == 1.0


def test_the_page_names_every_hook() -> None:
    assert [hook for hook in HOOKS if f"`{hook}`" not in PAGE] == []
