"""Worker processes: failures, deaths, imports, and what reaches them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
from scripted_envs import DrawingEnv, FailingEnv, LeavingEnv, ScriptedEnv, WrappingEnv, make_scripted_inside
from vector_builders import build, vector_env_of

from loxodon.envs import EnvError, EnvSpec, make_vector_env, resolve_env


def test_an_exception_is_raised_once_with_the_traceback_of_the_environment() -> None:
    env = build("fork", [EnvSpec(ScriptedEnv), EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": "raise"})])
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


NOT_FINITE = r"returned {} as observation 'observation' \(environment 1, step 2 since.*Fix"


@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        ("sync", "raise", r"^deep trouble"),
        ("fork", "raise in reset", "Environment 1 failed in reset: RuntimeError: cannot reset"),
        ("fork", "raise in render", "Environment 1 failed in render: RuntimeError: cannot render"),
        ("sync", "nan", "^The environment scripted0 " + NOT_FINITE.format("NaN")),
        ("fork", "inf", "Environment 1 failed in step.*scripted0 " + NOT_FINITE.format("inf")),
        ("sync", "nan in reset", r"^The environment scripted0 returned NaN as observation.*Fix"),
        ("fork", "nan in reset", r"Environment 1 failed in reset.*scripted0 returned NaN as obs.*Fix"),
        ("sync", "word as reward", r"^The environment scripted0 returned the reward 'much'.*Fix"),
        ("fork", "reward shape", r"Environment 1 failed in step.*the reward array\(\[0., 0.\]\).*Fix"),
        ("sync", "nan reward", r"NaN as reward \(environment 1, step 1 .*Fix"),
        ("sync", "inf reward", r"-inf as reward \(environment 1, step 1 .*Fix"),
        ("sync", "shape", r"with shape \(1,\).*the shape \(3,\).*Fix"),
        ("fork", "shape", r"with shape \(1,\).*the shape \(3,\).*Fix"),
    ],
)
def test_errors_say_where_in_an_environment_they_occurred(
    kind: str, how: str, words: str, opened: Any
) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": how})], num_workers=1)
    error = EnvError if kind == "fork" else ZeroDivisionError if how == "raise" else ValueError
    with pytest.raises(error, match=words):
        play(env)


def play(env: Any) -> None:
    env.reset(seed=0)
    env.step([0, 0])
    env.step([0, 0])
    env.render()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_environment_cannot_end_its_worker_silently(error: type[BaseException]) -> None:
    specs = [EnvSpec(ScriptedEnv), EnvSpec(LeavingEnv, {"where": "step", "error": error})]
    with pytest.raises(EnvError, match=rf"(?s)Environment 1 failed in step: {error.__name__}: bye.*Fix"):
        play(make_vector_env(specs, "async", context="fork", num_workers=1))


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
@pytest.mark.parametrize("kind", ["sync", "fork", "already_vectorized"])
def test_a_close_that_fails_is_a_warning_and_the_others_are_closed(
    kind: str, error: type[BaseException], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Last(ScriptedEnv):
        def close(self) -> None:
            os.write(1, b"the last is closed")

    specs = [EnvSpec(LeavingEnv, {"where": "close", "error": error}), EnvSpec(Last)]
    if kind == "already_vectorized":
        specs = [EnvSpec(functools.partial(vector_env_of, specs[0].build_raw))]
    logging.getLogger("loxodon").addHandler(handler := logging.StreamHandler())
    try:
        env = make_vector_env(specs, "async" if kind == "fork" else kind, context="fork", num_workers=1)
        env.close()
        env.close()
    finally:
        logging.getLogger("loxodon").removeHandler(handler)
    told = capfd.readouterr()
    assert f"failed in close: {error.__name__}: bye. Fix: correct its close()." in told.err
    assert "Traceback" not in told.err
    assert kind == "already_vectorized" or "the last is closed" in told.out


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, r"created None, but must create one gymnasium.Env. Fix: derive .* and return one"),
        (3, r"created a int, .*Fix: derive"),
        (vector_env_of(ScriptedEnv), r"created a SyncVectorEnv.*Fix: set Experiment.env_mode"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_an_object_that_is_not_an_environment_is_one_clear_error(
    kind: str, made: Any, words: str, opened: Any
) -> None:
    with pytest.raises(TypeError, match=words):
        opened(kind, [EnvSpec(lambda: made)])


@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [("fork", "kill", "was killed by signal 9"), ("spawn", "exit", "exited with code 3")],
)
def test_a_dead_worker_is_one_clear_error(kind: str, how: str, words: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv), EnvSpec(FailingEnv, {"how": how})])
    with pytest.raises(EnvError, match=rf"environments 1 to 1 {words}.*Fix"):
        play(env)


def test_a_worker_that_does_not_answer_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loxodon.envs.vector.workers.SLOW_S", 0.0)
    monkeypatch.setattr("loxodon.envs.vector.workers.ALIVE_CHECK_MS", 10)
    env: Any = build("fork", [EnvSpec(ScriptedEnv)] * 4)
    env.reset(seed=0)
    os.kill(env._processes[0].pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (env._processes[0].pid, signal.SIGCONT)).start()
    env.step([0] * 4)
    env.step([0] * 4)
    told = [text for text in caplog.messages if "has not answered" in text]
    assert len(told) == 1  # even if both workers take their time
    env.close()


def test_a_worker_killed_between_steps_is_one_clear_error() -> None:
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
    killed, kill = [], BaseProcess.kill  # a kill follows a timeout
    monkeypatch.setattr("loxodon.envs.vector.workers.CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(BaseProcess, "kill", lambda process: (killed.append(process), kill(process)))
    older: Any = build("fork", [EnvSpec(ScriptedEnv)] * 2)
    younger = build("fork", [EnvSpec(ScriptedEnv)] * 2)  # its workers inherit the older one's pipe ends
    older.reset(seed=0)
    older.step_async([0, 0])  # closing in mid-step works as well
    older.close()
    assert killed == []
    assert younger.reset(seed=0)[0]["observation"].tolist() == [[0, 0, 0], [1, 0, 0]]
    younger.close()


def test_workers_that_never_answer_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loxodon.envs.vector.workers.CLOSE_TIMEOUT_S", 0.3)
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
import colorsys  # nothing else imports it

class MyEnv(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.zeros(1, np.float32), float("colorsys" in sys.modules), False, False, {}

if __name__ == "__main__":
    for context in ("spawn", "forkserver"):
        env = make_vector_env([EnvSpec(MyEnv)] * 2, "async", context=context, num_workers=1)
        env.reset(seed=0)
        print("rewards", env.step([0, 0])[1].tolist(), hasattr(sys.modules["__main__"], "__file__"))
        env.close()
"""


