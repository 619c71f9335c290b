"""Minari datasets in a temporary folder: training on them, importing and exporting."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gin
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from loxodon.data import (
    DiskTrajDataset,
    Layout,
    MinariDataset,
    MixtureOfDatasets,
    PrioritySampler,
    Sampler,
    Trajectory,
    load_trajectory,
    save_trajectory,
    split_episodes,
)
from loxodon.data import minari as minari_module
from loxodon.data.episodes import join_pieces
from loxodon.data.foreign import episode
from loxodon.data.minari import (
    CACHE_FOLDER,
    EpisodeCodec,
    export_minari,
    guess_spaces,
    import_episodes,
    open_minari,
    require_minari,
)
from loxodon.data.spaces import ActionCode, ActionMap
from loxodon.data.trajectory import action_rows
from loxodon.envs import SequenceEnv
from loxodon.tools.data.commands import main

MakeTraj = Callable[..., Trajectory]
Configured = Callable[..., MinariDataset]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def make_minari(dataset_id: str, columns: list[dict[str, Any]], env: gym.Env[Any, Any]) -> None:
    """Make a dataset of raw episodes in the spaces of an environment, with Minari alone."""
    minari = require_minari()
    from minari.data_collector import EpisodeBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about optional metadata
        minari.create_dataset_from_buffers(
            dataset_id,
            [EpisodeBuffer(**episode) for episode in columns],
            observation_space=env.observation_space,
            action_space=env.action_space,
        )


def save_all(folder: Path, trajs: list[Trajectory], save_as: str = "npz") -> list[Path]:
    """One file per trajectory, each one second newer."""
    folder.mkdir(exist_ok=True)
    return [
        save_trajectory(folder, traj, save_as=save_as, traj_id=f"{i:08x}", unix_time=1e9 + i)
        for i, traj in enumerate(trajs)
    ]


@pytest.fixture
def configured(make_dataset: Configured) -> Configured:
    def make(dataset_id: str, max_seq_len: int = 100, **kwargs: Any) -> MinariDataset:
        return make_dataset(MinariDataset(dataset_id, **kwargs), max_seq_len=max_seq_len, edit=False)

    return make


@pytest.fixture
def numbered(make_traj: MakeTraj, tmp_path: Path) -> str:
    """A Minari dataset of episodes of 10, 20 and 30 steps that observe 1000 * episode + time."""
    trajs = [make_traj(n, first=1000 * i, env_name="numbers") for i, n in enumerate((10, 20, 30))]
    trajs = [dataclasses.replace(traj, obs={"observation": traj.obs["position"]}) for traj in trajs]
    paths = save_all(tmp_path, trajs, "npz")
    export_minari(paths, "test/numbers-v0")
    return "test/numbers-v0"


# ---- datasets ----


def test_windows_are_drawn_from_all_episodes_and_nothing_else_happens(
    configured: Configured, numbered: str
) -> None:
    dataset = configured(numbered, max_seq_len=8, sampler=Sampler("timestep"))
    assert dataset.num_files == 3
    windows = dataset.sample_windows(3000, np.random.default_rng(0))
    assert {len(window) for window in windows} == {8}
    episodes = [int(window.obs["observation"][0, 0]) // 1000 for window in windows]
    np.testing.assert_allclose(np.bincount(episodes) / 3000, [1 / 6, 2 / 6, 3 / 6], atol=0.03)
    assert {int(window.time_idxs[0, 0]) for window in windows} == set(range(23))
    for window in windows[:50]:
        np.testing.assert_array_equal(window.obs["observation"][:, 0] % 1000, window.time_idxs[:, 0])
    assert dataset.save_new_trajs_to is None
    assert dataset.ready_for_training
    assert dataset.set_aside_newer(dataset.state_dict()) == dataset.begin_new_run() == 0
    dataset.delete()  # nothing was collected into it
    assert dataset.num_files == 3


def test_a_mixture_draws_from_it_and_from_collected_data(
    make_dataset: Callable[..., MixtureOfDatasets], numbered: str, tmp_path: Path
) -> None:
    mixture = make_dataset(MixtureOfDatasets([DiskTrajDataset(), MinariDataset(numbered)], [1, 1]))
    assert mixture.current_weights().tolist() == [0, 1]
    assert mixture.save_new_trajs_to == tmp_path / "set/buffer/fifo"
    assert mixture.sample_random_trajectory(np.random.default_rng(0)).env_name == "numbers"
    mixture.delete()
    mixture.close()


def test_gin_bindings_of_disk_datasets_do_not_apply(configured: Configured, numbered: str) -> None:
    gin.clear_config()
    texts = "dset_min_size = 10", "sampler = @PrioritySampler()"
    gin.parse_config([f"DiskTrajDataset.{text}" for text in texts])
    assert configured(numbered).ready_for_training
    assert type(configured(numbered).sampler) is Sampler
    gin.parse_config("RLDataset.sampler = @PrioritySampler()")
    assert type(configured(numbered).sampler) is PrioritySampler
    gin.clear_config()


def test_every_argument_of_disk_datasets_is_passed() -> None:
    with mock.patch.object(DiskTrajDataset, "__init__", autospec=True) as parent:
        MinariDataset("a/b-v0")
    assert {"self", *parent.call_args.kwargs} == {*inspect.signature(DiskTrajDataset.__init__).parameters}


def test_episodes_are_converted_once(
    configured: Configured, numbered: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(numbered)
    cache = root / "test" / "numbers-v0" / CACHE_FOLDER
    before = sorted(cache.rglob("*"))
    assert len(before) == 4 + 3  # the folders and three episodes
    with monkeypatch.context() as patch:
        patch.setattr(minari_module, "import_episodes", None)
        first = configured(numbered)
    assert sorted(cache.rglob("*")) == before
    (cache.parent / "data" / "main_data.hdf5").touch()  # a changed dataset is converted again
    assert {file.path for file in first._buffer.files}.isdisjoint(
        file.path for file in configured(numbered)._buffer.files
    )


def test_an_interrupted_conversion_leaves_nothing_readable(
    configured: Configured, numbered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(minari_module, "save_trajectory", disk_full)
        with pytest.raises(OSError, match="No space"):
            configured(numbered, cache_root=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
    assert configured(numbered, cache_root=str(tmp_path / "cache")).num_files == 3


def test_user_errors_are_explained_with_a_fix(configured: Configured, numbered: str, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no Minari dataset 'a/b-v0'.*test/numbers-v0.*minari download"
    ):
        configured("a/b-v0")
    with pytest.raises(ValueError, match=r"MinariDataset has no folder yet.*Fix: call configure\(\)"):
        MinariDataset(numbered).sample_random_trajectory(np.random.default_rng(0))
    dataset = configured(numbered)
    fitting = Layout({"observation": ((1,), np.dtype(np.float32))}, 3)
    dataset.expect(fitting)
    assert dataset.layout == fitting
    with pytest.raises(ValueError, match=r"does not fit the environments.*3 columns, expected 2.*Fix:"):
        dataset.expect(Layout(fitting.obs, 2))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be written.*MinariDataset.cache_root"):
        configured(numbered, cache_root=str(tmp_path / "file" / "cache"))
    dataset.close()
    for file in dataset._buffer.files:
        Path(file.path).unlink()
    with pytest.raises(ValueError, match="holds no trajectories"):
        dataset.sample_random_trajectory(np.random.default_rng(0))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need minari, h5py, PIL.*pip install 'loxodon\[minari\]'"):
        open_minari("a/b-v0")


@pytest.mark.slow
def test_minari_is_imported_only_when_used(tmp_path: Path) -> None:
    code = (
        "import json, sys, loxodon.data, loxodon.tools.data.commands;"
        "loxodon.data.MinariDataset('a/b-v0'); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "loxodon.data.minari" in loaded
    assert loaded.isdisjoint({"minari", "h5py", "pyarrow", "gymnasium", "matplotlib", "torch"})


# ---- episodes ----


class Nested(gym.Env[Any, Any]):
    """Dict and Tuple observations, integers from -1 on; terminates after 3 or is truncated after 5 steps."""

    def __init__(self, is_discrete: bool) -> None:
        self.observation_space = spaces.Dict(
            {
                "zone": spaces.Discrete(4, start=-1),
                "arm": spaces.Tuple(
                    (spaces.Box(-9, 9, (2,), np.float64), spaces.Box(0, 255, (3, 2), np.uint8))
                ),
            }
        )
        low, high = np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)
        self.action_space = spaces.Discrete(3, start=2) if is_discrete else spaces.Box(low, high)
        self.rng, self.episode = np.random.default_rng(0), -1
        self.record: dict[str, list[Any]] = {}

    def _obs(self) -> dict[str, Any]:
        obs = {
            "zone": np.int64(self.rng.integers(-1, 3)),
            "arm": (self.rng.uniform(-9, 9, 2), self.rng.integers(0, 256, (3, 2), np.uint8)),
        }
        self.record["observations"].append(obs)
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.time = self.episode + 1, 0
        self.record = {name: [] for name in ("observations", "actions", "rewards", "ends")}
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        ends = self.episode % 2 == 0 and self.time == 3, self.episode % 2 == 1 and self.time == 5
        reward = float(self.rng.normal())
        for name, value in (("actions", action), ("rewards", reward), ("ends", ends)):
            self.record[name].append(value)
        return self._obs(), reward, *ends, {}


def raw_columns(env: Nested) -> dict[str, Any]:
    """The arrays that Minari's own recorder would store for the last episode."""
    obs = env.record["observations"]
    ends = np.array(env.record["ends"])
    return {
        "observations": {
            "zone": np.array([o["zone"] for o in obs]),
            "arm": tuple(np.array([o["arm"][i] for o in obs]) for i in range(2)),
        },
        "actions": np.array(env.record["actions"]),
        "rewards": np.array(env.record["rewards"]),
        "terminations": ends[:, 0],
        "truncations": ends[:, 1],
        "infos": {},
    }


