from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces

from loxodon.envs import Tokens
from loxodon.experiment.checkpoint.spaces import EnvSpaces, space_differences, space_from_json, space_to_json

ALL: list[Space[Any]] = [
    spaces.Box(-np.inf, np.inf, (3, 2), np.float32),
    spaces.Box(np.array([0.1, -2.0]), np.array([0.3, np.inf]), dtype=np.float64),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(np.array(-1.5, np.float32), np.array(0.1, np.float32), (), np.float32),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int32),
    spaces.MultiBinary(7),
    spaces.MultiBinary((2, 3)),
    Tokens(["go", "left"], 4),
    spaces.Text(9, min_length=2, charset="xyz"),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))])}),
]


def test_every_space_survives_strict_json() -> None:
    for space in ALL:
        text = json.dumps(space_to_json(space), allow_nan=False)
        back = space_from_json(json.loads(text))
        assert (back, back.dtype) == (space, space.dtype)


def test_spaces_that_are_unknown_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no JSON form.*Fix:"):
        space_to_json(spaces.Graph(spaces.Discrete(2), None))
    with pytest.raises(ValueError, match=r"describes no space.*Fix:"):
        space_from_json({"type": "Sphere"})
    with pytest.raises(ValueError, match=r"describes no space.*Fix:"):
        space_from_json({"type": "Box", "low": 0})


def env(action: Space[Any] | None = None, **obs: Space[Any]) -> EnvSpaces:
    return EnvSpaces(spaces.Dict(obs), action or spaces.Discrete(3))


def test_differences_name_each_observation_and_the_actions() -> None:
    saved = env(gone=spaces.Discrete(2), image=spaces.Box(0, 255, (8, 8), np.uint8), same=spaces.Discrete(4))
    own = env(
        spaces.Discrete(4),
        new=spaces.Discrete(2),
        image=spaces.Box(0, 255, (9, 9), np.uint8),
        same=spaces.Discrete(4),
    )
    found = space_differences(saved, own, "the file")
    assert found == [
        "observation 'gone' is only in the file",
        "observation 'image' is Box(0, 255, (8, 8), uint8) in the file and Box(0, 255, (9, 9), uint8) here",
        "observation 'new' is not in the file",
        "the action space is Discrete(3) in the file and Discrete(4) here",
    ]


def test_bounds_count_for_actions_only() -> None:
    one = env(spaces.Box(-1, 1, (2,)), x=spaces.Box(0, 1, (3,)))
    two = env(spaces.Box(-2, 2, (2,)), x=spaces.Box(0, 9, (3,)))
    assert [text.split(" is ")[0] for text in space_differences(one, two, "f")] == ["the action space"]
    assert space_differences(one, one, "f") == []
    assert one.digest() == EnvSpaces(one.observation, one.action).digest() != two.digest()
