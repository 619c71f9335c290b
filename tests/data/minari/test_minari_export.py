from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from loxodon.data import Trajectory, load_trajectory, save_trajectory
from loxodon.data.cli import main
from loxodon.data.minari import export_minari, import_episodes, join_pieces, open_minari
from loxodon.envs import SequenceEnv

MakeTraj = Callable[..., Trajectory]


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
    with pytest.raises(ValueError, match="not of the environment's action space"):
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