@pytest.mark.parametrize("is_discrete", [True, False])
def test_episodes_look_as_the_environment_shows_them_to_a_policy(
    is_discrete: bool, configured: Configured
) -> None:
    """The import equals what SequenceEnv showed or received during the recording."""
    env = Nested(is_discrete)
    shown = SequenceEnv(env)
    columns, seen = [], []
    for _ in range(4):
        obs, _ = shown.reset()
        steps: list[Any] = [(obs, None, 0.0, False)]
        while True:
            action = shown.action_space.sample()
            obs, reward, terminated, truncated, _ = shown.step(action)
            steps.append((obs, action, reward, terminated))
            if terminated or truncated:
                break
        columns.append(raw_columns(env))
        seen.append(steps)
    make_minari("test/nested-v0", columns, env)
    trajs = [load_trajectory(file.path) for file in configured("test/nested-v0")._buffer.files]
    assert [len(traj) for traj in trajs] == [3, 5, 3, 5]
    codec = EpisodeCodec(env.observation_space, env.action_space)
    for traj, steps, raw in zip(trajs, seen, columns, strict=True):
        back = codec.to_columns(traj)  # the way back gives the recorded arrays
        for i in range(2):
            np.testing.assert_array_equal(back["observations"]["arm"][i], raw["observations"]["arm"][i])
        np.testing.assert_array_equal(back["observations"]["zone"], raw["observations"]["zone"])
        np.testing.assert_allclose(back["actions"], raw["actions"], atol=1e-6)
        for name in ("terminations", "truncations"):
            np.testing.assert_array_equal(back[name], raw[name])
        assert set(traj.obs) == set(shown.observation_space.spaces) == {"arm/0", "arm/1", "zone"}
        for t, (obs, action, reward, terminated) in enumerate(steps):
            for key, value in obs.items():
                np.testing.assert_array_equal(traj.obs[key][t], value)
                assert traj.obs[key].dtype == value.dtype
            assert traj.time_idxs[t, 0] == t
            if t == 0:
                assert not traj.rl2s[0].any()
                continue
            row = np.eye(3)[action] if is_discrete else action
            np.testing.assert_allclose(traj.rl2s[t], [np.float32(reward), *row], atol=1e-6)
            np.testing.assert_allclose(traj.actions[t - 1], row, atol=1e-6)
            assert traj.rews[t - 1, 0] == np.float32(reward)
            assert traj.dones[t - 1, 0] == terminated
    assert trajs[0].dones[-1, 0]
    assert not trajs[1].dones.any()  # truncated


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[5, 1]])), spaces.MultiBinary(3)]
)
def test_actions_of_several_factors_survive_a_round_trip(space: Any) -> None:
    action_map = ActionMap(space)
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(20)])
    indices = action_map.from_env(actions)
    assert indices.min() == 0
    np.testing.assert_array_equal(action_map.to_env(indices), actions)
    with pytest.raises(ValueError, match=r"Actions range from .*Fix"):
        action_map.from_env(actions + 7)


