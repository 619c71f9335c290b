from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from loxodon.data import Layout, MinariDataset, Trajectory, load_trajectory, save_trajectory
from loxodon.data import minari as minari_module
from loxodon.data.commands.command_line import main
from loxodon.data.minari import CACHE_FOLDER, import_episodes, open_minari
from loxodon.data.minari_episodes import EpisodeCodec, guess_spaces
from loxodon.data.minari_export import export_minari, join_pieces
from loxodon.envs import SequenceEnv

MakeTraj = Callable[..., Trajectory]


class Nested(gym.Env[Any, Any]):
    """Dict and Tuple observations, integers that start at -1; ends after 3 or is cut after 5 steps."""

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
    """What Minari's own recorder would store of the episode just played."""
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


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def make_minari(dataset_id: str, columns: list[dict[str, Any]], env: gym.Env[Any, Any]) -> Any:
    minari = minari_module.require_minari()
    from minari.data_collector import EpisodeBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional metadata
        return minari.create_dataset_from_buffers(
            dataset_id,
            [EpisodeBuffer(**episode) for episode in columns],
            observation_space=env.observation_space,
            action_space=env.action_space,
        )


def configured(dataset_id: str, max_seq_len: int = 100, **kwargs: Any) -> MinariDataset:
    dataset = MinariDataset(dataset_id, **kwargs)
    dataset.configure(
        max_seq_len=max_seq_len,
        padded_sampling="none",
        has_edit_rights=False,
        default_root="unused",
        default_name="unused",
    )
    return dataset


def episodes_of(dataset: MinariDataset) -> list[Trajectory]:
    return [load_trajectory(Path(path)) for path in dataset._paths]


@pytest.mark.parametrize("is_discrete", [True, False])
def test_episodes_look_as_the_environment_shows_them_to_a_policy(is_discrete: bool) -> None:
    """Every number of the import equals what SequenceEnv showed or was given during the recording."""
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
    trajs = episodes_of(configured("test/nested-v0"))
    assert [len(traj) for traj in trajs] == [3, 5, 3, 5]
    for traj, steps in zip(trajs, seen, strict=True):
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
            np.testing.assert_allclose(traj.actions[t - 1], action, atol=1e-6)
            assert traj.rews[t - 1, 0] == np.float32(reward)
            assert traj.dones[t - 1, 0] == terminated
    assert trajs[0].dones[-1, 0]
    assert not trajs[1].dones.any()  # truncated


def test_actions_outside_the_bounds_are_clipped_and_fixed_ones_are_zero() -> None:
    space = spaces.Box(np.array([-1.0, 3.0], np.float32), np.array([3.0, 3.0], np.float32))
    codec = EpisodeCodec(spaces.Box(-1, 1, (1,)), space).actions
    stored, rows = codec.from_env(np.array([[-1, 3], [1, 3], [9, 3]]))
    np.testing.assert_array_equal(rows, [[-1, 0], [0, 0], [1, 0]])
    assert stored is rows
    np.testing.assert_array_equal(codec.to_env(rows), [[-1, 3], [1, 3], [3, 3]])


@pytest.mark.parametrize(
    ("obs", "action", "error", "match"),
    [
        (spaces.Text(5), spaces.Discrete(2), TypeError, "no fixed array form.*Fix:"),
        (spaces.Discrete(2), spaces.MultiBinary(3), TypeError, "allowed are Discrete and Box"),
        (spaces.Discrete(2), spaces.Box(0, 9, (1,), np.int64), TypeError, "Box with a float dtype"),
        (spaces.Discrete(2), spaces.Box(0, np.inf, (1,)), ValueError, "infinite bounds.*Fix:"),
    ],
)
def test_spaces_that_cannot_be_stored_are_refused(
    obs: Any, action: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        EpisodeCodec(obs, action)


def test_episodes_that_contradict_their_spaces_are_refused() -> None:
    codec = EpisodeCodec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    episode: dict[str, Any] = {"id": 7, "rewards": [0.0, 1.0], "terminations": [False, True]}
    with pytest.raises(ValueError, match=r"of episode 7 has the shape \(2, 2\).*\(3, 2\)"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((2, 2)), actions=[0, 1], **episode), "env")
    with pytest.raises(ValueError, match="Actions range from 0 to 2"):
        codec.to_trajectory(SimpleNamespace(observations=np.zeros((3, 2)), actions=[0, 2], **episode), "env")


# --- MinariDataset -------------------------------------------------------------------------------------


