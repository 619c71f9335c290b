"""What an experiment stores as artifacts, and when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gin

from .outbox import Outbox
from .store import POLICY, STATE, ArtifactStore, RunAccess

if TYPE_CHECKING:
    from ..experiment import Experiment

LATEST, BEST = "latest", "best"
STATE_FOLDER, POLICY_FILE, CONFIG_FILE = "training_state", "policy.safetensors", "config.txt"
_STOP_S = 5.0  # a preempted process has seconds; what is not stored then waits on disk


class Publisher:
    """Hands checkpoints (alias `latest`) and the best policy (alias `best`) to the run's store, if any.

    Attributes:
        store: the store, in every process that may restore from it; None without Experiment.artifact_store.
    """

    def __init__(self, exp: Experiment) -> None:
        self.store: ArtifactStore | None = None
        self._outbox: Outbox | None = None
        if exp.artifact_store is None or exp.mode == "collect" or not exp.accelerator.is_main_process:
            return
        self.store = exp.artifact_store()
        self.store.attach(
            RunAccess(
                exp.run_dir,
                exp.run_name,
                exp.wandb_project,
                exp.wandb_entity,
                start_wandb=lambda: exp.metric_logger.start_wandb(),  # noqa: PLW0108 - it is made after this
            )
        )
        self._outbox = Outbox(exp.checkpoints.root / "artifacts_pending", self.store)

    @property
    def needs_wandb(self) -> bool:
        """True if the store cannot work without a run of Weights & Biases."""
        return self.store is not None and self.store.needs_wandb

    def store_state(self, exp: Experiment, folder: Path, epoch: int) -> None:
        """Store a complete training state and the operative config."""
        self._submit(exp, STATE, {STATE_FOLDER: folder}, {"checkpoint_epoch": epoch}, LATEST)

    def store_best(self, exp: Experiment) -> None:
        """Store the weights that have just had the best evaluation so far."""
        self._submit(exp, POLICY, {POLICY_FILE: exp.checkpoints.best_path}, {}, BEST)

    def close(self, is_urgent: bool = False) -> None:
        """Finish what is under way; is_urgent: for a few seconds at most."""
        if self._outbox is not None:
            self._outbox.close(_STOP_S if is_urgent else None)

    def _submit(
        self, exp: Experiment, what: str, files: dict[str, Path], facts: dict[str, Any], alias: str
    ) -> None:
        if self._outbox is None:
            return
        metadata = {
            "what": what,
            "run": exp.run_name,
            "seed": exp.ctx.progress.seed,
            **exp.x_axis_metrics(),
            **facts,
        }
        metadata["best_score"] = exp.best_score
        self._outbox.submit(
            f"{exp.run_name}/{what}",
            {**files, CONFIG_FILE: gin.operative_config_str()},
            metadata=metadata,
            aliases=[alias],
        )