def test_actions_outside_the_bounds_are_clipped_and_fixed_ones_are_zero() -> None:
    action_map = ActionMap(spaces.Box(np.array([-1.0, 3.0], np.float32), np.array([3.0, 3.0], np.float32)))
    rows = action_map.from_env(np.array([[-1, 3], [1, 3], [9, 3]]))
    np.testing.assert_array_equal(rows, [[-1, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(action_map.to_env(rows), [[-1, 3], [1, 3], [3, 3]])


def test_spaces_are_guessed_from_the_arrays(make_traj: MakeTraj) -> None:
    obs, action = guess_spaces(make_traj(3))
    assert action == spaces.Discrete(3)
    assert isinstance(obs, spaces.Dict)
    assert obs["image"] == spaces.Box(0, 255, (2, 2), np.uint8)
    assert obs["position"] == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    actions, ends = np.array([[0, 2], [1, 1], [1, 0]]), np.array([False, False, True])
    (traj,) = split_episodes(np.zeros((3, 1)), actions, np.ones(3), ends, 0 * ends, num_actions=[2, 3])
    assert guess_spaces(traj)[1] == spaces.MultiDiscrete([2, 3])
    np.testing.assert_array_equal(EpisodeCodec(*guess_spaces(traj)).to_columns(traj)["actions"], actions)


def test_texts_and_episodes_that_contradict_their_spaces_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Text, which only a vocabulary.*Fix:"):
        EpisodeCodec(spaces.Text(5), spaces.Discrete(2))
    codec = EpisodeCodec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    episode: dict[str, Any] = {"id": 7, "rewards": [0.0, 1.0], "terminations": [False, True]}
    with pytest.raises(ValueError, match=r"Episode 7 has .* with shape \(2, 2\).*\(3, 2\)"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((2, 2)), actions=[0, 1], **episode), "env")
    odd = np.array([[0, 1], [1, 1e39], [0, 0]])
    with pytest.raises(ValueError, match=r"Episode 7 has inf as observation.*Fix:.*leave out"):
        codec.to_trajectory(SimpleNamespace(observations=odd, actions=[0, 1], **episode), "env")
    with pytest.raises(ValueError, match=r"Episode 7 has 2 as observation 'observation'.*Discrete\(2\)"):
        EpisodeCodec(spaces.Discrete(2), spaces.Discrete(2)).to_trajectory(
            SimpleNamespace(observations=np.array([0, 2, 1]), actions=[0, 1], **episode), "env"
        )
    with pytest.raises(ValueError, match="Actions range from 0 to 2"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((3, 2)), actions=[0, 2], **episode), "env")


# ---- export and import ----


@pytest.mark.parametrize(
    ("space", "observations", "text"),
    [
        (
            spaces.Box(0, 255, (1,), np.uint8),
            [[0.5], [1.0]],
            r"has 0.5 \(float64\) .*\(timestep 0\).*dtype uint8.*Fix:",
        ),
        (
            spaces.Box(0, 255, (1,), np.uint8),
            [[0], [-1]],
            r"has -1 \(int64\) .*\(timestep 1\).*dtype uint8.*Fix:",
        ),
        (spaces.Box(-1, 1, (1,), np.float32), [[0.0], [np.nan]], r"Episode 7 has NaN .*\(timestep 1\).*Fix:"),
        (spaces.Discrete(3), [0, 3], r"Episode 7 has 3 .*\(timestep 1\).*Discrete\(3\) does not contain"),
    ],
)
def test_observations_that_do_not_fit_their_space_are_refused(
    space: Any, observations: list[Any], text: str
) -> None:
    source = SimpleNamespace(
        id=7, observations=np.array(observations), actions=np.array([1]), rewards=[0.0], terminations=[True]
    )
    with pytest.raises(ValueError, match=text):
        EpisodeCodec(space, spaces.Discrete(2)).to_trajectory(source, "env")


def test_actions_of_a_discrete_space_are_not_rounded() -> None:
    with pytest.raises(ValueError, match=r"actions is float64 and holds 1.7.*int64 cannot hold"):
        ActionMap(spaces.Discrete(3)).from_env(np.array([0.0, 1.7]))


def test_exports_and_conversions_are_readable_by_others(
    configured: Configured, numbered: str, root: Path
) -> None:
    configured(numbered)
    cache = next(path for path in root.rglob(CACHE_FOLDER))
    for folder in (root / numbered, *cache.iterdir()):
        assert folder.stat().st_mode & 0o055 == 0o055


def played(env_id: str, folder: Path) -> list[Trajectory]:
    """Whole random episodes of at most 30 steps, stored in pieces of at most 12."""
    env = SequenceEnv(gym.make(env_id, max_episode_steps=30))
    env.action_space.seed(0)
    wholes: list[Trajectory] = []
    pieces: list[Trajectory] = []
    for seed in range(4):
        obs, _ = env.reset(seed=seed)
        seen, actions, rews, dones, ended = [obs["observation"]], [], [], [], False
        while not ended:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            actions.append(np.atleast_1d(action))
            seen.append(obs["observation"])
            rews.append([reward])
            dones.append([terminated])
            ended = terminated or truncated
        width = ActionCode(env.action_space).width  # type: ignore[arg-type]
        whole = episode(
            {"observation": np.array(seen)},
            action_rows(np.array(actions), width),
            np.array(rews, np.float32),
            np.array(dones),
            env.env_name,
            policy_version=4,
        )
        wholes.append(whole)
        pieces += [whole.slice(i, min(i + 12, len(whole))) for i in range(0, len(whole), 12)]
    save_all(folder, pieces)
    return wholes


def test_a_dataset_of_another_process_survives_an_export_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played("CartPole-v1", tmp_path)
    paths = sorted(tmp_path.glob("*.npz"))

    def exported_meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(minari_module, "join_pieces", join_pieces)
        export_minari(paths, "test/race-v0")
        return join_pieces(*given)

    monkeypatch.setattr(minari_module, "join_pieces", exported_meanwhile)
    with pytest.raises(ValueError, match="already exists"):
        export_minari(paths, "test/race-v0")
    assert open_minari("test/race-v0").total_episodes == 4


@pytest.mark.parametrize(("env_id", "with_env"), [("CartPole-v1", False), ("Pendulum-v1", True)])
def test_export_and_import_give_back_the_same(tmp_path: Path, env_id: str, with_env: bool) -> None:
    """Pieces come back as whole episodes, equal in every bit; half the width of Pendulum's bounds is 2."""
    source, target = tmp_path / "source", tmp_path / "target"
    originals = played(env_id, source)
    words = ["--env", env_id] if with_env else []
    assert main(["export-minari", str(source), "test/round-trip-v0", *words]) == 0
    raw = open_minari("test/round-trip-v0")
    assert raw.action_space == gym.make(env_id).action_space
    assert main(["import-minari", "test/round-trip-v0", str(target), "--format", "npz-compressed"]) == 0
    imported = [
        load_trajectory(path) for path in sorted(target.iterdir(), key=lambda p: p.name.split("_")[2])
    ]
    assert len(list(source.iterdir())) > len(imported) == len(originals)
    for number, (traj, original) in enumerate(zip(imported, originals, strict=True)):
        assert (traj.env_name, traj.policy_version) == (env_id.partition("-")[0], 4)
        for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
            np.testing.assert_array_equal(getattr(traj, name), getattr(original, name))
        np.testing.assert_array_equal(traj.obs["observation"], original.obs["observation"])
        flags = raw[number]
        assert flags.terminations[-1] == traj.dones[-1, 0] != flags.truncations[-1]
        assert not flags.truncations[:-1].any()


def test_large_images_are_exported_without_loss(tmp_path: Path, make_traj: MakeTraj) -> None:
    """Minari's own default is JPEG."""
    traj = make_traj(3)
    image = np.random.default_rng(0).integers(0, 256, (4, 40, 40, 3), np.uint8)
    traj = dataclasses.replace(traj, obs={"view/image": image, "view/goal": traj.obs["position"]})
    export_minari(save_all(tmp_path, [traj]), "test/images-v0")
    import_episodes(open_minari("test/images-v0"), tmp_path / "out", "npz")
    again = load_trajectory(next((tmp_path / "out").iterdir()))
    assert set(again.obs) == {"view/image", "view/goal"}
    np.testing.assert_array_equal(again.obs["view/image"], image)


def test_rewards_are_exported_as_the_environment_paid_them(tmp_path: Path, make_traj: MakeTraj) -> None:
    traj = make_traj(6)
    shaped = dataclasses.replace(traj, rews=np.ones((6, 1), np.float32), extras={"raw_rewards": traj.rews})
    export_minari(save_all(tmp_path, [shaped.slice(0, 4), shaped.slice(4, 6)]), "test/shaped-v0")
    (episode,) = open_minari("test/shaped-v0")
    np.testing.assert_array_equal(episode.rewards, traj.rews[:, 0])


def test_pieces_without_a_beginning_or_an_end_stay_episodes_of_their_own(
    tmp_path: Path, make_traj: MakeTraj
) -> None:
    whole = make_traj(12)
    parts = [whole.slice(4, 8), whole.slice(8, 12), make_traj(12, first=500).slice(0, 4)]
    assert export_minari(save_all(tmp_path, parts), "test/pieces-v0") == (2, 12)


def test_a_failed_export_leaves_no_dataset(tmp_path: Path, make_traj: MakeTraj, root: Path) -> None:
    paths = save_all(tmp_path, [make_traj(3, num_actions=n) for n in (2, 3)])
    with pytest.raises(ValueError, match="not belong to the environment's action space"):
        export_minari(paths, "test/mixed-v0")
    assert not (root / "test" / "mixed-v0").exists()
    narrow = dataclasses.replace(make_traj(3), obs={"observation": np.zeros((4, 2), np.float32)})
    with pytest.raises(ValueError, match=r"is float32\[2\], but that of the environment float32\[4\]. Fix"):
        export_minari(save_all(tmp_path / "narrow", [narrow]), "test/mixed-v0", "CartPole-v1")
    with pytest.raises(ValueError, match=r"is not the id of a Minari dataset.*end it with -v"):
        export_minari(paths, "mixed")
    with pytest.raises(ValueError, match=r"'Nowhere-v0' cannot be created.*Fix:"):
        export_minari(paths, "test/mixed-v0", "Nowhere-v0")
    export_minari(paths[:1], "test/mixed-v0")
    with pytest.raises(FileExistsError, match=r"exists in .*raise its version number"):
        export_minari(paths[:1], "test/mixed-v0")


def test_an_interrupted_import_continues(numbered: str, tmp_path: Path) -> None:
    dataset = open_minari(numbered)
    written, _ = import_episodes(dataset, tmp_path / "out", "npz")
    (tmp_path / "out" / written[1][0]).unlink()
    again, num_present = import_episodes(dataset, tmp_path / "out", "npz")
    assert ([length for _, length in again], num_present) == ([20], 2)
