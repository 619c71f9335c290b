"""FolderStore: versions are whole or absent, whoever writes and whatever dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from loxodon.experiment.artifacts import ArtifactInfo, FolderStore
from loxodon.experiment.artifacts.stores import find_artifact


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "store"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 3000)
    (folder / "sub" / "note.txt").write_text("hello")
    return folder


def put_many(store: FolderStore, files: Path, count: int, alias: str) -> None:
    for i in range(count):
        store.put("run/state", files, metadata={"i": i}, aliases=["latest", alias])


def test_what_is_put_can_be_fetched_by_version_and_by_alias(
    store: FolderStore, files: Path, tmp_path: Path
) -> None:
    assert store.put("run/state", files, metadata={"epoch": 1}, aliases=["latest"]) == "v0"
    (files / "weights").write_bytes(b"changed")
    assert store.put("run/state", files, metadata={"epoch": 2}, aliases=["latest"]) == "v1"
    assert store.put("run/policy", files / "weights", metadata={}, aliases=["best"]) == "v0"
    old = store.get("run/state:v0", tmp_path / "a" / "old")
    new = store.get("run/state:latest", tmp_path / "new")
    assert (old / "weights").read_bytes() == b"w" * 3000
    assert (new / "weights").read_bytes() == b"changed"
    assert (new / "sub" / "note.txt").read_text() == "hello"
    assert sorted(path.name for path in new.iterdir()) == ["sub", "weights"]
    assert [path.name for path in store.get("run/policy:best", tmp_path / "file").iterdir()] == ["weights"]
    home = store.root / "run" / "state"
    assert json.loads((home / "aliases.json").read_text()) == {"latest": "v1"}
    assert json.loads((home / "v0" / "metadata.json").read_text())["metadata"] == {"epoch": 1}


def test_a_list_has_versions_in_order_with_aliases_and_metadata(store: FolderStore, files: Path) -> None:
    for i in range(11):
        store.put("run/state", files, metadata={"i": i}, aliases=["latest", *(["best"] if i == 3 else [])])
    store.put("r[u]n/state", files, metadata={})
    infos = store.list("run")
    assert [info.version for info in infos] == [f"v{i}" for i in range(11)]
    assert infos[3] == ArtifactInfo("run/state", "v3", ("best",), {"i": 3})
    assert infos[10].aliases == ("latest",)
    assert [info.reference for info in store.list("r[u]n")] == ["r[u]n/state:v0"]
    assert len(store.list()) == 12
    assert FolderStore("/does/not/exist").list() == []


def test_short_references_mean_this_run_and_states_before_weights(store: FolderStore, files: Path) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    for _ in range(3):
        store.put("run/policy", files, metadata={}, aliases=["best", "latest"])
    store.put("base/policy", files, metadata={}, aliases=["best"])
    meanings = {
        "latest": "run/state:v1",
        "best": "run/policy:v2",
        "v1": "run/state:v1",
        "run:v0": "run/state:v0",
        "run/policy:v1": "run/policy:v1",
        "base:best": "base/policy:v0",
        "base/policy:best": "base/policy:v0",
    }
    assert {short: find_artifact(store, short, "run").reference for short in meanings} == meanings
    with pytest.raises(FileNotFoundError, match="base/policy:v0"):  # a number is never one of weights
        find_artifact(store, "base:v0", "run")


def test_an_unknown_reference_lists_what_exists(store: FolderStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={}, aliases=["latest"])
    store.put("run/policy", files, metadata={}, aliases=["best"])
    known = r"Run 'run' has run/policy:v0 \(best\), run/state:v0 \(latest\)\. Fix: choose one"
    for unknown in ("run/state:v7", "run/state:best", "run/state:../v0"):
        with pytest.raises(FileNotFoundError, match=rf"no artifact '{unknown}'.*{known}"):
            store.get(unknown, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"Run 'ruin' has none; runs that have some are run\. Fix:"):
        store.get("ruin/state:v0", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="has none, nor have others"):
        find_artifact(FolderStore(str(tmp_path / "empty")), "latest", "run")
    with pytest.raises(ValueError, match=r"'latest' is no reference.*Fix: name run, artifact"):
        store.get("latest", tmp_path / "out")


def test_damage_is_noticed(store: FolderStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={})
    stored = store.root / "run" / "state" / "v0" / "weights"
    stored.write_bytes(b"W" + stored.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"v0 is damaged: weights differ.*Fix: delete that folder"):
        store.get("run/state:v0", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["state", "a/b/c", "run:1/x", ".x/state"])
def test_names_that_would_mean_something_else_are_refused(store: FolderStore, files: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is no reference to an artifact.*Fix: name run"):
        store.put(name, files, metadata={})
    (files / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match=r"metadata.json is the name.*Fix: rename"):
        store.put("run/own", files, metadata={})
    assert store.list() == []


def test_a_failed_put_leaves_nothing(
    store: FolderStore, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    assert [path.name for path in (store.root / "run" / "state").iterdir()] == [".lock"]


def test_the_number_of_a_deleted_version_is_not_used_again(store: FolderStore, files: Path) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    (store.root / "run" / "state" / "v1").rename(store.root / "gone")
    with pytest.raises(FileNotFoundError, match="no artifact"):
        store.get("run/state:latest", store.root / "out")
    assert store.put("run/state", files, metadata={}) == "v2"


def test_two_processes_get_versions_of_their_own_and_kill_9_leaves_whole_ones(
    store: FolderStore, files: Path, tmp_path: Path
) -> None:
    (files / "big").write_bytes(os.urandom(1 << 20))
    fork = multiprocessing.get_context("fork")
    left, right = (
        fork.Process(target=put_many, args=(store, files, count, alias), daemon=True)
        for count, alias in ((15, "left"), (1000, "right"))
    )
    left.start()
    right.start()
    left.join(300)
    assert left.exitcode == 0
    while not any("right" in info.aliases for info in store.list("run")):
        assert right.is_alive()
    assert right.pid is not None
    os.kill(right.pid, signal.SIGKILL)  # one is whole; another is being written
    right.join()
    home, infos = store.root / "run" / "state", store.list("run")
    assert [info.version for info in infos] == [f"v{i}" for i in range(len(infos))]
    own = [info.metadata["i"] for info in infos]
    assert sorted(own) == sorted([*range(15), *range(len(own) - 15)])
    aliases = {alias: info.version for info in infos for alias in info.aliases}
    assert aliases.keys() == {"latest", "left", "right"}  # no update of either was lost
    assert aliases["latest"] in (aliases["left"], aliases["right"])
    for info in infos[::13]:
        store.get(info.reference, tmp_path / info.version)
    (home / "v7.1.tmp").mkdir()  # as the killed one may have left
    (home / "aliases.json.1.tmp").write_text("{")
    assert store.put("run/state", files / "weights", metadata={}) == f"v{len(infos)}"
    assert not list(home.glob("*.tmp"))


# ---- links and damage ----


@pytest.mark.parametrize("name", ["weights", "sub", "sub/note.txt"])
def test_a_link_out_of_what_is_stored_is_refused(
    store: FolderStore, files: Path, tmp_path: Path, name: str
) -> None:
    path = (files / name).rename(tmp_path / "secret")
    (files / name).symlink_to(path)
    with pytest.raises(ValueError, match=rf"{name} is a link out of .*files, to .*secret.*Fix:"):
        store.put("run/state", files, metadata={})
    assert store.list() == []
    (files / name).unlink()
    path.rename(files / name)
    (files / "inner").symlink_to(name)
    store.put("run/state", files, metadata={})
    assert not (store.get("run/state:v0", tmp_path / "got") / "inner").is_symlink()


@pytest.mark.parametrize("name", ["v0/weights", "v0/sub", "v0", "."])
def test_a_link_out_of_the_store_is_refused(
    store: FolderStore, files: Path, tmp_path: Path, name: str
) -> None:
    store.put("run/state", files, metadata={})
    place = store.root / "run" / "state" / name
    path = place.rename(tmp_path / "secret")
    place.symlink_to(path)
    with pytest.raises(ValueError, match=r"is a link out of .*store, to .*secret.*Fix:"):
        store.get("run/state:v0", tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_pipe_is_not_copied(store: FolderStore, files: Path) -> None:
    os.mkfifo(files / "pipe")
    with pytest.raises(ValueError, match=r"pipe is not a plain file. Fix:"):
        store.put("run/state", files, metadata={})


@pytest.mark.parametrize("name", ["aliases.json", "v0/metadata.json"])
@pytest.mark.parametrize("content", [b"[]", b"[" * 100_000, b"\xff", b'{"files": 1, "metadata": 2, "a": 3}'])
def test_damaged_facts_hide_no_other_version(
    store: FolderStore, files: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={})
    (store.root / "run" / "state" / name).write_bytes(content)
    assert [info.version for info in store.list("run")] == ["v0", "v1"]
    assert (store.get("run/state:v1", tmp_path / "got") / "weights").exists()
    if name.startswith("v0"):
        with pytest.raises(ValueError, match=r"v0 is damaged: .*weights.*Fix:"):
            store.get("run/state:v0", tmp_path / "broken")
