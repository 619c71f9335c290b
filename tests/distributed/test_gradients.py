"""Two processes with half the batch each do what one process does with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..rounding import assert_equal_but_for_rounding
from .launching import run_scenario
from .scenarios import NUM_UPDATES, updates

pytestmark = pytest.mark.slow
NUM_OPS = 256 * 6 * 12  # width and layers of the agent, timesteps
CASES = [f"{name}-{batches}" for name in ("discrete", "box", "masked") for batches in (1, 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process got, and what each of two got."""
    folder = tmp_path_factory.mktemp("updates")
    run_scenario("updates", folder)
    return updates(folder / "alone"), [torch.load(folder / f"updates_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_the_whole_batch(results: Any, case: str) -> None:
    alone, ranks = results
    assert len(alone[case]["gradients"]) > 10
    for rank in ranks:
        for one, other in zip(alone[case]["gradients"], rank[case]["gradients"], strict=True):
            assert_equal_but_for_rounding(other, one, NUM_OPS)


@pytest.mark.parametrize("case", CASES)
def test_weights_targets_and_statistics_stay_those_of_one_process(results: Any, case: str) -> None:
    alone, ranks = results
    state = alone[case]["state"]
    assert {"popart.mu", "popart.w", "tstep_encoder.input_norm.var"} <= state.keys()
    assert any(name.startswith("target_critics") for name in state)
    assert state["popart.updates"] == NUM_UPDATES
    for name, value in state.items():
        assert_equal_but_for_rounding(ranks[0][case]["state"][name], value, NUM_OPS * NUM_UPDATES, name)
        assert torch.equal(ranks[0][case]["state"][name], ranks[1][case]["state"][name]), name


@pytest.mark.parametrize("case", CASES)
def test_logged_figures_are_those_of_the_whole_batch(results: Any, case: str) -> None:
    alone, ranks = results
    for one, other in zip(alone[case]["logs"], ranks[0][case]["logs"], strict=True):
        assert one.keys() == other.keys()
        names = {"Loss", "Actor Loss", "Critic Loss", "grad_norm", "batch_timesteps", "sequence_length"}
        if case.endswith("-1"):  # the agent's own figures are of the last micro-batch of each process
            names |= one.keys() - {"q_ensemble_std", "batch_padded_share"}
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_learning_rate_does_not_depend_on_the_number_of_processes(results: Any, case: str) -> None:
    alone, ranks = results
    assert alone[case]["rates"] == pytest.approx([0.00025, 0.0005, 0.00075, 0.001, 0.001])
    assert ranks[0][case]["rates"] == ranks[1][case]["rates"] == alone[case]["rates"]
