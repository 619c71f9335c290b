"""The Python samples of docs/data.md and docs/sampling.md run, and docs/data.md names every dataset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest

import loxodon.data
from loxodon.data import MemoryTrajDataset, RLDataset, Trajectory
from loxodon.data.batch import pad_batch

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, SAMPLING = ((DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "sampling.md"))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the Python samples define."""
    defined: dict[str, Any] = {"__name__": "docs_sample"}
    with gin.unlock_config():
        for code in re.findall(r"```python\n(.*?)```", PAGE + SAMPLING, flags=re.DOTALL):
            if "__main__" not in code:  # scripts in examples/ have a test of their own
                exec(code, defined)
    return defined


def test_the_dataset_of_the_page_makes_batches(names: dict[str, Any]) -> None:
    dataset = names["SineWaves"](num_timesteps=50)
    assert isinstance(dataset, RLDataset)
    dataset.configure(
        max_seq_len=8, padded_sampling="none", has_edit_rights=False, default_root="", default_name=""
    )
    windows = dataset.sample_windows(5, np.random.default_rng(0))
    assert [len(window) for window in windows] == [8] * 5
    batch = pad_batch(windows)
    assert tuple(batch.actions.shape) == (5, 8, 2)
    for window in windows:
        np.testing.assert_array_equal(window.rl2s[1:], np.concatenate([window.rews, window.actions], 1))


def test_the_sampler_of_the_page_takes_recent_ends(names: dict[str, Any], make_traj: Any) -> None:
    trajs = [make_traj(length, first=1000 * i) for i, length in enumerate((20, 6, 3))]
    dataset = MemoryTrajDataset(trajs, sampler=names["RecentEnds"]())
    dataset.configure(
        max_seq_len=4, padded_sampling="none", has_edit_rights=False, default_root="", default_name=""
    )
    windows = dataset.sample_windows(900, np.random.default_rng(0))
    counts = np.bincount([int(window.obs["position"][-1, 0]) // 1000 for window in windows])
    np.testing.assert_allclose(counts / 900, [1 / 9, 4 / 9, 4 / 9], atol=0.06)
    assert {len(window) for window in windows} == {3, 4}
    assert all(window.dones[-1, 0] for window in windows)


def test_the_relabeler_of_the_page_leaves_its_input_unchanged(names: dict[str, Any], make_traj: Any) -> None:
    traj: Trajectory = make_traj(20)
    before = traj.rews.copy(), traj.rl2s.copy()
    clipped = names["ClipRewards"]().relabel(traj, np.random.default_rng(0))
    np.testing.assert_array_equal(traj.rews, before[0])
    np.testing.assert_array_equal(traj.rl2s, before[1])
    assert clipped.rews.max() == clipped.rl2s[:, 0].max() == 1.0 < traj.rews.max()


def test_every_public_dataset_is_on_the_page() -> None:
    for name in loxodon.data.__all__:
        value = getattr(loxodon.data, name)
        if isinstance(value, type) and issubclass(value, RLDataset) and value is not RLDataset:
            assert f"`{name}`" in PAGE, name
