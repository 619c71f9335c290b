"""The exchange between the experiment and its dataset, except windows: layouts, versions, priorities."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.agents import Agent, Retrace
from loxodon.data import Batch, DiskTrajDataset, PrioritySampler, load_trajectory, save_trajectory
from loxodon.envs import EnvSpec, EpsilonGreedy
from loxodon.experiment import Experiment
from loxodon.experiment.learn.learner import sequence_priorities
from loxodon.nets import FFTrajEncoder, FFTstepEncoder, GRUTrajEncoder

from .fakes import CountingEnv, make_experiment, metrics, run
from .test_learner import make_trajectory


def test_priorities_mix_the_largest_and_the_mean_error_of_real_timesteps() -> None:
    squared = torch.tensor([[1.0, 9.0, 1e6], [4.0, 4.0, 4.0]])[:, :, None, None, None].expand(2, 3, 2, 4, 1)
    mask = torch.tensor([[True, True, False], [True, True, True]])[:, :, None, None, None].expand_as(squared)
    expected = torch.tensor([0.9 * 3.0 + 0.1 * 2.0, 2.0])
    windows = torch.tensor([[0, 0, 0], [1, 1, 1]])
    found, _ = sequence_priorities(squared, mask, windows, num_windows=2)
    torch.testing.assert_close(found, expected)


def with_priorities(folder: Path) -> tuple[Experiment, DiskTrajDataset, Batch]:
    """A run that has collected, its dataset, and a batch of it."""
    dataset = DiskTrajDataset(sampler=PrioritySampler())
    experiment = make_experiment(folder, dataset=dataset)
    experiment.start()
    experiment.collect_new_training_data()
    dataset.refresh()
    return experiment, dataset, next(iter(experiment.loader.epoch(0, 1)))


def test_training_sets_the_priorities_of_the_files_it_saw(tmp_path: Path) -> None:
    experiment, dataset, batch = with_priorities(tmp_path)
    assert batch.priority_slots is not None
    assert (batch.priority_slots >= 0).all()
    before = dataset.sampler.state_dict()
    experiment.train_step([batch])
    after = dataset.sampler.state_dict()
    experiment.close()
    assert before != after


def test_windows_without_losses_keep_their_priorities(tmp_path: Path) -> None:
    experiment, _, batch = with_priorities(tmp_path)
    batch.mask[0] = False  # such as a window of burn-in alone
    reported: list[Any] = []
    experiment.learner.report_priorities = lambda slots, priorities: reported.append(slots)
    experiment.train_step([batch])
    experiment.close()
    assert batch.priority_slots is not None
    assert reported[0].tolist() == [-1, *batch.priority_slots[1:].tolist()]


@pytest.mark.parametrize("sample", [True, False])
def test_a_run_with_retrace_stores_the_probabilities_of_its_actions(tmp_path: Path, sample: bool) -> None:
    experiment = make_experiment(
        tmp_path,
        agent_type=partial(Agent, returns=Retrace()),
        tstep_encoder_type=FFTstepEncoder,
        traj_encoder_type=GRUTrajEncoder,
        exploration_wrapper_type=partial(
            EpsilonGreedy, eps_start=0.3, eps_end=0.3, randomize_eps=False, mean_repeat=1.0
        ),
        sample_actions=sample,
    )
    experiment.start()
    experiment.collect_new_training_data()
    experiment.dataset.refresh()
    batch: Any = next(iter(experiment.loader.epoch(0, 1)))
    agent: Any = experiment.policy
    with torch.no_grad():
        policy = agent.policies(agent.actor, agent.transitions(batch).current)
    acting = policy.probs[:, :, -1]
    chances = acting if sample else torch.nn.functional.one_hot(acting.argmax(-1), 3).float()
    taken = (0.7 * (chances * batch.actions).sum(-1, keepdim=True) + 0.3 / 3).log()
    torch.testing.assert_close(batch.log_probs[batch.mask], taken[batch.mask], atol=1e-4, rtol=1e-4)
    experiment.learn()
    experiment.close()


def test_a_run_learns_from_packed_batches(tmp_path: Path) -> None:
    class Watched(Experiment):
        def compute_loss(self, batch: Any, log_step: bool = False) -> dict[str, Any]:
            shapes.append((batch.resets is not None, len(batch.priority_slots), batch.mask.shape[1]))
            return super().compute_loss(batch, log_step)

    shapes: list[tuple[bool, int, int]] = []
    experiment = make_experiment(
        tmp_path,
        Watched,
        packed_batches=True,
        max_seq_len=16,
        make_train_env=[EnvSpec(CountingEnv, {"length": length}) for length in (2, 5, 12)],
        batches_per_update=2,
        dataset=DiskTrajDataset(sampler=PrioritySampler()),
        agent_type=partial(Agent, num_critics=2),
        tstep_encoder_type=partial(FFTstepEncoder, d_hidden=8, d_output=8),
        traj_encoder_type=partial(GRUTrajEncoder, d_hidden=8, d_output=8),
    )
    run(experiment)
    assert experiment.learner.gradient_steps == 4
    assert {windows for _, windows, _ in shapes} == {4}
    assert max(width for packs, _, width in shapes if packs) <= 16
    losses = [record["train/loss"] for record in metrics(experiment.run_dir) if "train/loss" in record]
    assert len(losses) == 2
    assert np.isfinite(losses).all()


def test_a_loss_without_errors_per_timestep_cannot_feed_priorities(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, dataset=DiskTrajDataset(sampler=PrioritySampler()))
    experiment.start()
    experiment.collect_new_training_data()
    experiment.dataset.refresh()
    batch = next(iter(experiment.loader.epoch(0, 1)))
    zero = next(experiment.policy.parameters()).sum() * 0.0
    experiment.learner.compute_loss = lambda *_, **__: {"Actor Loss": zero, "Critic Loss": zero}
    with pytest.raises(ValueError, match=r"no squared_errors.*Fix"):
        experiment.train_step([batch])
    experiment.close()


def test_files_and_batches_carry_the_version_of_the_policy_that_acted(tmp_path: Path) -> None:
    experiment = run(make_experiment(tmp_path, epochs=3))
    versions = [load_trajectory(file).policy_version for file in fifo(tmp_path)]
    assert sorted({version for version in versions if version is not None}) == [0, 1, 2]
    batch = next(iter(experiment.loader.epoch(9, 1)))
    assert batch.policy_versions is not None
    assert set(batch.policy_versions.tolist()) <= {0, 1, 2}


def test_files_of_other_spaces_are_set_aside_and_training_continues(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, epochs=3, train_timesteps_per_epoch=60, train_batches_per_epoch=99)
    experiment.start()
    experiment.collect_new_training_data()
    good = load_trajectory(fifo(tmp_path)[0])
    wider = {"observation": np.zeros((len(good) + 1, 5), np.float32)}
    other = type(good)(
        wider, good.rl2s, good.time_idxs, good.actions, good.rews, good.dones, env_name=good.env_name
    )
    protected = tmp_path / "tiny" / "buffer" / "protected"
    save_trajectory(protected, other, save_as="npz", traj_id="0badf11e", unix_time=1.0)
    experiment.learn()
    experiment.close()
    reasons = list((tmp_path / "tiny" / "buffer" / "quarantine").glob("*0badf11e*.txt"))
    assert len(reasons) == 1
    assert "float32[5], expected float32[2]" in reasons[0].read_text()
    records = metrics(experiment.run_dir)
    assert max(record.get("dataset/broken_files", 0) for record in records) == 1
    assert any(record.get("dataset/padded_share") is not None for record in records)


def test_a_resumed_run_takes_its_own_learning_rate(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, learning_rate=1e-2, l2_coeff=1e-3))
    resumed = make_experiment(tmp_path, learning_rate=5e-3, l2_coeff=0.0, epochs=3, lr_warmup_steps=1)
    resumed.start()
    resumed.load_checkpoint()
    resumed.learn()
    resumed.close()
    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.0)


def weights_after_learning(
    folder: Path, *, extra_files: range = range(0), first_seed: int = 0
) -> list[torch.Tensor]:
    """Train on twelve trajectories, some of which have extras."""
    protected = folder / "tiny" / "buffer" / "protected"
    protected.mkdir(parents=True)
    for number in range(12):
        traj = dataclasses.replace(
            make_trajectory(4 + number, seed=first_seed + number), policy_version=number
        )
        if number in extra_files:
            rows = np.full((len(traj), 1), float(number), np.float32)
            traj = dataclasses.replace(traj, extras={"log_probs": rows, "samples": rows.repeat(3, 1)})
        save_trajectory(protected, traj, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
    exp = run(
        make_experiment(
            folder,
            agent_type=Agent,  # without Retrace, which reads log_probs
            tstep_encoder_type=FFTstepEncoder,
            traj_encoder_type=FFTrajEncoder,
            train_timesteps_per_epoch=0,
            val_timesteps_per_epoch=0,
        )
    )
    return [p.detach().clone() for p in exp.policy.parameters()]


def test_learning_is_the_same_with_and_without_extras_in_the_files(tmp_path: Path) -> None:
    plain, mixed = (
        weights_after_learning(tmp_path / str(len(files)), extra_files=files)
        for files in (range(0), range(6))
    )
    assert all(map(torch.equal, plain, mixed))
    others = weights_after_learning(tmp_path / "others", first_seed=100)
    assert not all(map(torch.equal, plain, others))  # the trajectories matter


def fifo(folder: Path) -> list[Path]:
    return sorted((folder / "tiny" / "buffer" / "fifo").glob("*.npz"))
