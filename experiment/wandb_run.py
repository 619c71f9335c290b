"""The run of Weights & Biases that belongs to an experiment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .policy_files import write_text

_AXES = ("epoch", "env_steps", "gradient_steps")


class WandbRun:
    """Started by its first use, continued by its id, and given each record once.

    Weights & Biases can only append. A run that was killed resumes from its checkpoint and makes the records
    after it again; those that were sent before are left out, so that steps neither go back nor repeat.

    Args:
        run_dir: folder of the run; everything that wandb writes goes to its `wandb_logs/`.
        arguments: of `wandb.init`.
    """

    def __init__(self, run_dir: Path, arguments: dict[str, Any]) -> None:
        self.folder = run_dir / "wandb_logs"
        self.id: str | None = None
        self._arguments = arguments
        self._run: Any = None
        self._num_sent = 0

    @property
    def is_started(self) -> bool:
        """True between the first use and `finish`."""
        return self._run is not None

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
            # What the server has counts if this folder is another than before.
            self._num_sent = max(self._read_num_sent(run.id), int(run.step) if run.resumed else 0)
            self.id, self._run = run.id, run
        return self._run

    def log(self, record: dict[str, Any], number: int) -> None:
        """Send a record. number: of records of this experiment before it, which is wandb's own step."""
        run = self.start()
        if number < self._num_sent:
            return
        run.log(record, step=number, commit=True)
        self._num_sent = number + 1
        write_text(self._progress_path, json.dumps({"id": self.id, "num_sent": self._num_sent}) + "\n")

    def finish(self) -> None:
        """End the run; a later use continues it."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _progress_path(self) -> Path:
        return self.folder / "progress.json"

    def _read_num_sent(self, run_id: str) -> int:
        try:
            progress = json.loads(self._progress_path.read_text(encoding="utf-8"))
            return int(progress["num_sent"]) if progress["id"] == run_id else 0
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # none yet, or spoilt: records may repeat
            return 0


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
