"""What processes that train together agree on: skipped steps, figures, stops, rights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.data import save_trajectory

from .launching import run_scenario
from .scenarios import LENGTHS, make_trajectory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes got."""
    folder = tmp_path_factory.mktemp("agreements")
    (folder / "data" / "buffer" / "fifo").mkdir(parents=True)
    for i in range(20):
        _store(folder / "data" / "buffer" / "fifo", i)
    run_scenario("agreements", folder)
    return [torch.load(folder / f"agreements_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How runs ended in each of two processes, one of which got a signal."""
    folder = tmp_path_factory.mktemp("stops")
    run_scenario("stops", folder)
    return [torch.load(folder / f"stops_{rank}.pt") for rank in range(2)]


def _store(folder: Path, i: int) -> None:
    traj = make_trajectory(5 + i % 3, i, is_discrete=True)
    save_trajectory(folder, traj, save_as="npz", traj_id=f"{i:08x}", unix_time=1000 + i)


def test_a_gradient_that_is_not_finite_in_one_process_leaves_the_update_out_in_all(ranks: Any) -> None:
    first, second = (rank["guarded"] for rank in ranks)
    assert first["counts"] == second["counts"] == (2, 1)
    for before, after, is_skipped in zip(first["states"], first["states"][1:], (0, 1, 0), strict=False):
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert bool(moved) != bool(is_skipped)
        assert not any(name.startswith("critics.") for name in moved)  # they are frozen
    for name, value in first["states"][-1].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second["states"][-1][name]), name


def test_each_process_stores_its_own_environments(ranks: Any) -> None:
    cues = []
    for saved, resumed in (rank["stored"] for rank in ranks):
        assert saved["time_idxs"].any()
        assert np.array_equal(saved["time_idxs"], resumed["time_idxs"])
        assert np.array_equal(saved["rl2s"], resumed["rl2s"])
        assert saved["envs"] == resumed["envs"]
        cues.append(saved["envs"])
    assert cues[0] != cues[1]


def test_an_overflow_in_one_process_skips_the_step_in_all(ranks: Any) -> None:
    first, second = (rank["skipped"] for rank in ranks)
    assert first["counts"] == second["counts"]
    (steps, num_rows, scale), (later_steps, later_rows, _) = first["counts"]
    assert (steps, num_rows, scale) == (0, 0.0, 4.0)
    assert later_steps == 1
    assert later_rows == 2 * (sum(LENGTHS) + len(LENGTHS)), (
        "what was gathered before the skipped step counts too"
    )
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
        assert torch.isfinite(value).all(), name


def test_a_process_without_any_timestep_does_not_change_the_mean(ranks: Any) -> None:
    assert ranks[0]["empty"] == ranks[1]["empty"]
    assert ranks[0]["empty"]["Loss"] > 0


def test_figures_are_weighted_by_timesteps(ranks: Any) -> None:
    expected = {"q": 0.25, "q_max": 1.0, "q_min": 0.0, "n": 3.0, "loss": 0.5}
    assert ranks[0]["metrics"] == ranks[1]["metrics"] == expected


def test_one_process_is_enough_to_decide(ranks: Any) -> None:
    assert ranks[0]["any"] == ranks[1]["any"] == [True, False]


def test_every_episode_weighs_the_same_whoever_played_it(ranks: Any) -> None:
    assert ranks[0]["episodes"] == ranks[1]["episodes"]
    episodes = ranks[0]["episodes"]
    assert episodes["collect/episodes"] == 5
    assert episodes["collect/return/a"] == pytest.approx(15 / 4)
    assert episodes["collect/return"] == pytest.approx((15 / 4 + 50) / 2)  # of the means of both envs
    assert episodes["collect/return_p20"] == pytest.approx(1.8)  # of 1, 2, 3, 9, 50
    assert episodes["collect/success"] == 0.5


def test_processes_stop_at_the_same_update(ranks: Any) -> None:
    assert ranks[0]["stops"] == ranks[1]["stops"] >= 4


def test_processes_draw_different_windows_and_one_may_delete(ranks: Any) -> None:
    first, second = (rank["windows"] for rank in ranks)
    assert len(first["drawn"]) == len(second["drawn"]) == 3 * 4  # batch_size is per process
    assert not torch.equal(first["drawn"], second["drawn"])
    assert (first["may_delete"], second["may_delete"]) == (True, False)


@pytest.mark.parametrize("phase", ["evaluating", "collecting", "learning"])
def test_a_signal_to_one_process_in_any_phase_stops_all_at_one_place(
    stopped: list[dict[str, Any]], phase: str
) -> None:
    assert [rank[phase]["code"] for rank in stopped] == [0, 0]
    assert stopped[0][phase] == stopped[1][phase]
    assert stopped[0][phase]["saved"] == [1]


@pytest.mark.parametrize("cause", ["requested", "too long"])
def test_an_end_that_one_process_asks_for_comes_after_the_same_epoch_in_all(
    stopped: list[dict[str, Any]], cause: str
) -> None:
    assert stopped[0][cause] == stopped[1][cause] == {"epoch": 2, "finished": False, "saved": [1]}


def test_priorities_reach_every_process(ranks: Any) -> None:
    every = torch.cat([rank["windows"]["sources"] for rank in ranks])
    for rank in ranks:
        ((sources, priorities),) = rank["windows"]["reported"]
        assert torch.equal(sources, every)
        assert priorities.shape == every.shape
    assert torch.equal(ranks[0]["windows"]["reported"][0][1], ranks[1]["windows"]["reported"][0][1])


def test_a_parameter_without_gradient_is_named(ranks: Any) -> None:
    for rank in ranks:
        assert "does not depend on these parameters: actor" in rank["unused"]
        assert "Fix:" in rank["unused"]
