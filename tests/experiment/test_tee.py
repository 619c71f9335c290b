from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import Sink, TrajectoryWriter, load_trajectory
from loxodon.experiment.tee import TeeSink


class FakeSink:
    """Notes its calls; raises in those named."""

    def __init__(self, *failing: str) -> None:
        self.policy_version: int | None = None
        self.failing, self.calls, self.state = failing, [], {"count": 0}  # type: ignore[var-annotated]

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))
        if name in self.failing:
            raise OSError(f"{name} failed in sink {id(self)}")

    def begin(self, *args: Any) -> None:
        self._note("begin", *args)

    def add(
        self,
        actions: Any,
        rewards: Any,
        terminated: Any,
        ended: Any,
        obs: Any,
        rl2s: Any,
        time_idxs: Any,
        ignored: Any = None,
        extras: Any = None,
    ) -> None:
        self._note("add", actions, rewards, terminated, ended, obs, rl2s, time_idxs, ignored, extras)

    def flush_partial(self) -> None:
        self._note("flush_partial")

    def wait(self) -> None:
        self._note("wait")

    def close(self) -> None:
        self._note("close")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


STEP: tuple[Any, ...] = (1, 2, 3, 4, {"x": 5}, 6, 7)


def call_all(sink: Sink) -> None:
    everything: Any = sink
    everything.begin(1, {}, 2, 3, ["a"])
    everything.add(*STEP)
    everything.add(*STEP, 8)
    everything.add(*STEP, extras={"log_probs": 9})
    sink.flush_partial()
    sink.wait()
    sink.close()


def test_every_sink_gets_what_one_alone_would() -> None:
    alone, first, second = FakeSink(), FakeSink(), FakeSink()
    call_all(alone)
    call_all(TeeSink([first, second]))
    assert first.calls == second.calls == alone.calls
    assert len(alone.calls) == 7


def test_a_sink_that_raises_keeps_nothing_from_the_others() -> None:
    first, second, third = FakeSink("add", "close"), FakeSink("add"), FakeSink()
    tee = TeeSink([first, second, third])
    with pytest.raises(OSError, match=f"add failed in sink {id(first)}"):
        tee.add(*STEP)
    with pytest.raises(OSError, match="close failed"):
        tee.close()
    assert [name for name, _ in third.calls] == ["add", "close"]


def test_the_policy_version_is_that_of_all() -> None:
    sinks = FakeSink(), FakeSink()
    tee = TeeSink(sinks)
    assert tee.policy_version is None
    tee.policy_version = 5
    assert [tee.policy_version, *(sink.policy_version for sink in sinks)] == [5, 5, 5]


def test_states_go_back_to_their_sinks() -> None:
    first, second = FakeSink(), FakeSink()
    first.state, second.state = {"count": 3}, {"count": 8}
    state = json.loads(json.dumps(TeeSink([first, second]).state_dict()))
    others = FakeSink(), FakeSink()
    TeeSink(others).load_state_dict(state)
    assert [sink.state for sink in others] == [{"count": 3}, {"count": 8}]
    with pytest.raises(ValueError, match=r"state is that of 2 sinks, but there are 1 now.*Fix: resume with"):
        TeeSink(others[:1]).load_state_dict(state)


def test_no_sinks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TeeSink received no sinks.*Fix:"):
        TeeSink([])


def test_two_writers_store_the_same_steps(tmp_path: Path) -> None:
    writers = [TrajectoryWriter(tmp_path / save_as, 1, save_as=save_as) for save_as in ("npz", "traj")]
    tee: Sink = TeeSink(writers)
    tee.policy_version = 2
    obs, rl2s, times = {"x": np.ones((1, 1))}, np.zeros((1, 3), np.float32), np.zeros((1, 1), np.int64)
    no, yes = np.zeros(1, np.bool_), np.ones(1, np.bool_)
    tee.begin(np.array([0]), obs, rl2s, times, ["env"])
    log_probs = np.array([[-0.5]], np.float32)
    tee.add(np.array([1]), np.ones(1, np.float32), no, yes, obs, rl2s, times, extras={"log_probs": log_probs})
    tee.close()
    for path in (*tmp_path.glob("npz/*"), *tmp_path.glob("traj/*")):
        traj = load_trajectory(path)
        assert (len(traj), traj.policy_version) == (1, 2)
        np.testing.assert_array_equal(traj.extras["log_probs"], log_probs)
    assert len(list(tmp_path.glob("*/*"))) == 2
