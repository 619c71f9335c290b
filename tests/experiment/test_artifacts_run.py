"""Artifacts that a run stores, failures and delays of the store, and runs that begin from artifacts."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loxodon.experiment import Experiment
from loxodon.experiment.artifacts import RunAccess, UrlStore
from loxodon.experiment.artifacts.upload import Uploads
from loxodon.experiment.checkpoint.store import find_files

from .fakes import make_experiment, run


def with_store(tmp_path: Path, **changes: Any) -> Experiment:
    changes = {"Artifacts.store": lambda: UrlStore(str(tmp_path / "store")), "epochs": 2, **changes}
    return make_experiment(tmp_path / "runs", **{"ckpt_interval": 1, **changes})


def store_of(tmp_path: Path) -> UrlStore:
    return UrlStore(str(tmp_path / "store"))


def weights(exp: Experiment) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in exp.policy.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_checkpoints_and_the_best_policy_become_artifacts_without_side_effects(tmp_path: Path) -> None:
    exp = run(with_store(tmp_path, epochs=3, **{"CheckpointManager.keep": 1}))
    plain = make_experiment(tmp_path / "plain", epochs=3, ckpt_interval=1, **{"Artifacts.store": None})
    assert_equal(weights(exp), weights(run(plain)))
    store = store_of(tmp_path)
    state = store.get("tiny/state:latest", tmp_path / "state")
    assert sorted(path.name for path in state.iterdir()) == ["config.txt", "training_state"]
    for path in exp.checkpoints.state_dir(2).iterdir():
        assert (state / "training_state" / path.name).read_bytes() == path.read_bytes()
    best = store.get("tiny/policy:best", tmp_path / "best")
    assert sorted(path.name for path in best.iterdir()) == ["config.txt", "policy.safetensors"]
    assert (best / "policy.safetensors").read_bytes() == exp.checkpoints.best_path.read_bytes()
    newest = next(info for info in store.list("tiny") if "latest" in info.aliases)
    facts = {"what": "state", "run": "tiny", "seed": 7, "epoch": 3, "checkpoint_epoch": 2, "env_steps": 108}
    assert {name: newest.metadata[name] for name in facts} == facts
    assert newest.metadata["best_score"] == exp.best_score
    assert not list((exp.checkpoints.root / "artifacts_pending").iterdir())


def test_a_run_whose_store_fails_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("not a folder")
    exp = run(with_store(tmp_path))
    assert exp.checkpoints.complete_epochs() == [0, 1]
    texts = [r.getMessage() for r in caplog.records if "The local checkpoint" in r.getMessage()]
    assert len(texts) == 2  # one for states, one for policies
    (tmp_path / "store").unlink()
    again = run(with_store(tmp_path, epochs=3), lambda exp: exp.load_checkpoint())
    assert [info.reference for info in store_of(tmp_path).list("tiny") if info.aliases]
    assert list((again.checkpoints.root / "artifacts_pending").iterdir()) == []


# --- uploads in the background --------------------------------------------------------------------------


class SlowStore(UrlStore):
    """Records uploads in a list; on request, it blocks at a gate or fails."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, str, int, list[str]]] = []
        self.error: Exception | None = None
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.gate.set()

    def __repr__(self) -> str:
        return "SlowStore"

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        self.has_begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        assert (files / "config.txt").exists()
        (content,) = (
            path.read_text() for path in files.rglob("*") if path.name in ("x", "policy.safetensors")
        )
        self.stored.append((name, content, metadata["i"], [*aliases]))
        return None


class Sender:
    """Uploads of small states and policies; their metadata count them."""

    def __init__(self, tmp_path: Path, store: SlowStore) -> None:
        self.source, self.i = tmp_path / "source", 0
        self.pending = tmp_path / "ckpts" / "artifacts_pending"
        access = RunAccess(tmp_path, "run", None, None, lambda: None)
        self.uploads = Uploads(access, lambda: {"i": self.i}, store=lambda: store)
        self.source.mkdir(exist_ok=True)

    def send(self, i: int, *, policy: bool = False) -> None:
        """Hand over a file and replace it at once, as runs do."""
        self.i = i
        path = self.source / "x"
        path.write_text(str(i))
        if policy:
            self.uploads.store_best(path)
        else:
            self.uploads.store_state(self.source, i)
        path.unlink()


