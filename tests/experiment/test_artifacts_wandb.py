"""Weights & Biases without a network: offline runs, disabled ones, and a server that is made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loxodon.experiment import Experiment
from loxodon.experiment.artifacts import RunAccess, WandbStore
from loxodon.experiment.artifacts.store import find_artifact

from .fakes import make_experiment, run

wandb = pytest.importorskip("wandb")
BLOCK, HEADER = 32768, 7  # bytes: a file of wandb is a log in LevelDB's format, behind 7 bytes of its own
SMALL: dict[str, Any] = {"epochs": 2, "ckpt_interval": 1, "train_batches_per_epoch": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home directory, and no settings of wandb but these."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # its service has the environment of its first use
    yield home
    wandb.teardown()


def records(path: Path) -> list[Any]:
    """What an offline run has recorded."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, found, parts, at = path.read_bytes(), [], b"", HEADER
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = pb.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def offline_records(exp: Experiment) -> list[Any]:
    """Of all offline runs of an experiment, in the order of their making."""
    wandb.teardown()  # its service may still be writing
    paths = sorted((exp.run_dir / "wandb_logs" / "wandb").glob("offline-run-*/*.wandb"), key=made_at)
    return [record for path in paths for record in records(path)]


def made_at(path: Path) -> int:
    return path.stat().st_ctime_ns


