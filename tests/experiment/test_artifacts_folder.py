"""UrlStore: versions are complete or absent, in a folder and behind a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.artifacts import ArtifactInfo, UrlStore
from loxodon.experiment.artifacts.stores import find_artifact


@pytest.fixture
def store(tmp_path: Path) -> UrlStore:
    return UrlStore(str(tmp_path / "store"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 3000)
    (folder / "sub" / "note.txt").write_text("hello")
    return folder


@pytest.fixture(params=["", "memory:/"], ids=["folder", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> UrlStore:
    return UrlStore(f"{request.param}{tmp_path}/store")


def test_artifacts_can_be_fetched_by_version_and_by_alias(
    any_store: UrlStore, files: Path, tmp_path: Path
) -> None:
    store = any_store
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


def test_a_list_has_versions_in_order_with_aliases_and_metadata(any_store: UrlStore, files: Path) -> None:
    store = any_store
    for i in range(11):
        store.put("run/state", files, metadata={"i": i}, aliases=["latest", *(["best"] if i == 3 else [])])
    store.put("r[u]n/state", files, metadata={})
    infos = store.list("run")
    assert [info.version for info in infos] == [f"v{i}" for i in range(11)]
    assert infos[3] == ArtifactInfo("run/state", "v3", ("best",), {"i": 3})
    assert infos[10].aliases == ("latest",)
    assert [info.reference for info in store.list("r[u]n")] == ["r[u]n/state:v0"]
    assert len(store.list()) == 12
    assert UrlStore("/does/not/exist").list() == []


def test_short_references_mean_this_run_and_states_before_policies(store: UrlStore, files: Path) -> None:
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
    with pytest.raises(FileNotFoundError, match="base/policy:v0"):  # a version number never means a policy
        find_artifact(store, "base:v0", "run")


def test_an_unknown_reference_lists_what_exists(store: UrlStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={}, aliases=["latest"])
    store.put("run/policy", files, metadata={}, aliases=["best"])
    known = r"Run 'run' has run/policy:v0 \(best\), run/state:v0 \(latest\)\. Fix: choose one"
    for unknown in ("run/state:v7", "run/state:best", "run/state:../v0"):
        with pytest.raises(FileNotFoundError, match=rf"no artifact '{unknown}'.*{known}"):
            store.get(unknown, tmp_path / "out")
    with pytest.raises(
        FileNotFoundError, match=r"Run 'ruin' has no artifacts; runs with artifacts are run\. Fix:"
    ):
        store.get("ruin/state:v0", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="has no artifacts, and no other run has any"):
        find_artifact(UrlStore(str(tmp_path / "empty")), "latest", "run")
    with pytest.raises(ValueError, match=r"'latest' is not a reference.*Fix: name the run, the artifact"):
        store.get("latest", tmp_path / "out")


def test_damage_is_detected(store: UrlStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={})
    stored = Path(store.url, "run", "state", "v0", "weights")
    for damage in (lambda: stored.write_bytes(b"W"), stored.unlink):
        damage()
        with pytest.raises(ValueError, match=r"v0 is damaged: weights differs.*Fix: delete that folder"):
            store.get("run/state:v0", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["state", "a/b/c", "run:1/x", ".x/state"])
def test_ambiguous_names_are_refused(store: UrlStore, files: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a reference to an artifact.*Fix: name the run"):
        store.put(name, files, metadata={})
    assert store.list() == []


def test_an_address_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(ValueError, match=r"UrlStore.url = 'nothing://x' cannot be opened.*Fix: install"):
        UrlStore("nothing://x")


def test_a_failed_put_leaves_nothing(
    any_store: UrlStore, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(any_store._fs, "pipe_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        any_store.put("run/state", files, metadata={}, aliases=["latest"])
    assert not any_store._fs.exists(any_store._path("run/state/v0"))


def test_an_incomplete_version_of_a_killed_process_does_not_count_and_is_not_reused(
    store: UrlStore, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("run/state", files, metadata={}, aliases=["latest"])
    home = Path(store.url, "run", "state")
    (home / "v1").mkdir()
    (home / "v1" / "old").write_text("half")
    assert [info.reference for info in store.list()] == ["run/state:v0"]
    assert store.put("run/state", files, metadata={}) == "v2"
    monkeypatch.setattr(store, "_names", lambda *_: [])  # another process is about to write the same version
    with pytest.raises(FileExistsError):
        store.put("run/state", files, metadata={})
    assert (home / "v0" / "weights").exists()


# ---- links and damage ----


@pytest.mark.parametrize("name", ["weights", "sub/note.txt"])
def test_links_that_leave_the_files_to_store_are_refused(
    store: UrlStore, files: Path, tmp_path: Path, name: str
) -> None:
    path = (files / name).rename(tmp_path / "secret")
    (files / name).symlink_to(path)
    with pytest.raises(ValueError, match=rf"{name} is a link out of .*files to .*secret.*Fix:"):
        store.put("run/state", files, metadata={})
    assert store.list() == []
    (files / name).unlink()
    path.rename(files / name)
    (files / "inner").symlink_to(name)
    store.put("run/state", files, metadata={})
    assert not (store.get("run/state:v0", tmp_path / "got") / "inner").is_symlink()


@pytest.mark.parametrize("name", ["v0/weights", "v0/sub", "v0", "."])
def test_links_that_leave_the_store_are_refused(
    store: UrlStore, files: Path, tmp_path: Path, name: str
) -> None:
    store.put("run/state", files, metadata={})
    place = Path(store.url, "run", "state", name)
    path = place.rename(tmp_path / "secret")
    place.symlink_to(path)
    with pytest.raises(ValueError, match=r"is a link out of .*store to .*secret.*Fix:"):
        store.get("run/state:v0", tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_pipe_is_not_copied(store: UrlStore, files: Path) -> None:
    os.mkfifo(files / "pipe")
    with pytest.raises(ValueError, match=r"pipe is not a plain file. Fix:"):
        store.put("run/state", files, metadata={})


@pytest.mark.parametrize("content", [b"[]", b"[" * 100_000, b"\xff", b'{"aliases": [], "bytes": 1}'])
def test_damaged_metadata_hides_no_other_version(
    store: UrlStore, files: Path, tmp_path: Path, content: bytes
) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={})
    Path(store.url, "run", "state", "v0", "metadata.json").write_bytes(content)
    assert [info.version for info in store.list("run")] == ["v1"]
    assert (store.get("run/state:v1", tmp_path / "got") / "weights").exists()


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped"])
def test_metadata_cannot_name_files_outside_the_version(
    store: UrlStore, files: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("run/state", files, metadata={})
    facts: dict[str, Any] = {"aliases": [], "metadata": {}, "bytes": {name: 1}}
    monkeypatch.setattr(store, "_facts", lambda *_: facts)
    with pytest.raises(ValueError, match=r"out of .*Fix:"):
        store.get("run/state:v0", tmp_path / "got")
