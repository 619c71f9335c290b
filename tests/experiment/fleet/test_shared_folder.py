"""Processes of a run that do not see the same folder."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.config import ConfigError
from loxodon.experiment.fleet import launchers, shared_folder
from loxodon.experiment.fleet.shared_folder import TOKEN_VARIABLE, check_folder, write_token
from loxodon.tools.run import main


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_WITHIN_S", 0.3)
    monkeypatch.setattr(shared_folder, "_POLL_S", 0.01)


def test_a_process_in_another_folder_names_both_folders(tmp_path: Path) -> None:
    ours, copy = tmp_path / "ours", tmp_path / "copy"
    expected, host = write_token(ours), socket.gethostname()
    assert write_token(ours) == expected  # every process that is started writes it again
    check_folder(ours, expected)
    check_folder(tmp_path / "anywhere", None)  # a process that was started by hand
    (tmp_path / "empty").mkdir()
    write_token(copy)
    places = {"missing": "is missing", "empty": "holds nothing of this run", "copy": "is another folder"}
    for name, what in places.items():
        words = rf"which is {host}:{ours}: {host}:{tmp_path / name} {what}. Fix: set Experiment.ckpt_base_dir"
        with pytest.raises(ConfigError, match=words):
            check_folder(tmp_path / name, expected)
    assert not (tmp_path / "missing").exists()


def test_a_folder_that_appears_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_WITHIN_S", 20.0)
    expected = write_token(tmp_path / "remote")
    timer = threading.Timer(0.1, lambda: shutil.copytree(tmp_path / "remote", tmp_path / "here"))
    timer.start()
    check_folder(tmp_path / "here", expected)
    timer.join()


def test_an_actor_that_does_not_see_the_folder_ends_and_leaves_nothing_behind(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, write_token(tiny.run_dir.parent / "of_the_learner"))
    assert main(["--config", "tiny.gin", "--mode", "collect"]) == 2
    error = capsys.readouterr().err
    assert f"which is {socket.gethostname()}:{tiny.run_dir.parent}/of_the_learner" in error
    assert "tiny.gin:" not in error  # no line of the config is wrong
    assert not tiny.run_dir.exists()


def test_a_ray_worker_that_does_not_see_the_folder_starts_nothing(tmp_path: Path) -> None:
    expected, elsewhere = write_token(tmp_path / "run"), tmp_path / "elsewhere"
    failure = launchers.supervise_actor(
        3, ["--mode", "collect"], str(tmp_path), str(elsewhere), {TOKEN_VARIABLE: expected}
    )
    assert failure is not None
    assert f"actor 3 cannot start on {socket.gethostname()}" in failure
    assert f"{tmp_path}/run: " in failure
    assert not elsewhere.exists()


def test_a_slurm_job_passes_the_token_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "that of the shell")
    seen: list[str | None] = []

    def run(*_: Any, **__: Any) -> int:
        seen.append(shared_folder.expected_token())
        return 0

    job = launchers.SlurmJob(run, ["--mode", "collect"], tmp_path, Path.cwd())
    dataclasses.replace(job, environment={TOKEN_VARIABLE: "token place"})()
    assert seen == ["token place"]
