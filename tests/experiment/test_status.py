from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loxodon.experiment import status
from loxodon.experiment.fleet import overview as overview_module
from loxodon.experiment.fleet.overview import overview

from .test_heartbeat import write_beat


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    write_beat(
        tmp_path,
        "L",
        role="learner",
        gradient_steps=80,
        policy_version=9,
        state="learning",
        started=1.0,
        began_env_steps=500,
        began_updates=0,
    )
    write_beat(tmp_path, "busy", env_steps=1200, env_steps_per_s=300.0, policy_version=7, started=2.0)
    write_beat(tmp_path, "gone", env_steps=800, age_s=3 * 24 * 3600.0, started=3.0)
    write_beat(tmp_path, "broke", env_steps=100, state="failed", note="OSError: no space", started=4.0)
    for part, num_files in (("fifo", 3), ("protected", 1)):
        (tmp_path / "buffer" / part).mkdir(parents=True)
        for i in range(num_files):
            (tmp_path / "buffer" / part / f"env_0000000{i}_17000000{i}0.5.npz").write_bytes(b"1234")
        (tmp_path / "buffer" / part / "notes.txt").write_text("no trajectory")
    (tmp_path / "ckpts/training_states/run_epoch_4").mkdir(parents=True)
    (tmp_path / "ckpts/training_states/run_epoch_4/COMPLETE").touch()
    (tmp_path / "ckpts/training_states/run_epoch_5").mkdir()
    return tmp_path


def test_an_overview_has_everybody_and_everything(fleet: Path) -> None:
    facts = overview(fleet)
    assert (facts["alive"], facts["env_steps"], facts["gradient_steps"]) == (2, 2100, 80)
    assert facts["env_steps_per_s"] == 300.0
    assert facts["replay_ratio"] == 80 / 1600
    assert [(p["id"], p["life"]) for p in facts["processes"]] == [
        ("L", "alive"),
        ("busy", "alive"),
        ("gone", "dead"),
        ("broke", "ended"),
    ]
    assert facts["processes"][1]["versions_behind"] == 2
    assert facts["buffer"]["fifo_files"] == 3
    assert facts["buffer"]["protected_files"] == 1
    assert facts["buffer"]["bytes"] == 16
    assert facts["buffer"]["newest_age_s"] > 0
    assert facts["checkpoint_epochs"] == [4]


def test_people_get_a_table(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(fleet)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run {fleet}: 2 of 4 processes at work"
    assert lines[1].split() == list(overview_module._COLUMNS)
    busy, gone, broke = (next(line for line in lines if word in line) for word in ("1,200", "800", "failed"))
    assert busy.split()[-2:] == ["7", "2"]
    assert "dead" in gone
    assert "3.0 d ago" in gone
    assert lines[lines.index(broke) + 1].strip() == "OSError: no space"
    assert all(len(line) <= 110 for line in lines[1:6])


def test_files_of_others_can_neither_steer_the_terminal_nor_stop_the_view(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b]0;owned\x07\n"
    write_beat(fleet, "odd", host=f"h{bad}", note=f"n{bad}", buffer=f"b{bad}", state="waiting")
    write_beat(fleet, "types", note={"a": 1}, buffer=["no", "path"], loxodon=3, started="nan")
    os.mkfifo(fleet / "status" / "actor_pipe.json")
    (fleet / "status" / "actor_deep.json").write_text("[" * 100_000)
    (fleet / "ckpts/training_states/run_epoch_²").mkdir()
    (fleet / "ckpts/training_states/run_epoch_²/COMPLETE").touch()
    assert status.main([str(fleet)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert r"h\x1b]0;owned\x07\n" in out
    assert r"n\x1b]0;owned\x07\n" in out


def test_json_is_one_line_for_programs_and_nobody_at_work_another_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ckpts").mkdir()
    assert status.main([str(tmp_path), "--json"]) == status.NOBODY
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["alive"] == 0


@pytest.mark.parametrize(("name", "words"), [("empty", "holds no run"), ("absent", "does not exist")])
def test_a_folder_that_is_no_run_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert status.main([str(tmp_path / name)]) == status.NO_RUN
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert "Fix: give <ckpt_base_dir>/<run_name>" in shown.err


def test_watching_goes_on_until_it_is_interrupted(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_looks = iter(range(3))

    def interrupt(_: float) -> None:
        if next(num_looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", interrupt)
    assert status.main([str(fleet), "--watch"]) == 0
    assert capsys.readouterr().out.count("processes at work") == 3
