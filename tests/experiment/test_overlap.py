from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import TrajectoryWriter, WritingClock, load_trajectory
from loxodon.envs import EnvSpec, EpsilonGreedy, make_vector_env
from loxodon.experiment import Collector, Histories
from loxodon.experiment.overlap import EnvHalves, OverlappedCollector

from .fakes import CountingEnv, TinyAgent, make_experiment, run


class InProcessHalf:
    """A vector env of this process with the two-part step of one in other processes; notes the order."""

    def __init__(self, name: str, lengths: Sequence[int], calls: list[str]) -> None:
        specs = [EnvSpec(CountingEnv, {"length": n}) for n in lengths]
        self.name, self.calls, self.envs = name, calls, make_vector_env(specs, "sync")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def step_async(self, actions: np.ndarray) -> None:
        self.calls.append(f"{self.name} starts")
        self.actions = actions

    def step_wait(self) -> Any:
        self.calls.append(f"{self.name} is awaited")
        return self.envs.step(self.actions)


def make_overlapped(*lengths: Sequence[int], folder: Path | None = None) -> tuple[Any, list[str]]:
    calls: list[str] = []
    parts: list[Any] = [InProcessHalf("ab"[i], part, calls) for i, part in enumerate(lengths)]
    torch.manual_seed(0)
    agent: Any = TinyAgent(parts[0].single_observation_space, parts[0].single_action_space, None, None, 8)
    histories, clock = Histories.create(sum(map(len, lengths))), WritingClock()
    halves = []
    for i, part in enumerate(parts):
        writer = folder and TrajectoryWriter(folder, part.num_envs, seed=i, clock=clock)
        noise = EpsilonGreedy(spaces.Discrete(3), part.num_envs, i)
        own = histories.share(part.num_envs)
        halves.append(Collector(part, agent, torch.device("cpu"), noise, writer, own, True))
    return OverlappedCollector(halves, histories), calls


def test_one_half_steps_while_the_policy_acts_for_the_other() -> None:
    collector, calls = make_overlapped([9, 9], [9])
    assert collector.collect(2) == 6
    assert calls[:4] == ["a starts", "b starts", "a is awaited", "a starts"]
    assert calls[4:] == ["b is awaited", "b starts", "a is awaited", "b is awaited"]


def test_figures_and_files_are_those_of_all_envs(tmp_path: Path) -> None:
    collector, _ = make_overlapped([2, 3], [4], folder=tmp_path)
    collector.restart(seed=0)
    collector.collect(12)
    assert collector.histories.summary("")["episodes"] == 6 + 4 + 3
    assert sorted({n for ns in collector.histories.returns.lengths.values() for n in ns}) == [2, 3, 4]
    assert "success" in collector.histories.summary("")
    collector.histories.clear()
    assert collector.histories.summary("") == {}
    collector.close()
    lengths = sorted(len(load_trajectory(path)) for path in tmp_path.glob("*.npz"))
    assert lengths == [2] * 6 + [3] * 4 + [4] * 3


def test_calls_may_be_cut_anywhere(tmp_path: Path) -> None:
    stored = []
    for name, parts in (("whole", [12]), ("parts", [5, 0, 7])):
        collector, _ = make_overlapped([3, 5], [4], folder=tmp_path / name)
        collector.restart(seed=3)
        torch.manual_seed(1)
        assert sum(collector.collect(part) for part in parts) == 36
        collector.close()
        paths = sorted((tmp_path / name).glob("*.npz"), key=lambda path: path.name.split("_")[1])
        stored.append([load_trajectory(path) for path in paths])
    for one, other in zip(*stored, strict=True):
        np.testing.assert_array_equal(one.obs["observation"], other.obs["observation"])
        np.testing.assert_array_equal(one.actions, other.actions)


def test_shares_of_episodes_span_both_halves() -> None:
    collector, _ = make_overlapped([2, 10], [3])
    collector.collect(1000, episodes=6)
    lengths = [n for ns in collector.histories.returns.lengths.values() for n in ns]
    assert sorted(lengths) == [2, 2, 3, 3, 10, 10]
    assert all(half.state.actions is None for half in collector.halves)


def test_a_request_to_stop_leaves_no_step_under_way() -> None:
    collector, _ = make_overlapped([9], [9])
    collector.halves[0].should_stop = lambda: True
    assert collector.collect(100) == 2
    assert collector.collect(0) == 0
    assert all(half.state.actions is None for half in collector.halves)


