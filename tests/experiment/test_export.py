"""`loxodon export`: a folder that is a policy with its model card; nothing leaves the machine unasked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import numpy as np
import pytest

from loxodon.experiment import Experiment, evaluate, load_policy
from loxodon.experiment.config import load_config
from loxodon.experiment.export import main

from .fakes import TINY, run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a finished run that was evaluated."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.gin").write_text(TINY)
    load_config(["tiny.gin"], ["Experiment.verbose=False", "Experiment.seed=4"])
    folder = run(Experiment()).run_dir  # type: ignore[call-arg]  # gin supplies the arguments
    gin.clear_config()
    assert evaluate.main([str(folder), "--episodes", "4", "--context", "2,full"]) == 0
    return folder


def test_the_folder_is_all_that_others_need(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # nobody looks for it
    (run_dir / "videos").mkdir()
    (run_dir / "videos" / "best-episode-0.mp4").write_bytes(b"film")
    assert main([str(run_dir), "-o", "out", "--license", "mit"]) == 0
    names = ["README.md", "config.gin", "policy.safetensors", "replay.mp4"]
    assert sorted(path.name for path in Path("out").iterdir()) == names
    _, front, card = Path("out/README.md").read_text().split("---\n", 2)
    values = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in front.splitlines()}
    assert values["library_name"] == "loxodon"
    assert values["license"] == "mit"
    assert {"reinforcement-learning", "TMazePassive"} <= set(values["tags"])
    ((result,), *_) = [one["results"] for one in values["model-index"]]
    (report,) = (run_dir / "evaluations").glob("*.json")
    _, full = json.loads(report.read_text())["results"]
    assert result["dataset"]["name"] == "TMazePassive"
    assert result["metrics"][0]["type"] == "mean_reward"
    assert result["metrics"][0]["value"].startswith(f"{np.mean(full['returns']):.2f} +/- ")
    for part in ("Agent, FFTstepEncoder, FFTrajEncoder", "| greedy | last 2 | TMazePassive |", "[A recorded"):
        assert part in card
    assert "loxodon run --config config.gin --seed 4" in card
    assert load_config(["out/config.gin"]).source.warnings == []
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir("out")
    found: dict[str, Any] = {"obs": np.zeros(3, np.float32)}
    exec(code, found)
    assert found["policy"].action_space.contains(found["action"])


def test_it_is_uploaded_on_request_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class HfApi:
        def create_repo(self, name: str, exist_ok: bool) -> None:
            calls.append(name)
            if "/" not in name:
                raise OSError("no such user")

        def upload_folder(self, repo_id: str, folder_path: Path) -> str:
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))
            return f"https://hub/{repo_id}"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=HfApi))
    assert main([str(run_dir), "-o", "out"]) == 0
    assert calls == []
    assert main([str(run_dir), "-o", "out", "--push", "me/tiny"]) == 0
    assert calls == ["me/tiny", ("me/tiny", ["README.md", "config.gin", "policy.safetensors"])]
    assert 'hf_hub_download("me/tiny", "policy.safetensors")' in Path("out/README.md").read_text()
    assert main([str(run_dir), "-o", "out", "--push", "tiny"]) == 1
    assert (
        "out is complete, but could not be uploaded to tiny: no such user. Fix: " in capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main([str(run_dir), "-o", "other", "--push", "me/tiny"]) == 1
    assert "Fix: pip install huggingface_hub" in capsys.readouterr().err
    assert not Path("other").exists()
    assert load_policy("out/policy.safetensors").info.epoch == load_policy(run_dir).info.epoch
