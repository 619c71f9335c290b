from __future__ import annotations

import itertools
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loxodon.experiment.contracts import Progress, Role
from loxodon.experiment.fleet import ReplayRatio, pace, read_heartbeats
from loxodon.experiment.fleet.pace import Ratio
from loxodon.experiment.learn import off_policy

from .fakes import make_experiment, metrics, run
from .test_heartbeat import publish, write_beat

RATIOS = st.builds(
    Ratio, st.floats(1e-4, 50.0), st.floats(0.0, 0.9), st.integers(0, 2000), st.integers(0, 10**6)
)
COUNTS = st.integers(0, 10**7)
DAY_S = 24 * 3600.0


class Process:
    """A process with a pace, its reported states, and its progress. It is asked to stop once it waits."""

    def __init__(self, run_dir: Path, mode: str = "learn", name: str = "me", **settings: Any) -> None:
        self.told: list[tuple[str, str | None]] = []
        self.lines: list[str] = []
        self.progress = Progress(epochs=10, seed=0, epoch=3)
        ctx: Any = SimpleNamespace(
            run_dir=run_dir,
            role=Role.of(mode),
            is_main=True,
            accelerator=SimpleNamespace(num_processes=1),
            progress=self.progress,
            status=SimpleNamespace(state=lambda *told: self.told.append(told), put=lambda **_: None),
            console=SimpleNamespace(say=self.lines.append),
            stop=SimpleNamespace(requested=lambda: True),
            stop_agreed=lambda: ("waiting", "for env steps of actors") in self.told,
        )
        self.pace: ReplayRatio = ReplayRatio(ctx, name, **settings)

    def count(self) -> int:
        self.pace.begin_epoch()
        return self.progress.env_steps


@given(RATIOS, COUNTS, COUNTS)
def test_the_two_sides_never_wait_for_each_other_and_their_allowance_ends_just_beyond_the_limit(
    ratio: Ratio, env_steps: int, updates: int
) -> None:
    more_updates = ratio.updates_allowed(env_steps, updates)
    more_steps = ratio.env_steps_allowed(env_steps, updates)
    assert more_updates or more_steps
    assert not more_updates or ratio.updates_allowed(env_steps, updates + more_updates) == 0
    assert not more_steps or ratio.env_steps_allowed(env_steps + more_steps, updates) == 0


def test_the_limits_follow_the_formula() -> None:
    ratio = Ratio(0.5, 0.1, 10)
    assert ratio.updates_allowed(1000, 549) == 2  # 550 = 0.5 * 1000 * 1.1 may be reached and passed once
    assert ratio.updates_allowed(1000, 551) == 0
    assert ratio.env_steps_allowed(1000, 450) == 1  # 450 = 0.5 * 1000 * 0.9
    assert ratio.env_steps_allowed(1000, 449) == 0
    assert ratio.updates_allowed(0, 0) == 2  # a tenth of the first epoch's updates
    assert ratio.updates_due(1000, 450) == 50


def test_while_the_ratio_rises_updates_grow_with_the_square_of_env_steps() -> None:
    ratio = Ratio(0.5, 0.1, 0, warmup_env_steps=100)
    assert [ratio.updates_due(env_steps, 0) for env_steps in (0, 20, 50, 100, 120)] == [0, 1, 6, 25, 35]
    assert ratio.env_steps_allowed(50, 6) == 2  # 6 / 0.9 updates are due after 51.6 env steps
    assert ratio.env_steps_allowed(100, 25) == 6  # 25 / 0.9 updates are due after 105.6 env steps


