from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loxodon.experiment import CheckpointManager, Experiment
from loxodon.experiment.checkpoints import MARKER

from .fakes import TinyAgent, make_experiment, run


def started(folder: Path, **changes: Any) -> Experiment:
    exp = make_experiment(folder, **changes)
    exp.start()
    return exp


def perturb(policy: Any) -> None:
    with torch.no_grad():
        policy.actor.bias.add_(1.0)


def test_weights_optimizer_and_counters_come_back(tmp_path: Path) -> None:
    one = run(make_experiment(tmp_path))
    two = started(tmp_path)
    assert two.load_checkpoint() == 2
    for a, b in zip(one.policy.state_dict().values(), two.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (
        (two.env_steps, two.learner.gradient_steps) == (one.env_steps, one.learner.gradient_steps) == (72, 8)
    )
    assert two.best_score == one.best_score
    moments = [next(iter(e.optimizer.state_dict()["state"].values()))["exp_avg"] for e in (one, two)]
    assert torch.equal(*moments)


def test_exploration_goes_on_where_it_was(tmp_path: Path) -> None:
    one = run(make_experiment(tmp_path))
    two = started(tmp_path)
    two.load_checkpoint()
    first, second = (exp.collector.groups[0].exploration for exp in (one, two))  # type: ignore[union-attr]
    assert second.num_calls == first.num_calls == 24


def test_loading_weights_only_starts_at_the_first_epoch(tmp_path: Path) -> None:
    one = run(make_experiment(tmp_path))
    two = started(tmp_path, run_name="other")
    two.load_checkpoint_from_path(one.run_dir / "ckpts" / "policy_weights" / "policy_epoch_1.safetensors")
    assert torch.equal(one.policy.actor.bias, two.policy.actor.bias)
    assert (two.epoch, two.learner.gradient_steps) == (0, 0)
    assert started(tmp_path).load_checkpoint(1, resume_training_state=False) == 0


def test_an_incomplete_checkpoint_is_never_taken(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, epochs=4))
    assert exp.checkpoints.complete_epochs() == [1, 3]
    (exp.checkpoints.state_dir(3) / MARKER).unlink()
    assert exp.checkpoints.newest_epoch() == 1
    with pytest.raises(FileNotFoundError, match=r"is incomplete. Complete ones are of epochs \[1\].*Fix:"):
        exp.load_checkpoint(3)


def test_a_missing_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no complete checkpoint.*Fix:"):
        exp.load_checkpoint()
    with pytest.raises(FileNotFoundError, match=r"does not exist.*Fix:"):
        exp.load_checkpoint(9)
    with pytest.raises(FileNotFoundError, match=r"no weights at.*Fix:"):
        exp.load_checkpoint_from_path(tmp_path / "nothing.safetensors")


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    class Wider(TinyAgent):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.critic = nn.Linear(99, 1)

    run(make_experiment(tmp_path))
    with pytest.raises(
        ValueError, match=r"critic.weight is \(1, 6\) in the file and \(1, 99\) in the agent.*Fix:"
    ):
        started(tmp_path, agent_type=Wider).load_checkpoint()


def test_a_broken_weights_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"bad\.safetensors is not a readable safetensors file.*Fix:"):
        started(tmp_path).load_checkpoint_from_path(path)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    manager = CheckpointManager(exp.run_dir, exp.run_name, rank=0, num_ranks=2)
    folder = manager.state_dir(1)
    (folder / "rank_1.json").write_text("{}")
    with pytest.raises(ValueError, match=r"saved by 2 process\(es\), this run has 1.*Fix:"):
        exp.load_checkpoint()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    folder = exp.checkpoints.state_dir(1)
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    (folder / MARKER).write_text(json.dumps({"files": {}}))
    with pytest.raises(ValueError, match=r"format version 99.*Fix:"):
        exp.load_checkpoint()


def test_a_save_that_died_between_the_two_renames_is_finished(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    final = exp.checkpoints.state_dir(1)
    final.rename(final.with_name(final.name + ".replaced"))
    final.with_name("tiny_epoch_5.tmp").mkdir()
    exp.checkpoints.make_folders(clean=True)
    assert exp.checkpoints.complete_epochs() == [1]
    assert list(final.parent.iterdir()) == [final]


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


def test_only_the_newest_checkpoints_stay_when_asked(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, epochs=4, ckpt_interval=1, keep_checkpoints=2))
    assert exp.checkpoints.complete_epochs() == [2, 3]


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


def test_checkpoints_hold_no_pickled_objects(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    suffixes = {path.suffix for path in exp.checkpoints.root.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".txt", ""}  # the last one is the marker, which is JSON
