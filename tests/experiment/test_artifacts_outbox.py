"""The outbox: storing never stalls, a failing store costs a warning, and nothing that waits is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.artifacts import ArtifactInfo, ArtifactStore
from loxodon.experiment.artifacts.outbox import Outbox


class ListStore(ArtifactStore):
    """Keeps what is put in a list; fails, or waits at a gate, on request."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, dict[str, str], Any, Any]] = []
        self.error: Exception | None = None
        self.prepare_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()

    def __repr__(self) -> str:
        return "ListStore"

    def prepare(self) -> None:
        if self.prepare_error is not None:
            raise self.prepare_error

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        self.has_begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        texts = {p.relative_to(files).as_posix(): p.read_text() for p in files.rglob("*") if p.is_file()}
        self.stored.append((name, texts, dict(metadata), list(aliases)))
        return f"v{len(self.stored) - 1}"

    def get(self, reference: str, folder: Path) -> Path:
        raise NotImplementedError

    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        raise NotImplementedError


@pytest.fixture
def store() -> ListStore:
    return ListStore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pending"


def submit(outbox: Outbox, value: int, name: str = "run/state") -> None:
    outbox.submit(name, {"value.txt": str(value)}, metadata={"value": value}, aliases=["latest"])


def values(store: ListStore) -> list[int]:
    return [metadata["value"] for _, _, metadata, _ in store.stored]


def test_files_folders_and_texts_arrive_though_the_originals_are_gone(
    store: ListStore, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "state" / "sub").mkdir(parents=True)
    (tmp_path / "state" / "sub" / "a").write_text("A")
    (tmp_path / "b").write_text("B")
    store.gate.clear()
    outbox = Outbox(folder, store)
    files: dict[str, Path | str] = {"s": tmp_path / "state", "weights": tmp_path / "b", "config.txt": "gin"}
    outbox.submit("run/state", files, metadata={"epoch": 3}, aliases=["latest"])
    (tmp_path / "state" / "sub" / "a").unlink()
    (tmp_path / "new").write_text("another")
    (tmp_path / "new").replace(tmp_path / "b")  # as policy files are
    store.gate.set()
    outbox.close()
    arrived = {"s/sub/a": "A", "weights": "B", "config.txt": "gin"}
    assert store.stored == [("run/state", arrived, {"epoch": 3}, ["latest"])]
    assert list(folder.iterdir()) == []


def test_handing_over_does_not_wait_for_the_store(store: ListStore, folder: Path) -> None:
    store.gate.clear()
    outbox = Outbox(folder, store)
    for value in range(5):  # would never return if it waited
        submit(outbox, value)
    assert outbox.num_pending == 1
    store.gate.set()
    outbox.close()
    assert values(store)[-1] == 4
    assert list(folder.iterdir()) == []


def test_while_one_is_stored_only_the_newest_of_its_name_waits(store: ListStore, folder: Path) -> None:
    store.gate.clear()
    outbox = Outbox(folder, store)
    submit(outbox, 0)
    assert store.has_begun.wait(10)
    for value in (1, 2, 3):
        submit(outbox, value)
    submit(outbox, 9, "run/policy")
    store.gate.set()
    outbox.close()
    assert values(store) == [0, 3, 9]


def test_a_failing_store_warns_once_and_is_tried_again(
    store: ListStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = OSError("server away")
    outbox = Outbox(folder, store)
    for value in range(3):
        store.has_begun.clear()
        submit(outbox, value)
        assert store.has_begun.wait(10)
    assert outbox.num_pending == 1
    assert len(list(folder.iterdir())) <= 2  # the one that waits, and perhaps the one being tried
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "run/state could not be stored in ListStore: OSError: server away" in texts[0]
    store.error = None
    submit(outbox, 3)
    outbox.close()
    assert values(store) == [3]
    assert list(folder.iterdir()) == []


def test_what_failed_is_tried_with_the_next_artifact_of_any_name(store: ListStore, folder: Path) -> None:
    store.prepare_error = RuntimeError("no network")
    outbox = Outbox(folder, store)
    submit(outbox, 1, "run/policy")
    assert not store.has_begun.wait(0.05)
    store.prepare_error = None
    submit(outbox, 2)
    outbox.close()
    assert sorted(values(store)) == [1, 2]


def test_each_kind_of_error_is_reported(
    store: ListStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(folder, store)
    errors: list[Exception] = [OSError("a"), OSError("b"), ValueError("c")]
    for store.error in errors:
        submit(outbox, 0)
        outbox.close()
    kinds = [r.getMessage() for r in caplog.records if "The run goes on" in r.getMessage()]
    assert [("OSError: a" in text, "ValueError: c" in text) for text in kinds] == [
        (True, False),
        (False, True),
    ]


def test_closing_in_a_hurry_leaves_the_rest_for_the_next_process(
    store: ListStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.gate.clear()
    outbox = Outbox(folder, store)
    submit(outbox, 7)
    outbox.close(wait_s=0.2)  # would never return if it waited for all
    assert "1 artifact(s) could not be stored in ListStore yet" in caplog.text
    later = ListStore()
    Outbox(folder, later).close()
    assert values(later) == [7]
    store.gate.set()


def test_what_a_killed_process_left_is_stored_and_what_it_half_wrote_is_removed(
    store: ListStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = OSError("away")
    for value in range(2):
        submit(Outbox(folder, store), value)  # the second process finds what the first one left
        time.sleep(0.01)
    (folder / "00000000000000000009.tmp" / "files").mkdir(parents=True)
    (folder / "00000000000000000008").mkdir()
    store.error = None
    caplog.set_level(logging.ERROR)
    outbox = Outbox(folder, store)
    assert outbox.num_pending == 1
    submit(outbox, 5, "run/policy")
    outbox.close()
    assert values(store) == [1, 5]
    assert list(folder.iterdir()) == []


def test_a_full_disk_of_one_s_own_is_reported_and_survived(
    store: ListStore, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    outbox = Outbox(folder, store)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", disk_full)
        submit(outbox, 0)
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []
    submit(outbox, 1)
    outbox.close()
    assert values(store) == [1]