def test_no_step_is_counted_twice_whether_files_stay_or_vanish(tmp_path: Path) -> None:
    write_beat(tmp_path, "old", age_s=3 * DAY_S, env_steps=100, state="stopped")
    write_beat(tmp_path, "killed", age_s=2 * DAY_S, env_steps=30)
    write_beat(tmp_path, "new", env_steps=7)
    write_beat(tmp_path, "x", role="both", env_steps=1000)  # a learner's own steps do not count as an actor's
    learner = Process(tmp_path)
    learner.pace.begin(is_new=False)
    assert learner.count() == 137
    assert {beat.id for beat in read_heartbeats(tmp_path)} == {"new", "x"}  # the others are forgotten
    write_beat(tmp_path, "again", env_steps=5)  # a restarted actor
    assert learner.count() == 142
    saved = json.loads(json.dumps(learner.pace.state_dict()))
    for folder in (tmp_path, tmp_path / "copy"):  # with the heartbeats, and without them
        write_beat(folder, "me", role="learner", state="stopped", forgotten_env_steps=130)
        successor = Process(folder, name="next")
        successor.pace.load_state_dict(saved)
        successor.pace.begin(is_new=False)
        assert successor.count() == 142
    anew = Process(tmp_path, name="anew")
    write_beat(tmp_path, "new", state="stopped", env_steps=7)
    anew.pace.begin(is_new=True)
    assert anew.count() == 5  # a new run of the name counts only running actors
    branch = Process(tmp_path, name="branch")
    write_beat(tmp_path, "again", state="stopped", env_steps=5)
    branch.pace.load_state_dict(saved)
    branch.pace.begin(is_new=True)
    assert branch.count() == 142  # those of the run that it continues


def continued(process: Process, folder: Path, mode: str) -> Process:
    """The process that resumes in another mode from a checkpoint of this one."""
    pace, progress = json.loads(json.dumps([process.pace.state_dict(), process.progress.state_dict()]))
    successor = Process(folder, mode, name=f"{mode}-again", ratio=0.5, epoch_updates=100)
    successor.pace.load_state_dict(pace)
    successor.progress.load_state_dict(progress)
    successor.pace.begin(is_new=False)
    return successor


def test_a_run_keeps_its_env_steps_and_its_ratio_when_it_continues_in_another_mode(tmp_path: Path) -> None:
    learner = Process(tmp_path, "learn", ratio=0.5, epoch_updates=100)
    write_beat(tmp_path, "actor", state="stopped", env_steps=10_000)
    learner.progress.gradient_steps, learner.pace._began_at = 5000, (0, 0)
    learner.pace.begin(is_new=False)
    assert learner.count() == 10_000

    alone = continued(learner, tmp_path, "both")
    alone.pace.begin_epoch()
    assert alone.pace.count_env_steps() == 10_000
    alone.progress.env_steps += 100
    alone.pace.after_env_steps(100)
    assert alone.pace.batches(0) == 50
    alone.progress.gradient_steps += 50

    again = continued(alone, tmp_path, "learn")
    write_beat(tmp_path, "new", env_steps=4000)
    assert again.count() == 14_100
    assert again.pace._since_began() == (14_100, 5050)


def test_a_learner_that_stopped_before_its_first_update_keeps_its_env_steps(tmp_path: Path) -> None:
    write_beat(tmp_path, "actor", state="stopped", env_steps=900)
    learner = Process(tmp_path, ratio=0.5, start_after=1000)
    learner.progress.epoch = 0
    learner.pace.begin(is_new=True)
    write_beat(tmp_path, "actor", state="stopped", env_steps=900)
    again = continued(learner, tmp_path, "learn")
    write_beat(tmp_path, "new", env_steps=200)
    assert again.count() == 1100


@pytest.mark.parametrize(
    ("learner", "note"),
    [
        ({"gradient_steps": 260}, None),  # 250 updates allow 555 env steps since training began
        ({"gradient_steps": 200}, "for the learner's updates"),
        ({"gradient_steps": 200, "state": "stopped"}, "for the learner, which is not running"),
        ({"gradient_steps": 200, "age_s": 5000.0}, "for the learner, which is not running"),
        ({"gradient_steps": 200, "state": "finished"}, None),
        ({"gradient_steps": 200, "rank": 1}, None),  # there is no learner yet
        ({"began_env_steps": None}, "for the learner's updates"),  # enough for it to begin
        ({"began_env_steps": None, "start_after": 701}, None),
        ({"began_env_steps": None, "lacks_data": True}, None),
        ({"gradient_steps": 200, "lacks_data": True}, None),  # resumed without its trajectories
    ],
)
def test_an_actor_waits_while_it_is_too_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: dict[str, Any], note: str | None
) -> None:
    monkeypatch.setattr(pace.time, "sleep", lambda _: None)
    start_after = learner.pop("start_after", 600)
    write_beat(tmp_path, "L", **{"role": "learner", "began_env_steps": 100, "began_updates": 10, **learner})
    write_beat(tmp_path, "other", env_steps=100, age_s=5000.0)  # its steps count even though it is dead
    publish(tmp_path)
    actor = Process(tmp_path, "collect", "self", ratio=0.5, start_after=start_after)
    for _ in range(5):
        actor.pace.after_env_steps(100)
    assert actor.told == ([] if note is None else [("waiting", note), ("collecting",)])
    assert len(actor.lines) == (note == "for the learner, which is not running")