def test_nothing_waits_for_the_store_and_only_the_newest_of_each_name_is_queued(tmp_path: Path) -> None:
    store = SlowStore()
    sender = Sender(tmp_path, store)
    store.gate.clear()
    sender.send(0)
    assert store.has_begun.wait(10)
    for i in (1, 2, 3):  # this would never return if it waited
        sender.send(i)
    sender.send(9, policy=True)
    store.gate.set()
    sender.uploads.close()
    states = [("run/state", str(i), i, ["latest"]) for i in (0, 3)]
    assert store.stored == [*states, ("run/policy", "9", 9, ["best"])]
    assert list(sender.pending.iterdir()) == []


def test_each_kind_of_error_gives_one_warning_and_uploads_are_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SlowStore()
    sender = Sender(tmp_path, store)
    errors: list[Exception] = [OSError("a"), OSError("b"), ValueError("c")]
    for store.error in errors:
        sender.send(1)
        sender.uploads.close()
    texts = [r.getMessage() for r in caplog.records if "The local checkpoint" in r.getMessage()]
    assert [text.partition(" The local")[0] for text in texts] == [
        "The artifact run/state could not be stored in SlowStore: OSError: a.",
        "The artifact run/state could not be stored in SlowStore: ValueError: c.",
    ]
    assert len(list(sender.pending.iterdir())) == 1
    store.error = None
    sender.send(2, policy=True)
    sender.uploads.close()
    assert [(name, i) for name, _, i, _ in store.stored] == [("run/state", 1), ("run/policy", 2)]


def test_a_success_does_not_repeat_the_warning_about_another_artifact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class PolicyStore(SlowStore):
        def put(self, name: str, files: Path, **how: Any) -> str | None:
            if name == "run/state":
                raise OSError("too large")
            return super().put(name, files, **how)

    sender = Sender(tmp_path, PolicyStore())
    for policy in (False, True, False):
        sender.send(1, policy=policy)
        sender.uploads.close()
    assert sum("too large" in r.getMessage() for r in caplog.records) == 1


def test_uploads_left_by_a_killed_or_hurried_process_are_stored_and_partial_ones_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loxodon.experiment.artifacts.upload._HURRY_S", 0.05)
    store, away = SlowStore(), SlowStore()
    store.gate.clear()
    away.error = OSError("away")
    one, two = Sender(tmp_path, store), Sender(tmp_path, away)
    one.send(1)
    one.uploads.close(is_urgent=True)  # this would never return if it waited for all
    assert "1 artifact(s) could not be stored in SlowStore yet" in caplog.text
    two.send(2)
    two.uploads.close()
    (one.pending / "00000000000000000009_state.7.tmp" / "files").mkdir(parents=True)
    later = SlowStore()
    Sender(tmp_path, later).uploads.close()
    assert [i for _, _, i, _ in later.stored] == [2]  # the newest
    assert list(one.pending.iterdir()) == []
    caplog.set_level(logging.CRITICAL)
    store.gate.set()
    one.uploads.close()


# --- runs that begin from artifacts ---------------------------------------------------------------------


