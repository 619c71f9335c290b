from __future__ import annotations

import errno
import fcntl
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loxodon.data import DiskTrajDataset
from loxodon.data import lock as lock_module
from loxodon.data.lock import MANAGER, FolderLock

MakeDataset = Callable[..., DiskTrajDataset]

MANAGE = """
import sys
from loxodon.data import DiskTrajDataset
dataset = DiskTrajDataset()
try:
    dataset.configure(max_seq_len=4, padded_sampling="none", has_edit_rights=sys.argv[2] == "edit",
                      default_root=sys.argv[1], default_name="set")
except ValueError as error:
    print(error, flush=True)
    raise SystemExit(3)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(root: Path, rights: str = "edit") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that configures a dataset at root/set, and the first line that it prints."""
    command = [sys.executable, "-c", MANAGE, str(root), rights]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.slow
def test_second_manager_is_told_who_the_first_is(make_dataset: MakeDataset, tmp_path: Path) -> None:
    with other_process(tmp_path) as (first, line):
        assert line == "ready\n"
        note = json.loads((tmp_path / "set/buffer/manager.json").read_text())
        text = rf"Process {first.pid} on {note['host']} \(run 'set', since {note['since'][:10]}.*\) manages "
        with pytest.raises(ValueError, match=rf"{text}.*set/buffer already.*Fix: end that process.*False"):
            make_dataset()
        make_dataset(edit=False)  # any number may sample
        first.kill()  # SIGKILL: nothing is tidied up
        first.wait()
        make_dataset().close()


@pytest.mark.slow
def test_processes_without_edit_rights_are_no_managers(make_dataset: MakeDataset, tmp_path: Path) -> None:
    with other_process(tmp_path, "none") as (_, line):
        assert line == "ready\n"
        dataset = make_dataset()
        assert dataset.on_end_of_collection()["total_files"] == 0


@pytest.mark.slow
def test_this_process_keeps_others_out_until_it_closes(make_dataset: MakeDataset, tmp_path: Path) -> None:
    dataset, twin = make_dataset(), make_dataset()  # one process counts as one manager
    dataset.configure(
        max_seq_len=4,
        padded_sampling="none",
        has_edit_rights=True,
        default_root=str(tmp_path),
        default_name="set",
    )
    dataset.close()
    with other_process(tmp_path) as (_, line):
        assert f"Process {os.getpid()} on" in line
    twin.close()
    twin.close()
    with other_process(tmp_path) as (_, line):
        assert line == "ready\n"
        with pytest.raises(ValueError, match=r"manages .* already"):
            twin.delete()  # needs the right again
    twin.on_end_of_collection()
    with other_process(tmp_path) as (_, line):
        assert "manages" in line


@pytest.mark.slow
def test_a_child_neither_has_nor_ends_the_right_of_its_parent(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    dataset = make_dataset()
    child = multiprocessing.get_context("fork").Process(target=dataset.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (tmp_path / "set/buffer/manager.json").exists()
    with other_process(tmp_path) as (_, line):
        assert f"Process {os.getpid()} on" in line


def test_a_dataset_that_is_dropped_gives_the_right_back(make_dataset: MakeDataset, tmp_path: Path) -> None:
    dataset = make_dataset()
    note = tmp_path / "set/buffer/manager.json"
    assert note.exists()
    del dataset
    gc.collect()
    assert not note.exists()


def test_file_systems_without_locks_get_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(lock_module, "_has_warned", False)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        FolderLock(tmp_path / name, "run", MANAGER).release()
    assert caplog.text.count("has no locks") == 1


def test_holder_without_a_note_is_still_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", taken)
    (tmp_path / "manager.json").write_text("{")
    with pytest.raises(ValueError, match=r"^Another process manages .*Fix:"):
        FolderLock(tmp_path, "run", MANAGER)