def test_an_actor_of_a_finished_run_waits_for_its_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace.time, "sleep", lambda _: None)
    actor = Process(tmp_path, "collect", "self")
    assert actor.pace.wait_for_continuation()  # there is no learner yet
    write_beat(tmp_path, "L", role="learner", state="finished")
    publish(tmp_path)
    assert not actor.pace.wait_for_continuation()
    monkeypatch.setattr(actor.pace.ctx.stop, "requested", lambda: False)
    monkeypatch.setattr(pace, "CONTINUE_S", 0.0)
    assert not actor.pace.wait_for_continuation()
    monkeypatch.setattr(pace, "CONTINUE_S", 1e9)

    def another_begins(_: float) -> None:
        write_beat(tmp_path, "L", role="learner", state="learning")
        publish(tmp_path)

    monkeypatch.setattr(pace.time, "sleep", another_begins)
    assert actor.pace.wait_for_continuation()
    assert "waits for 1e+09 s for one that continues the run" in actor.lines[0]
    monkeypatch.setattr(pace, "CONTINUE_S", 0.0)  # as in a job whose learner is still in the queue
    monkeypatch.setenv(pace.FINISHED_VARIABLE, "K L")
    write_beat(tmp_path, "L", role="learner", state="finished")
    publish(tmp_path)
    assert actor.pace.wait_for_continuation()


def test_a_learner_without_data_says_so_to_its_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(make_experiment(tmp_path, epochs=1)).run_dir / "buffer/fifo"
    for path in folder.iterdir():
        path.rename(tmp_path / path.name)
    learner = make_experiment(tmp_path, mode="learn")
    learner.start()
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(learner.fleet, "put", lambda **values: told.append(values))

    def data_arrive(_: float) -> None:
        for path in tmp_path.glob("*.npz"):
            path.rename(folder / path.name)

    # Threads of the run sleep, too, so the module gets a clock of its own.
    clock = SimpleNamespace(sleep=data_arrive, monotonic=time.monotonic)
    monkeypatch.setattr(off_policy, "time", clock)
    assert learner.trainer.wait_for_data()
    assert told == [{"lacks_data": True}, {"lacks_data": False}]
    learner.close()


OPENED: list[str] | None = None


def note_opening(event: str, args: tuple[Any, ...]) -> None:
    if OPENED is not None and event in ("open", "os.scandir", "os.listdir"):
        OPENED.append(str(args[0]))


sys.addaudithook(note_opening)  # audit hooks cannot be removed


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_an_actor_opens_one_file_to_learn_the_progress_of_all_others(
    tmp_path: Path, ratio: float | None
) -> None:
    global OPENED  # noqa: PLW0603
    write_beat(tmp_path, "L", role="learner", began_env_steps=0, began_updates=0, gradient_steps=1000)
    for i in range(20):
        write_beat(tmp_path, f"actor{i}", env_steps=50)
    publish(tmp_path)
    actor = Process(tmp_path, "collect", "actor3", ratio=ratio, tolerance=0.0)
    OPENED = []
    actor.pace.after_env_steps(60)
    opened, OPENED = OPENED, None
    assert opened == [str(tmp_path / "status" / "pace.json")]
    if ratio is not None:  # 2000 env steps are due, and 19 * 50 + 60 were taken; 20 actors share the rest
        assert actor.pace._env_steps_left == (2000 - 1010 + 1) // 20


