"""A run of seconds in a folder of its own, and what its processes left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import pytest

TINY = """
Experiment.run_name = 'tiny'
Experiment.ckpt_base_dir = 'runs'
Experiment.max_seq_len = 8
Experiment.dataset = @DiskTrajDataset()
Experiment.tstep_encoder_type = @FFTstepEncoder
Experiment.traj_encoder_type = @FFTrajEncoder
Experiment.agent_type = @Agent
Experiment.val_timesteps_per_epoch = 4
Experiment.val_interval = 1
Experiment.make_train_env = @TMazePassive
Experiment.make_val_env = @TMazePassive
Experiment.parallel_actors = 2
Experiment.env_mode = 'sync'
Experiment.dloader_workers = 0
Experiment.epochs = 2
Experiment.train_timesteps_per_epoch = 8
Experiment.train_batches_per_epoch = 4
Experiment.batch_size = 2
MetricLogger.tensorboard = False
TMazePassive.horizon = 3
FFTstepEncoder.d_hidden = 8
FFTstepEncoder.d_output = 8
FFTrajEncoder.d_model = 8
Agent.num_critics = 2
Actor.d_hidden = 8
CriticEnsemble.d_hidden = 8
"""


@dataclass(frozen=True)
class TinyRun:
    """The run that `--config tiny.gin` makes in this folder."""

    run_dir: Path

    def records(self, pattern: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """All metric records in log files of these names."""
        texts = [path.read_text() for path in (self.run_dir / "logs").glob(pattern)]
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def actors(self) -> list[str]:
        """Names of the actors' metric files."""
        return sorted(path.name for path in (self.run_dir / "logs").glob("metrics_collect_*.jsonl"))

    def assert_it_has_trained(self, updates: int, num_actors: int) -> None:
        """The learner has made its updates, and every actor has collected."""
        assert max(record["gradient_steps"] for record in self.records()) == updates
        assert len(self.actors()) == num_actors
        assert min(self.records(name)[-1]["env_steps"] for name in self.actors()) > 0


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyRun]:
    """Works in a new folder that holds tiny.gin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("tiny.gin").write_text(TINY)
    yield TinyRun(tmp_path / "runs" / "tiny")
    gin.clear_config()