def history(found: list[Any]) -> list[dict[str, Any]]:
    rows = [r.history for r in found if r.HasField("history")]
    return [
        {"step": row.step.num}
        | {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in rows
    ]


def artifacts(found: list[Any]) -> list[Any]:
    requests = [r.request.log_artifact.artifact for r in found if r.request.HasField("log_artifact")]
    return [r.artifact for r in found if r.HasField("artifact")] + requests


def experiment(tmp_path: Path, **changes: Any) -> Experiment:
    settings = {"log_to_wandb": True, "wandb_project": "p", "artifact_store": WandbStore, **SMALL}
    return make_experiment(tmp_path / "runs", **{**settings, **changes})


def metrics(exp: Experiment) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_offline_run_records_figures_config_and_artifacts(tmp_path: Path, home: Path) -> None:
    exp = run(experiment(tmp_path))
    found = offline_records(exp)
    rows, lines = history(found), metrics(exp)
    assert [row["step"] for row in rows] == list(range(len(lines)))
    assert [row["env_steps"] for row in rows] == [line["env_steps"] for line in lines]
    assert [row.get("val/return") for row in rows] == [line.get("val/return") for line in lines]
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert axes["*"] == "env_steps"
    (config,) = [r.run.config for r in found if r.HasField("run")][:1]
    assert {"gin", "seed"} <= {item.key for item in config.update}
    logged = artifacts(found)
    states = [a for a in logged if a.name == "tiny-state"]
    assert states
    assert {a.type for a in states} == {"training-state"}
    assert list(states[-1].aliases) == ["latest"]
    names = {entry.path for entry in states[-1].manifest.contents}
    assert {"config.txt", "training_state/COMPLETE", "training_state/model.safetensors"} <= names
    assert json.loads(states[-1].metadata)["loxodon_name"] == "tiny/state"
    assert all(Path(entry.local_path).is_file() for entry in states[-1].manifest.contents)
    policies = [a for a in logged if a.name == "tiny-policy"]
    assert policies
    assert (policies[-1].type, set(policies[-1].aliases)) == ("model", {"best", "latest"})  # W&B adds one
    assert list(home.iterdir()) == []  # everything of wandb is in the run folder
    assert not Path("wandb").exists()
    assert not [name for name in os.environ if name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")]


@pytest.mark.slow
def test_without_a_login_the_run_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    exp = experiment(tmp_path, artifact_store=None)
    exp.start()
    with pytest.raises(ValueError, match=r"did not start: .*Fix: `wandb login`, or set WANDB_MODE=offline"):
        exp.learn()
    exp.close()


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.slow
def test_a_killed_run_goes_on_under_its_id_without_a_step_back_or_twice(tmp_path: Path) -> None:
    first = experiment(tmp_path, epochs=4, ckpt_interval=2)
    first.start()
    update = first.learner.update

    def dying(*args: Any) -> Any:
        if first.epoch == 3:
            raise KilledError
        return update(*args)

    first.learner.update = dying  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        first.learn()
    num_before, run_id = len(metrics(first)), first.metric_logger.state_dict()["wandb_id"]
    first.metric_logger.start_wandb().finish()
    second = experiment(tmp_path, epochs=4, ckpt_interval=2)
    second.start()
    assert second.load_checkpoint() == 2
    second.learn()
    assert second.metric_logger.state_dict()["wandb_id"] == run_id
    second.close()
    found = offline_records(second)
    assert {r.run.run_id for r in found if r.HasField("run")} == {run_id}
    rows, lines = history(found), metrics(second)
    assert len(lines) > num_before
    assert [row["step"] for row in rows] == list(range(len(lines)))
    assert [row["env_steps"] for row in rows] == [line["env_steps"] for line in lines]
    assert [row.get("val/return") for row in rows] == [line.get("val/return") for line in lines]


@pytest.mark.slow
def test_the_store_works_without_logging_and_the_figures_stay_here(tmp_path: Path) -> None:
    exp = run(experiment(tmp_path, log_to_wandb=False))
    found = offline_records(exp)
    assert history(found) == []
    assert {a.name for a in artifacts(found)} == {"tiny-state", "tiny-policy"}


@pytest.mark.slow
def test_disabled_means_that_nothing_is_written(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    exp = run(experiment(tmp_path))
    assert [path.name for path in (exp.run_dir / "wandb_logs").iterdir()] in ([], ["progress.json"])
    assert list(home.iterdir()) == []
    assert "could not be stored" not in caplog.text


@pytest.mark.slow
def test_nothing_of_wandb_is_imported_unless_it_is_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.path.insert(0, {folder!r})\nfrom fakes import make_experiment, run\n"
        "from loxodon.experiment.artifacts import FolderStore\n"
        "from pathlib import Path\n"
        "run(make_experiment(Path({out!r}), artifact_store=lambda: FolderStore({out!r})))\n"
        "assert 'wandb' not in sys.modules\n"
    ).format(folder=str(Path(__file__).parent), out=str(tmp_path / "out"))
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- fetching -----------------------------------------------------------------------------------------


class FakeArtifact:
    def __init__(self, server: FakeServer, version: str, aliases: list[str], name: str) -> None:
        self.server, self.version, self.aliases = server, version, [*aliases, version]
        self.metadata = {"epoch": int(version[1:]), "loxodon_name": name}

    def download(self, root: str) -> str:
        self.server.num_downloads += 1
        return str(shutil.copytree(self.server.files, root))


class FakeServer:
    """Stands for wandb.Api(): a project with states of the run `base`, newest first as wandb lists them."""

    def __init__(self, files: Path) -> None:
        self.files, self.num_downloads = files, 0
        names = {"base-state": "base/state", "base-policy": "base/policy"}
        self.collections = {
            f"me/p/{collection}": [
                FakeArtifact(self, "v1", ["latest", "best"] if "policy" in name else ["latest"], name),
                FakeArtifact(self, "v0", [], name),
            ]
            for collection, name in names.items()
        }

    def artifact(self, path: str) -> FakeArtifact:
        collection, _, wanted = path.partition(":")
        for artifact in self.collections.get(collection, []):
            if wanted in artifact.aliases:
                return artifact
        raise wandb.errors.CommError(f"artifact '{path}' not found")

    def artifact_collection_exists(self, name: str, type_name: str) -> bool:
        return name in self.collections

    def artifacts(self, type_name: str, name: str) -> list[FakeArtifact]:
        return self.collections[name]

    def artifact_collections(self, project: str, type_name: str) -> list[Any]:
        what = {"training-state": "state", "model": "policy"}[type_name]
        assert project == "me/p"
        return [SimpleNamespace(name=path.split("/")[-1]) for path in self.collections if what in path]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    base = run(make_experiment(tmp_path / "base", run_name="base"))
    shutil.copytree(base.checkpoints.state_dir(1), tmp_path / "files" / "training_state")
    server = FakeServer(tmp_path / "files")
    monkeypatch.setattr(wandb, "Api", lambda: server)
    monkeypatch.setenv("WANDB_MODE", "online")
    return server


def attached(tmp_path: Path) -> WandbStore:
    def never() -> Any:
        raise AssertionError("fetching needs no run")

    store = WandbStore()
    store.attach(RunAccess(tmp_path / "runs" / "tiny", "tiny", "p", "me", never))
    return store


def test_short_references_are_found_on_the_server(tmp_path: Path, server: FakeServer) -> None:
    store = attached(tmp_path)
    assert find_artifact(store, "base:latest", "tiny").reference == "base/state:v1"
    assert find_artifact(store, "base:best", "tiny").reference == "base/policy:v1"
    infos = store.list()
    assert [(info.reference, info.aliases) for info in infos][:2] == [
        ("base/state:v0", ()),
        ("base/state:v1", ("latest",)),
    ]
    assert infos[0].metadata == {"epoch": 0}
    with pytest.raises(FileNotFoundError, match=r"Run 'bass' has none; runs that have some are base\. Fix:"):
        find_artifact(store, "bass:best", "tiny")


def test_a_version_is_downloaded_once_and_then_there_without_a_network(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = attached(tmp_path)
    fetched = store.get("base/state:latest", tmp_path / "one")
    assert (fetched / "training_state" / "COMPLETE").is_file()
    store.get("base/state:v1", tmp_path / "two")
    assert server.num_downloads == 1
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert find_artifact(store, "base:v1", "tiny").reference == "base/state:v1"
    store.get("base/state:v1", tmp_path / "three")
    assert server.num_downloads == 1
    with pytest.raises(RuntimeError, match=r"W&B is offline \(WANDB_MODE=offline\).*Fix: set WANDB_MODE=onl"):
        store.get("base/state:latest", tmp_path / "four")


def test_what_the_server_does_not_have_is_an_error_that_says_what_to_check(
    tmp_path: Path, server: FakeServer
) -> None:
    with pytest.raises(FileNotFoundError, match=r"W&B did not give artifact me/p/base-state:v9.*Fix: check"):
        attached(tmp_path).get("base/state:v9", tmp_path / "out")


def test_a_store_of_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serves no run yet.*Fix: set Experiment.artifact_store"):
        WandbStore().get("a/b:v0", tmp_path / "out")


def test_restoring_offline_what_was_never_downloaded_says_what_to_do(tmp_path: Path) -> None:
    exp = experiment(tmp_path, restore_from="base:best")
    with pytest.raises(RuntimeError, match=r"offline.*Fix: set WANDB_MODE=online"):
        exp.start()
    exp.close()


def test_a_run_begins_from_an_artifact_of_the_server(tmp_path: Path, server: FakeServer) -> None:
    exp = experiment(tmp_path, log_to_wandb=False, wandb_entity="me", restore_from="base:latest")
    exp.start()
    assert exp.epoch == 2
    assert exp.metric_logger.state_dict()["wandb_id"] is None
    exp.close()


def test_names_wandb_would_refuse_are_changed_for_it_and_kept_in_the_metadata(tmp_path: Path) -> None:
    exp = experiment(tmp_path, run_name="my run", epochs=1)
    run(exp)
    (state, *_) = [a for a in artifacts(offline_records(exp)) if a.name == "my-run-state"]
    assert json.loads(state.metadata)["loxodon_name"] == "my run/state"
