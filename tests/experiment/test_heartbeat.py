"""Heartbeats of the processes of a run, and how `status` shows them."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.fleet import Membership, heartbeat, read_heartbeats
from loxodon.experiment.process.files import write_text
from loxodon.tools import status
from loxodon.tools.status import overview

from .fakes import make_experiment
from .processes import wait_for


def joined(run_dir: Path, role: str = "actor", period_s: float = 60.0) -> Membership:
    """A process of the run whose first heartbeat is written."""
    member = Membership(run_dir, "run", role, period_s=period_s)
    with member.joining():
        wait_for(lambda: any(beat.id == member.id for beat in read_heartbeats(run_dir)))
    return member


def write_beat(run_dir: Path, name: str = "a", *, age_s: float = 0.0, **changes: Any) -> Path:
    """A heartbeat of a process on another machine, `age_s` old."""
    now = time.time() - age_s
    facts: dict[str, Any] = {
        "format": 1,
        "id": name,
        "role": "actor",
        "host": "far",
        "pid": 7,
        "rank": 0,
        "started": now - 10,
        "time": now,
        "beat": 1,
        "state": "collecting",
        "machine": "another-boot pid:[1]",
        "env_steps": 5,
    }
    path = run_dir / "status" / f"{changes.get('role', 'actor')}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **changes}))
    os.utime(path, (now, now))
    return path


def publish(run_dir: Path) -> None:
    """Write the pace file of the learner of these heartbeats, if any, with the age of its heartbeat."""
    beats = read_heartbeats(run_dir)
    if (learner := heartbeat.newest_learner(beats)) is not None:
        heartbeat.write_learner_report(run_dir, json.loads(learner.path.read_text()), beats)
        os.utime(run_dir / "status" / "pace.json", (learner.modified, learner.modified))


def test_a_heartbeat_is_written_at_once_on_changes_and_reports_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    member = joined(Path("run"))
    monkeypatch.chdir("/")  # the folder is remembered as an absolute path
    run_dir = tmp_path / "run"
    assert read_heartbeats(run_dir)[0].state == "starting"
    member.put(env_steps=12, policy_version=3)
    member.state("collecting", "two\nlines")
    wait_for(lambda: read_heartbeats(run_dir)[0].state == "collecting")
    beat = read_heartbeats(run_dir)[0]
    assert (beat.env_steps, beat.policy_version, beat.note) == (12, 3, "two lines")
    assert (beat.role, beat.pid, beat.life) == ("actor", os.getpid(), "alive")
    child = multiprocessing.get_context("fork").Process(target=member.leave)
    child.start()
    child.join()
    assert read_heartbeats(run_dir)[0].is_alive  # the exit of a forked child does not end the process
    member.end("failed", "ValueError: no")
    member.leave()
    member.leave()
    beat = read_heartbeats(run_dir)[0]
    assert (beat.state, beat.note, beat.life) == ("failed", "ValueError: no", "ended")
    dropped = joined(run_dir)  # the same pid, but a file of its own
    dropped.put(env_steps=4)
    del dropped
    assert [(beat.state, beat.env_steps) for beat in read_heartbeats(run_dir)] == [
        ("failed", 12),
        ("stopped", 4),
    ]


def test_liveness_is_decided_by_the_process_table_here_and_by_age_elsewhere(tmp_path: Path) -> None:
    assert read_heartbeats(tmp_path) == []
    member = joined(tmp_path)
    (own,) = read_heartbeats(tmp_path)
    facts = json.loads(own.path.read_text())
    write_beat(tmp_path, "gone", **{**facts, "id": "gone", "pid": 2**22 + 1})
    used_again = {**facts, "id": "earlier", "started": 1.0}
    write_beat(tmp_path, "earlier", age_s=1e6, **used_again)
    # Setting the clock changes the start times of processes, but not the recorded ones.
    write_beat(tmp_path, "clock_set", age_s=1.0, **{**used_again, "id": "clock_set"})
    os.utime(own.path, (1.0, 1.0))
    for name, age_s in (("fresh", 1.0), ("ahead", -5000.0), ("silent", 31.0)):
        write_beat(tmp_path, name, age_s=age_s)
    lives = {beat.id: beat.life for beat in read_heartbeats(tmp_path)}
    dead = dict.fromkeys(("gone", "earlier", "silent"), "dead")
    assert lives == {**dict.fromkeys((member.id, "clock_set", "fresh", "ahead"), "alive"), **dead}
    member.leave()


def test_an_open_experiment_may_be_collected_by_its_own_heartbeat_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_MIN_GAP_S", 0.0)
    member = joined(tmp_path, period_s=0.01)
    collected_in: list[str] = []
    weakref.finalize(member, lambda: collected_in.append(threading.current_thread().name))
    cycle: list[Any] = [member]
    cycle.append(cycle)

    def write_and_collect(*args: Any, **kwargs: Any) -> None:
        write_text(*args, **kwargs)
        if not collected_in:
            gc.collect()

    gc.disable()  # only the thread itself may collect it
    try:
        monkeypatch.setattr(heartbeat, "write_text", write_and_collect)
        del member, cycle
        wait_for(lambda: [beat.state for beat in read_heartbeats(tmp_path)] == ["stopped"])
    finally:
        gc.enable()
    assert collected_in == ["heartbeat"]


def test_a_run_reports_its_states_and_its_end(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    told: list[str] = []
    tell = exp.fleet.state
    exp.fleet.state = lambda state, note=None: (told.append(state), tell(state, note))[1]  # type: ignore[method-assign]
    exp.start()
    exp.learn()
    exp.close()
    assert told == ["waiting", *["evaluating", "collecting", "learning"] * 2, "evaluating", "finished"]
    beat = read_heartbeats(exp.run_dir)[0]
    assert (beat.role, beat.state, beat.env_steps, beat.gradient_steps) == ("both", "finished", 72, 8)
    assert (beat.policy_version, beat.epoch) == (exp.ctx.progress.policy_version, 1)
    assert beat.buffer == str((exp.run_dir / "buffer").absolute())


def test_a_run_that_fails_leaves_its_error_and_releases_the_lock(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path / "a")
    exp.start()
    exp.learner.update = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        exp.learn()
    exp.close()
    unbuilt = make_experiment(tmp_path / "b", make_train_env=[])
    with pytest.raises(ValueError, match="entries"):
        unbuilt.start()
    beats = [read_heartbeats(one.run_dir)[0] for one in (exp, unbuilt)]
    assert [beat.state for beat in beats] == ["failed", "failed"]
    assert beats[0].note == "ZeroDivisionError: division by zero"
    assert not (unbuilt.run_dir / "learner.json").exists()


def test_a_learner_without_any_work_does_not_replace_one_that_worked(tmp_path: Path) -> None:
    write_beat(tmp_path, "L1", role="learner", state="finished", started=1.0, gradient_steps=9)
    write_beat(tmp_path, "L2", role="learner", state="failed", started=2.0, env_steps=0)
    learner = heartbeat.newest_learner(read_heartbeats(tmp_path))
    assert learner is not None
    assert learner.started == 1.0


# ---- status ----


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


def test_an_overview_covers_all_processes_and_files(fleet: Path) -> None:
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


def test_status_prints_a_table(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(fleet)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run {fleet}: 2 of 4 processes running"
    assert lines[1].split() == list(status._COLUMNS)
    busy, gone, broke = (next(line for line in lines if word in line) for word in ("1,200", "800", "failed"))
    assert busy.split()[-2:] == ["7", "2"]
    assert "dead" in gone
    assert "3 d ago" in gone
    assert lines[lines.index(broke) + 1].strip() == "OSError: no space"
    assert all(len(line) <= 110 for line in lines[1:6])


def test_untrusted_files_cannot_control_the_terminal_or_break_the_view(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b]0;owned\x07\n"
    write_beat(fleet, "odd", host=f"h{bad}", note=f"n{bad}", buffer=f"b{bad}", state="waiting")
    write_beat(fleet, "types", note={"a": 1}, buffer=["no", "path"], loxodon=3, started="nan")
    write_beat(fleet, "king", role="king")
    os.mkfifo(fleet / "status" / "actor_pipe.json")
    for i, text in enumerate([b"", b"[]", b"\xff\x00", b'{"id": "x"}', b'{"pid": "x"}', b"[" * 100_000]):
        (fleet / "status" / f"actor_{i}.json").write_bytes(text)
    assert {beat.id for beat in read_heartbeats(fleet)} == {"L", "busy", "gone", "broke", "odd", "types"}
    (fleet / "ckpts/training_states/run_epoch_²").mkdir()
    (fleet / "ckpts/training_states/run_epoch_²/COMPLETE").touch()
    assert status.main([str(fleet)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert r"h\x1b]0;owned\x07\n" in out
    assert r"n\x1b]0;owned\x07\n" in out


def test_json_is_one_line_and_a_run_without_processes_has_its_own_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ckpts").mkdir()
    assert status.main([str(tmp_path), "--json"]) == status.NOBODY
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["alive"] == 0


@pytest.mark.parametrize(
    ("state", "age_s", "expected"),
    [
        ("learning", 0.0, 0),
        ("finished", 1e6, 0),
        ("stopped", 0.0, 3),
        ("failed", 0.0, 3),
        ("learning", 1e6, 3),
    ],
)
def test_the_exit_status_says_whether_a_run_needs_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, age_s: float, expected: int
) -> None:
    write_beat(tmp_path, "L", role="learner", state=state, age_s=age_s)
    write_beat(tmp_path, "actor", state="stopped")
    assert status.main([str(tmp_path)]) == expected


def test_env_steps_of_actors_whose_files_are_gone_still_count(tmp_path: Path) -> None:
    write_beat(tmp_path, "L", role="learner", forgotten_env_steps=100)
    write_beat(tmp_path, "actor", env_steps=5)
    assert heartbeat.env_steps_of(read_heartbeats(tmp_path)) == 105


@pytest.mark.parametrize(("name", "words"), [("empty", "holds no run"), ("absent", "does not exist")])
def test_a_folder_without_a_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "empty" / "buffer").mkdir(parents=True)  # data without a run
    try:
        ended: Any = status.main([str(tmp_path / name)])
    except SystemExit as error:  # found while parsing the arguments
        ended = error.code
    shown = capsys.readouterr()
    assert ended == status.NO_RUN
    assert shown.out == ""
    assert words in shown.err
    assert re.search("Fix: give .*<ckpt_base_dir>/<run_name>", shown.err)


def test_a_folder_that_cannot_be_written_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status").write_text("in the way")
    member = Membership(tmp_path, "run", "actor", period_s=0.01)
    with member.joining(), caplog.at_level(logging.WARNING, "loxodon"):
        wait_for(lambda: "heartbeat" in caplog.text)
        assert read_heartbeats(tmp_path) == []
        first = member._writer.num_beats  # type: ignore[union-attr]
        wait_for(lambda: member._writer.num_beats > first + 2)  # type: ignore[union-attr]
        (tmp_path / "status").unlink()
        wait_for(lambda: read_heartbeats(tmp_path))
    member.leave()
    assert caplog.text.count("cannot be written") == 1
    assert "Fix:" in caplog.text
