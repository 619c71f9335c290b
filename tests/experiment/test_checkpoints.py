"""Checkpoints of a run: what comes back, which one is taken, which ones stay, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.store import MARKER, read_values, write_values

from .fakes import TinyAgent, make_experiment, run


def started(folder: Path, **changes: Any) -> Experiment:
    exp = make_experiment(folder, **changes)
    exp.start()
    return exp


def perturb(policy: Any) -> None:
    with torch.no_grad():
        policy.actor.bias.add_(1.0)


def test_weights_optimizer_counters_and_exploration_come_back(tmp_path: Path) -> None:
    one, two = run(make_experiment(tmp_path)), started(tmp_path)
    assert two.load_checkpoint() == 2
    for a, b in zip(one.policy.state_dict().values(), two.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (two.env_steps, two.learner.gradient_steps, two.best_score) == (72, 8, one.best_score)
    moments = [next(iter(e.optimizer.state_dict()["state"].values()))["exp_avg"] for e in (one, two)]
    assert torch.equal(*moments)
    first, second = (exp.collector.groups[0].exploration for exp in (one, two))  # type: ignore[union-attr]
    assert second.num_calls == first.num_calls == 24


def test_loading_weights_only_starts_at_the_first_epoch(tmp_path: Path) -> None:
    one = run(make_experiment(tmp_path))
    two = started(tmp_path, run_name="other")
    two.load_checkpoint_from_path(one.run_dir / "ckpts" / "policy_weights" / "policy_epoch_1.safetensors")
    assert torch.equal(one.policy.actor.bias, two.policy.actor.bias)
    assert (two.epoch, two.learner.gradient_steps) == (0, 0)
    assert started(tmp_path).load_checkpoint(1, resume_training_state=False) == 0


def test_saving_an_epoch_twice_keeps_the_second(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.epoch = 1
    exp.save_checkpoint()
    perturb(exp.policy)
    exp.save_checkpoint()
    expected = exp.policy.actor.bias.detach().clone()
    perturb(exp.policy)
    exp.load_checkpoint(0)
    assert torch.equal(exp.policy.actor.bias, expected)
    assert [p.name for p in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_0"]


def test_every_nth_and_the_newest_checkpoints_stay_and_all_policies(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ckpt_interval": 1,
        "CheckpointManager.keep": 2,
        "CheckpointManager.keep_every": 3,
    }
    exp = run(make_experiment(tmp_path, epochs=8, **settings))
    assert exp.checkpoints.complete_epochs() == [2, 5, 6, 7]  # after 3 and 6 epochs, and the last two
    assert exp.checkpoints.best_path.exists()
    assert len(list(exp.checkpoints.weights_dir.iterdir())) == 8
    with pytest.raises(ValueError, match=r"keep_every is 0.*Fix:"):
        make_experiment(tmp_path, **{"CheckpointManager.keep_every": 0}).start()


def test_published_weights_carry_rising_versions_and_are_loaded_once(tmp_path: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    assert actor.read_latest_policy() is None
    for version in (1, 2):
        perturb(learner.policy)
        learner.write_latest_policy()
        info = actor.read_latest_policy()
        assert info is not None
        assert (info.version, info.epoch, info.is_final) == (version, 0, False)
        assert torch.equal(actor.policy.actor.bias, learner.policy.actor.bias)
    perturb(actor.policy)
    actor.read_latest_policy()  # the same version: nothing is loaded
    assert not torch.equal(actor.policy.actor.bias, learner.policy.actor.bias)
    assert list((learner.run_dir / "ckpts" / "latest").iterdir()) == [learner.checkpoints.latest_path]


# --- what cannot be loaded ------------------------------------------------------------------------------


def test_what_is_incomplete_missing_or_of_another_shape_is_a_clear_error(tmp_path: Path) -> None:
    class Wider(TinyAgent):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.critic = nn.Linear(99, 1)

    exp = started(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no complete checkpoint.*Fix:"):
        exp.load_checkpoint()
    with pytest.raises(FileNotFoundError, match=r"no weights at.*Fix:"):
        exp.load_checkpoint_from_path(tmp_path / "nothing.safetensors")
    exp = run(make_experiment(tmp_path, epochs=4))
    with pytest.raises(FileNotFoundError, match=r"does not exist. Complete ones are of epochs \[1, 3\].*Fix"):
        exp.load_checkpoint(9)
    (exp.checkpoints.state_dir(3) / MARKER).unlink()
    assert exp.checkpoints.newest_epoch() == 1
    with pytest.raises(FileNotFoundError, match=r"is incomplete. Complete ones are of epochs \[1\].*Fix:"):
        exp.load_checkpoint(3)
    shapes = r"critic.weight is \(1, 6\) in the file and \(1, 99\) in the agent.*Fix:"
    with pytest.raises(ValueError, match=shapes):
        started(tmp_path, agent_type=Wider).load_checkpoint()


@pytest.mark.parametrize("version", [3, 99])
def test_another_format_is_refused(tmp_path: Path, version: int) -> None:
    exp = run(make_experiment(tmp_path))
    folder = exp.checkpoints.state_dir(1)
    path = folder / "metadata.json"
    about = json.loads(path.read_text())
    if version == 3:  # had the number elsewhere
        (folder / "state.json").write_text(json.dumps({"format_version": about.pop("format_version") - 1}))
    path.write_text(json.dumps({**about, **({} if version == 3 else {"format_version": version})}))
    (folder / MARKER).write_text(json.dumps({"files": {}}))
    with pytest.raises(ValueError, match=rf"format version {version}, this Loxodon reads 4. Fix:"):
        exp.load_checkpoint()


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    (exp.checkpoints.state_dir(1) / "rank_1.pt").write_text("{}")
    with pytest.raises(ValueError, match=r"saved by 2 process\(es\), this run has 1.*Fix:"):
        exp.load_checkpoint()


# --- values ---------------------------------------------------------------------------------------------


def test_all_values_that_states_may_hold_come_back_as_they_were(tmp_path: Path) -> None:
    base, array = torch.arange(6), np.arange(6.0).reshape(2, 3)
    tree = {
        "shared memory": [base, base[::2]],
        "plain": (None, True, "text", 2**127, [{7: ()}]),
        "generators": [np.random.default_rng(0).bit_generator.state, random.Random(0).getstate()],
    }
    arrays = [array[:, ::2], array.astype(">i2"), np.zeros((0, 3), np.uint8), np.array(True)]
    write_values(tmp_path / "x.pt", {**tree, "arrays": arrays, "scalar": np.float32(0.1)})
    back = read_values(tmp_path / "x.pt")
    for one, two in zip(arrays, back.pop("arrays"), strict=True):
        assert (two.dtype, two.shape) == (one.dtype, one.shape)
        assert np.array_equal(one, two)
    scalar = back.pop("scalar")
    assert (type(scalar), scalar) == (np.float32, np.float32(0.1))
    assert [t.tolist() for t in back.pop("shared memory")] == [[0, 1, 2, 3, 4, 5], [0, 2, 4]]
    del tree["shared memory"]
    assert back == tree


@pytest.mark.parametrize(
    ("value", "what"), [({"x": object()}, "object"), ({(1, 2): 3}, r"\(1, 2\)"), ({None: 1}, "key None")]
)
def test_objects_are_refused(tmp_path: Path, value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"cannot hold .*{what}.*Fix:"):
        write_values(tmp_path / "x.pt", value)
