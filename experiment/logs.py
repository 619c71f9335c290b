"""Metrics: a JSONL file always, TensorBoard if it is installed, Weights & Biases on request."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch

from .wandb_run import WandbRun

logger = logging.getLogger("loxodon")


def to_plain(value: Any) -> float | int | str | bool | None:
    """A JSON value of a scalar number, array or tensor; NaN and infinities become None."""
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item()
    if isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


@gin.configurable(allowlist=["tensorboard"])
class MetricLogger:
    """Writes figures of one run. Files are opened by the first `log`, so that a resume can choose how.

    Args:
        run_dir: folder of the run; logs go to its `logs/` (and `wandb_logs/`).
        file_name: name of the JSONL file in `logs/`.
        has_tensorboard: False for a process that never writes TensorBoard files.
        tensorboard: whether they are written, if tensorboard is installed.
        wandb: arguments of `wandb.init`, or None to leave Weights & Biases alone.
        wandb_metrics: False keeps the figures from Weights & Biases, whose run is then there for artifacts.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        file_name: str = "metrics.jsonl",
        has_tensorboard: bool = True,
        tensorboard: bool = True,
        wandb: dict[str, Any] | None = None,
        wandb_metrics: bool = True,
    ) -> None:
        self.run_dir, self.path = run_dir, run_dir / "logs" / file_name
        self._wants_tensorboard, self._wandb_metrics = tensorboard and has_tensorboard, wandb_metrics
        self._wandb = None if wandb is None else WandbRun(run_dir, wandb)
        self._resume_at: int | None = None
        self._wandb_id: str | None = None  # of an earlier process, kept even if this one does not use wandb
        self._num_records = 0  # logged so far by this run, by earlier processes too
        self._is_open = False
        self._tensorboard: Any = None

    def log(self, metrics: dict[str, Any], axes: dict[str, Any]) -> None:
        """Append one record of `axes` (epoch, env_steps, ...) and `metrics`; none without metrics."""
        if not metrics:
            return
        if not self._is_open:
            self._open()
        record = {key: to_plain(value) for key, value in {**axes, **metrics}.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in axes}
        if self._tensorboard is not None:
            for key, number in numbers.items():
                self._tensorboard.add_scalar(key, number, int(axes.get("env_steps", 0)))
        if self._wandb is not None and self._wandb_metrics:
            self._wandb.log({**numbers, **axes}, self._num_records)
        self._num_records += 1

    def start_wandb(self) -> Any:
        """The run of Weights & Biases; it is started if that has not happened.

        Raises: ValueError when Weights & Biases is not in use.
        """
        if self._wandb is None:
            raise ValueError(
                "This run does not use Weights & Biases. Fix: set Experiment.log_to_wandb = True, or "
                "Artifacts.store = @WandbStore."
            )
        return self._wandb.start()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if self._resume_at is None:
                _set_aside(self.path)
            else:
                os.truncate(self.path, min(self._resume_at, self.path.stat().st_size))
        # On another machine than before the file is missing, and its records still count.
        self._num_records = max(self._num_records, _count_lines(self.path))
        self._is_open = True
        if self._wants_tensorboard and importlib.util.find_spec("tensorboard") is None:
            logger.info(
                "TensorBoard is not installed, so figures go to %s alone. Fix: pip install tensorboard, or "
                "MetricLogger.tensorboard = False.",
                self.path,
            )
        elif self._wants_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.run_dir / "logs" / "tensorboard"))
        if self._wandb is not None and self._wandb_metrics:
            self._wandb.start()

    def state_dict(self) -> dict[str, Any]:
        """Where the JSONL file and the wandb run stand, so that a resumed run continues both."""
        size = self.path.stat().st_size if self._is_open else (self._resume_at or 0)
        wandb_id = self._wandb_id if self._wandb is None else self._wandb.id
        return {"metrics_bytes": size, "num_records": self._num_records, "wandb_id": wandb_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the records that were there when the state was saved; later ones are dropped."""
        self.close()
        self._resume_at, self._wandb_id = int(state["metrics_bytes"]), state.get("wandb_id")
        self._num_records = int(state.get("num_records", 0))
        if self._wandb is not None:
            self._wandb.id = self._wandb_id

    def close(self) -> None:
        """Close everything; a later `log` continues it."""
        if self._is_open:
            # It is missing if Weights & Biases refused before the first record was written.
            self._resume_at = self.path.stat().st_size if self.path.exists() else 0
            self._is_open = False
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _set_aside(path: Path) -> None:
    """Rename the records of an earlier run of the same name, so that two runs are never mixed in one file."""
    number = 1
    while (moved := path.with_name(f"{path.stem}_old{number}{path.suffix}")).exists():
        number += 1
    path.rename(moved)
    logger.info("%s belonged to an earlier run and is now %s", path, moved.name)
