"""How a run begins from an artifact or from files: `Experiment.restore_from`."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from .. import resume
from ..checkpoints import MARKER
from ..metadata import check_metadata
from ..policy_files import load_weights
from .publishing import POLICY_FILE, STATE_FOLDER
from .store import ArtifactStore, find_artifact

if TYPE_CHECKING:
    from ..experiment import Experiment

logger = logging.getLogger("loxodon")
_WEIGHTS_SUFFIX = ".safetensors"


def check_artifact_settings(artifact_store: Any, restore_from: Any, name: str = "restore_from") -> None:
    """Raise for settings of the artifacts that cannot work, before anything is built."""
    is_store = isinstance(artifact_store, ArtifactStore)
    if artifact_store is not None and (is_store or not callable(artifact_store)):
        raise TypeError(
            f"Experiment.artifact_store is {artifact_store!r}, but must be what makes a store. Fix: set "
            "Experiment.artifact_store = @FolderStore (without parentheses) and FolderStore.root."
        )
    if restore_from is None:
        return
    if not isinstance(restore_from, str) or not restore_from:
        raise TypeError(
            f"Experiment.{name} is {restore_from!r}, but must be None or a text. Fix: set it to "
            "'latest', 'other-run:best' or a path such as './runs/base/ckpts/best/policy.safetensors'."
        )
    if artifact_store is None and not is_path(restore_from):
        raise ValueError(
            f"Experiment.{name} = {restore_from!r} names an artifact, but this run has no store. Fix: "
            "set Experiment.artifact_store = @FolderStore and FolderStore.root, or give a path, which begins "
            "with '/', './' or '~'."
        )


def is_path(reference: str) -> bool:
    """True if this means a file or folder and not an artifact."""
    if reference.startswith(("/", "./", "../", "~")) or reference.endswith(_WEIGHTS_SUFFIX):
        return True
    return "/" in reference and ":" not in reference and Path(reference).exists()


def restore_if_asked(exp: Experiment) -> None:
    """Begin from what restore_from names: a training state goes on, policy weights are learned on from.

    A training state of another run starts a new branch: counters, optimizer and weights are those of the base
    run; trajectories, metrics, W&B run and best score are this run's own. A collecting process follows the
    learner's weights and restores nothing.

    Raises: FileNotFoundError, listing what exists; ValueError if it does not fit this run.
    """
    if exp.restore_from is None or exp.mode == "collect":
        return
    fetched = exp.checkpoints.root / "restored"
    where: list[Any] = [None, None]
    if exp.accelerator.is_main_process:
        where = list(locate(exp, exp.restore_from, fetched))
    broadcast_object_list(where)
    path, run = where
    is_state = path.is_dir()
    if not is_state:
        exp.load_checkpoint_from_path(path, False)
    elif run == exp.run_name:
        exp.load_checkpoint_from_path(path, True)
    else:
        exp.hooks.around("load_checkpoint", _branch_off, exp, path)
    exp.accelerator.wait_for_everyone()
    if exp.accelerator.is_main_process:
        shutil.rmtree(fetched, ignore_errors=True)
        began = f"the training state, at epoch {exp.epoch}" if is_state else "the weights"
        logger.info("Restored %s, from %s.", began, exp.restore_from)


def locate(
    exp: Experiment, reference: str, folder: Path, name: str = "restore_from"
) -> tuple[Path, str | None]:
    """File or folder to load, and the run it belongs to as far as that is known; artifacts are fetched."""
    if is_path(reference):
        found = find_files(Path(reference).expanduser(), name)
        is_own = found.resolve().is_relative_to(exp.checkpoints.root.resolve())
        return found, exp.run_name if is_own else None
    store = exp.artifacts.store
    assert store is not None  # check_artifact_settings
    info = find_artifact(store, reference, exp.run_name)
    shutil.rmtree(folder, ignore_errors=True)
    exp.ctx.console.say(f"Fetching {info.reference} from {store!r}.")
    return find_files(store.get(info.reference, folder), name), info.name.partition("/")[0]


def find_files(path: Path, name: str = "restore_from") -> Path:
    """The training state (a folder) or weights (a file) at `path`, which may be an artifact's folder.

    Raises: FileNotFoundError if there is neither.
    """
    if path.is_file():
        return path
    for folder in (path, path / STATE_FOLDER):
        if (folder / MARKER).is_file():
            return folder
    if (path / POLICY_FILE).is_file():
        return path / POLICY_FILE
    holds = ", ".join(sorted(one.name for one in path.iterdir())) if path.is_dir() else ""
    found = f"holds neither a training state nor {POLICY_FILE}, but: {holds or 'nothing'}"
    raise FileNotFoundError(
        f"Experiment.{name}: {path} {found if path.is_dir() else 'does not exist'}. Fix: name a "
        f"checkpoint's folder, a {_WEIGHTS_SUFFIX} file, or the folder of an artifact's version."
    )


def _branch_off(exp: Experiment, folder: Path) -> None:
    """Go on from another run's training state with this run's own data, metrics and best score."""
    state = exp.checkpoints.read(folder)
    check_metadata(exp, state.metadata, f"the training state {exp.restore_from}")
    load_weights(exp.policy, folder / "model.safetensors")
    state.shared.update(
        dataset=exp.dataset.state_dict(),
        logs=exp.metric_logger.state_dict(),
        best_score=None,
        is_finished=False,
        run_id=None,
    )
    if (collector := state.rank_tensors["collector"]) is not None:
        collector["rollout"] = None  # a run of its own begins episodes and files of its own
        collector["sinks"] = [[] for _ in collector["sinks"]]
    resume.restore(exp, state)
    exp.metric_logger.begin_anew()
