"""Worker processes: failures, deaths, what they import and what reaches them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import gin
import numpy as np
import pytest
from scripted_envs import FailingEnv, ScriptedEnv, make_scripted_inside
from vector_builders import PROCESS_KINDS, build

from loxodon.envs import EnvError, EnvSpec, resolve_env


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_exception_comes_back_once_with_the_envs_traceback(kind: str) -> None:
    env = build(kind, [EnvSpec(ScriptedEnv), EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": "raise"})])
    env.reset(seed=1)
    env.step(np.zeros(3, np.int64))
    with pytest.raises(EnvError) as caught:
        env.step(np.zeros(3, np.int64))
    text = str(caught.value)
    assert "Environment 2 failed in step: ZeroDivisionError: deep trouble" in text
    assert "in _deep_inside" in text
    assert text.count("deep trouble") == 3  # headline, source line, last line of the traceback
    assert "Fix:" in text
    with pytest.raises(EnvError, match=r"closed.*Fix"):
        env.step(np.zeros(3, np.int64))
    env.close()


def test_exception_in_process_keeps_its_type(opened: Any) -> None:
    env = opened("sync", [EnvSpec(FailingEnv, {"how": "raise"})])
    env.reset(seed=0)
    env.step([0])
    with pytest.raises(ZeroDivisionError, match="deep trouble"):
        env.step([0])


def test_exception_in_reset() -> None:
    env = build("fork", [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": "raise in reset"})])
    with pytest.raises(EnvError, match="Environment 1 failed in reset: RuntimeError: cannot reset"):
        env.reset()


def test_exception_in_render() -> None:
    env = build(
        "fork", [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": "raise in render"})], num_workers=1
    )
    env.reset(seed=0)
    with pytest.raises(EnvError, match="Environment 1 failed in render: RuntimeError: cannot render"):
        env.render()


@pytest.mark.parametrize(("how", "what"), [("nan", "NaN"), ("inf", "inf")])
@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_numbers_that_are_not_finite_are_named(kind: str, how: str, what: str) -> None:
    env = build(kind, [EnvSpec(ScriptedEnv)] * 2 + [EnvSpec(FailingEnv, {"how": how})], num_workers=2)
    env.reset(seed=0)
    env.step([0] * 3)
    where = "scripted0" if kind == "sync" else r"Environment 2 failed in step.*scripted0"
    place = r"'observation' \(environment 2, step 2 since"
    with pytest.raises((ValueError, EnvError), match=rf"{where} returned {what} as observation {place}.*Fix"):
        env.step([0] * 3)
    env.close()


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_nan_in_a_first_observation(kind: str) -> None:
    env = build(kind, [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": "nan in reset"})])
    where = "scripted0" if kind == "sync" else r"Environment 1 failed in reset.*scripted0"
    with pytest.raises((ValueError, EnvError), match=rf"{where} returned NaN as observation.*Fix"):
        env.reset(seed=0)
    env.close()


@pytest.mark.parametrize(
    ("how", "words"), [("word as reward", "'much'"), ("reward shape", r"array\(\[0., 0.\]\)")]
)
@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_rewards_that_are_no_number_are_named(kind: str, how: str, words: str) -> None:
    env = build(kind, [EnvSpec(ScriptedEnv)] * 2 + [EnvSpec(FailingEnv, {"how": how})], num_workers=1)
    env.reset(seed=0)
    where = "scripted0" if kind == "sync" else r"Environment 2 failed in step.*scripted0"
    with pytest.raises((ValueError, EnvError), match=rf"{where} returned the reward {words}.*Fix"):
        env.step([0] * 3)
    env.close()


@pytest.mark.parametrize(("how", "what"), [("nan reward", "NaN"), ("inf reward", "-inf")])
def test_rewards_that_are_not_finite_are_named(how: str, what: str) -> None:
    env = build("sync", [EnvSpec(FailingEnv, {"how": how})])
    env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"{what} as reward \(environment 0, step 1 .*Fix"):
        env.step([0])


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_wrong_observation_shape_is_named(kind: str) -> None:
    env = build(kind, [EnvSpec(FailingEnv, {"how": "shape"})])
    env.reset(seed=0)
    with pytest.raises((ValueError, EnvError), match=r"with shape \(1,\).*says \(3,\).*Fix"):
        env.step([0])
    env.close()


@pytest.mark.parametrize(
    ("how", "words"), [("kill", "was killed by signal 9"), ("exit", "exited with code 3")]
)
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_dead_worker_is_one_clear_error(kind: str, how: str, words: str) -> None:
    env = build(kind, [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": how})])
    env.reset(seed=0)
    env.step([0, 0])
    with pytest.raises(EnvError, match=rf"environments 1 to 1 {words}.*Fix"):
        env.step([0, 0])
    env.close()


def test_worker_killed_between_steps() -> None:
    env: Any = build("fork", [EnvSpec(ScriptedEnv)] * 4)
    env.reset(seed=0)
    victim = env._processes[0]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(5)
    with pytest.raises(EnvError, match="environments 0 to 1 was killed by signal 9"):
        env.step([0] * 4)


def test_close_is_idempotent_and_leaves_no_process() -> None:
    env: Any = build("fork", [EnvSpec(ScriptedEnv)] * 4)
    pids = [process.pid for process in env._processes]
    assert len(pids) == 2
    env.close()
    env.close()
    assert not {child.pid for child in multiprocessing.active_children()} & set(pids)


def test_closing_an_older_environment_does_not_wait_for_a_younger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, kill = [], BaseProcess.kill  # what follows a wait in vain
    monkeypatch.setattr("loxodon.envs.async_vector.CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(BaseProcess, "kill", lambda process: (killed.append(process), kill(process)))
    older: Any = build("fork", [EnvSpec(ScriptedEnv)] * 2)
    younger = build("fork", [EnvSpec(ScriptedEnv)] * 2)  # its workers inherit the older one's pipe ends
    older.reset(seed=0)
    older.step_async([0, 0])  # closing in mid-step is no different
    older.close()
    assert killed == []
    assert younger.reset(seed=0)[0]["observation"].tolist() == [[0, 0, 0], [1, 0, 0]]
    younger.close()


def test_workers_that_never_come_back_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loxodon.envs.async_vector.CLOSE_TIMEOUT_S", 0.3)
    env: Any = build("fork", [EnvSpec(FailingEnv, {"how": "hang"})] * 4, num_workers=4)
    env.reset(seed=0)
    env.step([0] * 4)
    env.step_async([0] * 4)
    waits, join = [], BaseProcess.join
    monkeypatch.setattr(
        BaseProcess, "join", lambda process, timeout=None: (waits.append(timeout), join(process, timeout))[1]
    )
    env.close()
    assert [wait for wait in waits if wait is not None] == [pytest.approx(0.3, abs=0.3), 0.0, 0.0, 0.0]


def test_workers_hold_several_envs_each_and_import_nothing_heavy(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = opened("spawn", [EnvSpec(FailingEnv, {"how": "modules"})] * 6)
    env.reset(seed=0)
    metrics = env.step([0] * 6)[-1]["metrics"]
    assert [value for _, name, value in metrics if name == "heavy"] == [0.0] * 6
    assert [value for _, name, value in metrics if name == "threads"] == [1.0] * 6
    pids = [value for _, name, value in metrics if name == "pid"]
    assert len(set(pids)) == 2
    assert pids[0] == pids[1] == pids[2] != os.getpid()


MAIN_SCRIPT = """
import sys, types
import gymnasium as gym, numpy as np
from loxodon.envs import EnvSpec, make_vector_env
import torch

