"""Weights & Biases without a network: offline and disabled runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment import Experiment
from loxodon.experiment.artifacts import WandbStore

from .fakes import KilledError, make_experiment, metrics, run

BLOCK, HEADER = 32768, 7  # bytes; a file of wandb is a log in LevelDB's format behind a header of 7 bytes
SMALL: dict[str, Any] = {"epochs": 2, "ckpt_interval": 1, "train_batches_per_epoch": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home directory, with no wandb settings except these."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb replaces it
    wandb.teardown()  # its service keeps the environment of its first use
    yield home
    wandb.teardown()


def records(path: Path) -> list[Any]:
    """The records of an offline run."""
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
    """The records of all offline runs of an experiment, in order of creation."""
    import wandb

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
    settings = {"log_to_wandb": True, "wandb_project": "p", "Artifacts.store": WandbStore, **SMALL}
    return make_experiment(tmp_path / "runs", **{**settings, **changes})


@pytest.mark.slow
def test_an_offline_run_records_metrics_config_and_artifacts(tmp_path: Path, home: Path) -> None:
    exp = run(experiment(tmp_path, run_name="my run", wandb_entity="e", wandb_group_name="g"))
    found = offline_records(exp)
    rows, lines = history(found), metrics(exp.run_dir)
    assert [row["step"] for row in rows] == list(range(len(lines)))
    assert [row["env_steps"] for row in rows] == [line["env_steps"] for line in lines]
    assert [row.get("val/return") for row in rows] == [line.get("val/return") for line in lines]
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert axes["*"] == "env_steps"
    about = next(r.run for r in found if r.HasField("run"))
    assert {"gin", "seed"} <= {item.key for item in about.config.update}
    assert (about.project, about.entity, about.run_group, about.display_name) == ("p", "e", "g", "my run")
    logged = artifacts(found)
    states = [a for a in logged if a.name == "my-run-state"]
    assert states
    assert {a.type for a in states} == {"training-state"}
    assert list(states[-1].aliases) == ["latest"]
    names = {entry.path for entry in states[-1].manifest.contents}
    assert {"config.txt", "training_state/COMPLETE", "training_state/model.safetensors"} <= names
    assert json.loads(states[-1].metadata)["loxodon_name"] == "my run/state"
    assert all(Path(entry.local_path).is_file() for entry in states[-1].manifest.contents)
    policies = [a for a in logged if a.name == "my-run-policy"]
    assert policies
    # W&B adds the alias `latest`
    assert (policies[-1].type, set(policies[-1].aliases)) == ("model", {"best", "latest"})
    assert list(home.iterdir()) == []  # all files of wandb are in the run folder
    assert not Path("wandb").exists()
    assert not [name for name in os.environ if name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")]


@pytest.mark.slow
def test_a_run_without_a_login_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    exp = experiment(tmp_path, **{"Artifacts.store": None})
    exp.start()
    with pytest.raises(ValueError, match=r"did not start: .*Fix: run `wandb login`, set WANDB_MODE=offline"):
        exp.learn()
    exp.close()


@pytest.mark.slow
def test_a_killed_run_continues_under_its_id_and_repeats_records_at_their_env_steps(tmp_path: Path) -> None:
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
    num_before, run_id = len(metrics(first.run_dir)), first.metric_logger.state_dict()["wandb_id"]
    num_kept = first.checkpoints.read(first.checkpoints.state_dir(1)).shared["logs"]["num_records"]
    first.metric_logger.start_wandb().finish()
    second = experiment(tmp_path, epochs=4, ckpt_interval=2)
    second.start()
    assert second.load_checkpoint() == 2
    second.learn()
    assert second.metric_logger.state_dict()["wandb_id"] == run_id
    second.close()
    found = offline_records(second)
    assert {r.run.run_id for r in found if r.HasField("run")} == {run_id}
    rows, lines = history(found), metrics(second.run_dir)
    repeated = num_before - num_kept
    assert repeated > 0
    assert [row["step"] for row in rows] == [*range(num_before), *range(num_kept, len(lines))]
    sent = [(row["env_steps"], row.get("val/return")) for row in rows]
    kept = [(line["env_steps"], line.get("val/return")) for line in lines]
    assert sent == [*kept[:num_before], *kept[num_kept:]]


@pytest.mark.slow
def test_the_store_works_without_logging_and_metrics_stay_local(tmp_path: Path) -> None:
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
    assert [path.name for path in (exp.run_dir / "wandb_logs").iterdir()] == []
    assert list(home.iterdir()) == []
    assert "could not be stored" not in caplog.text


def test_fetching_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    exp = experiment(tmp_path, restore_from="other:best")
    with pytest.raises(
        RuntimeError, match=r"W&B is offline \(WANDB_MODE=offline\).*Fix: set WANDB_MODE=online"
    ):
        exp.start()
    exp.close()
