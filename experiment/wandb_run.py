"""The run of Weights & Biases that belongs to an experiment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_AXES = ("epoch", "env_steps", "gradient_steps")


class WandbRun:
    """Started by its first use and continued by its id.

    Weights & Biases can only append: a run that was killed and resumes from its checkpoint sends the records
    after it again. They share their env_steps, over which figures are drawn.

    Args:
        run_dir: folder of the run; everything that wandb writes goes to its `wandb_logs/`.
        arguments: of `wandb.init`.
    """

    def __init__(self, run_dir: Path, arguments: dict[str, Any]) -> None:
        self.folder = run_dir / "wandb_logs"
        self.id: str | None = None
        self._arguments = arguments
        self._run: Any = None

    def start(self) -> Any:
        """The run of wandb; the first call starts it.

        Raises: ValueError if wandb cannot, as without a login.
        """
        if self._run is None:
            import wandb

            try:
                with wandb_files_in(self.folder):
                    run = wandb.init(dir=str(self.folder), id=self.id, resume="allow", **self._arguments)
            except wandb.Error as error:
                raise ValueError(
                    f"Weights & Biases did not start: {error}. Fix: `wandb login`, or set WANDB_MODE=offline "
                    "(`wandb sync` sends it later), or leave it out: Experiment.log_to_wandb = False."
                ) from error
            for axis in _AXES:
                run.define_metric(axis)
            run.define_metric("*", step_metric="env_steps")
            self.id, self._run = run.id, run
        return self._run

    def log(self, record: dict[str, Any], number: int) -> None:
        """Send a record. number: of records of this experiment before it.

        That is wandb's own step, or the next one where a killed process has sent more: wandb drops what comes
        with an earlier step, and an offline run does not know where the one before it has stopped.
        """
        run = self.start()
        run.log(record, step=max(number, run.step), commit=True)

    def finish(self) -> None:
        """End the run; a later use continues it."""
        if self._run is not None:
            self._run.finish()
            self._run = None


@contextlib.contextmanager
def wandb_files_in(folder: Path) -> Iterator[None]:
    """Let wandb keep its copies and caches in `folder`, unless the environment says where."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"WANDB_DATA_DIR": "data", "WANDB_CACHE_DIR": "cache"}
    ours = {name: str(folder.absolute() / sub) for name, sub in places.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
