"""Environments that bring their own batch axis, in every autoreset mode."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from scripted_envs import FailingEnv, ScriptedEnv, SpacesEnv
from vector_builders import gymnasium_vector_env

from loxodon.envs import AlreadyVectorizedEnv, EnvSpec, make_vector_env, resolve_env

NUM_STEPS = 40
Step = tuple[Any, ...]  # observation, action, reward, terminated, truncated, true next observation


def adapted(target: Any, num_specs: int = 1, **kwargs: Any) -> Any:
    return make_vector_env([EnvSpec(target, kwargs)] * num_specs, "already_vectorized")


def recorded_episodes(env: Any, seed: int | None, num_steps: int = NUM_STEPS) -> list[list[list[Step]]]:
    """Episodes per row, recorded according to the contract of `SequenceVectorEnv`."""
    episodes: list[list[list[Step]]] = [[[]] for _ in range(env.num_envs)]
    obs, _ = env.reset(seed=seed)
    actions = np.random.default_rng(0).integers(env.single_action_space.n, size=(num_steps, env.num_envs))
    for row_actions in actions:
        before = obs["observation"].copy()
        obs, rewards, terminated, truncated, infos = env.step(row_actions)
        ended = terminated | truncated
        ignored = infos.get("_ignore", np.zeros(env.num_envs, bool))
        following = obs["observation"].copy()
        if ended.any():
            np.testing.assert_array_equal(infos["_final_obs"], ended)
            following[ended] = infos["final_obs"]["observation"][ended]
        for row in np.flatnonzero(~ignored).tolist():
            figures = (float(x[row]) for x in (row_actions, rewards, terminated, truncated))
            step = (before[row].tolist(), *figures, following[row].tolist())
            episodes[row][-1].append(step)
            if ended[row]:
                episodes[row].append([])
        assert not (ignored & ended).any()
        assert not rewards[ignored].any()
    return [[episode for episode in of_row if episode] for of_row in episodes]


def assert_whole(episodes: list[list[list[Step]]]) -> None:
    """Check that observations are continuous and that all episodes but the last of each row have ended."""
    for row in episodes:
        for episode in row:
            for earlier, later in pairwise(episode):
                assert earlier[-1] == later[0]
                assert not earlier[3]
                assert not earlier[4]
        assert all(episode[-1][3] or episode[-1][4] for episode in row[:-1])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_mode_gives_the_episodes_of_a_plain_loop(mode: str) -> None:
    episodes = recorded_episodes(adapted(gymnasium_vector_env, num_envs=3, mode=mode), seed=5)
    assert_whole(episodes)
    for row, of_row in enumerate(episodes):
        env = ScriptedEnv()
        env.reset(seed=5 + row)
        assert len(of_row) > 5
        for number, episode in enumerate(of_row):
            for time, (obs, action, reward, terminated, truncated, following) in enumerate(episode):
                assert obs == [5 + row, number, time]
                expected = env.step(int(action))
                assert (following, reward) == (expected[0].tolist(), expected[1])
                assert (bool(terminated), bool(truncated)) == expected[2:4]
            env.reset()


def test_next_step_marks_the_row_that_only_resets() -> None:
    env = adapted(gymnasium_vector_env, num_envs=2, mode="NextStep")
    env.reset(seed=0)  # episode 0: two steps in row 0, three in row 1
    env.step([0, 0])
    obs, _, terminated, _, infos = env.step([0, 0])
    assert terminated.tolist() == [True, False]
    assert "_ignore" not in infos
    assert obs["observation"][0].tolist() == [0, 0, 2]  # not yet that of the next episode
    obs, rewards, terminated, truncated, infos = env.step([3, 3])
    assert infos["_ignore"].tolist() == [True, False]
    assert obs["observation"].tolist() == [[0, 1, 0], [1, 0, 3]]
    assert rewards.tolist() == [0, 33]
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    *_, infos = env.step([1, 1])
    assert infos["_ignore"].tolist() == [False, True]
    env.step([1, 1])
    _, _, terminated, truncated, infos = env.step([1, 1])
    assert "_ignore" not in infos
    assert (terminated | truncated).any()
    env.reset(seed=0)  # no row is about to be reset any more
    *_, infos = env.step([1, 1])
    assert "_ignore" not in infos


NEEDS_ENVPOOL = pytest.mark.skipif(find_spec("envpool") is None, reason="envpool is not installed")


def envpool_cartpole() -> Any:
    envpool = importlib.import_module("envpool")
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=4)


@pytest.mark.filterwarnings("ignore:.*precision lowered")  # raised by EnvPool's own spaces
@pytest.mark.parametrize(
    ("target", "seed"),
    [
        (lambda: gym.make_vec("CartPole-v1", num_envs=3), 1),
        (lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"), 1),
        (lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="async"), 1),
        pytest.param(envpool_cartpole, None, marks=NEEDS_ENVPOOL),
    ],
    ids=["default", "sync", "async", "envpool"],
)
def test_vector_environments_of_other_packages(target: Any, seed: int | None) -> None:
    env = adapted(target)
    assert env.env_names == ["CartPole"] * 3
    episodes = recorded_episodes(env, seed=seed, num_steps=120)
    env.close()
    assert_whole(episodes)
    for of_row in episodes:
        assert len(of_row) > 2
        for episode in of_row:
            # a first observation, not the last one of another episode
            assert np.abs(episode[0][0]).max() <= 0.05
            assert all(step[2] == 1.0 for step in episode)
            assert all(np.abs(step[0][2]) <= 0.2095 for step in episode)


def test_an_id_is_made_by_make_vec_with_one_row_per_recipe() -> None:
    env = adapted("CartPole-v1", num_specs=4)
    assert env.num_envs == 4
    assert isinstance(env, AlreadyVectorizedEnv)
    with pytest.raises(ValueError, match=r"No environment is registered under 'CartPoel-v1'.*Fix"):
        adapted("CartPoel-v1")


class PooledEnv(gym.vector.VectorEnv):
    """Behaves like EnvPool's gymnasium interface: spaces of one row, arrays in infos, its own buffers."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, batch_size: int | None = None) -> None:
        self.num_envs = num_envs
        self.batch_size = batch_size or num_envs
        self.rows = [ScriptedEnv() for _ in range(num_envs)]
        self.over = np.zeros(num_envs, bool)
        self.single_observation_space = self.observation_space = self.rows[0].observation_space
        self.single_action_space = self.action_space = self.rows[0].action_space
        self.spec = object()  # not a gymnasium spec
        self.buffer = np.zeros((num_envs, 3), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        for row, env in enumerate(self.rows):
            self.buffer[row] = env.reset(seed=row)[0]
        self.over[:] = False
        return self.buffer, self._infos()

    def step(self, actions: Any) -> Any:
        assert actions.dtype.kind == "i"
        rewards, flags = np.zeros(self.num_envs, np.float32), np.zeros((2, self.num_envs), bool)
        for row, env in enumerate(self.rows):
            if self.over[row]:
                self.buffer[row] = env.reset()[0]
            else:
                self.buffer[row], rewards[row], *flags[:, row], _ = env.step(int(actions[row]))
        self.over = flags.any(axis=0)
        part = slice(self.batch_size)
        return self.buffer[part], rewards[part], flags[0, part], flags[1, part], self._infos()

    def _infos(self) -> dict[str, Any]:
        rows = np.arange(self.num_envs, dtype=np.int32)
        return {"env_id": rows, "players": {"env_id": rows}, "elapsed_step": rows}


def test_an_environment_like_envpool() -> None:
    env = adapted(PooledEnv, num_envs=3)
    assert env.env_names == ["PooledEnv"] * 3
    ours = recorded_episodes(env, seed=None)
    assert ours == recorded_episodes(adapted(gymnasium_vector_env, num_envs=3, mode="NextStep"), seed=0)


def test_rows_that_come_in_parts_are_refused() -> None:
    env = adapted(PooledEnv, num_envs=3, batch_size=2)
    env.reset()
    with pytest.raises(
        ValueError, match=r"rewards with shape \(2,\), but .* require \(3, ...\).*Fix.*batch_size"
    ):
        env.step([0, 0, 0])


def test_dict_observations_survive_same_step_and_disabled() -> None:
    space = gym.spaces.Dict(
        {"a": gym.spaces.Box(-1, 1, (2,), np.float32), "b": gym.spaces.Discrete(9, start=4)}
    )

    class Short(SpacesEnv):
        def step(self, action: Any) -> Any:
            self.last = self.observation_space.sample()
            return self.last, 1.0, True, False, {}

    def target(mode: str) -> gym.vector.VectorEnv:
        makers = [lambda: Short(gym.spaces.Discrete(2), space)] * 2
        return gym.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))

    for mode in ("SameStep", "Disabled", "NextStep"):
        env: Any = adapted(target, mode=mode)
        obs, _ = env.reset(seed=0)
        assert env.observation_space.contains(obs)
        *_, infos = env.step([0, 1])
        for row, inner in enumerate(env.env.envs):
            np.testing.assert_array_equal(infos["final_obs"]["a"][row], inner.last["a"])
            assert infos["final_obs"]["b"][row] == inner.last["b"] - 4


