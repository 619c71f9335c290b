from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from loxodon.data import Trajectory, load_trajectory, save_trajectory
from loxodon.data.cli import main
from loxodon.data.foreign import episode
from loxodon.data.minari import export_minari, import_episodes, open_minari
from loxodon.data.spaces import ActionCode
from loxodon.data.trajectory import action_rows
from loxodon.envs import SequenceEnv

MakeTraj = Callable[..., Trajectory]


def played(env_id: str, folder: Path) -> list[Trajectory]:
    """Whole random episodes of at most 30 steps, stored in pieces of at most 12."""
    env = SequenceEnv(gym.make(env_id, max_episode_steps=30))
    env.action_space.seed(0)
    wholes, number = [], 0
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
        for start in range(0, len(whole), 12):
            piece = whole.slice(start, min(start + 12, len(whole)))
            save_trajectory(folder, piece, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
            number += 1
    return wholes


@pytest.mark.parametrize(("env_id", "with_env"), [("CartPole-v1", False), ("Pendulum-v1", True)])
def test_export_and_import_give_back_the_same(tmp_path: Path, env_id: str, with_env: bool) -> None:
    """Pieces come back as whole episodes, equal in every bit; half the width of Pendulum's bounds is 2."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    originals = played(env_id, source)
    words = ["--env", env_id] if with_env else []
    assert main(["export-minari", str(source), "test/round-trip-v0", *words]) == 0
    raw = open_minari("test/round-trip-v0")
    assert raw.action_space == gym.make(env_id).action_space
    assert main(["import-minari", "test/round-trip-v0", str(target), "--format", "traj"]) == 0
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
