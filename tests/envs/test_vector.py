"""One contract for every kind of vector environment, checked on scripted environments."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from scripted_envs import FailingEnv, ScriptedEnv, SpacesEnv

from loxodon.envs import EnvError, EnvSpec, make_vector_env, resolve_env
from loxodon.envs.vector_base import SequenceVectorEnv

NUM_ENVS = 5
KINDS = ["sync", "fork", "forkserver", "spawn", "already_vectorized"]
PROCESS_KINDS = ["fork", "spawn"]


def gymnasium_vector_env(num_envs: int, **kwargs: Any) -> gym.vector.VectorEnv:
    makers = [lambda: ScriptedEnv(**kwargs)] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def build(kind: str, specs: list[EnvSpec], num_workers: int | None = 2) -> SequenceVectorEnv:
    if kind == "already_vectorized":
        return make_vector_env(
            [EnvSpec(gymnasium_vector_env, {"num_envs": len(specs), **specs[0].kwargs})], kind
        )
    mode, context = ("sync", None) if kind == "sync" else ("async", kind)
    return make_vector_env(specs, mode, context=context, num_workers=num_workers)


@pytest.fixture
def opened() -> Iterator[Callable[..., SequenceVectorEnv]]:
    envs: list[SequenceVectorEnv] = []

    def open_env(*args: Any, **kwargs: Any) -> SequenceVectorEnv:
        envs.append(build(*args, **kwargs))
        return envs[-1]

    yield open_env
    for env in envs:
        env.close()


def expected_stream(seeds: list[int], actions: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """What the scripted environments must give, from a plain loop."""
    envs = [ScriptedEnv() for _ in seeds]
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    for row_actions in actions:
        results = [env.step(int(a)) for env, a in zip(envs, row_actions, strict=True)]
        final = np.stack([obs for obs, *_ in results])
        obs = np.stack([
            env.reset()[0] if result[2] or result[3] else result[0]
            for env, result in zip(envs, results, strict=True)
        ])
        metrics = [(i, "final_time", r[4]["metric/final_time"]) for i, r in enumerate(results) if r[4]]
        rewards, terminated, truncated = (np.array([r[k] for r in results]) for k in (1, 2, 3))
        yield obs, final, rewards, terminated, truncated, metrics


@pytest.mark.parametrize("kind", KINDS)
def test_streams_equal_a_plain_loop(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv)] * NUM_ENVS)
    actions = np.random.default_rng(0).integers(4, size=(20, NUM_ENVS))
    obs, infos = env.reset(seed=7)
    np.testing.assert_array_equal(obs["observation"], [[7 + i, 0, 0] for i in range(NUM_ENVS)])
    assert "final_obs" not in infos
    seen = {"terminated": 0, "truncated": 0}
    stream = expected_stream([7 + i for i in range(NUM_ENVS)], actions)
    for row_actions, expected in zip(actions, stream, strict=True):
        want_obs, want_final, *want_flags, want_metrics = expected
        obs, rewards, terminated, truncated, infos = env.step(row_actions)
        np.testing.assert_array_equal(obs["observation"], want_obs)
        for got, want in zip((rewards, terminated, truncated), want_flags, strict=True):
            np.testing.assert_array_equal(got, want)
        ended = terminated | truncated
        assert ("final_obs" in infos) == ended.any()
        if ended.any():
            np.testing.assert_array_equal(infos["_final_obs"], ended)
            np.testing.assert_array_equal(infos["final_obs"]["observation"][ended], want_final[ended])
        assert [tuple(m) for m in infos.get("metrics", [])] == want_metrics
        seen["terminated"] += int(terminated.sum())
        seen["truncated"] += int(truncated.sum())
    assert min(seen.values()) > 5  # both ways of ending were really exercised


@pytest.mark.parametrize("kind", KINDS)
def test_spaces_dtypes_and_metadata(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv, {"start": 3})] * NUM_ENVS)
    assert env.num_envs == NUM_ENVS
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.single_action_space == gym.spaces.Discrete(4)
    assert env.action_space.shape == (NUM_ENVS,)
    assert env.observation_space["observation"].shape == (NUM_ENVS, 3)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    _, rewards, terminated, truncated, _ = env.step(np.zeros(NUM_ENVS, np.int64))
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)
    kept = rewards.copy()
    env.step(np.ones(NUM_ENVS, np.int64))
    np.testing.assert_array_equal(rewards, kept)  # only observations are reused


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_names_change_with_episodes_and_old_lists_stay(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv, {"num_names": 2})] * 3)
    env.reset(seed=0)
    before = env.env_names
    assert before == ["scripted0"] * 3
    for _ in range(2):
        env.step(np.zeros(3, np.int64))
    assert before == ["scripted0"] * 3
    assert env.env_names == ["scripted1", "scripted0", "scripted0"]  # env 0 ends after 2 steps


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_box_actions_and_nested_observations(kind: str, opened: Any) -> None:
    obs_space = gym.spaces.Dict({
        "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "parts": gym.spaces.Tuple([gym.spaces.Discrete(5, start=2), gym.spaces.MultiBinary(3)]),
    })
    spec = EnvSpec(SpacesEnv, {"action_space": gym.spaces.Box(0, 4, (2, 3), np.float64),
                               "observation_space": obs_space})
    env = opened(kind, [spec] * 3)
    assert env.single_action_space == gym.spaces.Box(-1, 1, (6,), np.float32)
    assert sorted(env.single_observation_space) == ["image", "parts/0", "parts/1"]
    obs, _ = env.reset(seed=0)
    assert obs["image"].dtype == np.uint8
    assert obs["image"].any()
    assert obs["parts/0"].max() < 5
    obs, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_different_environments_side_by_side(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv, {"gain": g, "start": int(g)}) for g in (1.0, 2.0, 3.0)])
    env.reset(seed=0)
    _, rewards, *_ = env.step(np.array([0, 1, 2]))
    np.testing.assert_array_equal(rewards, [10, 22, 36])


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_seed_list_and_wrong_length(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv)] * 3)
    obs, _ = env.reset(seed=[4, 9, None])
    np.testing.assert_array_equal(obs["observation"][:, 0], [4, 9, 0])
    with pytest.raises(ValueError, match=r"2 seeds for 3 environments.*Fix"):
        env.reset(seed=[1, 2])


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_render_gives_one_frame_each(kind: str, opened: Any) -> None:
    env = opened(kind, [EnvSpec(ScriptedEnv)] * 3)
    env.reset(seed=0)
    env.step(np.zeros(3, np.int64))
    assert [frame.tolist() for frame in env.render()] == [[[1, 1], [1, 1]]] * 3


@pytest.mark.parametrize("kind", ["sync", *PROCESS_KINDS])
def test_disagreeing_spaces_are_refused(kind: str) -> None:
    other = EnvSpec(SpacesEnv, {"action_space": gym.spaces.Discrete(4)})
    with pytest.raises(EnvError, match=r"(?s)Environment 1 \(SpacesEnv\) has observations.*Fix"):
        build(kind, [EnvSpec(ScriptedEnv), other])


# ---- workers ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["sync", "fork"])
def test_wrong_observation_shape_is_named(kind: str) -> None:
    env = build(kind, [EnvSpec(FailingEnv, {"how": "shape"})])
    env.reset(seed=0)
    with pytest.raises((ValueError, EnvError), match=r"with shape \(1,\).*says \(3,\).*Fix"):
        env.step([0])
    env.close()


@pytest.mark.parametrize(("how", "words"), [("kill", "killed by signal 9"), ("exit", "exited with code 3")])
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


def test_workers_hold_several_envs_each_and_import_nothing_heavy(opened: Any) -> None:
    env = opened("spawn", [EnvSpec(FailingEnv, {"how": "modules"})] * 6)
    env.reset(seed=0)
    metrics = env.step([0] * 6)[-1]["metrics"]
    assert [value for _, name, value in metrics if name == "heavy"] == [0.0] * 6
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
    for _ in range(100):
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


def test_unpicklable_recipe_is_refused_under_spawn() -> None:
    import threading

    lock = threading.Lock()
    spec = EnvSpec(lambda: (lock, ScriptedEnv())[1])
    with pytest.raises(EnvError, match=r"cannot be sent to a worker process.*importable module"):
        build("spawn", [spec])
    build("fork", [spec]).close()


def test_lambdas_cross_into_spawned_workers(opened: Any) -> None:
    env = opened("spawn", [EnvSpec(lambda: ScriptedEnv(gain=2.0))])
    env.reset(seed=0)
    assert env.step([0])[1].tolist() == [20.0]


# ---- modes ------------------------------------------------------------------------------------------------


def test_async_halves_must_alternate(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv)] * 2)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"without step_async.*Fix"):
        env.step_wait()
    env.step_async([0, 0])
    with pytest.raises(RuntimeError, match=r"twice.*Fix"):
        env.step_async([0, 0])
    assert env.step_wait()[1].tolist() == [10.0, 10.0]


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loxodon.envs.vector.AUTO_TRIAL_S", 0.02)
    with caplog.at_level(logging.INFO, logger="loxodon"):
        env = make_vector_env([EnvSpec(ScriptedEnv)] * 2, "auto", num_workers=1)
    assert len(caplog.records) == 1
    assert "env_mode=auto chose sync" in caplog.text  # a step costs microseconds, a wake-up many of them
    obs, _ = env.reset(seed=3)
    np.testing.assert_array_equal(obs["observation"], [[3, 0, 0], [4, 0, 0]])
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"mode": "asink"}, r"env_mode is 'asink'.*'async'.*Fix"),
        ({"mode": "async", "context": "forc"}, r"async_env_mp_context is 'forc'.*'fork'.*Fix"),
        ({"mode": "async", "num_workers": 0}, r"num_workers is 0.*Fix"),
    ],
)
def test_wrong_choices(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_vector_env([EnvSpec(ScriptedEnv)], **kwargs)


def test_no_environments() -> None:
    with pytest.raises(ValueError, match=r"no environments.*parallel_actors"):
        make_vector_env([], "sync")


def test_already_vectorized_refuses_what_it_cannot_map() -> None:
    def next_step() -> gym.vector.VectorEnv:
        return gym.vector.SyncVectorEnv([ScriptedEnv] * 2)

    with pytest.raises(ValueError, match=r"autoreset mode is .*NEXT_STEP.*Fix"):
        make_vector_env([EnvSpec(next_step)], "already_vectorized")
    with pytest.raises(TypeError, match=r"got ScriptedEnv.*needs a gymnasium.vector.VectorEnv.*Fix"):
        make_vector_env([EnvSpec(ScriptedEnv)], "already_vectorized")
    spec = EnvSpec(gymnasium_vector_env, {"num_envs": 2})
    with pytest.raises(ValueError, match=r"2 rows, but parallel_actors is 3.*Fix"):
        make_vector_env([spec] * 3, "already_vectorized")
    with pytest.raises(ValueError, match=r"2 different environments.*Fix"):
        make_vector_env([spec, EnvSpec(ScriptedEnv)], "already_vectorized")


class BatchedFinalEnv(gym.vector.VectorEnv):
    """Reports final observations as one [N, ...] array, or not at all."""

    def __init__(self, has_final: bool) -> None:
        self.num_envs, self.has_final = 2, has_final
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        ended = np.array([False, True])
        infos = {"final_obs": np.array([[0.0], [8.0]]), "_final_obs": ended} if self.has_final else {}
        return np.zeros((2, 1), np.float32), np.ones(2), np.zeros(2, bool), ended, infos


def test_already_vectorized_takes_batched_final_obs_and_misses_none() -> None:
    env = make_vector_env([EnvSpec(BatchedFinalEnv, {"has_final": True})], "already_vectorized")
    env.reset()
    *_, truncated, infos = env.step([0, 0])
    assert truncated.tolist() == [False, True]
    assert infos["final_obs"]["observation"][1].tolist() == [8.0]
    env = make_vector_env([EnvSpec(BatchedFinalEnv, {"has_final": False})], "already_vectorized")
    env.reset()
    with pytest.raises(ValueError, match=r"without infos\['final_obs'\].*Fix"):
        env.step([0, 0])
