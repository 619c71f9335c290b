from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loxodon.experiment.fleet.ratio import Ledger, Ratio, Tally, Throttle, read_tally
from loxodon.experiment.fleet.reading import read_heartbeats

from .fakes import make_experiment, run
from .test_experiment import records
from .test_heartbeat import write_beat

RATIOS = st.builds(Ratio, st.floats(1e-4, 50.0), st.floats(0.0, 0.9), st.integers(0, 2000))
DAY_S = 24 * 3600.0


@settings(max_examples=300, deadline=None)
@given(RATIOS, st.integers(0, 10**7), st.integers(0, 10**7))
def test_never_do_both_sides_have_to_wait(ratio: Ratio, env_steps: int, updates: int) -> None:
    assert ratio.updates_allowed(env_steps, updates) or ratio.env_steps_allowed(env_steps, updates)


@settings(max_examples=200, deadline=None)
@given(RATIOS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_is_allowed_leads_just_beyond_the_limit(ratio: Ratio, env_steps: int, updates: int) -> None:
    for allowed, again in (
        (n := ratio.updates_allowed(env_steps, updates), ratio.updates_allowed(env_steps, updates + n)),
        (n := ratio.env_steps_allowed(env_steps, updates), ratio.env_steps_allowed(env_steps + n, updates)),
    ):
        if allowed:
            assert again == 0


def test_the_limits_are_those_of_the_formula() -> None:
    ratio = Ratio(0.5, 0.1, 10)
    assert ratio.updates_allowed(1000, 549) == 2  # 550 = 0.5 * 1000 * 1.1 may be reached and passed once
    assert ratio.updates_allowed(1000, 551) == 0
    assert ratio.env_steps_allowed(1000, 450) == 1  # 450 = 0.5 * 1000 * 0.9
    assert ratio.env_steps_allowed(1000, 449) == 0
    assert ratio.updates_allowed(0, 0) == 2  # a tenth of the first epoch's updates
    assert ratio.updates_due(1000, 450) == 50


def test_no_step_is_counted_twice_whatever_becomes_of_the_files(tmp_path: Path) -> None:
    write_beat(tmp_path, "old", age_s=3 * DAY_S, env_steps=100, state="stopped")
    write_beat(tmp_path, "killed", age_s=2 * DAY_S, env_steps=30)
    write_beat(tmp_path, "new", env_steps=7)
    write_beat(tmp_path, "x", role="both", env_steps=1000)  # a learner's own steps are no actor's
    ledger = Ledger(tmp_path, None, "me")
    ledger.begin()
    assert ledger.count() == 137
    ledger.fold()
    assert {beat.id for beat in read_heartbeats(tmp_path)} == {"new", "x"}
    assert ledger.count() == 137
    write_beat(tmp_path, "killed", env_steps=33)  # it was only asleep
    write_beat(tmp_path, "again", env_steps=5)  # an actor that was started again
    assert ledger.count() == 145
    successor = Ledger(tmp_path, None, "next")
    successor.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    successor.begin()
    assert successor.count() == 145
    for path in (tmp_path / "status").iterdir():
        path.unlink()
    assert successor.count() == 145  # the checkpoint remembers
    tally = read_tally(tmp_path)
    assert tally is None
    successor.write()
    tally = read_tally(tmp_path)
    assert tally is not None
    assert (tally.learner, tally.env_steps) == ("next", 145)


def test_a_clock_ahead_drops_no_file_of_a_process_that_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beat(tmp_path, "a", state="stopped")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * DAY_S)
    ledger = Ledger(tmp_path, None, "me")
    ledger.begin()
    ledger.fold()
    assert len(read_heartbeats(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"learner": 1, "counts": 3, "began_at": null}', "null"])
def test_broken_totals_are_no_totals(tmp_path: Path, text: str) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status/totals.json").write_text(text)
    assert read_tally(tmp_path) is None
    Ledger(tmp_path, None, "me").begin()
    assert read_tally(tmp_path) == Tally("me")


def test_a_full_disk_is_told_once_and_keeps_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_beat(tmp_path, "old", age_s=3 * DAY_S, state="stopped")
    write_beat(tmp_path, "new")
    ledger = Ledger(tmp_path, None, "me")
    ledger.begin()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        ledger.fold()
        ledger.fold()
    assert caplog.text.count("cannot be written") == 1
    assert len(read_heartbeats(tmp_path)) == 2
    ledger.fold()
    assert len(read_heartbeats(tmp_path)) == 1


def throttled(run_dir: Path, *, began_at: tuple[int, int] | None = (100, 10), **learner: Any) -> int | None:
    """What an actor that took 500 steps is allowed, beside another one with 100."""
    write_beat(run_dir, "L", role="learner", **{"gradient_steps": 260, **learner})
    write_beat(run_dir, "other", env_steps=100)
    ledger = Ledger(run_dir, None, "L")
    ledger.tally.began_at = began_at
    ledger.begin()
    return Throttle(run_dir, Ratio(0.5, 0.1, 0), "self").env_steps_allowed(500)


def test_an_actor_takes_its_share_of_what_is_left(tmp_path: Path) -> None:
    # 250 updates allow 555 env steps since training began, 500 were taken, and there are two actors.
    assert throttled(tmp_path) == 56 // 2


@pytest.mark.parametrize(
    ("learner", "allowed"),
    [
        ({"gradient_steps": 200}, 0),
        ({"gradient_steps": 200, "age_s": 5000.0}, 0),  # dead: it will be started again
        ({"gradient_steps": 200, "state": "stopped"}, 0),
        ({"gradient_steps": 200, "state": "finished"}, None),
        ({"gradient_steps": 200, "began_at": None}, None),
    ],
)
def test_whom_an_actor_waits_for(tmp_path: Path, learner: dict[str, Any], allowed: int | None) -> None:
    assert throttled(tmp_path, **learner) == allowed


def test_without_a_learner_nobody_waits(tmp_path: Path) -> None:
    assert Throttle(tmp_path, Ratio(0.5, 0.1, 10), "self").env_steps_allowed(10**9) is None


def test_in_mode_both_the_ratio_sets_the_updates_of_each_epoch(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 5, "replay_ratio": 0.2, "start_learning_at_epoch": 1}
    exp = run(make_experiment(tmp_path / "whole", **changes))
    logged = [r for r in records(exp) if "train/updates" in r]
    # 36 env steps an epoch; those before the first epoch that trains do not count.
    assert [r["train/updates"] for r in logged] == [7, 7, 7, 7]
    assert exp.learner.gradient_steps == int(0.2 * 36 * 4)
    assert logged[-1]["train/replay_ratio"] == pytest.approx(28 / 144)
    one = make_experiment(tmp_path / "parts", **{**changes, "epochs": 3})
    run(one)
    two = make_experiment(tmp_path / "parts", **changes)
    run(two, lambda exp: exp.load_checkpoint())
    assert two.learner.gradient_steps == exp.learner.gradient_steps


def test_micro_batches_count_as_one_update(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, replay_ratio=0.1, batches_per_update=2))
    assert exp.learner.gradient_steps == int(0.1 * 72)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replay_ratio": 0.0}, "replay_ratio is 0.0.*above 0.*Fix"),
        ({"replay_ratio": -1}, "replay_ratio is -1.*above 0.*Fix"),
        ({"replay_ratio_tolerance": 1.0}, "replay_ratio_tolerance is 1.0.*below 1.*Fix"),
        ({"replay_ratio_tolerance": -0.1}, "replay_ratio_tolerance is -0.1.*Fix"),
    ],
)
def test_wrong_ratios_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_experiment(tmp_path, **changes)


def test_a_run_that_begins_anew_counts_the_actors_at_work_only(tmp_path: Path) -> None:
    earlier = Ledger(tmp_path, None, "earlier")
    write_beat(tmp_path, "killed", age_s=2 * DAY_S, env_steps=30)
    earlier.begin(anew=True)
    assert earlier.count() == 30  # the first learner of the run; this actor was there before it
    write_beat(tmp_path, "new", env_steps=7)
    again = Ledger(tmp_path, None, "again")
    again.begin(anew=True)
    assert again.count() == 7
    assert {beat.id for beat in read_heartbeats(tmp_path)} == {"new"}
