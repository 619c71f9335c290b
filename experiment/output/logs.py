"""Metrics: a JSONL file always, TensorBoard if it is installed, Weights & Biases on request."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch

from ..process.exits import close_each
from ..process.versions import import_extra

logger = logging.getLogger("loxodon")
_WANDB_AXES = ("epoch", "env_steps", "gradient_steps")


def to_plain(value: Any) -> float | int | str | bool | None:
    """JSON value of a scalar number, array or tensor; NaN and infinities become None."""
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
    """Writes metrics of one run. Files are opened by the first `log`, so that a resume can choose how.

    Args:
        run_dir: folder of the run; logs go to its `logs/` (and `wandb_logs/`).
        file_name: name of the JSONL file in `logs/`.
        has_tensorboard: False for a process that never writes TensorBoard files.
        tensorboard: whether they are written, if tensorboard is installed.
        wandb: arguments of `wandb.init`, or None to leave Weights & Biases alone.
        wandb_metrics: False does not send metrics to Weights & Biases; its run is then only for artifacts.
        x_axis: the axis over which TensorBoard and Weights & Biases draw metrics.

    Raises: ImportError if `wandb` is asked for and not installed.
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
        x_axis: str = "env_steps",
    ) -> None:
        self._x_axis = x_axis
        self.run_dir, self.path = run_dir, run_dir / "logs" / file_name
        if wandb is not None:
            import_extra("wandb", "loxodon[wandb]")
        self._wants_tensorboard = tensorboard and has_tensorboard
        self._wandb_arguments, self._sends_metrics = wandb, wandb is not None and wandb_metrics
        self._wandb_id: str | None = None  # kept even by a process that does not use it
        self._wandb_run: Any = None
        self._resume_at: int | None = None
        self._num_records = 0  # number of records of this run, including earlier processes
        self._is_open = False
        self._tensorboard: Any = None

    def log(self, metrics: dict[str, Any], axes: dict[str, Any]) -> None:
        """Append one record of `axes` (epoch, env_steps, ...) and `metrics`; does nothing without metrics."""
        if not metrics:
            return
        if not self._is_open:
            self._open()
        record = {key: to_plain(value) for key, value in {**axes, **metrics}.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been deleted
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in axes}
        if self._tensorboard is not None:
            for key, number in numbers.items():
                self._tensorboard.add_scalar(key, number, int(axes.get(self._x_axis, 0)))
        if self._sends_metrics:
            run = self.start_wandb()
            # wandb drops records with an earlier step than before. A killed process may have sent more
            # records, and an offline run does not know the last step of the previous one.
            run.log({**numbers, **axes}, step=max(self._num_records, run.step), commit=True)
        self._num_records += 1

    def start_wandb(self) -> Any:
        """The run of Weights & Biases; its first use starts it, and its id continues it in later processes.

        Weights & Biases can only append: a run that was killed and resumes from its checkpoint sends the
        records after it again. They share their env_steps, over which metrics are drawn.

        Raises: ValueError if it is not in use, or cannot start, for example without a login.
        """
        if self._wandb_run is not None:
            return self._wandb_run
        if self._wandb_arguments is None:
            raise ValueError(
                "This run does not use Weights & Biases. Fix: set Experiment.log_to_wandb = True, or "
                "Artifacts.store = @WandbStore."
            )
        import wandb

        folder = self.run_dir / "wandb_logs"
        try:
            with wandb_files_in(folder):
                run = wandb.init(dir=str(folder), id=self._wandb_id, resume="allow", **self._wandb_arguments)
        except wandb.Error as error:
            raise ValueError(
                f"Weights & Biases did not start: {error}. Fix: run `wandb login`, set WANDB_MODE=offline "
                "(`wandb sync` uploads the run later), or set Experiment.log_to_wandb = False."
            ) from error
        for axis in _WANDB_AXES:
            run.define_metric(axis)
        run.define_metric("*", step_metric=self._x_axis)
        self._wandb_id, self._wandb_run = run.id, run
        return run

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if self._resume_at is None:
                _set_aside(self.path)
            else:
                _cut(self.path, self._resume_at)
        self._is_open = True
        if self._wants_tensorboard and importlib.util.find_spec("tensorboard") is None:
            logger.info(
                "TensorBoard is not installed, so metrics are written to %s only. Fix: pip install "
                "'loxodon[tensorboard]', or set MetricLogger.tensorboard = False.",
                self.path,
            )
        elif self._wants_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.run_dir / "logs" / "tensorboard"))
        if self._sends_metrics:
            self.start_wandb()

    def state_dict(self) -> dict[str, Any]:
        """Positions in the JSONL file and the wandb run, so that a resumed run continues both."""
        size = self._resume_at or 0
        if self._is_open:
            size = self.path.stat().st_size if self.path.exists() else 0
        return {"metrics_bytes": size, "num_records": self._num_records, "wandb_id": self._wandb_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the records that were there when the state was saved; later ones are dropped."""
        self.close()
        self._resume_at, self._num_records = int(state["metrics_bytes"]), int(state.get("num_records", 0))
        self._wandb_id = state.get("wandb_id")

    def close(self) -> None:
        """Close everything; a later `log` continues it."""
        if self._is_open:
            # The file is missing if Weights & Biases refused before the first record was written.
            self._resume_at = self.path.stat().st_size if self.path.exists() else 0
            self._is_open = False
        tensorboard, self._tensorboard = self._tensorboard, None
        wandb_run, self._wandb_run = self._wandb_run, None
        if tensorboard is not None:
            close_each([("TensorBoard writer", tensorboard.close)])
        if wandb_run is not None:
            close_each([("Weights & Biases run", wandb_run.finish)])


def _cut(path: Path, num_bytes: int) -> None:
    """Shorten a file of records; one that a power cut has shortened further ends with a whole record."""
    with path.open("r+b") as file:
        kept = file.read(num_bytes)
        file.truncate(kept.rfind(b"\n") + 1)


def _set_aside(path: Path) -> None:
    """Rename the records of an earlier run of the same name, so that two runs are never mixed in one file."""
    number = 1
    while (moved := path.with_name(f"{path.stem}_old{number}{path.suffix}")).exists():
        number += 1
    path.rename(moved)
    logger.info("%s belonged to an earlier run and was renamed to %s", path, moved.name)


@contextlib.contextmanager
def wandb_files_in(folder: Path) -> Iterator[None]:
    """Let wandb keep its copies and caches in `folder`, unless the environment sets their place."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"WANDB_DATA_DIR": "data", "WANDB_CACHE_DIR": "cache"}
    ours = {name: str(folder.absolute() / sub) for name, sub in places.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
