"""Agreements between processes that train together: skipped steps, metrics, stops, rights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from .scenarios import LENGTHS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def agreed(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["agreements"] for rank in ranks]


def test_a_gradient_that_is_not_finite_in_one_process_skips_the_update_in_all(agreed: Any) -> None:
    first, second = (rank["guarded"] for rank in agreed)
    assert first["counts"] == second["counts"] == (2, 1)
    for before, after, is_skipped in zip(first["states"], first["states"][1:], (0, 1, 0), strict=False):
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert bool(moved) != bool(is_skipped)
        assert not any(name.startswith("critics.") for name in moved)  # the critics are frozen
    for name, value in first["states"][-1].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second["states"][-1][name]), name


def test_all_processes_stop_if_one_meets_nan(agreed: Any) -> None:
    first, second = (rank["nan"] for rank in agreed)
    assert "applied: the losses of another process are not finite; the batch is finite" in first, first
    assert re.search(r"applied: the critic loss is nan.*batch's rews.*update_0_process1.pt", second)


def test_each_process_stores_its_own_environments(agreed: Any) -> None:
    cues = []
    for saved, resumed in (rank["stored"] for rank in agreed):
        assert saved["time_idxs"].any()
        assert np.array_equal(saved["time_idxs"], resumed["time_idxs"])
        assert np.array_equal(saved["rl2s"], resumed["rl2s"])
        assert saved["envs"] == resumed["envs"]
        cues.append(saved["envs"])
    assert cues[0] != cues[1]


def test_an_overflow_in_one_process_skips_the_step_in_all(agreed: Any) -> None:
    first, second = (rank["skipped"] for rank in agreed)
    assert first["counts"] == second["counts"]
    (steps, num_rows, scale), (later_steps, later_rows, _) = first["counts"]
    assert (steps, num_rows, scale) == (0, 0.0, 4.0)
    assert later_steps == 1
    assert later_rows == sum(LENGTHS) + len(LENGTHS), "a skipped step also drops what it gathered"
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
        assert torch.isfinite(value).all(), name


def test_statistics_of_a_process_are_not_replaced_by_those_of_another(agreed: Any) -> None:
    assert [rank["buffers"] for rank in agreed] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_process_without_any_timestep_does_not_change_the_mean(agreed: Any) -> None:
    assert agreed[0]["empty"] == agreed[1]["empty"]
    assert agreed[0]["empty"]["Loss"] > 0


def test_metrics_are_weighted_by_timesteps(agreed: Any) -> None:
    expected = {"q": 0.25, "q_max": 1.0, "q_min": 0.0, "n": 3.0, "loss": 0.5}
    assert agreed[0]["metrics"] == agreed[1]["metrics"] == expected


def test_every_episode_has_the_same_weight_in_any_process(agreed: Any) -> None:
    assert agreed[0]["episodes"] == agreed[1]["episodes"]
    episodes = agreed[0]["episodes"]
    assert episodes["collect/episodes"] == 5
    assert episodes["collect/return/a"] == pytest.approx(15 / 4)
    assert episodes["collect/return"] == pytest.approx((15 / 4 + 50) / 2)  # the mean over both envs
    assert episodes["collect/return_p20"] == pytest.approx(1.8)  # returns are 1, 2, 3, 9, 50
    assert episodes["collect/success"] == 0.5


def test_processes_stop_at_the_same_update(agreed: Any) -> None:
    assert agreed[0]["stops"] == agreed[1]["stops"] >= 4


def test_processes_draw_different_windows_and_one_may_delete(agreed: Any) -> None:
    first, second = (rank["windows"] for rank in agreed)
    assert len(first["drawn"]) == len(second["drawn"]) == 3 * 4  # batch_size is per process
    assert not torch.equal(first["drawn"], second["drawn"])
    assert (first["may_delete"], second["may_delete"]) == (True, False)


def test_a_signal_to_one_process_in_any_phase_stops_all_at_the_same_point(ranks: Any) -> None:
    for phase in ("evaluating", "collecting", "learning"):
        stopped = [rank["stops"][phase] for rank in ranks]
        assert [one["code"] for one in stopped] == [0, 0], phase
        assert stopped[0] == stopped[1], phase
        assert stopped[0]["saved"] == [1], phase


def test_a_stop_requested_by_one_process_takes_effect_after_the_same_epoch_in_all(ranks: Any) -> None:
    for rank in ranks:
        assert rank["stops"]["requested"] == {"epoch": 2, "finished": False, "saved": [1]}


def test_priorities_reach_every_process(agreed: Any) -> None:
    every = torch.cat([rank["windows"]["slots"] for rank in agreed])
    for rank in agreed:
        ((slots, priorities),) = rank["windows"]["reported"]
        assert torch.equal(slots, every)
        assert priorities.shape == every.shape
    assert torch.equal(agreed[0]["windows"]["reported"][0][1], agreed[1]["windows"]["reported"][0][1])


def test_a_parameter_without_gradient_is_named(agreed: Any) -> None:
    for rank in agreed:
        assert "does not depend on these parameters: actor" in rank["unused"]
        assert "Fix:" in rank["unused"]
