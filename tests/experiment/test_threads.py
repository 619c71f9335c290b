"""How many threads torch gets in a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import gin
import pytest
import torch

from loxodon.envs import async_vector
from loxodon.experiment import Experiment, threads
from loxodon.experiment.config import load_config

from .fakes import make_experiment


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "num_usable_cores", lambda: 4)
    threads._replaced.clear()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    gin.clear_config()


def threads_of(folder: Path, setting: int | None = None) -> int:
    """Threads of torch once a small run has started."""
    exp = make_experiment(folder, torch_threads=setting)
    exp.start()
    exp.close()
    return torch.get_num_threads()


@pytest.mark.parametrize("preset", ["tmaze", "ppo/cartpole"])
@pytest.mark.parametrize("limit", [1, 4])
def test_presets_train_small_models_on_one_thread(tmp_path: Path, preset: str, limit: int) -> None:
    torch.set_num_threads(limit)
    folder = f"Experiment.ckpt_base_dir='{tmp_path}'"
    load_config([preset], [(folder, folder)])
    exp = Experiment()  # type: ignore[call-arg]
    exp.verbose = False
    exp.start()
    exp.close()
    assert torch.get_num_threads() == 1


def test_a_large_model_gets_what_the_user_and_the_cores_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WORTH_MORE", 0.0)
    for limit, share, expected in (
        (4, "1", 4),
        (3, "1", 3),
        (4, "2", 2),
        (1, "1", 1),
        (8, "1", 4),
        (4, "9", 1),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", share)
        torch.set_num_threads(limit)
        threads._replaced.clear()
        assert threads_of(tmp_path) == expected


def test_more_than_the_limit_is_cut_to_it_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.WARNING):
        assert threads_of(tmp_path, 3) == 2
    assert "torch_threads is 3, but this process may use 2" in caplog.text
    caplog.clear()
    assert threads_of(tmp_path) == 1
    assert threads_of(tmp_path, 2) == 2  # what the run before has chosen is no limit
    assert caplog.text == ""


def test_the_quota_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(async_vector, "CPU_QUOTA", quota)
    without = async_vector.num_usable_cores()
    for text, expected in (("max 100000", without), ("100000 100000", 1), ("50000 100000", 1)):
        quota.write_text(text)
        assert async_vector.num_usable_cores() == expected