class MyEnv(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.zeros(1, np.float32), float("torch" in sys.modules), False, False, {}

if __name__ == "__main__":
    env = make_vector_env([EnvSpec(MyEnv)] * 2, "async", context=sys.argv[1], num_workers=1)
    env.reset(seed=0)
    print("rewards", env.step([0, 0])[1].tolist(), hasattr(sys.modules["__main__"], "__file__"))
    env.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_do_not_import_the_main_script(context: str, tmp_path: Any) -> None:
    script = tmp_path / "main_script.py"
    script.write_text(MAIN_SCRIPT)
    done = subprocess.run([sys.executable, str(script), context], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "rewards [0.0, 0.0] True", done.stderr


ORPHAN_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from scripted_envs import ScriptedEnv
from loxodon.envs import EnvSpec, make_vector_env
train = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "async", context="fork", num_workers=2)
val = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "async", context="fork", num_workers=2)
print(*(p.pid for env in (train, val) for p in env._processes), flush=True)
import time; time.sleep(60)
"""


@pytest.mark.slow
def test_no_orphans_when_the_parent_is_killed() -> None:
    here = os.path.dirname(__file__)  # noqa: PTH120
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_SCRIPT, here], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(1200):
        alive = [pid for pid in pids if _is_running(pid)]
        if not alive:
            break
        time.sleep(0.05)
    assert not alive


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:  # noqa: PTH123
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", ["sync", "fork", "spawn"])
def test_gin_bindings_reach_every_kind(kind: str, opened: Any) -> None:
    gin.parse_config("ScriptedEnv.gain = 5.0")
    env = opened(kind, [resolve_env(ScriptedEnv)] * 2)
    env.reset(seed=0)
    assert env.step([0, 0])[1].tolist() == [50.0, 50.0]


@pytest.mark.parametrize("kind", ["fork", "forkserver", "spawn"])
def test_gin_reaches_what_the_environment_builds_inside(kind: str, opened: Any) -> None:
    gin.parse_config("ScriptedEnv.gain = %GAIN\nGAIN = 4.0\nTMazePassive.horizon = 3")
    env = opened(kind, [resolve_env(make_scripted_inside)])
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [40.0]


def test_unpicklable_recipe_is_refused_under_spawn() -> None:
    lock = threading.Lock()
    spec = EnvSpec(lambda: (lock, ScriptedEnv())[1])
    with pytest.raises(EnvError, match=r"cannot be sent to a worker process.*importable module"):
        build("spawn", [spec])
    build("fork", [spec]).close()


def test_lambdas_cross_into_spawned_workers(opened: Any) -> None:
    env = opened("spawn", [EnvSpec(lambda: ScriptedEnv(gain=2.0))])
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [20.0]
