"""What passes between the experiment and its dataset beside the windows: layouts, versions, priorities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import DiskTrajDataset, load_trajectory, save_trajectory
from loxodon.experiment.building import layout_of
from loxodon.experiment.learn.learner import sequence_priorities

from .fakes import make_experiment, run


def test_priorities_mix_the_largest_and_the_mean_error_of_real_timesteps() -> None:
    squared = torch.tensor([[1.0, 9.0, 1e6], [4.0, 4.0, 4.0]])[:, :, None, None, None].expand(2, 3, 2, 4, 1)
    mask = torch.tensor([[True, True, False], [True, True, True]])[:, :, None, None, None].expand_as(squared)
    expected = torch.tensor([0.9 * 3.0 + 0.1 * 2.0, 2.0])
    torch.testing.assert_close(sequence_priorities(squared, mask), expected)


def test_sequences_without_a_timestep_that_counts_have_no_priority() -> None:
    none = torch.zeros(1, 3, 2, 1, dtype=torch.bool)
    assert sequence_priorities(torch.ones(1, 3, 2, 1), none).tolist() == [0.0]


def test_training_sets_the_priorities_of_the_files_it_saw(tmp_path: Path) -> None:
    dataset = DiskTrajDataset(priority_exponent=0.6)
    experiment = make_experiment(tmp_path, dataset=dataset)
    experiment.start()
    experiment.collect_new_training_data()
    dataset.refresh()
    batch = next(iter(experiment.loader.epoch(0, 1)))
    assert batch.sources is not None
    assert (batch.sources >= 0).all()
    assert dataset.priorities is not None
    before = dataset.priorities.state_dict([file.stem.split("_")[1] for file in fifo(tmp_path)])
    experiment.train_step([batch])
    after = dataset.priorities.state_dict([file.stem.split("_")[1] for file in fifo(tmp_path)])
    experiment.close()
    assert before != after


def test_a_loss_without_errors_per_timestep_cannot_feed_priorities(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, dataset=DiskTrajDataset(priority_exponent=0.6))
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


def test_files_of_other_spaces_are_set_aside_and_training_goes_on(tmp_path: Path) -> None:
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
    records = [json.loads(line) for line in experiment.metric_logger.path.read_text().splitlines()]
    assert max(record.get("dataset/broken_files", 0) for record in records) == 1
    assert any(record.get("dataset/padded_fraction") is not None for record in records)


def test_a_resumed_run_takes_its_own_learning_rate(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, learning_rate=1e-2, l2_coeff=1e-3))
    resumed = make_experiment(tmp_path, learning_rate=5e-3, l2_coeff=0.0, epochs=3, lr_warmup_steps=1)
    resumed.start()
    resumed.load_checkpoint()
    resumed.learn()
    resumed.close()
    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.0)


def test_the_layout_of_spaces_leaves_texts_out() -> None:
    obs = spaces.Dict({"position": spaces.Box(-1, 1, (2,), np.float32), "cell": spaces.Discrete(7)})
    mission = spaces.Dict({**obs.spaces, "mission": spaces.Text(9)})
    layout = layout_of(mission, spaces.Discrete(4))
    assert layout == layout_of(obs, spaces.Discrete(4))
    assert layout.obs["position"] == ((2,), np.dtype(np.float32))
    assert layout.obs["cell"] == ((), np.dtype(np.int64))
    assert layout.action_width == 4
    assert layout_of(obs, spaces.Box(-1, 1, (3,))).action_width == 3


def fifo(folder: Path) -> list[Path]:
    return sorted((folder / "tiny" / "buffer" / "fifo").glob("*.npz"))
