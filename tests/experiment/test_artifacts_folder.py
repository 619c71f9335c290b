"""FolderStore: versions are whole or absent, whoever writes and whatever dies."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loxodon.experiment.artifacts import ArtifactInfo, FolderStore
from loxodon.experiment.artifacts.store import find_artifact

WRITER = """
import sys
from pathlib import Path
from loxodon.experiment.artifacts import FolderStore
store = FolderStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    store.put("run/state", Path(sys.argv[2]), metadata={"i": i}, aliases=["latest", sys.argv[4]])
    print(i, flush=True)
"""


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


def start_writer(store: FolderStore, files: Path, count: int, alias: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(store.root), str(files), str(count), alias]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_what_is_put_can_be_fetched_by_version_and_by_alias(
    store: FolderStore, files: Path, tmp_path: Path
) -> None:
    assert store.put("run/state", files, metadata={"epoch": 1}, aliases=["latest"]) == "v0"
    (files / "weights").write_bytes(b"changed")
    assert store.put("run/state", files, metadata={"epoch": 2}, aliases=["latest"]) == "v1"
    old = store.get("run/state:v0", tmp_path / "a" / "old")
    new = store.get("run/state:latest", tmp_path / "new")
    assert (old / "weights").read_bytes() == b"w" * 3000
    assert (new / "weights").read_bytes() == b"changed"
    assert (new / "sub" / "note.txt").read_text() == "hello"
    assert sorted(path.name for path in new.iterdir()) == ["sub", "weights"]


def test_the_layout_is_the_documented_one(store: FolderStore, files: Path) -> None:
    store.put("run/policy", files / "weights", metadata={"epoch": 1}, aliases=["best"])
    home = store.root / "run" / "policy"
    assert sorted(path.name for path in (home / "v0").iterdir()) == ["metadata.json", "weights"]
    assert json.loads((home / "aliases.json").read_text()) == {"best": "v0"}
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


def test_an_unknown_reference_lists_what_exists(store: FolderStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={}, aliases=["latest"])
    store.put("run/policy", files, metadata={}, aliases=["best"])
    known = r"Run 'run' has run/policy:v0 \(best\), run/state:v0 \(latest\)\. Fix: choose one"
    for unknown in ("run/state:v7", "run/state:best", "run/state:../v0"):
        with pytest.raises(FileNotFoundError, match=rf"no artifact '{unknown}'.*{known}"):
            store.get(unknown, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"Run 'ruin' has none; runs that have some are run\. Fix:"):
        store.get("ruin/state:v0", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=rf"no artifact 'v7'.*{known}"):
        find_artifact(store, "v7", "run")
    with pytest.raises(FileNotFoundError, match="has none, nor have others"):
        find_artifact(FolderStore(str(tmp_path / "empty")), "latest", "run")
    with pytest.raises(ValueError, match=r"'latest' is no reference.*Fix: name run, artifact"):
        store.get("latest", tmp_path / "out")


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("latest", "run/state:v1"),
        ("best", "run/policy:v2"),
        ("v1", "run/state:v1"),
        ("run:v0", "run/state:v0"),
        ("run/policy:v1", "run/policy:v1"),
        ("base:best", "base/policy:v0"),
        ("base/policy:best", "base/policy:v0"),
    ],
)
def test_short_references_mean_this_run_and_states_before_weights(
    store: FolderStore, files: Path, reference: str, found: str
) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    for _ in range(3):
        store.put("run/policy", files, metadata={}, aliases=["best", "latest"])
    store.put("base/policy", files, metadata={}, aliases=["best"])
    assert find_artifact(store, reference, "run").reference == found


def test_a_number_never_means_weights_by_accident(store: FolderStore, files: Path) -> None:
    store.put("run/policy", files, metadata={})
    with pytest.raises(FileNotFoundError, match="run/policy:v0"):
        find_artifact(store, "run:v0", "run")


def test_damage_is_noticed(store: FolderStore, files: Path, tmp_path: Path) -> None:
    store.put("run/state", files, metadata={})
    stored = store.root / "run" / "state" / "v0" / "weights"
    stored.write_bytes(b"W" + stored.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"v0 is damaged: weights differ.*Fix: delete that folder"):
        store.get("run/state:v0", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["state", "run/", "a/b/c", "run:1/state", ".hidden/state", "../x/state"])
def test_names_that_no_reference_could_hold_are_refused(store: FolderStore, files: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot name an artifact.*Fix: change"):
        store.put(name, files, metadata={})


@pytest.mark.parametrize("alias", ["v3", "a/b", ""])
def test_aliases_that_look_like_something_else_are_refused(
    store: FolderStore, files: Path, alias: str
) -> None:
    with pytest.raises(ValueError, match=r"cannot be an alias.*Fix:"):
        store.put("run/state", files, metadata={}, aliases=[alias])
    assert store.list() == []


def test_a_file_of_the_store_s_own_name_is_refused(store: FolderStore, files: Path) -> None:
    (files / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match=r"metadata.json is the name.*Fix: rename"):
        store.put("run/state", files, metadata={})
    assert store.list() == []


def test_a_failed_put_leaves_nothing(
    store: FolderStore, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    assert list((store.root / "run" / "state").iterdir()) == []


def test_an_older_version_never_takes_an_alias_back(store: FolderStore, files: Path) -> None:
    """Of two writers, the one with the older version may be the later one to move the alias."""
    for _ in range(2):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    store._move_aliases(store.root / "run" / "state", "v0", ["latest", "first"])
    aliases = json.loads((store.root / "run" / "state" / "aliases.json").read_text())
    assert aliases == {"latest": "v1", "first": "v0"}


def test_the_number_of_a_deleted_version_is_not_used_again(store: FolderStore, files: Path) -> None:
    for _ in range(2):
        store.put("run/state", files, metadata={}, aliases=["latest"])
    newest = store.root / "run" / "state" / "v1"
    newest.rename(store.root / "gone")
    with pytest.raises(FileNotFoundError, match="no artifact"):
        store.get("run/state:latest", store.root / "out")
    assert store.put("run/state", files, metadata={}) == "v2"


def test_leftovers_of_dead_writers_go_and_those_of_live_ones_stay(store: FolderStore, files: Path) -> None:
    home = store.root / "run" / "state"
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = home / f".tmp-{platform.node()}-{gone.pid}-0"
    alive = home / f".tmp-{platform.node()}-{os.getpid()}-0"
    elsewhere, ancient = home / ".tmp-other-host-1-0", home / ".tmp-other-host-2-0"
    for folder in (dead, alive, elsewhere, ancient):
        folder.mkdir(parents=True)
    os.utime(ancient, (time.time() - 1e6,) * 2)
    store.put("run/state", files, metadata={})
    assert [path.exists() for path in (dead, alive, elsewhere, ancient)] == [False, True, True, False]


@pytest.mark.slow
def test_two_processes_get_versions_of_their_own(store: FolderStore, files: Path, tmp_path: Path) -> None:
    with start_writer(store, files, 40, "left") as left, start_writer(store, files, 40, "right") as right:
        go(left)
        go(right)
        for writer in (left, right):
            writer.communicate(timeout=300)
    assert (left.returncode, right.returncode) == (0, 0)
    infos = store.list("run")
    assert [info.version for info in infos] == [f"v{i}" for i in range(80)]
    assert sorted(info.metadata["i"] for info in infos) == sorted([*range(40)] * 2)
    assert "latest" in infos[-1].aliases
    assert sum(len(info.aliases) for info in infos) == 3  # no update of either was lost
    for info in infos[::13]:
        store.get(info.reference, tmp_path / info.version)
    assert not list((store.root / "run" / "state").glob(".tmp-*"))


@pytest.mark.slow
def test_kill_9_leaves_whole_versions_only(store: FolderStore, files: Path, tmp_path: Path) -> None:
    (files / "big").write_bytes(os.urandom(8 << 20))
    for attempt in range(3):
        with start_writer(store, files, 1000, "mine") as writer:
            go(writer)
            assert writer.stdout is not None
            writer.stdout.readline()  # one is whole; another is being written
            time.sleep(0.005 * (1 + 3 * attempt))
            writer.send_signal(signal.SIGKILL)
        infos = store.list("run")
        assert infos
        latest = store.get("run/state:latest", tmp_path / f"out{attempt}")
        assert (latest / "big").stat().st_size == 8 << 20
    for info in infos:
        store.get(info.reference, tmp_path / "all" / info.version)
    assert store.put("run/state", files / "weights", metadata={}) == f"v{len(infos)}"
    assert not list((store.root / "run" / "state").glob(".tmp-*"))
