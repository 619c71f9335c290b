"""From what a user names to a recipe of plain values."""

from __future__ import annotations

import builtins
import functools
import pickle
import sys
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import scripted_envs
from scripted_envs import ScriptedEnv, SubclassOfScripted, make_scripted

from loxodon.envs import (
    EnvSpec,
    KShotWrapper,
    SequenceEnv,
    TMazePassive,
    gym_env,
    make_vector_env,
    resolve_env,
)
from loxodon.envs.gin_values import bind_known, ship, unship


@gin.configurable(module="tests.envs")
def env_holder(make_env: Any = gin.REQUIRED) -> Any:
    """Receives a reference as Experiment does."""
    return make_env


def resolved_from(config: str) -> EnvSpec:
    gin.parse_config(config)
    return resolve_env(env_holder())


def test_a_spec_survives_pickling_and_builds() -> None:
    spec = EnvSpec(ScriptedEnv, {"gain": 2.0}, env_name="mine")
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    env = copy.build()
    assert isinstance(env, SequenceEnv)
    assert env.env_name == "mine"
    assert env.unwrapped.gain == 2.0


def test_registered_ids_keep_their_time_limit() -> None:
    env = gym_env("CartPole-v1", kwargs={"max_episode_steps": 3}).build()
    env.reset(seed=0)
    assert [env.step(t % 2)[3] for t in range(3)] == [False, False, True]


def test_a_recipe_that_a_function_returns_keeps_its_name() -> None:
    assert resolve_env(lambda: EnvSpec(ScriptedEnv, env_name="mine")).build().env_name == "mine"


def test_popgym_ids_work() -> None:
    pytest.importorskip("popgym")
    env = make_vector_env([gym_env("popgym-RepeatPreviousEasy-v0")] * 2, "sync")
    assert env.env_names == ["popgym-RepeatPreviousEasy"] * 2
    obs, _ = env.reset(seed=0)
    assert obs["observation"].dtype == np.int64
    assert env.step([0, 1])[1].shape == (2,)


