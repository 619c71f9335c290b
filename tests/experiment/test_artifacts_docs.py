"""The samples of docs/artifacts.md run, and what it says of layout and references is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gin
import pytest

from loxodon.experiment.artifacts import FolderStore
from loxodon.experiment.artifacts.stores import find_artifact
from loxodon.experiment.checkpoint.start_from import is_path
from loxodon.experiment.config import load_config

from .fakes import make_experiment, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "artifacts.md").read_text(encoding="utf-8")


def samples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_samples() -> None:
    assert (len(samples("gin")), len(samples("python"))) == (3, 1)


@pytest.mark.parametrize("number", range(3))
def test_the_configs_of_the_page_are_sound(number: int, tmp_path: Path) -> None:
    text = samples("gin")[number]
    if "Artifacts.store" not in text:
        text += samples("gin")[0]
    path = tmp_path / "sample.gin"
    path.write_text(f"include 'tmaze.gin'\n{text}")
    assert "Artifacts.store" in load_config([str(path)]).text()
    gin.clear_config()


def test_the_layout_of_the_page_is_that_of_a_run(tmp_path: Path) -> None:
    run(
        make_experiment(
            tmp_path,
            run_name="my-run",
            **{"Artifacts.store": lambda: FolderStore(str(tmp_path / "artifacts"))},
        )
    )
    (layout,) = re.findall(r"```\n(artifacts/.*?)```", PAGE, flags=re.DOTALL)
    for what in ("state", "policy"):
        home = tmp_path / "artifacts" / "my-run" / what
        for path in (*(home / "v0").iterdir(), *home.glob("[!.]*")):
            assert path.name in layout, path


def test_the_references_of_the_page_are_understood(tmp_path: Path) -> None:
    store, file = FolderStore(str(tmp_path / "store")), tmp_path / "file"
    file.write_text("")
    for _ in range(4):
        for name in ("my-run/state", "base/state"):
            store.put(name, file, metadata={}, aliases=["latest"])
        store.put("base/policy", file, metadata={}, aliases=["best"])
    table = PAGE[PAGE.index("| value | meaning |") :]
    references = re.findall(r"^\| `'(.*?)'` \|", table, flags=re.MULTILINE)
    found = [find_artifact(store, one, "my-run").reference for one in references if not is_path(one)]
    assert found == [
        "my-run/state:v3",
        "my-run/state:v3",
        "base/policy:v3",
        "base/state:v3",
        "base/policy:v2",
    ]
    assert len(references) == 6


def test_the_store_of_the_page_serves_a_run(tmp_path: Path) -> None:
    defined: dict[str, Any] = {"__name__": "docs_sample"}
    with gin.unlock_config():
        exec(samples("python")[0], defined)

    def store() -> Any:
        return defined["NewestOnly"](root=str(tmp_path / "store"))

    base = run(make_experiment(tmp_path, run_name="base", **{"Artifacts.store": store}))
    exp = make_experiment(tmp_path, **{"Artifacts.store": store}, restore_from="base:latest", epochs=3)
    exp.start()
    assert exp.epoch == base.epoch
    exp.close()
