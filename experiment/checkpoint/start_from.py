"""Starting from the results of another run: `Experiment.restore_from` and `WarmStart`."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gin

from ..artifacts.stores import ArtifactStore, find_artifact
from ..callbacks import Callback
from ..contracts import Run, RunContext
from ..process.distributed import from_main
from ..process.files import check_tree
from .policy_file import load_what_fits, read_policy
from .spaces import check_spaces
from .store import TrainingState, find_files

logger = logging.getLogger("loxodon")
_WEIGHTS_SUFFIX = ".safetensors"


def is_path(reference: str) -> bool:
    """True if this refers to a file or folder and not to an artifact."""
    if reference.startswith(("/", "./", "../", "~")) or reference.endswith(_WEIGHTS_SUFFIX):
        return True
    return "/" in reference and ":" not in reference and Path(reference).exists()


@contextmanager
def fetched(
    reference: str, name: str, ctx: RunContext, store: ArtifactStore | None
) -> Iterator[tuple[Path, str | None]]:
    """Local path of a reference, for all processes, for the duration of the block.

    Args:
        reference: a path, or an artifact of `store`, which is fetched to a folder next to the checkpoints.
        name: gin name of the setting, for errors.
        ctx: context of this run.
        store: store of the main process.

    Yields: a training state (a folder) or weights (a file), and the run it belongs to if that is known.

    Raises: FileNotFoundError, listing what exists; TypeError for a reference that is not a text.
    """
    if not (isinstance(reference, str) and reference):
        raise TypeError(
            f"{name} is {reference!r}, but must be None or a string. Fix: set it to 'latest', "
            "'other-run:best' or a path such as './runs/base/ckpts/best/policy.safetensors'."
        )
    folder = ctx.run_dir / "ckpts" / "restored"
    yield from_main(lambda: _fetch(reference, name, ctx, store, folder), ctx.accelerator)
    ctx.accelerator.wait_for_everyone()
    if ctx.is_main:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(
    reference: str, name: str, ctx: RunContext, store: ArtifactStore | None, folder: Path
) -> tuple[Path, str | None]:
    if is_path(reference):
        path = find_files(Path(reference).expanduser(), name)
        is_own = path.resolve().is_relative_to(folder.parent.resolve())
        return path, ctx.run_name if is_own else None
    if store is None:
        raise ValueError(
            f"{name} = {reference!r} names an artifact, but this run has no store. Fix: set "
            "Artifacts.store = @UrlStore and UrlStore.url, or give a path, which begins with "
            "'/', './' or '~'."
        )
    info = find_artifact(store, reference, ctx.run_name)
    shutil.rmtree(folder, ignore_errors=True)
    ctx.console.say(f"Fetching {info.reference} from {store!r}.")
    stored = store.get(info.reference, folder)
    check_tree(stored)  # anybody with write access to the store may have made it
    return find_files(stored, name), info.name.partition("/")[0]


def as_branch(state: TrainingState) -> TrainingState:
    """The state from which a new run continues another run's training state.

    Counters, optimizer, generators and callbacks are those of the base run. Data, records, best score,
    episodes and files begin anew.
    """
    shared = {name: part for name, part in state.shared.items() if name not in ("dataset", "logs")}
    anew = {"best_score": None, "val_return": None, "is_finished": False}
    shared["progress"] = {**shared["progress"], **anew}
    own, inherited = _without_rollout(state.own), list(map(_without_rollout, state.inherited))
    metadata = {**state.metadata, "run_id": None}
    return dataclasses.replace(state, shared=shared, own=own, inherited=inherited, metadata=metadata)


def _without_rollout(own: dict[str, Any]) -> dict[str, Any]:
    """The state of one process; of the collector's state, only that of exploration remains."""
    if (collector := own.get("collector")) is None:
        return own
    return {**own, "collector": {**collector, "rollout": None, "sinks": [[] for _ in collector["sinks"]]}}


@gin.configurable
class WarmStart(Callback):
    """Starts a new run with the fitting weights of another run; counters and optimizer are new.

    Every run has one; set `WarmStart.source` to use it.

    Args:
        source: a path or an artifact, as in Experiment.restore_from; None disables it.
    """

    def __init__(self, source: str | None = None) -> None:
        self.source = source

    def on_model_init_start(self, run: Run) -> None:
        """Raise ValueError if the run has another starting point too."""
        if self.source is not None and run.restore_from is not None:
            raise ValueError(
                "Experiment.restore_from and WarmStart.source are both set, but a run can begin from only "
                "one of them. Fix: remove WarmStart.source to take all weights, or restore_from to take "
                "those that fit."
            )

    def on_start(self, run: Run) -> None:
        """Load the weights that fit, and print which do and which do not.

        Raises: FileNotFoundError; ValueError if they are for another environment, or nothing fits.
        """
        if self.source is None or not run.begins_anew or run.ctx.role.is_actor or run.test_run:
            return
        with run.fetched(self.source, "WarmStart.source") as (found, _):
            path = found / "model.safetensors" if found.is_dir() else found
            info, weights = read_policy(path)
            check_spaces(
                info.env_spaces(),
                run.env_spaces,
                what=f"WarmStart.source: {path}",
                fix="name a policy of an environment with these spaces.",
            )
            line = load_what_fits(run.policy, weights, str(path))
            run.learner.on_weights_loaded()
        logger.info("Warm start from %s: %s.", self.source, line)