def test_latest_continues_exactly_on_a_machine_that_has_only_the_store(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_timesteps_per_epoch": 0, "CheckpointManager.exact_resume": True}
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


def test_a_training_state_of_a_base_run_begins_a_branch_with_its_own_data(tmp_path: Path) -> None:
    base = run(with_store(tmp_path, run_name="base"))
    before = {path: path.read_bytes() for path in base.run_dir.rglob("*") if path.is_file()}
    buffer = run(make_experiment(tmp_path / "runs")).run_dir / "buffer" / "fifo"
    given = sorted(path.name for path in buffer.iterdir())
    exp = with_store(tmp_path, epochs=4, restore_from="base:v1")
    exp.start()
    assert (
        sorted(path.name for path in buffer.iterdir()) == given
    )  # the branch has no checkpoint of its own yet, so nothing is newer than one
    assert (exp.epoch, exp.env_steps, exp.best_score) == (2, 72, None)
    assert exp.learner.gradient_steps == base.learner.gradient_steps
    assert_equal(weights(exp), weights(base))
    assert exp.metric_logger.state_dict() == {"metrics_bytes": 0, "num_records": 0, "wandb_id": None}
    exp.learn()
    exp.close()
    assert exp.epoch == 4
    assert not {*given} & {path.name for path in buffer.iterdir()}  # data of an earlier run of this name
    assert exp.checkpoints.best_path.exists()
    lines = (exp.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["epoch"] == 2
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_begins_from_the_best_weights_and_from_paths(tmp_path: Path) -> None:
    base = run(with_store(tmp_path, run_name="base"))
    store, best, last = tmp_path / "store" / "base", load_file(base.checkpoints.best_path), weights(base)
    policies = [info for info in store_of(tmp_path).list("base") if info.name == "base/policy"]
    for reference, epoch, expected in [
        ("base:best", 0, best),
        (base.checkpoints.state_dir(1), 2, last),
        (store / "state" / "v1", 2, last),
        (base.checkpoints.weights_dir / "policy_epoch_1.safetensors", 0, last),
        (store / "policy" / policies[-1].version, 0, best),
    ]:
        exp = with_store(tmp_path, epochs=4, restore_from=str(reference))
        exp.start()
        assert exp.epoch == epoch, reference
        assert (exp.env_steps > 0) == (exp.learner.gradient_steps > 0) == (epoch > 0)
        assert_equal(weights(exp), expected)
        exp.close()


def test_unknown_references_and_paths_list_what_exists(tmp_path: Path) -> None:
    run(with_store(tmp_path, run_name="base"))
    for reference, text in [
        ("base:v9", r"'base:v9'\. Run 'base' has base/policy:v0.*base/state:v1 \(latest\)\. Fix:"),
        ("latest", r"Run 'tiny' has no artifacts; runs with artifacts are base\. Fix:"),
        ("./nowhere", r"'nowhere' does not exist\. Fix: name a \.safetensors file"),
        (
            str(tmp_path),
            r"holds neither a training state nor policy\.safetensors; it holds: runs, store\. Fix:",
        ),
    ]:
        exp = with_store(tmp_path, restore_from=reference)
        with pytest.raises(FileNotFoundError, match=text):
            exp.start()
        exp.close()


def test_a_run_folder_means_its_best_policy_or_the_latest_one(tmp_path: Path) -> None:
    base = run(make_experiment(tmp_path, run_name="base"))
    best, latest = base.checkpoints.best_path, base.checkpoints.latest_path
    for folder in (base.run_dir, base.run_dir / "ckpts"):
        assert find_files(folder, "x") == best
    best.unlink()
    assert find_files(base.run_dir, "x") == latest
    exp = make_experiment(tmp_path, restore_from=str(base.run_dir))
    exp.start()
    assert_equal(exp.policy.state_dict(), load_file(latest))
    exp.close()
    for missing in ("ckpts/best", "ckpts/training_states/base_epoch_77", "best"):
        with pytest.raises(FileNotFoundError, match=r"does not exist|neither"):
            find_files(base.run_dir / missing, "x")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"restore_from": "base:best"}, ValueError, r"has no store.*Fix: set Artifacts.store"),
        ({"restore_from": 3}, TypeError, r"restore_from is 3.*Fix: set it to"),
        (
            {"Artifacts.store": UrlStore("x")},
            TypeError,
            r"must be a class or function that creates a store.*Fix:.*@UrlStore",
        ),
    ],
)
def test_impossible_settings_are_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_experiment(tmp_path, **changes).start()


def test_a_collecting_process_has_no_store_and_restores_nothing(tmp_path: Path) -> None:
    exp = with_store(tmp_path, mode="collect", restore_from="nobody:best")
    exp.start()
    exp.close()
    assert exp.artifacts.store is None
    assert not (tmp_path / "store").exists()


def test_a_link_that_leaves_a_checkpoint_is_not_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, store = tmp_path / "state", UrlStore(str(tmp_path / "store"))
    state.mkdir()
    (tmp_path / "secret").touch()
    (state / "model.safetensors").symlink_to(tmp_path / "secret")
    uploads = Uploads(RunAccess(tmp_path / "run", "run", None, None, lambda: None), store=lambda: store)
    uploads.store_state(state, 0)
    uploads.close()
    assert "model.safetensors is a link out of" in caplog.text
    assert store.list() == []