def test_an_actor_without_a_learner_warns_and_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=lambda _: None))

    def num_warnings_in(seconds: int) -> int:
        nonlocal now_s
        caplog.clear()
        for _ in range(seconds):
            now_s += 1
            actor.pace.after_env_steps(1)
        return caplog.text.count(f"in {socket.gethostname()}:{tmp_path}, the run folder that this actor sees")

    for ratio in (None, 0.5):
        actor = Process(tmp_path, "collect", ratio=ratio)
        actor.pace.begin(is_new=False)
        assert num_warnings_in(10) == 1
        assert "There is no learner" in caplog.text
        assert num_warnings_in(60) == 2
    actor = Process(tmp_path, "collect")
    actor.pace.begin(is_new=False)
    write_beat(tmp_path, "L", role="learner", state="learning")
    publish(tmp_path)
    assert num_warnings_in(100) == 0
    write_beat(tmp_path, "L", role="learner", state="stopped")
    publish(tmp_path)
    assert num_warnings_in(10) == 1
    assert "The learner is not running" in caplog.text
    write_beat(tmp_path, "L", role="learner", state="finished")
    publish(tmp_path)
    assert num_warnings_in(100) == 0


def test_a_learner_waits_for_the_first_data_and_while_it_is_too_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = itertools.count(step=pace.REMIND_S + 1)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda _: None))
    write_beat(tmp_path, "actor", env_steps=99, state="stopped")
    learner = Process(tmp_path, ratio=0.5, start_after=100, epoch_updates=10)
    learner.pace.begin(is_new=False)
    assert not learner.pace.is_warm()
    write_beat(tmp_path, "actor", env_steps=100, state="stopped")
    assert learner.pace.is_warm()
    assert learner.pace.batches(7) == 7  # counting begins here
    for _ in range(2):  # a tenth of 10, and one
        assert learner.pace.before_update()
        learner.progress.gradient_steps += 1
    assert not learner.pace.before_update()  # asked to stop while it waits
    assert learner.told[-1] == ("waiting", "for env steps of actors")
    assert "but no running actor sees" in learner.lines[0]
    write_beat(tmp_path, "actor", env_steps=104, state="stopped")
    assert learner.pace.before_update()
    figures = learner.pace.metrics()
    assert figures["train/replay_ratio"] == 2 / 4
    assert figures["time/wait_for_actors_s"] >= 0


def test_in_mode_both_the_ratio_sets_the_updates_of_each_epoch(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 5, "replay_ratio": 0.2, "start_learning_at_epoch": 1}
    exp = run(make_experiment(tmp_path / "whole", **changes))
    assert exp.trainer.describe().startswith("0.2 updates of ")
    assert exp.trainer.describe().endswith(" sequences per env step")
    logged = [r for r in metrics(exp.run_dir) if "train/updates" in r]
    # An epoch has 36 env steps; those before the first training epoch do not count.
    assert [r["train/updates"] for r in logged] == [7, 7, 7, 7]
    assert exp.learner.gradient_steps == int(0.2 * 36 * 4)
    assert logged[-1]["train/replay_ratio"] == pytest.approx(28 / 144)
    run(make_experiment(tmp_path / "parts", **{**changes, "epochs": 3}))
    resumed = make_experiment(tmp_path / "parts", **changes)
    run(resumed, lambda exp: exp.load_checkpoint())
    assert resumed.learner.gradient_steps == exp.learner.gradient_steps
    # Epochs that collect nothing make the usual number of updates.
    for number, late in enumerate(({"train_timesteps_per_epoch": 0}, {"start_collecting_at_epoch": 9}), 1):
        offline = make_experiment(tmp_path / "parts", **{**changes, **late, "epochs": 5 + number})
        run(offline, lambda exp: exp.load_checkpoint())
        assert offline.learner.gradient_steps == 28 + number * offline.train_batches_per_epoch
    micro = run(make_experiment(tmp_path / "micro", replay_ratio=0.1, batches_per_update=2))
    assert micro.learner.gradient_steps == int(0.1 * 72)  # micro-batches count as one update
