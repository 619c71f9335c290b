"""Two processes with half the batch each, or half the envs, equal one process with the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..rounding import assert_equal_but_for_rounding
from .scenarios import FORMS, NUM_UPDATES, updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEAD = ("dead_units/actor", "dead_units/critics")
NUM_OPS = 256 * 6 * 12  # width and layers of the agent, timesteps


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of one process."""
    return updates(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("form", FORMS)
def test_an_update_equals_that_of_the_whole_batch(ranks: Any, alone: Any, form: str) -> None:
    one, (first, second) = alone[form], [rank["updates"][form] for rank in ranks]
    assert len(one["gradients"]) > 10
    for other in (first, second):
        for own, whole in zip(other["gradients"], one["gradients"], strict=True):
            assert_equal_but_for_rounding(own, whole, NUM_OPS)
    # The state holds weights, targets and statistics.
    state = one["state"]
    assert {
        "values.mu",
        "values.unit",
        "loss_weights.explained",
        "tstep_encoder.input_norm.var",
    } <= state.keys()
    assert any(name.startswith("target_critics") for name in state)
    assert state["values.updates"] == NUM_UPDATES
    for name, value in state.items():
        assert_equal_but_for_rounding(first["state"][name], value, NUM_OPS * NUM_UPDATES, name)
        assert torch.equal(first["state"][name], second["state"][name]), name
    # The learning rate does not depend on the number of processes.
    assert one["rates"] == pytest.approx([0.00025, 0.0005, 0.00075, 0.001, 0.001])
    assert first["rates"] == second["rates"] == one["rates"]


@pytest.mark.parametrize("form", FORMS)
def test_logged_metrics_are_those_of_the_whole_batch(ranks: Any, alone: Any, form: str) -> None:
    for one, other in zip(alone[form]["logs"], ranks[0]["updates"][form]["logs"], strict=True):
        assert one.keys() == other.keys()
        names = {"Loss", "Actor Loss", "Critic Loss", "grad_norm", "batch_timesteps", "sequence_length"}
        names |= {name for name in one if name.endswith("_loss")}
        assert ("next_obs_loss" in names) == (form == "masked-2")
        if form.endswith("-1"):  # the agent's own metrics cover only the last micro-batch of each process
            # these are not means over timesteps
            no_means = {"q_ensemble_std", "batch_places", "batch_padded_share", *DEAD}
            names |= one.keys() - no_means
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4, abs=1e-4)


def test_both_processes_leave_pretraining_with_the_same_weights(ranks: Any) -> None:
    first, second = (rank["pretraining"] for rank in ranks)
    assert len(first) > 10
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
