"""Values returned by environments are copied before the next call and checked before any cast."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from scripted_envs import OddEnv, ReusingBatch, ReusingEnv, ScriptedEnv

from loxodon.envs import EnvError, EnvSpec, KShotWrapper, PartialObs, SequenceEnv, Tokens, make_vector_env
from loxodon.envs.returned import as_flags, as_rewards

NUM_STEPS = 25


def recorded(env: Any, has_limit: bool = False) -> list[Any]:
    """All values that a vector environment returns, as plain Python values."""
    obs, _ = env.reset(seed=3)
    stream = [{key: column.tolist() for key, column in obs.items()}]
    if has_limit:
        env.set_attr("max_episode_length", 3)
    for _ in range(NUM_STEPS):
        obs, *figures, infos = env.step(np.ones(env.num_envs, np.int64))
        stream.append([{key: column.tolist() for key, column in obs.items()}, [x.tolist() for x in figures]])
        if "final_obs" in infos:
            ended = infos["_final_obs"]
            stream.append({key: column[ended].tolist() for key, column in infos["final_obs"].items()})
        stream.append([infos.get("metrics"), list(env.env_names)])
    return stream


def in_kshot(is_tidy: bool) -> gym.Env:
    return KShotWrapper(PartialObs(ReusingEnv(is_tidy), (2, 1)), 2, task_seed=False)


def reusing_specs(target: Any, is_tidy: bool, **kwargs: Any) -> list[EnvSpec]:
    return [EnvSpec(target, {"is_tidy": is_tidy, **kwargs})] * 3


@pytest.mark.parametrize("kind", ["sync", "fork"])
@pytest.mark.parametrize(
    ("target", "kwargs"), [(ReusingEnv, {}), (ReusingEnv, {"nests": True}), (in_kshot, {})]
)
@pytest.mark.parametrize("has_limit", [False, True])
def test_environments_that_reuse_their_objects_lose_nothing(
    kind: str, target: Any, kwargs: dict[str, Any], has_limit: bool, opened: Any
) -> None:
    streams = [recorded(opened(kind, reusing_specs(target, tidy, **kwargs)), has_limit) for tidy in (0, 1)]
    assert streams[0] == streams[1]
    assert "time" in str(streams[1])
    assert "begun" in str(streams[1])


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_batches_that_reuse_their_objects_lose_nothing(mode: str) -> None:
    streams = [
        recorded(
            make_vector_env([EnvSpec(ReusingBatch, {"mode": mode, "is_tidy": tidy})], "already_vectorized")
        )
        for tidy in (False, True)
    ]
    assert streams[0] == streams[1]
    assert "(2, 'time', 4.0)" in str(streams[1])


def test_a_single_environment_returns_values_of_its_own() -> None:
    env = SequenceEnv(ReusingEnv())
    results = [env.reset(seed=0), *(env.step(1) for _ in range(2))]
    env.reset()
    assert results[0][1]["metric/begun"].tolist() == [3]
    assert [obs["observation"].tolist() for obs, *_ in results] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert results[2][1:4] == (21.0, True, False)
    assert results[2][4]["metric/time"].tolist() == [2, 12]


def test_changes_that_an_environment_makes_to_its_options_stay_inside(opened: Any) -> None:
    seen = []

    class Taking(ScriptedEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seen.append(options.pop("level"))
            return super().reset(seed=seed)

    options = {"level": 2}
    env = opened("sync", [EnvSpec(lambda: KShotWrapper(Taking(), 2))] * 2)
    env.reset(seed=0, options=options)
    for _ in range(3):
        env.step([0, 0])
    assert (options, seen) == ({"level": 2}, [2, 2, 2, 2])


def test_frames_are_copies(opened: Any) -> None:
    class Painter(ScriptedEnv):
        frame = np.zeros(2)

        def render(self) -> Any:
            self.frame += 1
            return self.frame

    env = opened("sync", [EnvSpec(Painter)] * 2)
    assert [frame.tolist() for frame in env.render()] == [[1, 1], [2, 2]]


# --- refused values ---------------------------------------------------------------------------------------

IMAGE = spaces.Box(0, 255, (2,), np.uint8)
PARTS = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "y": spaces.Tuple([spaces.Discrete(3)] * 2)})
X, Y = np.zeros(2, np.float32), (0, 1)
BIG = spaces.Box(-np.inf, np.inf, (1,), np.float32)
WIDE = spaces.Box(-np.inf, np.inf, (1,), np.float64)
TEXT = Tokens(["word"], 2)
REFUSED: list[tuple[Any, Any, Any, str]] = [  # space, a good observation, the odd one, words of the error
    (
        IMAGE,
        np.zeros(2, np.uint8),
        np.array([0.5, 0.25]),
        r"0\.5 \(float64\) as .*dtype uint8, .*value into 0",
    ),
    (IMAGE, np.zeros(2, np.uint8), np.array([7, -1]), r"-1 \(int64\) as .*value into 255"),
    (IMAGE, [0, 0], [0, 256], r"256 \(int64\) as .*value into 0"),
    (IMAGE, np.zeros(2, np.uint8), np.array([np.nan, 0]), r"nan \(float64\) as"),
    (spaces.Box(0, 1, (1,), bool), [True], [2], r"2 \(int64\) as .*dtype bool"),
    (spaces.Discrete(4), 3, 1.7, r"1\.7 \(float64\) as .*Discrete\(4\)"),
    (spaces.Discrete(4), np.int32(3), 4, r"4 as .*Discrete\(4\) does not contain"),
    (spaces.Discrete(4), True, -1, r"-1 as .*Discrete\(4\) does not contain"),
    (spaces.Discrete(4, start=-2), np.int8(-2), np.int8(2), r"2 as .*start=-2\) does not contain"),
    (spaces.Discrete(4, start=5), np.uint8(5), np.uint8(3), r"3 as .*start=5\) does not contain"),
    (spaces.Discrete(4, start=1), 1.0, 1.5, r"1\.5 \(float64\) as"),
    (spaces.Discrete(4), 0, 10**30, r"as observation 'observation'"),
    (spaces.Discrete(4), np.array(0), np.array([1]), r"with shape \(1,\).*the shape \(\)"),
    (spaces.Discrete(4), 0, None, r"None as .*requires real numbers"),
    (spaces.MultiDiscrete([2, 3]), [1, 2], np.array([1, 3]), r"\[1 3\] as .*does not contain"),
    (spaces.MultiDiscrete([2, 3], start=[1, 1]), [1, 1], [0, 1], r"\[0 1\] as .*does not contain"),
    (spaces.MultiBinary(2), [0, 1], [0, 2], r"\[0 2\] as .*MultiBinary\(2\) does not contain"),
    (spaces.MultiBinary(2), np.ones(2), np.array([0.5, 0]), r"0\.5 \(float64\) as"),
    (BIG, np.ones(1), np.array([1e300]), r"inf as .*finite in float32"),
    (BIG, np.ones(1), np.array([-1e39]), r"-inf as"),
    (WIDE, np.ones(1), np.array([1e39]), r"1e\+39 as .*finite in float32"),
    (WIDE, np.ones(1), [-1e300], r"-1e\+300 as .*finite in float32"),
    (WIDE, np.full(1, -3e38), np.array([np.nan]), r"NaN as observation"),
    (BIG, [1], [np.inf], r"inf as observation"),
    (BIG, np.ones(1, int), np.array([1j]), r"array\(\[0\.\+1\.j\]\) as .*real numbers"),
    (BIG, np.ones(1), ["1.0"], r"\['1\.0'\] \(list\) as .*real numbers"),
    (BIG, np.ones(1), np.array([1.0], object), r"dtype=object\) as .*real numbers"),
    (BIG, np.ones(1), [[1], [1, 2]], r"\(list\) as .*real numbers"),
    (BIG, np.ones(1), {"x": 1}, r"\(dict\) as .*real numbers"),
    (TEXT, "word", 7, r"with shape \(\).*the shape \(2,\)"),
    (TEXT, np.str_("word"), b"word", r"b'word' \(bytes\) as .*requires text"),
    (TEXT, "word", None, r"None as .*requires text"),
    (PARTS, {"y": Y, "x": X}, {"x": X}, r"observation with the parts \['x'\].*parts \['x', 'y'\]"),
    (PARTS, {"x": X, "y": [0, 1]}, {"x": X, "y": Y, "z": 1}, r"the parts \['x', 'y', 'z'\]"),
    (PARTS, {"x": X, "y": np.array(Y)}, X, r"array\(\[0., 0.\].* as observation.*is a Dict"),
    (PARTS, {"x": X, "y": Y}, None, r"None as observation.*is a Dict"),
    (PARTS, {"x": X, "y": Y}, {"x": X, "y": (1,)}, r"observation 'y' with the parts \[0\].*a Tuple with"),
    (PARTS, {"x": X, "y": Y}, {"x": X, "y": {"a": 1, "b": 1}}, r"\(dict\) as observation 'y'.*a Tuple"),
    (PARTS, {"x": X, "y": Y}, {"x": {"a": 1}, "y": Y}, r"\{'a': 1\} \(dict\) as observation 'x'"),
    (PARTS, {"x": X, "y": Y}, {"x": X, "y": (1, 3)}, r"3 as observation 'y/1'"),
]


@pytest.mark.parametrize(("space", "good", "odd", "words"), REFUSED)
def test_observations_that_do_not_fit_their_space_are_refused(
    space: Any, good: Any, odd: Any, words: str, opened: Any
) -> None:
    specs = [EnvSpec(OddEnv, {"space": space, "odd": x, "good": good, "time": 1}) for x in (good, odd)]
    env = opened("sync", specs)
    env.reset(seed=0)
    with pytest.raises(
        ValueError, match=rf"(?s)^The environment scripted0 returned .*{words}.*Fix:"
    ) as caught:
        env.step([0, 0])
    assert "(environment 1, step 1 since all were reset)" in str(caught.value)
    env = opened("sync", [EnvSpec(OddEnv, {"space": space, "odd": odd, "time": 0, "good": good})])
    with pytest.raises(ValueError, match=rf"(?s)^The environment scripted0 returned .*{words}.*Fix:"):
        env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"(?s)^The environment scripted0 returned .*{words}.*Fix:"):
        SequenceEnv(OddEnv("obs", odd, 0, space, good)).reset()


@pytest.mark.parametrize(
    ("what", "odd", "words"),
    [
        ("reward", "1.0", r"the reward '1\.0'"),
        ("reward", None, "the reward None"),
        ("reward", 1j, r"the reward 1j \(complex\)"),
        ("reward", np.array("1.0"), "the reward array"),
        ("reward", np.ones(2), r"the reward array\(\[1., 1.\]\)"),
        ("reward", np.float64(1e39), r"1e\+39 as reward"),
        ("reward", 10**400, "inf as reward"),
        ("reward", float("nan"), "NaN as reward"),
        ("terminated", "False", "'False' as terminated"),
        ("truncated", None, "None as truncated"),
        ("terminated", np.zeros(2, bool), "as terminated"),
        ("truncated", 2, r"2 \(int\) as truncated"),
        ("terminated", float("nan"), r"nan \(float\) as terminated"),
        ("info", None, "the info None"),
        ("info", [1], r"the info \[1\] \(list\)"),
        ("info", {"metric/name": "abc"}, r"'abc' as info\['metric/name'\]"),
        ("info", {"metric/name": None}, r"None as info\['metric/name'\]"),
        ("info", {"metric/name": {"a": 1}}, r"\{'a': 1\} \(dict\) as info\['metric/name'\]"),
        ("info", {"metric/name": [1, "b"]}, r"\(list\) as info\['metric/name'\]"),
        ("info", {"metric/name": [[1], [1, 2]]}, r"\(list\) as info\['metric/name'\]"),
        ("info", {"metric/name": 1j}, r"1j \(complex\) as info\['metric/name'\]"),
    ],
)
@pytest.mark.parametrize("wrapper", [lambda env: env, lambda env: KShotWrapper(env, 2)])
def test_rewards_flags_and_infos_of_the_wrong_kind_are_refused(
    what: str, odd: Any, words: str, wrapper: Any, opened: Any
) -> None:
    good: dict[str, Any] = {"what": "info", "odd": {}}
    made = [EnvSpec(lambda k=kwargs: wrapper(OddEnv(**k))) for kwargs in (good, {"what": what, "odd": odd})]
    env = opened("sync", made)
    env.reset(seed=0)
    env.step([0, 0])
    with pytest.raises(ValueError, match=rf"^The environment scripted\d returned .*{words}.*Fix:") as caught:
        env.step([0, 0])
    assert "(environment 1, step 2 since all were reset)" in str(caught.value)


@pytest.mark.parametrize(
    "reward", [np.float16(2), np.int8(2), 2, True + 1, np.array(2), np.array([2.0]), [2]]
)
@pytest.mark.parametrize("flag", [True, 1, 1.0, np.True_, np.array(True), np.array([1])])
def test_numbers_and_truth_values_may_have_any_form(reward: Any, flag: Any, opened: Any) -> None:
    class Forms(ScriptedEnv):
        def step(self, action: Any) -> Any:
            obs, *_ = super().step(action)
            return obs, reward, flag, False, {"metric/figures": (1, np.float32(2))}

    env = opened("sync", [EnvSpec(Forms)])
    env.reset(seed=0)
    _, rewards, terminated, truncated, infos = env.step([0])
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([2.0], [True], [False])
    assert infos["metrics"] == [(0, "figures", [1.0, 2.0])]


def test_a_single_value_for_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the rewards array\(1.\).*Fix"):
        as_rewards(np.array(1.0), None)
    with pytest.raises(ValueError, match=r"array\(True\) as truncated.*Fix"):
        as_flags(np.array(True), "truncated", np.array([True]))


@pytest.mark.parametrize(
    ("call", "odd", "words"),
    [
        ("step", (X, 1.0, True, {}), r"OddEnv.step returned .*4.*Fix"),
        ("step", None, r"OddEnv.step returned .*NoneType.*Fix"),
        ("reset", np.zeros(3), r"OddEnv.reset returned .*Fix"),
        ("reset", (X, {}, {}), r"OddEnv.reset returned .*Fix"),
    ],
)
@pytest.mark.parametrize(
    "wrapper",
    [
        lambda env: env,
        lambda env: KShotWrapper(env, 2),
        lambda env: gym.wrappers.TimeLimit(PartialObs(env, (0,)), 9),
    ],
)
def test_results_of_old_gym_are_one_clear_error(
    call: str, odd: Any, words: str, wrapper: Any, opened: Any
) -> None:
    env = opened("sync", [EnvSpec(lambda: wrapper(OddEnv(call, odd, int(call == "step"))))])
    if call == "step":
        env.reset(seed=0)
    with pytest.raises(TypeError, match=words):
        env.step([0]) if call == "step" else env.reset()


def test_errors_from_workers_name_the_environment_too(opened: Any) -> None:
    env = opened("fork", [EnvSpec(ScriptedEnv), EnvSpec(OddEnv, {"what": "reward", "odd": "1.0", "time": 1})])
    env.reset(seed=0)
    with pytest.raises(
        EnvError, match=r"(?s)Environment 1 failed in step.*scripted0 returned the reward '1.0'.*Fix"
    ):
        env.step([0, 0])


# --- warnings that are given once -------------------------------------------------------------------------

NARROW = spaces.Box(np.array([0, -np.inf], np.float32), np.array([1, np.inf], np.float32))


@pytest.mark.parametrize(
    ("time", "ends", "space", "odd", "words"),
    [
        (2, False, NARROW, np.array([-1, 0], np.float32), r"-1 as observation 'observation'"),
        (137, True, spaces.Box(0, 10, (2,), np.uint8), np.array([3, 11], np.uint8), r"11 as observation"),
        (0, False, NARROW, np.array([2, 0], np.float32), r"2 as observation 'observation'"),
    ],
)
def test_an_early_or_last_observation_outside_its_box_is_reported_once(
    time: int, ends: bool, space: Any, odd: Any, words: str, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaving(OddEnv):
        def step(self, action: Any) -> Any:
            self.seed_, obs, info = 2, *super().step(action)[::4]
            return obs, 1.0, ends and self.time == time, False, info

    good = np.zeros(2, space.dtype)
    kwargs = ({"what": "info", "odd": {}}, {"odd": odd})
    specs = [EnvSpec(lambda k=k: Leaving(**k, time=time, space=space, good=good)) for k in kwargs]
    env = opened("sync", specs)
    with caplog.at_level(logging.WARNING, logger="loxodon"):
        env.reset(seed=0)
        for _ in range(150):
            env.step([0, 0])
    told = [text for text in caplog.messages if "outside the bounds" in text]
    assert len(told) == 1
    assert words in told[0]


# --- spaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("value", [None, (3,), "missing"])
@pytest.mark.parametrize(
    "wrapper",
    [
        lambda env: env,
        lambda env: KShotWrapper(env, 2),
        lambda env: KShotWrapper(lambda: env, 2),
        lambda env: gym.wrappers.TimeLimit(env, 3),
    ],
)
def test_environments_without_spaces_are_refused(name: str, value: Any, wrapper: Any) -> None:
    class Spaceless(ScriptedEnv):
        def __init__(self) -> None:
            super().__init__()
            delattr(self, name) if value == "missing" else setattr(self, name, value)

    for build in (EnvSpec(lambda: wrapper(Spaceless())).build, lambda: SequenceEnv(wrapper(Spaceless()))):
        with pytest.raises(
            TypeError, match=rf"The environment Spaceless has .*{name}, but .*Fix: set self.{name}"
        ):
            build()


@pytest.mark.parametrize(
    ("spaces_", "error", "words"),
    [
        ({"observation_space": spaces.Sequence(spaces.Discrete(2))}, TypeError, r"Sequence"),
        ({"observation_space": spaces.Dict()}, ValueError, r"Dict\(\) is empty"),
        ({"action_space": spaces.Text(3)}, TypeError, r"action space is Text"),
    ],
)
def test_spaces_that_cannot_be_used_name_the_environment(
    spaces_: dict[str, Any], error: type[Exception], words: str
) -> None:
    class Spaced(ScriptedEnv):
        def __init__(self) -> None:
            super().__init__()
            vars(self).update(spaces_)

    with pytest.raises(error, match=rf"The environment Spaced .*{words}.*Fix:"):
        EnvSpec(Spaced).build()
