"""Six epochs at once, and four, death, and the rest: the same weights and records to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import pytest
import torch

from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.policy_file import read_policy
from loxodon.experiment.config import load_config

from .killing import run_and_kill
from .test_resume import KilledError, metrics

EPOCHS, CHECKPOINT_AFTER, KILLED_IN = 6, 3, 4
CONFIG = """
Experiment.run_name = 'exact'
Experiment.ckpt_base_dir = '{folder}'
Experiment.max_seq_len = 7
Experiment.dataset = @MixtureOfDatasets()
MixtureOfDatasets.datasets = [@demos/DiskTrajDataset(), @own/DiskTrajDataset()]
MixtureOfDatasets.sampling_weights = [1.0, 3.0]
MixtureOfDatasets.smooth_sudden_starts = 4      # from epoch 1 to 4, over the checkpoint
demos/DiskTrajDataset.dset_root = '{folder}'
demos/DiskTrajDataset.dset_name = 'demos'
demos/DiskTrajDataset.takes_new_trajs = False
own/DiskTrajDataset.dset_min_size = 6           # reached in epoch 1
own/DiskTrajDataset.priority_exponent = {priorities}
Experiment.tstep_encoder_type = @FFTstepEncoder
Experiment.traj_encoder_type = @{encoder}
Experiment.agent_type = @Agent
Experiment.val_timesteps_per_epoch = 10
Experiment.val_interval = 2
Experiment.make_train_env = @TMazePassive
Experiment.make_val_env = @TMazePassive
TMazePassive.horizon = 5
Experiment.parallel_actors = 2
Experiment.env_mode = 'sync'
Experiment.dloader_workers = {workers}
Experiment.epochs = {epochs}
Experiment.ckpt_interval = 3
Experiment.train_timesteps_per_epoch = 13
Experiment.train_batches_per_epoch = 4
Experiment.batch_size = 4
Experiment.log_interval = 3
Experiment.lr_warmup_steps = 10
Experiment.learning_rate = 1e-3
Experiment.seed = 11
Experiment.deterministic = True
Experiment.verbose = False
MetricLogger.tensorboard = False
FFTstepEncoder.d_hidden = 8
FFTstepEncoder.d_output = 8
Agent.num_critics = 2
Actor.d_hidden = 8
CriticEnsemble.d_hidden = 8
"""
ENCODERS = {
    "GRUTrajEncoder": "GRUTrajEncoder.d_hidden = 8\nGRUTrajEncoder.d_output = 8\n",
    "TransformerTrajEncoder": "TransformerTrajEncoder.d_model = 8\nTransformerTrajEncoder.d_ff = 16\n"
    "TransformerTrajEncoder.n_heads = 2\nTransformerTrajEncoder.n_layers = 2\n"
    "TransformerTrajEncoder.dropout_ff = 0.1\n",
}


@pytest.fixture(autouse=True)
def _global_settings_are_put_back() -> Iterator[None]:
    yield
    gin.clear_config()
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of demonstrations."""
    folder = tmp_path_factory.mktemp("demos")
    text = (
        CONFIG.format(folder=folder, encoder="GRUTrajEncoder", workers=0, epochs=1, priorities="None")
        + "Experiment.train_batches_per_epoch = 0\nExperiment.run_name = 'demos'\n"
    )
    text = text.replace("@MixtureOfDatasets()", "@DiskTrajDataset()")
    lines = [
        line
        for line in text.splitlines()
        if "Mixture" not in line and not line.startswith(("demos/", "own/"))
    ]
    exp = configured(folder, "\n".join([*lines, ENCODERS["GRUTrajEncoder"]]))
    exp.learn()
    exp.close()
    return folder / "demos"


def configured(folder: Path, text: str) -> Experiment:
    path = folder / "exact.gin"
    path.write_text(text)
    load_config([str(path)])
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    exp.start()
    return exp


def prepared(folder: Path, demos: Path, **settings: Any) -> str:
    """Config of a run in its own folder, beside a copy of the demonstrations."""
    shutil.copytree(demos / "buffer", folder / "demos" / "buffer")
    text = CONFIG.format(folder=folder, epochs=EPOCHS, **{"priorities": "None", **settings})
    return text + ENCODERS[settings["encoder"]]


def die_in(exp: Experiment, epoch: int) -> None:
    """Learn, and die in the middle of an epoch's updates, leaving everything as it is."""
    update = exp.learner.update

    def dying(*args: Any, **kwargs: Any) -> Any:
        if exp.epoch == epoch and exp.learner.gradient_steps % 4 == 2:
            raise KilledError
        return update(*args, **kwargs)

    exp.learner.update = dying  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        exp.learn()
    exp.loader.close()  # a real death takes these with it
    exp.dataset.close()


def assert_same(one: Path, two: Path) -> None:
    """Weights of the last checkpoints are equal to the bit, and so are all records."""
    names = [run_dir / "ckpts/policy_weights/policy_epoch_5.safetensors" for run_dir in (one, two)]
    first, second = (read_policy(path)[1] for path in names)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert metrics(one) == metrics(two)


def single(text: str) -> str:
    """Without the mixture, which hands no priorities on."""
    text = text.replace("dataset = @MixtureOfDatasets()", "dataset = @own/DiskTrajDataset()")
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("Mixture", "demos/")))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mixture": ({"workers": 2}, ""),
    "dropout": ({"encoder": "TransformerTrajEncoder"}, ""),
    "priorities": ({"priorities": "0.6"}, ""),
    "cut episodes": ({}, "Collector.save_env_state = False\nCheckpointManager.exact_resume = True\n"),
    "cut files": ({}, "Experiment.traj_save_len = 8\nTMazePassive.horizon = 20\n"),
    "drawn seed": ({}, "Experiment.seed = None\n"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_resume_is_exact(tmp_path: Path, demos: Path, case: str) -> None:
    settings, more = CASES[case]
    texts = []
    for name in ("parts", "whole"):
        text = (
            prepared(tmp_path / name, demos, **{"encoder": "GRUTrajEncoder", "workers": 0, **settings}) + more
        )
        texts.append(single(text) if case == "priorities" else text)
    first = configured(tmp_path / "parts", texts[0])
    die_in(first, KILLED_IN)
    second = configured(tmp_path / "parts", texts[0])
    assert second.load_checkpoint() == CHECKPOINT_AFTER
    second.learn()
    second.close()
    whole = configured(tmp_path / "whole", texts[1] + f"Experiment.seed = {first.run_seed}\n")
    whole.learn()
    whole.close()
    assert_same(whole.run_dir, second.run_dir)
    assert list((second.run_dir / "buffer" / "superseded").iterdir())
    if case == "mixture":
        own = "dataset/1-DiskTrajDataset/weight"
        weights = [r[own] for r in metrics(second.run_dir) if own in r]
        assert len(set(weights)) > 3, weights  # else the ramp was not seen


@pytest.mark.slow
def test_kill_9_changes_no_bit(tmp_path: Path, demos: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        text = prepared(folder, demos, encoder="GRUTrajEncoder", workers=2)
        (folder / "exact.gin").write_text(
            text.replace("train_batches_per_epoch = 4", "train_batches_per_epoch = 40")
        )
    run_and_kill(folders, after_epoch=2, last_epoch=EPOCHS - 1)
    assert_same(folders[0] / "exact", folders[1] / "exact")
