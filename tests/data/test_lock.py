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
from loxodon.data.lock import MANAGER, FolderLock

MakeDataset = Callable[..., DiskTrajDataset]

# For each line of input, this tries to take the lock and prints the result.
MANAGE = """
import sys
from loxodon.data import DiskTrajDataset
for line in sys.stdin:
    try:
        dataset = DiskTrajDataset()
        dataset.configure(max_seq_len=4, padded_sampling="none", has_edit_rights=line.strip() == "edit",
                          default_root=sys.argv[1], default_name="set")
        print("ready", flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


@contextmanager
def other_process(root: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], str]]]:
    """A process, and a function that lets it configure a dataset at root/set with or without edit rights."""
    command = [sys.executable, "-c", MANAGE, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(rights: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{rights}\n")
            process.stdin.flush()
            return process.stdout.readline()

        try:
            yield process, ask
        finally:
            process.kill()


@pytest.mark.slow
def test_one_process_manages_a_folder_until_it_closes_or_is_killed(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    with other_process(tmp_path) as (other, ask):
        dataset, twin = make_dataset(), make_dataset()  # datasets of one process share its right
        dataset.close()
        assert f"Process {os.getpid()} on" in ask("edit")
        assert ask("none") == "ready\n"  # any number of processes may sample
        child = multiprocessing.get_context("fork").Process(target=twin.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert f"Process {os.getpid()} on" in ask("edit")  # a child does not end its parent's right
        twin.close()
        twin.close()
        assert ask("edit") == "ready\n"
        note = json.loads((tmp_path / "set/buffer/manager.json").read_text())
        text = rf"Process {other.pid} on {note['host']} \(run 'set', since {note['since'][:10]}.*\) already "
        with pytest.raises(ValueError, match=rf"{text}manages .*set/buffer: .*Fix: end that process.*False"):
            twin.delete()  # this needs the right again
        make_dataset(edit=False)
        other.kill()  # SIGKILL: nothing is cleaned up
        other.wait()
        twin.delete()


def test_a_dataset_that_is_dropped_releases_its_right(make_dataset: MakeDataset, tmp_path: Path) -> None:
    dataset = make_dataset()
    note = tmp_path / "set/buffer/manager.json"
    assert note.exists()
    del dataset
    gc.collect()
    assert not note.exists()


def test_without_locks_there_is_one_warning_and_an_error_even_without_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = errno.ENOLCK

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", fail)
    FolderLock(tmp_path, "run", MANAGER).release()
    assert caplog.text.count("has no locks") == 1
    number = errno.EAGAIN
    (tmp_path / "manager.json").write_text("{")
    with pytest.raises(ValueError, match=r"^Another process already manages .*Fix:"):
        FolderLock(tmp_path, "run", MANAGER)