@pytest.mark.slow
def test_workers_do_not_import_the_main_script(tmp_path: Any) -> None:
    script = tmp_path / "main_script.py"
    script.write_text(MAIN_SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["rewards [0.0, 0.0] True"] * 2, done.stderr


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
def test_no_workers_survive_when_the_parent_is_killed() -> None:
    envs = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_SCRIPT, envs], stdout=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize("kind", ["sync", "fork", "forkserver"])
def test_gin_reaches_environments_and_what_they_build_inside(kind: str, opened: Any) -> None:
    gin.parse_config("ScriptedEnv.gain = %GAIN\nGAIN = 4.0\nTMazePassive.horizon = 3")
    env = opened(kind, [resolve_env(ScriptedEnv), resolve_env(make_scripted_inside)], num_workers=1)
    env.reset(seed=0)
    assert env.step([0, 0])[1].tolist() == [40.0, 40.0]


def test_lambdas_reach_spawned_workers_unless_they_cannot_be_pickled(opened: Any) -> None:
    env = opened("spawn", [EnvSpec(lambda: ScriptedEnv(gain=2.0))])
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [20.0]
    lock = threading.Lock()
    spec = EnvSpec(lambda: (lock, ScriptedEnv())[1])
    with pytest.raises(EnvError, match=r"cannot be sent to a worker process.*importable module"):
        build("spawn", [spec])
    opened("fork", [spec])


# ---- workers get exactly the given environment ----


class PlainReward(ScriptedEnv):
    """Gives the reward of its argument; gin does not know it."""

    def __init__(self, reward: float = 0.0) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


@gin.configurable
class ConfiguredEnv(PlainReward):
    """Its reward is set by gin."""


@gin.configurable
def hold(thing: Any = None) -> Any:
    """Returns the object that gin passes for a reference."""
    return thing


def reference(name: str) -> Any:
    gin.bind_parameter("hold.thing", gin.config.ConfigurableReference(name, evaluate=False))
    return hold()


