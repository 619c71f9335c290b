from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.fleet import Heartbeat, StatusReader, read_heartbeats, reading
from loxodon.experiment.fleet.latest import WatchedFile

from .fakes import make_experiment

ELSEWHERE = "another-boot pid:[1]"


def until(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def write_beat(run_dir: Path, name: str = "a", *, age_s: float = 0.0, **changes: Any) -> Path:
    """A heartbeat of a process of another machine, `age_s` old."""
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
        "machine": ELSEWHERE,
        "env_steps": 5,
    }
    path = run_dir / "status" / f"{changes.get('role', 'actor')}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **changes}))
    os.utime(path, (now, now))
    return path


def test_a_heartbeat_says_at_once_what_changed_and_ends_with_its_last_state(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "actor", period_s=60.0)
    until(lambda: read_heartbeats(tmp_path))
    assert read_heartbeats(tmp_path)[0].state == "starting"
    heartbeat.put(env_steps=12, policy_version=3)
    heartbeat.state("collecting", "two\nlines")
    until(lambda: read_heartbeats(tmp_path)[0].state == "collecting")
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.env_steps, beat.policy_version, beat.note) == (12, 3, "two lines")
    assert (beat.role, beat.pid, beat.life) == ("actor", os.getpid(), "alive")
    assert beat.id == heartbeat.process_id
    heartbeat.close("failed", "ValueError: no")
    heartbeat.close("finished")  # too late
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.state, beat.note, beat.life) == ("failed", "ValueError: no", "ended")
    assert [path.name for path in (tmp_path / "status").iterdir()] == [heartbeat.path.name]


def test_a_heartbeat_that_is_dropped_says_that_it_stopped_unless_it_said_more(tmp_path: Path) -> None:
    for state, expected in (("learning", "stopped"), ("failed", "failed")):
        heartbeat = Heartbeat(tmp_path, "learner")
        heartbeat.state(state)
        del heartbeat
        assert read_heartbeats(tmp_path)[-1].state == expected


def test_beats_go_on_and_measure_speed(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "learner", period_s=0.02)
    until(lambda: read_heartbeats(tmp_path))
    heartbeat.put(gradient_steps=50)
    until(lambda: read_heartbeats(tmp_path)[0].updates_per_s > 0)
    first = read_heartbeats(tmp_path)[0].beat
    until(lambda: read_heartbeats(tmp_path)[0].beat > first)
    heartbeat.put(gradient_steps=10)  # a checkpoint was loaded
    until(lambda: read_heartbeats(tmp_path)[0].gradient_steps == 10)
    assert read_heartbeats(tmp_path)[0].updates_per_s >= 0
    heartbeat.close()


def test_a_folder_that_cannot_be_written_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status").write_text("in the way")
    heartbeat = Heartbeat(tmp_path, "actor", period_s=0.01)
    until(lambda: "heartbeat" in caplog.text)
    for state in ("collecting", "waiting", "collecting"):
        heartbeat.state(state)
        time.sleep(0.06)
    with caplog.at_level(logging.WARNING, "loxodon"):
        (tmp_path / "status").unlink()
        until(lambda: read_heartbeats(tmp_path))
    heartbeat.close("finished")
    assert caplog.text.count("cannot be written") == 1
    assert "Fix:" in caplog.text


def test_a_forked_child_leaves_the_heartbeat_of_its_parent_alone(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "actor")
    until(lambda: read_heartbeats(tmp_path))
    child = multiprocessing.get_context("fork").Process(target=heartbeat.close, args=("failed",))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert read_heartbeats(tmp_path)[0].state == "starting"
    heartbeat.close()


def test_an_earlier_process_of_the_same_number_keeps_its_file(tmp_path: Path) -> None:
    for steps in (3, 4):
        heartbeat = Heartbeat(tmp_path, "actor")
        heartbeat.put(env_steps=steps)
        heartbeat.close("finished")
    assert sorted(beat.env_steps for beat in read_heartbeats(tmp_path)) == [3, 4]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\x00",
        b'{"id": "x"}',
        json.dumps({"id": "x", "role": "king", "host": "h", "pid": 1, "beat": 1}).encode(),
    ],
)
def test_broken_files_are_passed_over(tmp_path: Path, text: bytes) -> None:
    write_beat(tmp_path, "whole")
    (tmp_path / "status" / "actor_broken.json").write_bytes(text)
    assert [beat.id for beat in read_heartbeats(tmp_path)] == ["whole"]


