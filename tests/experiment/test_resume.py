"""A run that dies or ends, and is resumed, has the same weights and records, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest
import torch

from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.policy_file import read_policy
from loxodon.experiment.config import load_config

from .fakes import CountingEnv, die_in, make_experiment, metrics, run
from .processes import kill_and_resume

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
own/RLDataset.sampler = @{sampler}()
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
Experiment.lr_schedule = @TorchSchedule()
TorchSchedule.scheduler = 'CosineAnnealingWarmRestarts'
TorchSchedule.num_steps = 6
TorchSchedule.settings = {{'T_0': 4}}
Experiment.seed = 11
Experiment.deterministic = True
Experiment.torch_threads = 1
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


def single(text: str) -> str:
    """The config without the mixture, which does not pass priorities on."""
    text = text.replace("dataset = @MixtureOfDatasets()", "dataset = @own/DiskTrajDataset()")
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("Mixture", "demos/")))


def config(folder: Path, encoder: str = "GRUTrajEncoder", **settings: Any) -> str:
    values = {"workers": 0, "sampler": "Sampler", "epochs": EPOCHS, **settings}
    return CONFIG.format(folder=folder, encoder=encoder, **values) + ENCODERS[encoder]


def learned(folder: Path, text: str, *, resumes: bool = False, dies: bool = False) -> Experiment:
    """A run of this config, in its own folder."""
    (folder / "exact.gin").write_text(text)
    load_config([str(folder / "exact.gin")])
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    exp.start()
    if resumes:
        assert exp.load_checkpoint() == CHECKPOINT_AFTER
    if dies:
        die_in(exp, KILLED_IN)
    else:
        exp.learn()
        exp.close()
    return exp


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of demonstrations."""
    folder = tmp_path_factory.mktemp("demos")
    text = single(config(folder, epochs=1)).replace("own/DiskTrajDataset.dset_min_size = 6", "")
    learned(folder, f"{text}Experiment.train_batches_per_epoch = 0\nExperiment.run_name = 'demos'\n")
    gin.clear_config()
    return folder / "demos"


def folders(tmp_path: Path, demos: Path) -> Iterator[Path]:
    for name in ("whole", "parts"):
        shutil.copytree(demos / "buffer", tmp_path / name / "demos" / "buffer")
        yield tmp_path / name


def assert_same(one: Path, two: Path) -> None:
    """Check that the weights of the last checkpoints are bit-equal, and so are all records."""
    names = [run_dir / "ckpts/policy_weights/policy_epoch_5.safetensors" for run_dir in (one, two)]
    first, second = (read_policy(path)[1] for path in names)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert metrics(one) == metrics(two)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mixture, drawn seed": ({}, "Experiment.seed = None\n"),
    "dropout, priorities": ({"encoder": "TransformerTrajEncoder", "sampler": "PrioritySampler"}, ""),
    "cut episodes": ({}, "Collector.save_env_state = False\nCheckpointManager.exact_resume = True\n"),
    "choice of discounts, bonus": (
        {},
        "Agent.acting = @ActByReturn()\nRewardShaping.bonus = @NoveltyBonus()\n",
    ),
    "cut files, averaged weights": (
        {},
        "Experiment.traj_save_len = 8\nTMazePassive.horizon = 20\n"
        "Experiment.weight_average = @WeightAverage\nWeightAverage.rate = 0.1\n",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_resume_is_exact(tmp_path: Path, demos: Path, case: str) -> None:
    settings, more = CASES[case]
    whole, parts = folders(tmp_path, demos)
    texts = [config(folder, **settings) + more for folder in (whole, parts)]
    texts = [single(text) for text in texts] if "priorities" in case else texts
    first = learned(parts, texts[1], dies=True)
    second = learned(parts, texts[1], resumes=True)
    learned(whole, texts[0] + f"Experiment.seed = {first.run_seed}\n")
    assert_same(whole / "exact", parts / "exact")
    assert list((second.run_dir / "buffer" / "superseded").iterdir())
    if "mixture" in case:
        own = "dataset/1-DiskTrajDataset/weight"
        weights = [r[own] for r in metrics(second.run_dir) if own in r]
        assert len(set(weights)) > 3, weights  # otherwise the ramp would not be tested


@pytest.mark.slow
@pytest.mark.forked
def test_kill_9_changes_no_bit(tmp_path: Path, demos: Path) -> None:
    whole, parts = folders(tmp_path, demos)
    texts = [config(folder, workers=2) for folder in (whole, parts)]
    (parts / "exact.gin").write_text(texts[1])
    kill_and_resume(parts, after_updates=4 * KILLED_IN + 2)
    learned(whole, texts[0])
    assert_same(whole / "exact", parts / "exact")


def test_a_finished_run_continues_when_epochs_is_raised(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=2))
    longer = run(make_experiment(tmp_path, epochs=4), lambda exp: exp.load_checkpoint())
    assert longer.checkpoints.complete_epochs() == [1, 3]
    assert longer.learner.gradient_steps == 16
    again = run(make_experiment(tmp_path, epochs=4), lambda exp: exp.load_checkpoint())
    assert again.learner.gradient_steps == 16  # nothing was left to do


class DrawingEnv(CountingEnv):
    """Draws its rewards from NumPy's global generator, and offers its state."""

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(np.random.uniform()), *rest  # noqa: NPY002 - that is the point

    def get_state(self) -> dict[str, Any]:
        return {"episode": self.episode, "timestep": self.timestep}

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_seed_repeats_a_run_whose_environments_draw_from_global_generators(
    tmp_path: Path, mode: str
) -> None:
    settings: dict[str, Any] = {
        "make_train_env": EnvSpec(DrawingEnv),
        "make_val_env": EnvSpec(DrawingEnv),
        "env_mode": mode,
        "async_env_mp_context": "fork",
        "epochs": 4,
        "AsyncVectorEnv.num_workers": 2,
        "CheckpointManager.exact_resume": True,
    }
    whole = run(make_experiment(tmp_path / "whole", **settings))
    dying = make_experiment(tmp_path / "parts", **settings)
    dying.start()
    die_in(dying, 3)
    for envs in (dying.val_envs, dying.train_envs):
        envs.close()
    parts = run(make_experiment(tmp_path / "parts", **settings), lambda exp: exp.load_checkpoint())
    assert metrics(parts.run_dir) == metrics(whole.run_dir)