def test_states_of_both_halves_come_back_and_foreign_ones_are_refused() -> None:
    collector, _ = make_overlapped([9, 9], [9])
    collector.collect(3)
    other, _ = make_overlapped([9, 9], [9])
    other.load_state_dict(collector.state_dict())
    assert other.state_dict() == collector.state_dict()
    single = collector.halves[0]
    with pytest.raises(ValueError, match=r"written without overlapping sampling.*Fix: resume"):
        collector.load_state_dict(single.state_dict())
    with pytest.raises(ValueError, match=r"written with overlapping sampling.*Fix: resume"):
        single.load_state_dict(collector.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"overlap_sampling": False}, {"parallel_actors": 1}, {"env_mode": "sync"}]
)
def test_an_experiment_overlaps_only_where_it_can(tmp_path: Path, settings: dict[str, Any]) -> None:
    for changes, overlaps in (({"env_mode": "async"}, True), ({"env_mode": "async"} | settings, False)):
        exp = make_experiment(tmp_path, **changes)
        exp.start()
        assert isinstance(exp.collector, OverlappedCollector) == overlaps
        assert isinstance(exp.train_envs, EnvHalves) == overlaps
        exp.close()


@pytest.mark.slow
def test_an_overlapped_run_repeats_and_resumes_exactly(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"env_mode": "async", "epochs": 4, "ckpt_interval": 2, "traj_save_len": 9}
    changes["exact_resume"] = True
    whole, again = (run(make_experiment(tmp_path / name, **changes)) for name in ("whole", "again"))
    run(make_experiment(tmp_path / "parts", **{**changes, "epochs": 2}))
    rest = run(make_experiment(tmp_path / "parts", **changes), lambda exp: exp.load_checkpoint())
    for other in (again, rest):
        for a, b in zip(whole.policy.parameters(), other.policy.parameters(), strict=True):
            assert torch.equal(a, b)
    files = [
        sorted(p.name.split("_")[1] for p in (e.run_dir / "buffer/fifo").iterdir()) for e in (whole, again)
    ]
    assert files[0] == files[1]


# ---- what goes wrong ----


class FailingEnv(CountingEnv):
    """Breaks in its 23rd step, in the way that it is told."""

    def __init__(self, way: str) -> None:
        super().__init__(length=5)
        self.way, self.count = way, 0

    def step(self, action: int) -> Any:
        self.count += 1
        if self.count == 23:
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the bearings are worn out")
        return super().step(action)


SCRIPT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
import types
package = types.ModuleType("fakery"); package.__path__ = [{here!r}]; sys.modules["fakery"] = package
from fakery import fakes, test_overlap
from loxodon.envs import EnvSpec
way, mode = sys.argv[1:]
make = EnvSpec(fakes.CountingEnv, {{}}) if way == "disk" else EnvSpec(test_overlap.FailingEnv, {{"way": way}})
exp = fakes.make_experiment({folder!r}, env_mode=mode, make_train_env=make, val_timesteps_per_epoch=0,
                            train_timesteps_per_epoch=100, async_env_mp_context="fork")
exp.start()
if way == "disk":
    from loxodon.data import files
    import threading
    pack, lock, packed = files.pack_npz, threading.Lock(), []
    def full(*args):
        with lock:  # both halves write at the same time
            if len(packed) >= 12:
                raise OSError(28, "No space left on device")
            packed.append(args)
        return pack(*args)
    files.pack_npz = full
exp.learn()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mode", "words"),
    [
        ("raises", "sync", "the bearings are worn out"),
        ("raises", "async", "the bearings are worn out"),
        ("killed", "async", "was killed by signal 9"),
        ("disk", "sync", "could not be written to"),
        ("disk", "async", "could not be written to"),
    ],
)
def test_a_failure_stores_what_is_finished_and_is_told_once(
    tmp_path: Path, way: str, mode: str, words: str
) -> None:
    code = SCRIPT.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code, way, mode],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "done" not in done.stdout
    told = [line for line in done.stderr.splitlines() if words in line and "raise " not in line]
    # From a worker, an env's error comes as a summary and in the env's own traceback; a full disk is told by
    # the writer of each half.
    assert len(told) == 1 or (len(told) == 2 and mode == "async" and way != "killed"), done.stderr
    assert "During handling" not in done.stderr
    lengths = [len(load_trajectory(path)) for path in (tmp_path / "tiny/buffer/fifo").glob("*.npz")]
    assert lengths.count(5) == 12  # four episodes of each of three envs ended before
    assert max(lengths) == 5  # and what was collected of the next ones is kept, too
