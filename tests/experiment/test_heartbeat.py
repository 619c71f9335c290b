from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from loxodon.experiment.files import WatchedFile
from loxodon.experiment.fleet import Membership, read_heartbeats

from .fakes import make_experiment


def until(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def joined(run_dir: Path, role: str = "actor", period_s: float = 60.0) -> Membership:
    """A process of the run whose first heartbeat is there."""
    member = Membership(run_dir, "run", role, period_s=period_s)
    with member.joining():
        until(lambda: any(beat.id == member.id for beat in read_heartbeats(run_dir)))
    return member


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
        "machine": "another-boot pid:[1]",
        "env_steps": 5,
    }
    path = run_dir / "status" / f"{changes.get('role', 'actor')}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **changes}))
    os.utime(path, (now, now))
    return path


def test_a_heartbeat_says_at_once_what_changed_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    member = joined(Path("run"))
    monkeypatch.chdir("/")  # the folder stays where it was
    run_dir = tmp_path / "run"
    assert read_heartbeats(run_dir)[0].state == "starting"
    member.put(env_steps=12, policy_version=3)
    member.state("collecting", "two\nlines")
    until(lambda: read_heartbeats(run_dir)[0].state == "collecting")
    beat = read_heartbeats(run_dir)[0]
    assert (beat.env_steps, beat.policy_version, beat.note) == (12, 3, "two lines")
    assert (beat.role, beat.pid, beat.life) == ("actor", os.getpid(), "alive")
    child = multiprocessing.get_context("fork").Process(target=member.leave)
    child.start()
    child.join()
    assert read_heartbeats(run_dir)[0].is_alive  # that of a forked child is no end
    member.end("failed", "ValueError: no")
    member.leave()
    member.leave()
    beat = read_heartbeats(run_dir)[0]
    assert (beat.state, beat.note, beat.life) == ("failed", "ValueError: no", "ended")
    dropped = joined(run_dir)  # of the same process number, so the earlier file gets another name
    dropped.put(env_steps=4)
    del dropped
    assert [(beat.state, beat.env_steps) for beat in read_heartbeats(run_dir)] == [
        ("failed", 12),
        ("stopped", 4),
    ]


def test_beats_go_on_and_measure_speed(tmp_path: Path) -> None:
    member = joined(tmp_path, period_s=0.02)
    member.put(gradient_steps=50)
    until(lambda: read_heartbeats(tmp_path)[0].updates_per_s > 0)
    member.put(gradient_steps=10)  # a checkpoint was loaded
    until(lambda: read_heartbeats(tmp_path)[0].gradient_steps == 10)
    assert read_heartbeats(tmp_path)[0].updates_per_s >= 0
    member.leave()


def test_a_folder_that_cannot_be_written_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status").write_text("in the way")
    member = Membership(tmp_path, "run", "actor", period_s=0.01)
    with member.joining(), caplog.at_level(logging.WARNING, "loxodon"):
        until(lambda: "heartbeat" in caplog.text)
        assert read_heartbeats(tmp_path) == []
        first = member._writer.num_beats  # type: ignore[union-attr]
        until(lambda: member._writer.num_beats > first + 2)  # type: ignore[union-attr]
        (tmp_path / "status").unlink()
        until(lambda: read_heartbeats(tmp_path))
    member.leave()
    assert caplog.text.count("cannot be written") == 1
    assert "Fix:" in caplog.text


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"\xff\x00", b'{"id": "x"}', b'{"pid": "x"}', b"[" * 100_000, None]
)
def test_broken_files_are_passed_over(tmp_path: Path, text: bytes | None) -> None:
    write_beat(tmp_path, "whole")
    if text is None:
        write_beat(tmp_path, "broken", role="king")
    else:
        (tmp_path / "status" / "actor_broken.json").write_bytes(text)
    assert [beat.id for beat in read_heartbeats(tmp_path)] == ["whole"]


def test_the_process_table_decides_here_and_the_age_elsewhere(tmp_path: Path) -> None:
    assert read_heartbeats(tmp_path) == []
    member = joined(tmp_path)
    (own,) = read_heartbeats(tmp_path)
    facts = json.loads(own.path.read_text())
    write_beat(tmp_path, "gone", **{**facts, "id": "gone", "pid": 2**22 + 1})
    write_beat(tmp_path, "earlier", **{**facts, "id": "earlier", "started": 1.0})  # its number is used again
    os.utime(own.path, (1.0, 1.0))
    for name, age_s in (("fresh", 1.0), ("ahead", -5000.0), ("silent", 31.0)):
        write_beat(tmp_path, name, age_s=age_s)
    lives = {beat.id: beat.life for beat in read_heartbeats(tmp_path)}
    dead = dict.fromkeys(("gone", "earlier", "silent"), "dead")
    assert lives == {member.id: "alive", "fresh": "alive", "ahead": "alive", **dead}
    member.leave()


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


def test_a_run_that_fails_leaves_its_error_and_the_lock(tmp_path: Path) -> None:
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