@pytest.fixture
def numbered(make_traj: MakeTraj, tmp_path: Path) -> str:
    """A Minari dataset of episodes of 10, 20 and 30 steps that observe 1000 * episode + time."""
    paths = []
    for index, length in enumerate((10, 20, 30)):
        traj = make_traj(length, first=1000 * index, env_name="numbers")
        traj = Trajectory(**{**vars(traj), "obs": {"observation": traj.obs["position"]}})
        paths.append(
            save_trajectory(tmp_path, traj, save_as="traj", traj_id=f"{index:08x}", unix_time=1e9 + index)
        )
    export_minari(paths, "test/numbers-v0")
    return "test/numbers-v0"


@pytest.mark.parametrize(("sample_by", "shares"), [("trajectory", [1, 1, 1]), ("timestep", [1, 2, 3])])
def test_windows_are_drawn_by_episode_or_by_timestep(
    numbered: str, sample_by: str, shares: list[int]
) -> None:
    dataset = configured(numbered, max_seq_len=8, sample_by=sample_by)
    assert (dataset.num_episodes, dataset.num_timesteps) == (3, 60)
    windows = dataset.sample_windows(3000, np.random.default_rng(0))
    assert {len(window) for window in windows} == {8}
    episodes = [int(window.obs["observation"][0, 0]) // 1000 for window in windows]
    np.testing.assert_allclose(np.bincount(episodes) / 3000, np.array(shares) / sum(shares), atol=0.03)
    starts = {int(window.time_idxs[0, 0]) for window in windows}
    assert starts == set(range(23))
    for window in windows[:50]:
        np.testing.assert_array_equal(window.obs["observation"][:, 0] % 1000, window.time_idxs[:, 0])


def test_the_same_seed_draws_the_same_windows_also_after_pickling(numbered: str) -> None:
    dataset = configured(numbered, max_seq_len=4)
    copy: MinariDataset = pickle.loads(pickle.dumps(dataset))
    draws = [
        [float(d.sample_random_trajectory(rng).obs["observation"][0, 0]) for _ in range(20)]
        for d, rng in ((dataset, np.random.default_rng(3)), (copy, np.random.default_rng(3)))
    ]
    assert draws[0] == draws[1]
    assert dataset.save_new_trajs_to is None
    assert dataset.ready_for_training


def test_episodes_are_converted_once(numbered: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(numbered)
    cache = root / "test" / "numbers-v0" / CACHE_FOLDER
    before = sorted(cache.rglob("*"))
    assert len(before) == 1 + 3 + 1  # the folder, three episodes, the index
    monkeypatch.setattr(minari_module, "import_episodes", None)
    configured(numbered)
    assert sorted(cache.rglob("*")) == before


def test_a_changed_dataset_is_converted_anew(numbered: str, root: Path) -> None:
    first = configured(numbered)
    data = root / "test" / "numbers-v0" / "data" / "main_data.hdf5"
    data.touch()
    second = configured(numbered)
    assert set(first._paths).isdisjoint(second._paths)


def test_an_interrupted_conversion_leaves_nothing_to_be_read(
    numbered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(minari_module, "save_trajectory", disk_full)
        with pytest.raises(OSError, match="No space"):
            configured(numbered, cache_root=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
    assert configured(numbered, cache_root=str(tmp_path / "cache")).num_episodes == 3


def test_mistakes_of_a_user_say_what_to_do(numbered: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample_by is 'length'; allowed are 'trajectory', 'timestep'"):
        MinariDataset(numbered, sample_by="length")
    with pytest.raises(
        FileNotFoundError, match=r"no Minari dataset 'a/b-v0'.*test/numbers-v0.*minari download"
    ):
        configured("a/b-v0")
    with pytest.raises(ValueError, match=r"not open yet.*Fix: call configure\(\)"):
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
    for path in dataset._paths:
        Path(path).unlink()
    with pytest.raises(FileNotFoundError, match="were deleted while in use"):
        dataset.sample_random_trajectory(np.random.default_rng(0))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need minari, h5py, PIL.*pip install 'loxodon\[minari\]'"):
        open_minari("a/b-v0")


@pytest.mark.slow
def test_minari_is_imported_on_use_only(tmp_path: Path) -> None:
    code = (
        "import json, sys, loxodon.data, loxodon.data.commands.command_line;"
        "loxodon.data.MinariDataset('a/b-v0'); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "loxodon.data.minari" in loaded
    assert loaded.isdisjoint({"minari", "h5py", "pyarrow", "gymnasium", "matplotlib", "torch"})


# --- export --------------------------------------------------------------------------------------------


def played(env_id: str, num_episodes: int, folder: Path) -> list[Path]:
    """Trajectory files of random episodes of at most 30 steps, in pieces of at most 12."""
    env = SequenceEnv(gym.make(env_id, max_episode_steps=30))
    env.action_space.seed(0)
    paths: list[Path] = []
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=episode)
        rows: dict[str, list[Any]] = {"obs": [obs["observation"]], "actions": [], "rews": [], "dones": []}
        ended = False
        while not ended:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            for name, value in (("actions", action), ("rews", reward), ("dones", terminated)):
                rows[name].append([value] if np.ndim(value) == 0 else value)
            rows["obs"].append(obs["observation"])
            ended = terminated or truncated
        whole = assemble(rows, env)
        for start in range(0, len(whole), 12):
            number = len(paths)
            piece = whole.slice(start, min(start + 12, len(whole)))
            paths.append(
                save_trajectory(folder, piece, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
            )
    return paths


def assemble(rows: dict[str, list[Any]], env: SequenceEnv) -> Trajectory:
    actions, rews = np.array(rows["actions"]), np.array(rows["rews"], np.float32)
    is_discrete = isinstance(env.action_space, spaces.Discrete)
    action_rows = np.eye(env.action_space.n)[actions[:, 0]] if is_discrete else actions  # type: ignore[attr-defined]
    first = np.zeros((1, 1 + action_rows.shape[1]), np.float32)
    return Trajectory(
        obs={"observation": np.array(rows["obs"])},
        rl2s=np.concatenate([first, np.concatenate([rews, action_rows], 1)]).astype(np.float32),
        time_idxs=np.arange(len(rews) + 1)[:, None],
        actions=actions,
        rews=rews,
        dones=np.array(rows["dones"], np.bool_),
        env_name=env.env_name,
        policy_version=4,
    )


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("with_env", [True, False])
def test_export_and_import_give_back_the_same(tmp_path: Path, env_id: str, with_env: bool) -> None:
    """Pieces come back as whole episodes, equal in every bit; half the width of Pendulum's bounds is 2."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    paths = played(env_id, 4, source)
    words = ["--env", env_id] if with_env else []
    assert main(["export-minari", str(source), "test/round-trip-v0", *words]) == 0
    raw = open_minari("test/round-trip-v0")
    assert raw.action_space == gym.make(env_id).action_space or not with_env
    assert main(["import-minari", "test/round-trip-v0", str(target), "--format", "traj"]) == 0
    imported = [
        load_trajectory(path) for path in sorted(target.iterdir(), key=lambda p: p.name.split("_")[2])
    ]
    originals = [load_trajectory(path) for path in paths]
    begins = [i for i, piece in enumerate(originals) if piece.time_idxs[0, 0] == 0]
    assert len(imported) == len(begins) == 4 < len(originals)
    for number, traj in enumerate(imported):
        pieces = originals[begins[number] : [*begins, len(originals)][number + 1]]
        assert len(traj) == sum(map(len, pieces))
        assert (traj.env_name, traj.policy_version) == (env_id.partition("-")[0], 4)
        for piece in pieces:
            begin = int(piece.time_idxs[0, 0])
            part = traj.slice(begin, begin + len(piece))
            for name in ("rl2s", "time_idxs", "rews", "dones"):
                np.testing.assert_array_equal(getattr(part, name), getattr(piece, name))
            np.testing.assert_array_equal(part.obs["observation"], piece.obs["observation"])
            indices = piece.actions.argmax(1)[:, None] if part.actions.dtype == np.int64 else piece.actions
            np.testing.assert_array_equal(part.actions, indices)
        flags = raw[number]
        assert flags.terminations[-1] == traj.dones[-1, 0]
        assert flags.truncations[-1] != flags.terminations[-1]
        assert not flags.truncations[:-1].any()


def test_nested_observations_come_back_equal(tmp_path: Path) -> None:
    env = Nested(is_discrete=True)
    rng = np.random.default_rng(1)
    codec = EpisodeCodec(env.observation_space, env.action_space)
    traj = codec.to_trajectory(
        SimpleNamespace(
            id=0,
            observations={
                "zone": rng.integers(-1, 3, 5),
                "arm": (rng.normal(size=(5, 2)), rng.integers(0, 256, (5, 3, 2), np.uint8)),
            },
            actions=np.array([2, 4, 3, 2]),
            rewards=rng.normal(size=4),
            terminations=np.zeros(4, np.bool_),
        ),
        "nested",
    )
    columns = codec.to_columns(traj)
    assert columns["actions"].tolist() == [2, 4, 3, 2]
    make_minari("test/nested-v1", [{**columns, "infos": {}}], env)
    dataset = open_minari("test/nested-v1")
    import_episodes(dataset, tmp_path / "out", "traj")
    again = load_trajectory(next((tmp_path / "out").iterdir()))
    assert again.layout == traj.layout
    for key in traj.obs:
        np.testing.assert_array_equal(again.obs[key], traj.obs[key])
    np.testing.assert_array_equal(again.rl2s, traj.rl2s)


def test_large_images_are_exported_without_loss(tmp_path: Path, make_traj: MakeTraj) -> None:
    """Minari's own default is JPEG."""
    traj = make_traj(3)
    image = np.random.default_rng(0).integers(0, 256, (4, 40, 40, 3), np.uint8)
    traj = Trajectory(**{**vars(traj), "obs": {"view/image": image, "view/goal": traj.obs["position"]}})
    path = save_trajectory(tmp_path, traj, save_as="npz", traj_id="00000001", unix_time=1e9)
    export_minari([path], "test/images-v0")
    import_episodes(open_minari("test/images-v0"), tmp_path / "out", "npz")
    again = load_trajectory(next((tmp_path / "out").iterdir()))
    assert set(again.obs) == {"view/image", "view/goal"}
    np.testing.assert_array_equal(again.obs["view/image"], image)


def test_pieces_without_a_beginning_or_an_end_stay_episodes_of_their_own(
    tmp_path: Path, make_traj: MakeTraj
) -> None:
    whole = make_traj(12)
    parts = [whole.slice(4, 8), whole.slice(8, 12), make_traj(12, first=500).slice(0, 4)]
    paths = [
        save_trajectory(tmp_path, part, save_as="npz", traj_id=f"{i:08x}", unix_time=1e9 + i)
        for i, part in enumerate(parts)
    ]
    episodes = join_pieces(paths)
    assert [len(episode.paths) for episode in episodes] == [2, 1]
    assert [episode.begins_at_reset for episode in episodes] == [False, True]
    assert [episode.is_terminated for episode in episodes] == [True, False]
    report = export_minari(paths, "test/pieces-v0")
    found = (report.num_episodes, report.num_joined, report.num_headless, report.num_truncated)
    assert (found, report.num_timesteps) == ((2, 1, 1, 1), 12)


def test_a_failed_export_leaves_no_dataset(tmp_path: Path, make_traj: MakeTraj, root: Path) -> None:
    paths = [
        save_trajectory(tmp_path, make_traj(3, num_actions=n), save_as="npz", traj_id=f"{n}", unix_time=n)
        for n in (2, 3)
    ]
    with pytest.raises(ValueError, match="not of the action space"):
        export_minari(paths, "test/mixed-v0")
    assert not (root / "test" / "mixed-v0").exists()
    with pytest.raises(ValueError, match=r"is not the id of a Minari dataset.*end it with -v"):
        export_minari(paths, "mixed")
    with pytest.raises(ValueError, match=r"'Nowhere-v0' cannot be made.*Fix:"):
        export_minari(paths, "test/mixed-v0", "Nowhere-v0")
    export_minari(paths[:1], "test/mixed-v0")
    with pytest.raises(FileExistsError, match=r"exists in .*raise its version number"):
        export_minari(paths[:1], "test/mixed-v0")


def test_import_goes_on_where_it_was_interrupted(numbered: str, tmp_path: Path) -> None:
    dataset = open_minari(numbered)
    written, _ = import_episodes(dataset, tmp_path / "out", "npz")
    (tmp_path / "out" / written[1][0]).unlink()
    again, num_present = import_episodes(dataset, tmp_path / "out", "npz")
    assert ([length for _, length in again], num_present) == ([20], 2)


def test_spaces_are_guessed_from_the_arrays(make_traj: MakeTraj) -> None:
    obs, action = guess_spaces(make_traj(3))
    assert action == spaces.Discrete(3)
    assert isinstance(obs, spaces.Dict)
    assert obs["image"] == spaces.Box(0, 255, (2, 2), np.uint8)
    assert obs["position"] == spaces.Box(-np.inf, np.inf, (1,), np.float32)
