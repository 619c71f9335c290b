"""Text observations as numbers, by a vocabulary that is part of the environment's recipe."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from scripted_envs import MissionEnv, ScriptedEnv, SpacesEnv, WordSpace

from loxodon.envs import (
    MINIGRID_WORDS,
    AlreadyVectorizedEnv,
    EnvSpec,
    ObsLayout,
    SequenceEnv,
    SyncVectorEnv,
    Tokens,
    gym_env,
    resolve_env,
)

WORDS = ["go", "to", "room", "4", ".", "0"]
GO_TO_ROOM_4_0 = [2, 3, 4, 5, 6, 7]


def test_words_have_fixed_numbers_and_unknown_ones_are_reported_once(caplog: Any) -> None:
    space = Tokens(["Go", "to", ",", "red"], max_tokens=5)
    assert space.encode("go to, RED").tolist() == [2, 3, 4, 5, 0]
    assert space.encode("").tolist() == [0] * 5
    assert not caplog.records
    for _ in range(2):
        assert space.encode("go to blue").tolist() == [2, 3, 1, 0, 0]
        assert space.encode("go go go go to to").tolist() == [2, 2, 2, 2, 3]
    blue, longer = [record.getMessage() for record in caplog.records]
    assert "'blue', which the vocabulary lacks" in blue
    assert "6 words, but only the first 5" in longer
    rows = space.encode(np.array(["go", "red"], object))
    assert (rows.dtype, rows.tolist()) == (np.int16, [[2, 0, 0, 0, 0], [5, 0, 0, 0, 0]])
    assert space.encode(rows) is rows
    assert space.contains(rows[0])
    copied = pickle.loads(pickle.dumps(space))
    assert copied == space != Tokens(["go", "to", ",", "blue"], max_tokens=5)
    assert copied.encode("red").tolist() == [5, 0, 0, 0, 0]


@pytest.mark.parametrize("words", [[], ["two words"], ["red", "Red"], [""]])
def test_impossible_vocabularies_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"The vocabulary has .*Fix:"):
        Tokens(words)


@pytest.mark.parametrize("space", [None, WordSpace()])
def test_the_recipe_turns_texts_into_numbers(space: Any) -> None:
    spec = EnvSpec(MissionEnv, {"space": space}, vocabulary=Tokens(WORDS, 7))
    nested = EnvSpec(lambda: spec)
    for recipe in (spec, nested):
        env = SyncVectorEnv([recipe] * 2)
        obs, _ = env.reset(seed=3)
        assert obs["mission"].tolist() == [[2, 3, 4, 1, 6, 7, 0], [*GO_TO_ROOM_4_0, 0]]
        assert isinstance(env.env_observation_space["mission"], Tokens)
        assert env.single_observation_space.contains({key: value[0] for key, value in obs.items()})
        env.close()


def test_environments_with_their_own_batch_axis_may_have_a_vocabulary() -> None:
    make = partial(gym.vector.SyncVectorEnv, [MissionEnv] * 2, autoreset_mode=AutoresetMode("SameStep"))
    env = AlreadyVectorizedEnv([EnvSpec(make, vocabulary=Tokens(WORDS, 6))] * 2)
    assert env.reset(seed=4)[0]["mission"].tolist() == [GO_TO_ROOM_4_0, [2, 3, 4, 1, 6, 7]]
    for _ in range(3):
        obs, *_, infos = env.step([0, 0])
    assert infos["final_obs"]["mission"][0].tolist() == GO_TO_ROOM_4_0
    assert obs["mission"][0].tolist() == [2, 3, 4, 5, 6, 1]


def test_an_environment_may_declare_tokens_itself() -> None:
    assert ObsLayout(Tokens(WORDS, 6)).flatten("go to")["observation"].tolist() == [2, 3, 0, 0, 0, 0]
    both = spaces.Tuple([Tokens(["left"], 2), spaces.Discrete(3, start=1)])
    env = SequenceEnv(SpacesEnv(spaces.Discrete(2), both))
    assert env.observation_space["0"] == Tokens(["left"], 2)


@pytest.mark.parametrize(
    "make",
    [
        gym_env,
        EnvSpec,
        resolve_env,
        lambda id_: EnvSpec(lambda: gym_env(id_)),
        lambda id_: gym_env(id_, vocabulary="minigrid"),
    ],
)
def test_minigrid_works_with_its_own_words(make: Any, caplog: Any) -> None:
    pytest.importorskip("minigrid")
    assert isinstance(make("BabyAI-GoToLocal-v0").build().observation_space["mission"], Tokens)
    env = make("MiniGrid-MemoryS7-v0").build()
    obs, _ = env.reset(seed=0)
    assert {key: str(value.dtype) for key, value in obs.items()} == {
        "direction": "int64",
        "image": "uint8",
        "mission": "int16",
    }
    assert not caplog.records


@pytest.mark.parametrize("space", [None, WordSpace()])
def test_a_text_without_a_vocabulary_is_refused(space: Any) -> None:
    with pytest.raises(TypeError, match=r"MissionEnv is not supported: .*'mission' is a .*vocabulary.*Fix:"):
        EnvSpec(MissionEnv, {"space": space}).build()


def test_gin_can_name_the_vocabulary() -> None:
    spec = gym_env("BabyAI-GoToLocal-v0", vocabulary="minigrid", max_tokens=9)
    assert spec.vocabulary == Tokens(MINIGRID_WORDS, 9)
    missions = (
        "get the red key from the room, unlock the red door and go to the goal. pick up a ball behind you"
    )
    assert (Tokens(MINIGRID_WORDS, 30).encode(missions) != Tokens.UNKNOWN).all()
    with pytest.raises(ValueError, match=r"gym_env.vocabulary is 'words'.*Fix:"):
        gym_env("CartPole-v1", vocabulary="words")
    with pytest.raises(ValueError, match=r"A vocabulary was given, but .* has no text.*Fix:"):
        EnvSpec(ScriptedEnv, vocabulary=Tokens(WORDS)).build()
