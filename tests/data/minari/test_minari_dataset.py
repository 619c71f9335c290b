from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import Layout, MinariDataset
from loxodon.data import minari as minari_module
from loxodon.data.minari import CACHE_FOLDER, open_minari

Configured = Callable[..., MinariDataset]


@pytest.mark.parametrize(("sample_by", "shares"), [("trajectory", [1, 1, 1]), ("timestep", [1, 2, 3])])
def test_windows_are_drawn_by_episode_or_by_timestep(
    configured: Configured, numbered: str, sample_by: str, shares: list[int]
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


def test_a_copy_for_another_process_draws_the_same(configured: Configured, numbered: str) -> None:
    dataset = configured(numbered, max_seq_len=4)
    draws = [
        [float(window.obs["observation"][0, 0]) for window in d.sample_windows(20, np.random.default_rng(3))]
        for d in (dataset, pickle.loads(pickle.dumps(dataset)))
    ]
    assert draws[0] == draws[1]
    assert dataset.save_new_trajs_to is None
    assert dataset.ready_for_training
    assert dataset.set_aside_newer(dataset.state_dict()) == dataset.begin_new_run() == 0
    dataset.delete()  # nothing was collected into it
    assert dataset.num_files == 3
    assert dataset.fingerprint() == configured(numbered).fingerprint()


def test_episodes_are_converted_once(
    configured: Configured, numbered: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(numbered)
    cache = root / "test" / "numbers-v0" / CACHE_FOLDER
    before = sorted(cache.rglob("*"))
    assert len(before) == 4 + 3  # the folders, three episodes
    with monkeypatch.context() as patch:
        patch.setattr(minari_module, "import_episodes", None)
        first = configured(numbered)
    assert sorted(cache.rglob("*")) == before
    (cache.parent / "data" / "main_data.hdf5").touch()  # a changed dataset is converted anew
    assert {file.path for file in first._buffer.files}.isdisjoint(
        file.path for file in configured(numbered)._buffer.files
    )


def test_an_interrupted_conversion_leaves_nothing_to_be_read(
    configured: Configured, numbered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(minari_module, "save_trajectory", disk_full)
        with pytest.raises(OSError, match="No space"):
            configured(numbered, cache_root=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
    assert configured(numbered, cache_root=str(tmp_path / "cache")).num_episodes == 3


def test_mistakes_of_a_user_say_what_to_do(configured: Configured, numbered: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample_by is 'length'; allowed are 'trajectory', 'timestep'"):
        MinariDataset(numbered, sample_by="length")
    with pytest.raises(
        FileNotFoundError, match=r"no Minari dataset 'a/b-v0'.*test/numbers-v0.*minari download"
    ):
        configured("a/b-v0")
    with pytest.raises(ValueError, match=r"MinariDataset does not know.*Fix: call configure\(\)"):
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
    with pytest.raises(ImportError, match=r"need minari, h5py, PIL.*pip install -e '\.\[minari\]'"):
        open_minari("a/b-v0")


@pytest.mark.slow
def test_minari_is_imported_on_use_only(tmp_path: Path) -> None:
    code = (
        "import json, sys, loxodon.data, loxodon.data.cli;"
        "loxodon.data.MinariDataset('a/b-v0'); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "loxodon.data.minari" in loaded
    assert loaded.isdisjoint({"minari", "h5py", "pyarrow", "gymnasium", "matplotlib", "torch"})
