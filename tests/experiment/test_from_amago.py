"""docs/from_amago.md: its sample runs, and every name of ours in its tables exists."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon import agents, data, envs, nets
from loxodon import experiment as package
from loxodon.experiment import CheckpointManager, Collector, Experiment, Learner
from loxodon.experiment.cli import parse

from .test_experiment import DEFAULTS, REQUIRED, records

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from_amago.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*?) \| .*\|$", PAGE, flags=re.MULTILINE)
OURS = [text for _, cell in ROWS for text in re.findall(r"`([^`]+)`", cell)]
SMALL = (
    "include 'tmaze.gin'\nExperiment.test_run = True\nExperiment.log_interval = 1\nTMazePassive.horizon = 5\n"
)


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The run of the page's sample."""
    folder = tmp_path_factory.mktemp("amago")
    (folder / "my.gin").write_text(f"{SMALL}Experiment.ckpt_base_dir = '{folder}'\n", encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    defined: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, defined)
    yield defined["experiment"]
    gin.clear_config()


def exists(name: str, exp: Any) -> bool:
    """Whether there is such an option, file, figure, class, function, setting or attribute."""
    name = name.split(" = ", maxsplit=1)[0]
    if name.startswith("--"):
        return re.search(rf"{name}\b", options()) is not None
    if "/" in name or "*" in name:
        pattern = re.sub(r"<\w+>", "*", name)
        return any(exp.run_dir.glob(pattern)) or pattern in figures(exp)
    owner, _, attribute = name.partition(".")
    found = [getattr(part, owner) for part in (agents, data, envs, nets, package) if hasattr(part, owner)]
    if not attribute:
        return bool(found) or name in figures(exp)
    alive = {
        Experiment: exp,
        Learner: exp.learner,
        Collector: exp.collector,
        CheckpointManager: exp.checkpoints,
    }
    return any(
        hasattr(alive.get(kind, kind), attribute)
        or attribute in inspect.signature(kind).parameters
        or attribute in getattr(kind, "__annotations__", {})
        for kind in found
    )


def options() -> str:
    """The help text of examples/run.py."""
    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
        parse(["--help"])
    return text.getvalue()


def figures(exp: Any) -> set[str]:
    """Names in the log, and with `*` for an environment's."""
    names = {name for one in records(exp, with_time=True) for name in one}
    return names | {name.replace("TMazePassive", "*") for name in names}


def test_the_sample_is_a_run_with_the_settings_of_the_file(exp: Any) -> None:
    assert type(exp).__name__ == "MyExperiment"
    assert exp.learner.edits_masks
    assert exp.learner.gradient_steps > 0


def test_every_name_on_our_side_exists(exp: Any) -> None:
    assert len(OURS) > 200
    assert [name for name in OURS if not exists(name, exp)] == []
    assert not exists("Agent.gama", exp)
    assert not exists("val/retrun", exp)


def test_every_row_has_a_name_or_a_reason() -> None:
    for theirs, ours in ROWS:
        assert ours == "here" or set(ours) <= {"-"} or "`" in ours or ours.startswith("not here, because "), (
            theirs
        )


def test_every_field_of_amago_is_named() -> None:
    (fields,) = re.findall(r"unless a remark says otherwise\):\n(.*?)\.\n\n", PAGE, flags=re.DOTALL)
    assert re.findall(r"`(\w+)`", fields) == [*REQUIRED, *DEFAULTS]
