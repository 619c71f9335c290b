"""On-policy training in two processes equals one process with all envs, and the two never diverge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..rounding import assert_equal_but_for_rounding
from .ppo_scenarios import CASES, NUM_ROLLOUTS, equality

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_OPS = 256 * 4 * 8 * 9  # width and layers of the agents, timesteps, updates


@pytest.fixture
def both(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["ppo"] for rank in ranks]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The results of one process."""
    return equality(0, 1)


def assert_same_weights(ranks: list[dict[str, Any]]) -> None:
    for name, value in ranks[0]["state"].items():
        assert torch.equal(value, ranks[1]["state"][name]), name


@pytest.mark.parametrize("case", CASES)
def test_weights_and_statistics_are_those_of_one_process_with_all_envs(
    both: Any, alone: Any, case: str
) -> None:
    one, two = alone[case], [rank["equality"][case] for rank in both]
    assert_same_weights(two)
    assert one["updates"] == two[0]["updates"] == two[1]["updates"]
    for name, value in one["state"].items():
        assert_equal_but_for_rounding(two[0]["state"][name], value, NUM_OPS, name)
    learned = [rank["learner"] for rank in two]
    for part, numbers in one["learner"].items():
        state = dict(numbers or {})
        accumulators = state.pop("accumulators", None)
        for name, value in state.items():
            found = [rank[part][name] for rank in learned]
            assert found[0] == found[1]
            if value is not None:
                assert found[0] == pytest.approx(value, rel=1e-5), (part, name)
        if accumulators is not None:
            halves = [x for rank in learned for x in rank[part]["accumulators"]]
            assert halves == pytest.approx(accumulators)


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_one_process_with_all_envs(both: Any, alone: Any, case: str) -> None:
    two = [rank["equality"][case]["figures"] for rank in both]
    assert two[0] == two[1]
    for one, found in zip(alone[case]["figures"], two[0], strict=True):
        assert one.keys() == found.keys()
        different = {"batch_places", "batch_padded_share"}  # these differ between processes
        names = one.keys() - different
        assert {n: found[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-3, abs=1e-4)
        assert found["initial_logratio_abs_max"] < found["initial_logratio_rounding_max"]


@pytest.mark.parametrize("scope", ["epoch", "update"])
def test_all_processes_stop_at_the_same_minibatch_by_their_mean_kl(both: Any, scope: str) -> None:
    two = [rank[scope] for rank in both]
    # The second minibatch is too far for one process, the third for both; later passes begin too far.
    assert [rank["calls"] for rank in two] == [4 if scope == "epoch" else 3] * 2
    for rank in two:
        assert rank["figures"]["updates"] == 2
        assert rank["figures"]["kl_last"] == pytest.approx(0.045 if scope == "epoch" else 0.03, rel=0.1)
        for refused in rank["before"][2:]:  # nothing moves after the first one that was too far
            assert all(map(torch.equal, refused, rank["after"]))
        assert not all(map(torch.equal, rank["before"][1], rank["after"]))
    assert all(map(torch.equal, two[0]["after"], two[1]["after"]))


@pytest.mark.parametrize("case", ["many", "too few"])
def test_the_number_of_updates_does_not_depend_on_the_number_of_sequences_of_a_process(
    both: Any, case: str
) -> None:
    two = [rank["uneven"][case] for rank in both]
    pieces = [rank["pieces"] for rank in two]
    assert all(a != b for a, b in zip(*pieces, strict=True))
    planned = {"many": 4, "too few": 32}[case]
    if case == "too few":
        assert min(map(min, pieces)) < 16
    assert [rank["updates"] for rank in two] == [planned * NUM_ROLLOUTS] * 2
    assert_same_weights(two)
    assert all(torch.isfinite(value).all() for value in two[0]["state"].values())


def test_the_compared_cases_exercise_their_features(alone: Any) -> None:
    everything, penalty = alone["feed-forward, everything normalised"], alone["gru, penalty"]
    assert everything["learner"]["lr_adapter"]["scale"] != 1.0
    assert alone["gru"]["learner"]["lr_adapter"]["scale"] != 1.0
    assert [figures["skipped_updates"] for figures in everything["figures"]] == [1, 0, 0]
    # The rollout's statistics are not lost with a skipped update.
    assert everything["state"]["tstep_encoder.input_norm.count"] == NUM_ROLLOUTS * 32
    assert float(penalty["state"]["loss.beta"]) != 1.0
    assert penalty["updates"] < 3 * NUM_ROLLOUTS  # some were ended by target_kl
    rates = [figures["learning_rate"] for figures in alone["feed-forward"]["figures"]]
    assert rates == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
