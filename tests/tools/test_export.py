"""`loxodon export`: a folder with the policy and its model card; uploads only on request."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import numpy as np
import pytest

from loxodon.experiment import Experiment, load_policy
from loxodon.experiment.config import load_config
from loxodon.tools import evaluate
from loxodon.tools.export import _of_epoch, main

from ..experiment.broken_files import BROKEN
from ..experiment.fakes import TINY, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that has been evaluated."""
    place = tmp_path_factory.mktemp("finished")
    (place / "tiny.gin").write_text(TINY)
    changes = ["Experiment.verbose=False", "Experiment.seed=4", f"Experiment.ckpt_base_dir='{place}'"]
    load_config([str(place / "tiny.gin")], changes)
    folder = run(Experiment()).run_dir  # type: ignore[call-arg]  # gin supplies the arguments
    gin.clear_config()
    assert evaluate.main([str(folder), "--episodes", "4", "--context", "2,full"]) == 0
    gin.clear_config()
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run for tests that change it, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(finished, Path("runs/tiny"))


def test_the_folder_contains_everything_that_others_need(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # the package is not needed
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


def test_the_folder_is_uploaded_only_on_request(
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
    assert "Fix: pip install 'huggingface_hub'" in capsys.readouterr().err
    assert not Path("other").exists()
    assert load_policy("out/policy.safetensors").info.epoch == load_policy(run_dir).info.epoch


# ---- results of the exported policy only ----


def test_the_card_of_a_run_with_environments_from_python_has_no_command(run_dir: Path) -> None:
    config = run_dir / "ckpts" / "config.txt"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "make_train_env" not in line))
    assert main([str(run_dir), "-o", "out"]) == 0
    card = Path("out/README.md").read_text()
    assert "loxodon run --config" not in card
    assert "A Python program passed the environments" in card


def test_the_card_has_no_results_of_other_policies(run_dir: Path) -> None:
    assert evaluate.main([str(run_dir), "--policy", "latest", "--episodes", "3"]) == 0
    (best,) = (run_dir / "evaluations").glob("best-*.json")
    (latest,) = (run_dir / "evaluations").glob("latest-*.json")
    of_latest = json.loads(latest.read_text())
    of_latest["results"][0]["returns"] = [777.0] * 3
    latest.write_text(json.dumps(of_latest))
    of_earlier = {**json.loads(best.read_text()), "epoch": 99}
    of_earlier["results"][1]["returns"] = [888.0] * 4
    (run_dir / "evaluations" / "earlier.json").write_text(json.dumps(of_earlier))
    with (run_dir / "logs" / "metrics.jsonl").open("a") as file:  # an epoch after that of the best policy
        axes = {"epoch": 99, "env_steps": 10**6, "gradient_steps": 9}
        file.write(json.dumps({**axes, "val/return": 555.0, "val/return/TMazePassive": 555.0}) + "\n")
    assert main([str(run_dir), "-o", "out"]) == 0
    card = Path("out/README.md").read_text()
    assert "| greedy | full | TMazePassive |" in card
    assert not {"777", "888", "555"} & set(re.findall(r"[0-9]+", card))


# ---- files that are not what they seem ----

LINKED = (
    "ckpts/best/policy.safetensors",
    *("ckpts/config.txt", "ckpts/versions.json", "ckpts/best", "ckpts"),
    *("logs/metrics.jsonl", "logs", "evaluations", "evaluations/best-val-greedy.json"),
    *("videos/a.mp4", "videos/sub", "videos"),
)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_that_leaves_the_run_folder_is_refused_and_nothing_is_copied(
    run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / name
    if path.exists():
        shutil.move(path, "secret")
    else:
        Path("secret").write_text("secret")
        path.parent.mkdir(exist_ok=True)
    path.symlink_to(Path("secret").absolute())
    assert main([str(run_dir), "-o", "out"]) == 1
    error = capsys.readouterr().err
    assert "is a link out of runs/tiny to" in error
    assert name in error
    assert "Fix: " in error
    assert not Path("out").exists()


def test_links_that_stay_in_the_run_folder_are_followed(run_dir: Path) -> None:
    (run_dir / "ckpts").rename(run_dir / "kept")
    (run_dir / "ckpts").symlink_to("kept")
    (run_dir / "kept" / "best" / "policy.safetensors").unlink()
    (run_dir / "kept" / "best" / "policy.safetensors").symlink_to("../latest/policy.safetensors")
    Path("elsewhere").symlink_to(run_dir)
    assert main(["elsewhere", "-o", "out"]) == 0
    assert not Path("out/policy.safetensors").is_symlink()
    assert load_policy("out/policy.safetensors").info.is_final


def test_a_link_in_the_output_folder_is_replaced_or_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=object))
    Path("mine").write_text("mine")
    Path("out").mkdir()
    Path("out/config.gin").symlink_to(Path("mine").absolute())
    Path("out/more").symlink_to(Path("mine").absolute())
    assert main([str(run_dir), "-o", "out", "--push", "me/tiny"]) == 1
    assert "out/more is a link out of out" in capsys.readouterr().err
    assert Path("mine").read_text() == "mine"
    assert not Path("out/config.gin").is_symlink()


def test_broken_files_are_left_out_of_the_card_and_named(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_dir / "evaluations"
    for name, content in BROKEN.items():
        (folder / f"{name}.json").write_bytes(content)
    (folder / "folder.json").mkdir()
    (folder / "nowhere.json").symlink_to("nothing")
    os.mkfifo(folder / "pipe.json")
    (run_dir / "ckpts" / "versions.json").write_bytes(BROKEN["brackets"])
    (run_dir / "logs" / "metrics.jsonl").write_bytes(b"\n".join(BROKEN.values()))
    (run_dir / "videos" / "folder.mp4").mkdir(parents=True)
    assert main([str(run_dir), "-o", "out"]) == 0
    assert "| greedy | full | TMazePassive |" in Path("out/README.md").read_text()
    for name in (*BROKEN, "folder", "pipe"):
        assert f"{name}.json is unreadable" in caplog.text
    assert "versions.json is unreadable" in caplog.text
    assert "metrics.jsonl are skipped" in caplog.text


def test_results_of_an_offline_run_are_those_of_the_policy_s_epoch() -> None:
    points = [{"value": value, "epoch": epoch, "env_steps": 0.0} for value, epoch in ((1.0, 0.0), (2.0, 2.0))]
    assert _of_epoch({"val/return": points, "val/late": points[1:]}, 0) == {"val/return": points[:1]}