class BatchedFinalEnv(gym.vector.VectorEnv):
    """Row 1 always ends. Reports final observations as one [N, ...] array, or not at all."""

    def __init__(self, has_final: bool, **metadata: Any) -> None:
        self.num_envs, self.has_final = 2, has_final
        self.metadata = metadata
        self.single_observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.reward: Any = np.ones(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        ended = np.array([False, True])
        infos = {"final_obs": np.array([[0.0], [8.0]]), "_final_obs": ended} if self.has_final else {}
        return np.zeros((2, 1), np.float32), self.reward, np.zeros(2, bool), ended, infos


def test_a_masked_reset_changes_only_the_finished_rows() -> None:
    class Careless(BatchedFinalEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.options = options
            return np.full((2, 1), 5.0, np.float32), {}

    env: Any = adapted(Careless, has_final=False, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    obs, *_, infos = env.step([0, 0])
    assert env.env.options["reset_mask"].tolist() == [False, True]
    assert obs["observation"].tolist() == [[0.0], [5.0]]  # its return value for the other row is ignored
    assert infos["final_obs"]["observation"][1].tolist() == [0.0]


def test_same_step_uses_batched_final_observations_and_requires_them() -> None:
    env = adapted(BatchedFinalEnv, has_final=True, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    *_, truncated, infos = env.step([0, 0])
    assert truncated.tolist() == [False, True]
    assert infos["final_obs"]["observation"][1].tolist() == [8.0]
    env = adapted(BatchedFinalEnv, has_final=False, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    with pytest.raises(ValueError, match=r"without infos\['final_obs'\].*Fix"):
        env.step([0, 0])


def test_impossible_numbers_and_shapes_are_refused() -> None:
    env: Any = adapted(lambda: gym.vector.SyncVectorEnv([ScriptedEnv, lambda: FailingEnv("nan")]))
    env.reset(seed=0)
    env.step([0, 0])
    with pytest.raises(ValueError, match=r"returned NaN as observation.*Fix"):
        env.step([0, 0])
    for reward, words in (
        (np.array([1.0, np.nan]), r"returned NaN as reward.*Fix"),
        # A scalar would silently be broadcast to all rows.
        (1.0, r"BatchedFinalEnv returned rewards with shape \(\).*require \(2, ...\).*Fix"),
    ):
        env = adapted(BatchedFinalEnv, has_final=True, autoreset_mode=AutoresetMode.SAME_STEP)
        env.reset()
        env.env.reward = reward
        with pytest.raises(ValueError, match=words):
            env.step([0, 0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_metrics_in_every_autoreset_mode(mode: str) -> None:
    env, found = adapted(gymnasium_vector_env, num_envs=2, mode=mode), []
    env.reset(seed=0)
    for _ in range(4):
        *_, infos = env.step([0, 0])
        found += [tuple(map(float, m[::2])) for m in infos.get("metrics", [])]
    assert found == [(0, 2), (1, 3)]


def test_environments_that_cannot_be_mapped_are_refused() -> None:
    for mode in ({"autoreset_mode": "sometimes"}, {}):
        with pytest.raises(ValueError, match=r"autoreset_mode'\] = ('sometimes'|None).*NEXT_STEP.*Fix"):
            adapted(BatchedFinalEnv, has_final=True, **mode)
    with pytest.raises(TypeError, match=r"got ScriptedEnv.*needs a gymnasium.vector.VectorEnv.*Fix"):
        adapted(ScriptedEnv)
    spec = EnvSpec(gymnasium_vector_env, {"num_envs": 2})
    with pytest.raises(ValueError, match=r"2 rows, but parallel_actors is 3.*Fix"):
        make_vector_env([spec] * 3, "already_vectorized")
    with pytest.raises(ValueError, match=r"2 different environments.*Fix"):
        make_vector_env([spec, EnvSpec(ScriptedEnv)], "already_vectorized")


def test_recipes_of_recipes_reach_make_vec() -> None:
    env = make_vector_env([resolve_env(lambda: EnvSpec("CartPole-v1"))] * 2, "already_vectorized")
    assert env.num_envs == 2
    assert isinstance(env.env_observation_space, spaces.Box)  # as the environment returns it


class OddBatch(BatchedFinalEnv):
    """Its step returns the values in `parts`, and the usual ones for all other names."""

    def __init__(self, parts: dict[str, Any], space: Any = None, mode: str = "SameStep") -> None:
        super().__init__(has_final=False, autoreset_mode=AutoresetMode(mode))
        self.parts, self.single_observation_space = parts, space or self.single_observation_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.parts.get("first", np.zeros((2, 1), np.float32)), self.parts.get("first_infos", {})

    def step(self, actions: Any) -> Any:
        usual = {
            "obs": np.zeros((2, 1), np.float32),
            "rewards": np.ones(2, np.float32),
            "terminated": np.zeros(2, bool),
            "truncated": np.zeros(2, bool),
            "infos": {},
        }
        return tuple(self.parts.get(name, value) for name, value in usual.items())


INTEGERS = {"space": gym.spaces.Discrete(3), "first": np.array([0, 1])}
ENDED = {"terminated": np.array([False, True])}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"rewards": np.array(["1.0", "2.0"])}, r"the rewards array\(\['1.0', '2.0'\]"),
        ({"rewards": [1.0, None]}, r"the rewards \[1.0, None\] \(list\)"),
        ({"rewards": np.array([1.0, 1e39])}, r"1e\+39 as reward \(environment 1, step 1"),
        ({"rewards": np.ones((2, 1))}, r"the rewards array\(\[\[1.\]"),
        ({"rewards": np.array([1.0, 1j])}, r"the rewards array"),
        ({"rewards": [[1.0], [1.0, 2.0]]}, r"the rewards \[\[1.0\], \[1.0, 2.0\]\] \(list\)"),
        ({"terminated": [[True], []]}, r"\[\[True\], \[\]\] \(list\) as terminated"),
        ({"rewards": np.float32(1)}, r"rewards with shape \(\)"),
        ({"terminated": np.array(["False", ""])}, r"as terminated"),
        ({"truncated": np.array([0, 2])}, r"array\(\[0, 2\]\) as truncated"),
        ({"truncated": [None, True]}, r"\[None, True\] \(list\) as truncated"),
        ({"obs": np.array([[0], [1e39]])}, r"inf as observation.*\(environment 1, step 1"),
        ({"obs": np.array([["0"], ["1"]])}, r"as observation 'observation'.*real numbers"),
        ({"obs": {"a": 1}}, r"observation"),
        ({"first_infos": [{}, {}]}, r"the info \[\{\}, \{\}\] \(list\)"),
        ({"infos": [{}, {}]}, r"the info \[\{\}, \{\}\] \(list\)"),
        (
            {"infos": {"metric/a": np.array([1.0, None])}},
            r"None as info\['metric/a'\] \(environment 1, step 1",
        ),
        ({"infos": {"metric/a": {"b": np.ones(2)}}}, r"infos\['metric/a'\] with shape \(\)"),
        ({"infos": {"metric/a": 1.0}}, r"infos\['metric/a'\] with shape \(\)"),
        (
            {**INTEGERS, "obs": np.array([0, 3])},
            r"3 as .*\(environment 1, step 1.*Discrete\(3\) does not contain",
        ),
        ({**INTEGERS, "obs": np.array([1.0, 1.7])}, r"1.7 \(float64\) as .*\(environment 1, step 1"),
        ({**INTEGERS, "first": np.array([-1, 0])}, r"-1 as .*\(environment 0, step 0"),
        ({**ENDED, "infos": {"final_obs": np.array([None, None])}}, r"None as .*\(environment 1, step 1"),
        (
            {**ENDED, "infos": {"final_obs": np.array([[np.nan], [np.nan]])}},
            r"NaN as .*\(environment 1, step 1",
        ),
        (
            {**ENDED, "infos": {"final_obs": np.array([[1e39], [1e39]])}},
            r"inf as .*\(environment 1, step 1",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(parts: dict[str, Any], words: str) -> None:
    env = adapted(OddBatch, parts=parts, space=parts.get("space"))

    def play() -> None:
        env.reset()
        env.step([0, 0])

    with pytest.raises(ValueError, match=rf"(?s)^(The environment )?OddBatch returned .*{words}.*Fix:"):
        play()


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({"final_info": {"metric/a": np.array([9.0, 2.0])}}, [(1, "a", 2.0)]),
        (
            {"final_info": {"metric/a": np.array([0.0, 2.0]), "_metric/a": np.array([False, True])}},
            [(1, "a", 2.0)],
        ),
        ({"final_info": {"metric/a": np.array([9.0, 2.0]), "_metric/a": np.array([True, False])}}, []),
        ({"final_info": np.array([{"metric/a": 9.0}, {"metric/a": 2.0}])}, [(1, "a", 2.0)]),
        ({"final_info": [None, {"metric/a": 2.0, "other": 1}]}, [(1, "a", 2.0)]),
        ({"final_info": [None, None]}, []),
        # Metrics of the next episode's reset count too, unless the end has the same name.
        (
            {"final_info": {"metric/a": np.array([0.0, 2.0])}, "metric/a": np.array([5.0, 6.0])},
            [(1, "a", 2.0), (0, "a", 5.0)],
        ),
    ],
)
def test_metrics_of_final_info_count_for_the_rows_that_ended(infos: dict[str, Any], expected: Any) -> None:
    last = [None, np.ones(1, np.float32)]
    for final_obs in (np.array(last, object), last, tuple(last)):
        env = adapted(OddBatch, parts={**ENDED, "infos": {"final_obs": final_obs, **infos}})
        env.reset()
        *_, found = env.step([0, 0])
        assert found.get("metrics", []) == expected
        assert found["final_obs"]["observation"][1].tolist() == [1.0]


def test_rows_that_are_only_reset_report_nothing_but_their_reset() -> None:
    infos = {
        "metric/a": np.array([1.0, 2.0]),
        "metric/b": np.array([3, 4]),
        "_metric/b": np.array([False, True]),
    }
    parts = {**ENDED, "infos": infos}
    env = adapted(OddBatch, parts=parts, mode="NextStep")
    env.reset()
    env.step([0, 0])
    left_out = {"rewards": np.array([1.0, np.nan]), "terminated": np.array([0, 5])}  # in row 1
    env.env.parts |= left_out
    *_, found = env.step([0, 0])
    assert found["_ignore"].tolist() == [False, True]
    assert found["metrics"] == [(0, "a", 1.0), (1, "b", 4.0)]


@pytest.mark.parametrize("name", ["single_observation_space", "single_action_space"])
def test_batches_without_spaces_are_refused(name: str) -> None:
    class Spaceless(BatchedFinalEnv):
        def __init__(self) -> None:
            super().__init__(has_final=True)
            delattr(self, name)

    with pytest.raises(TypeError, match=rf"Spaceless has no {name}.*Fix: set self.{name}"):
        adapted(Spaceless)