def test_no_folder_means_nobody(tmp_path: Path) -> None:
    assert read_heartbeats(tmp_path / "nothing") == []


def test_on_this_machine_the_process_table_decides_whatever_the_clocks_say(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "actor", period_s=60.0)
    heartbeat.state("collecting")
    until(lambda: [b for b in read_heartbeats(tmp_path) if b.state == "collecting"])
    time.sleep(0.1)
    for age_s in (1e6, -1e6):
        os.utime(heartbeat.path, (time.time() - age_s,) * 2)
        assert read_heartbeats(tmp_path)[0].life == "alive"
    facts = json.loads(heartbeat.path.read_text())
    for changes in ({"process_start": facts["process_start"] + 1}, {"pid": 2**22 + 1}):
        (tmp_path / "status" / "actor_other.json").write_text(json.dumps({**facts, **changes, "id": "other"}))
        assert {b.id: b.life for b in read_heartbeats(tmp_path)}["other"] == "dead"
    heartbeat.close()


@pytest.mark.parametrize(
    ("age_s", "beside", "life"),
    [(1.0, 0.0, "alive"), (-5000.0, 0.0, "alive"), (5000.0, 0.0, "dead"), (5000.0, 4995.0, "alive")],
)
def test_elsewhere_the_age_decides_for_now_and_is_measured_against_others(
    tmp_path: Path, age_s: float, beside: float, life: str
) -> None:
    write_beat(tmp_path, "one", age_s=age_s)
    write_beat(tmp_path, "two", age_s=beside)  # all clocks of the other side may differ from this one's
    assert {beat.id: beat.life for beat in read_heartbeats(tmp_path)}["one"] == life


def test_whoever_beats_while_one_looks_is_alive_and_whoever_does_not_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(reading.time, "monotonic", lambda: now[0])
    write_beat(tmp_path, "jumped", age_s=3600)
    write_beat(tmp_path, "silent", age_s=-3600)
    reader = StatusReader(tmp_path)

    def lives() -> dict[str, str]:
        return {beat.id: beat.life for beat in reader.read()}

    assert lives() == {"jumped": "dead", "silent": "alive"}
    now[0] += 5
    write_beat(tmp_path, "jumped", age_s=3598, beat=2)
    assert lives()["jumped"] == "alive"
    now[0] += reading.STALE_S + 1
    write_beat(tmp_path, "jumped", age_s=3500, beat=3)
    assert lives() == {"jumped": "alive", "silent": "dead"}
    now[0] += reading.STALE_S + 1
    assert lives()["jumped"] == "dead"


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beat(tmp_path)
    reader = StatusReader(tmp_path)
    reader.read()
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("was read"))
    assert [beat.id for beat in reader.read()] == ["a"]


def test_a_watched_file_is_read_only_after_it_was_replaced(tmp_path: Path) -> None:
    path, reads = tmp_path / "file", []

    def read(file: Path) -> str:
        reads.append(file)
        return file.read_text()

    watched = WatchedFile(path, read)
    assert watched.poll() is None
    for text in ("one", "two"):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)
        assert [watched.poll(), watched.poll()] == [text, text]
    assert len(reads) == 2
    path.unlink()
    assert watched.poll() is None


def test_a_run_tells_its_states_and_how_it_ended(tmp_path: Path) -> None:
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
    assert beat.spaces_digest is not None


def test_a_run_that_fails_leaves_its_error(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path)
    exp.start()
    exp.learner.update = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        exp.learn()
    exp.close()
    beat = read_heartbeats(exp.run_dir)[0]
    assert (beat.state, beat.note) == ("failed", "ZeroDivisionError: division by zero")


def test_a_run_that_cannot_be_built_leaves_its_error_and_the_lock(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, make_train_env=[])
    with pytest.raises(ValueError, match="entries"):
        exp.start()
    assert read_heartbeats(exp.run_dir)[0].state == "failed"
    assert not (exp.run_dir / "learner.json").exists()


def test_a_change_of_directory_does_not_move_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat(Path("run"), "actor")
    monkeypatch.chdir(elsewhere)
    heartbeat.close("finished")
    assert list(elsewhere.iterdir()) == []
    assert len(list((tmp_path / "run").rglob("actor_*.json"))) == 1
