"""What a run stores as artifacts, and how another one, or the same, begins from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gin
import pytest
import torch
from safetensors.torch import load_file

from loxodon.experiment import Experiment
from loxodon.experiment.artifacts import ArtifactStore, FolderStore
from loxodon.experiment.config import load_config

from .fakes import make_experiment, run


def with_store(tmp_path: Path, **changes: Any) -> Experiment:
    changes = {"artifact_store": lambda: FolderStore(str(tmp_path / "store")), "epochs": 2, **changes}
    return make_experiment(tmp_path / "runs", **{"ckpt_interval": 1, **changes})


def store_of(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "store"))


def weights(exp: Experiment) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in exp.policy.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_checkpoints_and_the_best_policy_become_artifacts(tmp_path: Path) -> None:
    exp = run(with_store(tmp_path, epochs=3))
    store = store_of(tmp_path)
    state = store.get("tiny/state:latest", tmp_path / "state")
    assert sorted(path.name for path in state.iterdir()) == ["config.txt", "training_state"]
    own = exp.checkpoints.state_dir(2)
    for path in own.iterdir():
        assert (state / "training_state" / path.name).read_bytes() == path.read_bytes()
    best = store.get("tiny/policy:best", tmp_path / "best")
    assert sorted(path.name for path in best.iterdir()) == ["config.txt", "policy.safetensors"]
    assert (best / "policy.safetensors").read_bytes() == exp.checkpoints.best_path.read_bytes()
    newest = next(info for info in store.list("tiny") if "latest" in info.aliases)
    facts = {"what": "state", "run": "tiny", "seed": 7, "epoch": 3, "checkpoint_epoch": 2, "env_steps": 108}
    assert {name: newest.metadata[name] for name in facts} == facts
    assert newest.metadata["best_score"] == exp.best_score
    assert not list((exp.checkpoints.root / "artifacts_pending").iterdir())


def test_pruned_checkpoints_are_stored_all_the_same(tmp_path: Path) -> None:
    exp = run(with_store(tmp_path, epochs=4, keep_checkpoints=1))
    assert exp.checkpoints.complete_epochs() == [3]
    store_of(tmp_path).get("tiny/state:latest", tmp_path / "out")


def test_a_store_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain = run(make_experiment(tmp_path / "plain", epochs=2, ckpt_interval=1))
    stored = run(with_store(tmp_path))
    assert_equal(weights(plain), weights(stored))


def test_a_run_whose_store_fails_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("not a folder")
    exp = run(with_store(tmp_path))
    assert exp.checkpoints.complete_epochs() == [0, 1]
    texts = [r.getMessage() for r in caplog.records if "The run goes on" in r.getMessage()]
    assert len(texts) == 2  # one for states, one for policies
    (tmp_path / "store").unlink()
    again = with_store(tmp_path, epochs=3)
    again.start()
    again.load_checkpoint()
    again.learn()
    again.close()
    assert [info.reference for info in store_of(tmp_path).list("tiny") if info.aliases]
    assert list((again.checkpoints.root / "artifacts_pending").iterdir()) == []


def test_latest_goes_on_exactly_on_a_machine_that_has_nothing_but_the_store(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_timesteps_per_epoch": 0, "exact_resume": True}
    whole = run(with_store(tmp_path / "whole", epochs=4, **settings))
    run(with_store(tmp_path, epochs=2, **settings))
    second = with_store(tmp_path, epochs=4, restore_from="latest", **settings)
    second.ckpt_base_dir = str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "buffer").rename(tmp_path / "elsewhere" / "tiny" / "buffer")
    second.start()
    assert (second.epoch, second.env_steps) == (2, 72)
    second.learn()
    second.close()
    assert_equal(weights(second), weights(whole))
    assert not (second.checkpoints.root / "restored").exists()


def test_a_new_run_begins_from_the_best_weights_of_a_base_run(tmp_path: Path) -> None:
    base = run(with_store(tmp_path, run_name="base"))
    exp = with_store(tmp_path, restore_from="base:best")
    exp.start()
    assert_equal(weights(exp), load_file(base.checkpoints.best_path))
    assert (exp.epoch, exp.env_steps, exp.learner.gradient_steps) == (0, 0, 0)
    exp.close()


def test_a_training_state_of_a_base_run_begins_a_branch(tmp_path: Path) -> None:
    base = run(with_store(tmp_path, run_name="base"))
    before = {path: path.read_bytes() for path in base.run_dir.rglob("*") if path.is_file()}
    exp = with_store(tmp_path, epochs=4, restore_from="base:v1")
    exp.start()
    assert (exp.epoch, exp.env_steps, exp.best_score) == (2, 72, None)
    assert exp.learner.gradient_steps == base.learner.gradient_steps
    assert_equal(weights(exp), weights(base))
    assert exp.metric_logger.state_dict() == {"metrics_bytes": 0, "num_records": 0, "wandb_id": None}
    exp.learn()
    exp.close()
    assert exp.epoch == 4
    assert exp.checkpoints.best_path.exists()
    lines = (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["epoch"] == 2
    assert {path: path.read_bytes() for path in before} == before


def test_a_branch_keeps_the_trajectories_it_was_given(tmp_path: Path) -> None:
    """Resuming sets aside what came after the checkpoint; to a branch that means nothing."""
    run(with_store(tmp_path, run_name="base"))
    other = run(make_experiment(tmp_path / "runs", run_name="other"))
    buffer = other.run_dir / "buffer" / "fifo"
    before = sorted(path.name for path in buffer.iterdir())
    exp = with_store(tmp_path, epochs=4, run_name="other", restore_from="base:latest")
    exp.start()
    assert sorted(path.name for path in buffer.iterdir()) == before
    exp.close()


@pytest.mark.parametrize("kind", ["checkpoint", "artifact", "weights", "policy artifact"])
def test_paths_are_taken_as_they_are(tmp_path: Path, kind: str) -> None:
    base = run(with_store(tmp_path, run_name="base"))
    store = store_of(tmp_path).root / "base"
    path = {
        "checkpoint": base.checkpoints.state_dir(1),
        "artifact": store / "state" / "v1",
        "weights": base.checkpoints.weights_dir / "policy_epoch_1.safetensors",
        "policy artifact": store / "policy" / "v0",
    }[kind]
    exp = make_experiment(tmp_path / "runs", epochs=4, restore_from=str(path))
    exp.start()
    assert exp.epoch == (2 if kind in ("checkpoint", "artifact") else 0)
    if kind != "policy artifact":
        assert_equal(weights(exp), weights(base))
    exp.close()


def test_unknown_references_and_paths_say_what_there_is(tmp_path: Path) -> None:
    run(with_store(tmp_path, run_name="base"))
    for reference, text in [
        (
            "base:v9",
            r"'base:v9'\. Run 'base' has base/policy:v0.*base/state:v1 \(latest\)\. Fix:",
        ),
        ("bass:best", r"Run 'bass' has none; runs that have some are base\. Fix:"),
        ("latest", r"Run 'tiny' has none; runs that have some are base\. Fix:"),
        ("./nowhere", r"nowhere does not exist\. Fix: name a checkpoint's folder"),
        (str(tmp_path), r"holds neither a training state nor policy\.safetensors, but: runs, store\. Fix:"),
    ]:
        exp = with_store(tmp_path, restore_from=reference)
        with pytest.raises(FileNotFoundError, match=text):
            exp.start()
        exp.close()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"restore_from": "base:best"}, ValueError, r"has no store.*Fix: set Experiment.artifact_store"),
        ({"restore_from": 3}, TypeError, r"restore_from is 3.*Fix: set it to"),
        ({"artifact_store": FolderStore("x")}, TypeError, r"must be what makes a store.*Fix:.*@FolderStore"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_experiment(tmp_path, **changes)


def test_a_collecting_process_has_no_store_and_restores_nothing(tmp_path: Path) -> None:
    exp = with_store(tmp_path, mode="collect", restore_from="nobody:best")
    exp.start()
    exp.close()
    assert exp.artifacts.store is None
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["FolderStore", "WandbStore"])
def test_gin_chooses_the_store(name: str) -> None:
    root = ["FolderStore.root='somewhere'"] if name == "FolderStore" else []
    load_config(["tmaze"], [f"Experiment.artifact_store=@{name}", *root])
    store = gin.query_parameter("Experiment.artifact_store").scoped_configurable_fn()
    assert isinstance(store, ArtifactStore)
    gin.clear_config()