def test_an_error_without_popgym_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "popgym", None)
    real_import = builtins.__import__

    def no_popgym(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "popgym":
            raise ModuleNotFoundError("No module named 'popgym'", name="popgym")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_popgym)
    with pytest.raises(ModuleNotFoundError, match=r"popgym, .*not installed. Fix: .*'loxodon\[envs\]'"):
        gym_env("popgym-RepeatPreviousEasy-v0").build()


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('Box2D is not installed, run `pip install "gymnasium[box2d]"`', r"pip install 'loxodon\[box2d\]'"),
        ("the simulator is not installed", "install it"),
    ],
)
def test_a_package_that_an_environment_misses_is_named_with_its_extra(text: str, fix: str) -> None:
    def needs_it() -> gym.Env[Any, Any]:
        raise gym.error.DependencyNotInstalled(text)

    with pytest.raises(ModuleNotFoundError, match=rf"needs_it needs a package.*not installed.*Fix: {fix}\.$"):
        EnvSpec(needs_it).build()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPol-v1", r"under 'CartPol-v1'.*Did you mean 'CartPole-v1'.*Fix"),
        ("cartpole-v1", r"Did you mean 'CartPole-v1'"),
        ("CartPole-v77", r"Did you mean 'CartPole-v"),
        ("zzzzqqqq-v0", r"No environment is registered under 'zzzzqqqq-v0'.*pprint_registry.*Fix"),
    ],
)
def test_unknown_ids_are_refused_with_similar_ones(env_id: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gym_env(env_id).build()


def test_a_module_prefix_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gym.register("LoxodonScripted-v0", entry_point=lambda: ScriptedEnv(gain=3.0))
    try:
        env = gym_env("scripted_envs:LoxodonScripted-v0").build()
        assert env.unwrapped.gain == 3.0
    finally:
        gym.registry.pop("LoxodonScripted-v0")


def test_resolve_accepts_specs_ids_classes_and_functions() -> None:
    spec = EnvSpec(ScriptedEnv)
    assert resolve_env(spec) is spec
    assert resolve_env("CartPole-v1") == EnvSpec("CartPole-v1")
    assert resolve_env(make_scripted) == EnvSpec(make_scripted)
    assert resolve_env(functools.partial(make_scripted, gain=4.0)).build().unwrapped.gain == 4.0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            TMazePassive(horizon=3),
            r"a single environment \(TMazePassive instance\).*@TMazePassive without parenthes",
        ),
        (5, r"make_env is 5 \(int\).*Fix"),
    ],
)
def test_resolve_refuses_instances_and_nonsense(bad: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        resolve_env(bad)


def test_gym_env_needs_a_string() -> None:
    with pytest.raises(TypeError, match=r"env_id is 5.*Fix"):
        gym_env(5)  # type: ignore[arg-type]


# ---- gin --------------------------------------------------------------------------------------------------


def elsewhere(spec: EnvSpec) -> EnvSpec:
    """The recipe in a process whose only gin configuration is the one sent to it."""
    sent = ship(spec)
    gin.clear_config()
    arrived, text = unship(sent)
    bind_known(text)
    assert isinstance(arrived, EnvSpec)
    return arrived


@pytest.mark.parametrize("reference", ["@gym_env()", "@gym_env", "@val/gym_env"])
def test_a_gym_env_of_gin_may_be_evaluated_or_not(reference: str) -> None:
    scope = "val/" if "val" in reference else ""
    spec = resolved_from(f"env_holder.make_env = {reference}\n{scope}gym_env.env_id = 'CartPole-v1'")
    assert elsewhere(spec).build().env_name == "CartPole"


def test_scoped_references_and_macros_reach_workers() -> None:
    spec = resolved_from(
        "env_holder.make_env = @train/TMazePassive\nH = 12\nTMazePassive.horizon = 3\n"
        "train/TMazePassive.horizon = %H\nTMazePassive.goal_reward = 2.0"
    )
    for env in (spec.build().unwrapped, elsewhere(spec).build().unwrapped):
        assert type(env) is TMazePassive
        assert (env.horizon, env.goal_reward) == (12, 2.0)


def test_the_current_scope_counts() -> None:
    gin.parse_config("TMazePassive.horizon = 3\nval/TMazePassive.horizon = 4")
    with gin.config_scope("val"):
        spec = resolve_env(TMazePassive)
    assert resolve_env(TMazePassive).build().unwrapped.horizon == 3
    assert elsewhere(spec).build().unwrapped.horizon == 4


def test_nested_references_make_a_new_object_per_environment() -> None:
    spec = resolved_from(
        "env_holder.make_env = @WrappingEnv\nWrappingEnv.inner = @inner/ScriptedEnv()\n"
        "inner/ScriptedEnv.gain = 7.0\nWrappingEnv.extra = [1, {'maker': @other/ScriptedEnv}]\n"
        "other/ScriptedEnv.gain = 8.0"
    )
    spec = elsewhere(spec)
    first, second = spec.build(), spec.build()
    assert first.env.env.gain == 7.0
    assert first.unwrapped is not second.unwrapped
    assert first.env.extra[1]["maker"]().gain == 8.0
    assert first.env.extra is not second.env.extra


def test_subclasses_and_external_configurables_reach_workers() -> None:
    gin.parse_config("ScriptedEnv.gain = 6.0")
    subclass = elsewhere(resolve_env(SubclassOfScripted)).build().unwrapped
    assert type(subclass) is SubclassOfScripted
    assert subclass.gain == 6.0
    external = gin.external_configurable(scripted_envs.SpacesEnv, module="tests.envs")
    gin.parse_config("SpacesEnv.action_space = %SPACE\nSPACE = 5")
    sent = ship(resolve_env(external))
    gin.config._REGISTRY.pop("tests.envs.SpacesEnv")  # elsewhere, only the environment's module is imported
    gin.config._INVERSE_REGISTRY.pop(scripted_envs.SpacesEnv)
    arrived, _ = unship(sent)
    assert arrived.target().action_space == 5


def test_only_bindings_that_the_environment_uses_reach_workers() -> None:
    gin.parse_config("WrappingEnv.inner = %INNER\nINNER = @KShotWrapper()\nOTHER = @env_holder\nS = %OTHER")
    sent = ship(resolve_env(scripted_envs.WrappingEnv))
    assert KShotWrapper.__module__.encode() in sent
    assert b"test_spec" not in sent


def test_bindings_count_as_used_when_the_environment_is_built() -> None:
    spec = resolved_from("env_holder.make_env = @train/TMazePassive\ntrain/TMazePassive.horizon = %H\nH = 9")
    spec.build()
    text = gin.operative_config_str()
    assert "train/TMazePassive.horizon = %H" in text
    assert "H = 9" in text


def test_a_missing_required_value_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"TMazePassive.*horizon"):
        resolve_env(TMazePassive).build()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        (
            "scripted_envs:FailingEnv",
            {},
            r"FailingEnv .*\{\}: .* missing 1 .*'how'\. It takes \(how.*gym_env\.kwargs",
        ),
        ("scripted_envs:FailingEnv", {"hwo": 3}, r"FailingEnv .*unexpected keyword argument 'hwo'"),
        (
            "CartPole-v1",
            {"sze": 3, "max_episode_steps": 9},
            r"CartPoleEnv .*argument 'sze'\. It takes \(sutton",
        ),
    ],
)
def test_wrong_arguments_are_named_with_the_class(env_id: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        gym_env(env_id, kwargs=kwargs).build()


def test_wrong_arguments_of_a_batch_are_named_with_the_class() -> None:
    with pytest.raises(TypeError, match=r"CartPoleVectorEnv .*argument 'sze'\. It takes \(num_envs"):
        gym_env("CartPole-v1", kwargs={"sze": 3}).build_vector(2)


def test_a_class_of_a_module_is_named_like_an_id_and_sent_as_text() -> None:
    spec = pickle.loads(pickle.dumps(gym_env("scripted_envs:ScriptedEnv", kwargs={"gain": 2.0})))
    assert spec.target == "scripted_envs:ScriptedEnv"
    assert spec.build().unwrapped.gain == 2.0
    with pytest.raises(ValueError, match=r"Did you mean 'scripted_envs:ScriptedEnv'.*Fix:"):
        gym_env("scripted_envs:ScriptedEnw").build()
    with pytest.raises(ValueError, match=r"module scripted_envs has no .* Nope\. Its .*ScriptedEnv, .*Fix:"):
        gym_env("scripted_envs:Nope").build()
    with pytest.raises(
        ModuleNotFoundError, match=r"module no_module_of_that_name, which was not found. Fix:"
    ):
        gym_env("no_module_of_that_name:X-v0").build()