def punishing(make: Any) -> Any:
    """A decorator as users write them."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return gym.wrappers.TransformReward(make(*args, **kwargs), lambda reward: -100.0)

    return made


def ways_to_give_an_environment() -> dict[str, Any]:
    """Makers of an environment with reward -100; each resembles something else that can be imported."""

    class Local(ScriptedEnv):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, -100.0, *rest

    @gin.configurable
    class LocalConfigured(ConfiguredEnv):
        def __init__(self, own_reward: float = 0.0) -> None:
            super().__init__(own_reward)

    @gin.configurable
    def local_factory(reward: float = 0.0) -> Any:
        return ConfiguredEnv(reward)

    class Maker:
        def make(self) -> Any:
            return Local()

        __call__ = make

    renamed = type("ScriptedEnv", (Local,), {"__module__": "scripted_envs", "__qualname__": "ScriptedEnv"})
    external = gin.external_configurable(PlainReward, "external")
    gin.parse_config(
        "LocalConfigured.own_reward = -100.0\nlocal_factory.reward = -100.0\nexternal.reward = -100.0\n"
        "train/ConfiguredEnv.reward = -100.0\nWrappingEnv.inner = @train/LocalConfigured()"
    )

    class OfReference(reference("train/ConfiguredEnv")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(-100.0)

    return {
        "local class": Local,
        "class of another's name": renamed,
        "local class that gin configures": LocalConfigured,
        "local function that gin configures": local_factory,
        "subclass of what gin configures": type("Sub", (LocalConfigured,), {}),
        "subclass of a scoped reference": OfReference,
        "external configurable": external,
        "scoped reference": reference("train/ConfiguredEnv"),
        "scoped reference to a local class": reference("train/LocalConfigured"),
        "class named by a binding": WrappingEnv,
        "decorated class": punishing(ScriptedEnv),
        "decorated function": punishing(make_scripted_inside),
        "decorated configurable": punishing(ConfiguredEnv),
        "decorated external configurable": punishing(external),
        "partial": functools.partial(functools.partial(punishing(ScriptedEnv)), gain=2.0),
        "argument of a partial": functools.partial(lambda kind: kind(), reference("train/ConfiguredEnv")),
        "bound method": Maker().make,
        "callable object": Maker(),
        "lambda": lambda: Local(),  # noqa: PLW0108 - that is the point
    }


KINDS_OF_PROCESS = ["sync", "fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)]


@pytest.fixture
def _as_gin_was() -> Iterator[None]:
    """Forget the gin registrations of a test."""
    registry, inverse = copy.copy(gin.config._REGISTRY._selector_map), dict(gin.config._INVERSE_REGISTRY)
    yield
    for name in set(gin.config._REGISTRY._selector_map) - set(registry):
        gin.config._REGISTRY.pop(name)
    gin.config._INVERSE_REGISTRY.clear()
    gin.config._INVERSE_REGISTRY.update(inverse)


@pytest.mark.usefixtures("_as_gin_was")
@pytest.mark.parametrize("kind", KINDS_OF_PROCESS)
def test_the_environment_is_exactly_the_given_one(kind: str, opened: Any) -> None:
    ways = ways_to_give_an_environment()
    env = opened(kind, [resolve_env(make) for make in ways.values()], num_workers=1)
    env.reset(seed=0)
    rewards = env.step([0] * len(ways))[1].tolist()
    assert dict(zip(ways, rewards, strict=True)) == dict.fromkeys(ways, -100.0)


@pytest.mark.parametrize("kind", ["sync", "spawn"])
def test_ids_that_a_program_registers_reach_its_workers(
    kind: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = dataclasses.replace(gym.spec("CartPole-v1"), entry_point=lambda **_: ScriptedEnv(gain=3.0))
    monkeypatch.setitem(gym.registry, "CartPole-v1", entry)
    env = opened(kind, [EnvSpec("CartPole-v1")], num_workers=1)
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [30.0]


def test_bindings_of_late_imports_of_an_environment_count(opened: Any) -> None:
    def make() -> Any:
        from scripted_envs import ScriptedEnv

        return ScriptedEnv()

    gin.parse_config("ScriptedEnv.gain = 4.0")
    env = opened("spawn", [resolve_env(make)])
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [40.0]


# ---- global random generators ----


def drawn_in(kind: str, seed: int | None) -> tuple[list[float], list[float], list[list[float]]]:
    """Draws of 6 environments in 2 workers, at construction and in two episodes each."""
    env = make_vector_env([EnvSpec(DrawingEnv)] * 6, "async", context=kind, num_workers=2, seed=seed)
    try:
        made = list(env.get_attr("drawn"))
        first = env.reset(seed=5)[0]["observation"][:, 1].tolist()
        return made, first, env.reset()[0]["observation"][:, 1].tolist()
    finally:
        env.close()


@pytest.mark.slow
def test_workers_draw_different_numbers_and_the_same_ones_for_a_seed_with_every_start_method() -> None:
    forked, spawned = drawn_in("fork", 3), drawn_in("spawn", 3)
    assert forked == spawned
    assert len({number for numbers in forked for number in numbers}) == 18
    assert drawn_in("fork", 4)[0] != forked[0]
    assert drawn_in("fork", None)[0] != drawn_in("fork", None)[0]


def test_states_of_environments_include_the_generators_of_their_process(opened: Any) -> None:
    env = opened("fork", [EnvSpec(DrawingEnv)] * 4)
    env.reset(seed=0)
    states = env.get_states()
    expected = env.reset()[0]["observation"][:, 1].tolist()
    env.set_states(states)
    assert env.reset()[0]["observation"][:, 1].tolist() == expected
