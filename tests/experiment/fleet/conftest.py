"""A short run in a folder of its own, and the files of its processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..fakes import TINY


@dataclass(frozen=True)
class TinyRun:
    """The run that `--config tiny.gin` makes in this folder."""

    run_dir: Path

    def records(self, pattern: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """All metric records in log files whose names match."""
        texts = [path.read_text() for path in (self.run_dir / "logs").glob(pattern)]
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def actors(self) -> list[str]:
        """Names of the actors' metric files."""
        return sorted(path.name for path in (self.run_dir / "logs").glob("metrics_collect_*.jsonl"))

    def assert_it_has_trained(self, updates: int, num_actors: int) -> None:
        """Check that the learner has made its updates, and that every actor has collected."""
        assert max(record["gradient_steps"] for record in self.records()) == updates
        assert len(self.actors()) == num_actors
        assert min(self.records(name)[-1]["env_steps"] for name in self.actors()) > 0


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """The working folder is a new one that holds tiny.gin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = TINY.replace("epochs = 1", "epochs = 2").replace("batches_per_epoch = 1", "batches_per_epoch = 4")
    Path("tiny.gin").write_text(f"{text}Experiment.val_interval = 1\n")
    return TinyRun(tmp_path / "runs" / "tiny")
