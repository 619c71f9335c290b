"""Checkpoints and policy files of a run: complete or absent, never half.

Folders, all in `<run_dir>/ckpts/`:
  training_states/<name>_epoch_<n>/: model.safetensors, trainer.safetensors, state.json, metadata.json,
    rank_<r>.safetensors, rank_<r>.json, and COMPLETE with the sizes and checksums of the others;
    <name> was that of the run when it was written, and may be any
  policy_weights/policy_epoch_<n>.safetensors
  latest/policy.safetensors: atomically replaced, carries a version number
  best/policy.safetensors: best value so far of the figure `CheckpointManager.best_by`
  config.txt: the operative gin config; versions.json: beside other facts, the id of the run

The folder belongs to one run, from a fresh start through all its resumptions. Another fresh start under its
name moves everything to `<run_dir>/ckpts_old<n>/`.

No file holds a pickled object, and none is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from .policy_files import (
    PolicyInfo,
    fsync,
    load_weights,
    plain_tensors,
    policy_header,
    read_info,
    write_policy,
    write_text,
)
from .tensor_tree import load_tree, save_tree

__all__ = ["MARKER", "CheckpointManager", "PolicyInfo", "TrainingState", "load_weights", "write_text"]

MARKER = "COMPLETE"
_CHUNK_BYTES = 1 << 20
_STATE_NAME = re.compile(r".+_epoch_(\d+)")


@dataclass
class TrainingState:
    """Everything a run needs to go on, beside the model.

    trainer: optimizer and scaler (tensors and plain values). shared: JSON values, equal for all processes.
    rank_tensors, rank_values: what each process has for itself, the second as JSON values.
    metadata: JSON values that say what the run was made with; see metadata.py.
    """

    trainer: dict[str, Any]
    shared: dict[str, Any]
    rank_tensors: dict[str, Any]
    rank_values: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)


@gin.configurable(allowlist=["best_by", "lowest_is_best", "on_mismatch"])
class CheckpointManager:
    """Reads and writes the `ckpts` folder of one run. Only the main process writes shared files.

    Args:
        run_dir: folder of the run.
        run_name: part of the names of checkpoints.
        rank: number of this process. num_ranks: how many train together.
        facts: called when a policy file is written, for what its header says beside version and epoch.
        best_by: name of the logged figure that the best policy is judged by; the policy is that of the moment
            in which the figure is logged.
        lowest_is_best: whether a lower figure is a better one.
        on_mismatch: what is done with a checkpoint of another major version of Loxodon (before 1.0: minor):
            "error" refuses it, "warn" only says so, as of all other versions.

    Attributes:
        run_id: names one run from its fresh start on. None before it has begun, or gone on from a
            checkpoint; then the run that is on disk counts as the own one.
        has_begun: `begin_run` was called since then, so this folder may be written to.

    Raises: ValueError for another on_mismatch.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        facts: Callable[[], Mapping[str, str]] = dict,
        best_by: str = "val/return",
        lowest_is_best: bool = False,
        on_mismatch: str = "error",
    ) -> None:
        if on_mismatch not in ("error", "warn"):
            raise ValueError(
                f"CheckpointManager.on_mismatch is {on_mismatch!r}, allowed are 'error' and 'warn'. "
                "Fix: bind one of these."
            )
        self.best_by, self.lowest_is_best, self.on_mismatch = best_by, lowest_is_best, on_mismatch
        self.root, self.run_name, self.rank, self.num_ranks = run_dir / "ckpts", run_name, rank, num_ranks
        self.facts = facts
        self.run_id: str | None = None
        self.has_begun = False
        self.states_dir = self.root / "training_states"
        self.weights_dir = self.root / "policy_weights"
        self.latest_path = self.root / "latest" / "policy.safetensors"
        self.best_path = self.root / "best" / "policy.safetensors"
        self.config_path = self.root / "config.txt"
        self.versions_path = self.root / "versions.json"

    def make_folders(self, *, clean: bool) -> None:
        """Make the folders; with `clean`, finish or remove what an interrupted save left."""
        for folder in (self.states_dir, self.weights_dir, self.latest_path.parent, self.best_path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if clean and self.rank == 0:
            for old in self.states_dir.glob("*.replaced"):
                final = old.with_suffix("")
                shutil.rmtree(old) if final.exists() else old.rename(final)
            for temp in self.states_dir.glob("*.tmp"):
                shutil.rmtree(temp, ignore_errors=True)

    # ---- whose folder this is ----

    def begin_run(self) -> Path | None:
        """Make sure that only this run's files are here; called in a learner before anything is written.

        Returns the folder to which those of an earlier run were moved; None if there were none.
        """
        self.has_begun = True
        if self.rank != 0:
            return None
        is_fresh, found = self.run_id is None, self._run_on_disk()
        self.run_id = self.run_id or uuid.uuid4().hex
        folders = (self.states_dir, self.weights_dir, self.latest_path.parent, self.best_path.parent)
        has_files = any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
        if not has_files or not (is_fresh or found not in (None, self.run_id)):
            return None
        number = 1
        while (old := self.root.with_name(f"ckpts_old{number}")).exists():
            number += 1
        old.mkdir()
        texts = self.config_path, self.root / "config_requested.txt", self.versions_path
        for path in (*folders, *texts):  # artifacts that are under way stay
            if path.exists():
                path.rename(old / path.name)
        self.make_folders(clean=False)
        return old

    def go_on_with(self, run_id: str | None) -> None:
        """Be the run of a checkpoint that was loaded; None for a new one."""
        self.run_id, self.has_begun = run_id, False

    def _run_on_disk(self) -> str | None:
        return _json_of(self.versions_path).get("run_id")

    # ---- full training states ----

    def state_dir(self, epoch: int) -> Path:
        """Folder of the checkpoint after epoch `epoch`."""
        return self._states().get(epoch, self.states_dir / f"{self.run_name}_epoch_{epoch}")

    def complete_epochs(self) -> list[int]:
        """Epochs of this run that have a complete checkpoint, ascending."""
        return sorted(self._states())

    def _states(self) -> dict[int, Path]:
        """Complete checkpoints of this run, by epoch."""
        own = self.run_id or self._run_on_disk()
        found = {}
        for marker in self.states_dir.glob(f"*_epoch_*/{MARKER}"):
            match = _STATE_NAME.fullmatch(marker.parent.name)
            # What cannot be read is counted in, so that somebody hears of the damage.
            if match and own in (None, about(marker.parent).get("run_id", own)):
                found[int(match[1])] = marker.parent
        return found

    def newest_epoch(self) -> int:
        """Epoch of the newest complete checkpoint.

        Raises: FileNotFoundError when there is none.
        """
        epochs = self.complete_epochs()
        if not epochs:
            old = sorted(path.name for path in self.root.parent.glob("ckpts_old*"))
            earlier = f" (runs before the newest start are in {', '.join(old)})" if old else ""
            raise FileNotFoundError(
                f"{self.states_dir} has no complete checkpoint{earlier}. Fix: start without --resume, or "
                "check that run_name and ckpt_base_dir are those of the run to continue."
            )
        return epochs[-1]

    def newest_intact_epoch(self) -> tuple[int, list[str]]:
        """Epoch of the newest checkpoint whose files are as they were written, and why newer ones were not.

        Raises: FileNotFoundError when there is none; ValueError when all are damaged.
        """
        self.newest_epoch()
        problems: list[str] = []
        for epoch in reversed(self.complete_epochs()):
            problem = damage(self.state_dir(epoch))
            if problem is None:
                return epoch, problems
            problems.append(f"{self.state_dir(epoch)} is damaged: {problem}")
        raise ValueError(
            f"No checkpoint can be resumed from. {'; '.join(problems)}. Fix: restore one from a copy, load "
            f"only weights, from {self.weights_dir}, or start anew without --resume."
        )

    def write_rank_files(self, epoch: int, state: TrainingState) -> None:
        """First half of a save, called by every process: its own part, into the temporary folder.

        Raises: OSError if it cannot be written; earlier checkpoints are as before then.
        """
        with self._saving(epoch) as temp:
            temp.mkdir(parents=True, exist_ok=True)
            save_tree(state.rank_tensors, temp / f"rank_{self.rank}.safetensors")
            (temp / f"rank_{self.rank}.json").write_text(json.dumps(state.rank_values))

    def commit(self, epoch: int, model: nn.Module, state: TrainingState) -> Path:
        """Second half, called by the main process when all have written: model, optimizer, marker, rename.

        One with `is_interim` in its metadata is deleted when there is a newer one, and has no policy weights.

        Raises: OSError if it cannot be written; earlier checkpoints are as before then.
        """
        final, header = self.state_dir(epoch), policy_header(PolicyInfo(0, epoch, False), self.facts())
        tensors = plain_tensors(model)
        with self._saving(epoch) as temp:
            save_file(tensors, temp / "model.safetensors", metadata=header)
            save_tree(state.trainer, temp / "trainer.safetensors")
            (temp / "state.json").write_text(json.dumps(state.shared, indent=1))
            (temp / "metadata.json").write_text(json.dumps(state.metadata, indent=1))
            for path in temp.iterdir():
                fsync(path)
            (temp / MARKER).write_text(json.dumps({"files": _contents(temp)}, indent=1))
            fsync(temp / MARKER)
            fsync(temp)
            replaced = final.with_name(final.name + ".replaced")
            if final.exists():
                final.rename(replaced)
            temp.rename(final)
            fsync(self.states_dir)
            shutil.rmtree(replaced, ignore_errors=True)
        if not state.metadata.get("is_interim"):
            write_policy(self.weights_dir / f"policy_epoch_{epoch}.safetensors", tensors, header)
        return final

    def prune(self, keep: int | None, keep_every: int | None = None) -> None:
        """Delete interim training states but the newest, and others but the newest `keep`; None keeps all.

        Policy weights stay. keep_every: those after a multiple of so many epochs stay too.
        """
        states = sorted(self._states().items())
        doomed = [one for one in states[:-1] if about(one[1]).get("is_interim")]
        lasting = [one for one in states if one not in doomed]
        for epoch, folder in lasting[: -keep if keep is not None else 0]:
            if keep_every is None or (epoch + 1) % keep_every != 0:
                doomed.append((epoch, folder))
        for _, folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)

    def read(self, folder: Path) -> TrainingState:
        """All of a complete checkpoint except the weights, which are in its `model.safetensors`.

        Raises: FileNotFoundError if the folder is missing or incomplete; ValueError if it is damaged or the
        number of processes differs.
        """
        self._require_intact(folder)
        own = folder / f"rank_{self.rank}.json"
        if not own.exists() or (folder / f"rank_{self.num_ranks}.json").exists():
            saved = len(list(folder.glob("rank_*.json")))
            raise ValueError(
                f"The checkpoint {folder} was saved by {saved} process(es), this run has {self.num_ranks}. "
                f"Fix: launch {saved} process(es), or load the weights only (resume_training_state=False)."
            )
        return TrainingState(
            trainer=load_tree(folder / "trainer.safetensors"),
            shared=json.loads((folder / "state.json").read_text()),
            rank_tensors=load_tree(own.with_suffix(".safetensors")),
            rank_values=json.loads(own.read_text()),
            metadata=about(folder),
        )

    def _require_intact(self, folder: Path) -> None:
        if not (folder / MARKER).exists():
            found = "is incomplete" if folder.exists() else "does not exist"
            raise FileNotFoundError(
                f"The checkpoint {folder} {found}. Complete ones are of epochs {self.complete_epochs()}. "
                "Fix: choose one of these."
            )
        problem = damage(folder)
        if problem is not None:
            raise ValueError(
                f"The checkpoint {folder} is damaged: {problem}. Complete ones are of epochs "
                f"{self.complete_epochs()}. Fix: choose another, or none to take the newest that is intact."
            )

    def _temp_dir(self, epoch: int) -> Path:
        return self.states_dir / f"{self.run_name}_epoch_{epoch}.tmp"

    @contextlib.contextmanager
    def _saving(self, epoch: int) -> Iterator[Path]:
        """The temporary folder of a save; if that fails, everything is as before it and the error says so."""
        temp, final = self._temp_dir(epoch), self.state_dir(epoch)
        try:
            yield temp
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                replaced = final.with_name(final.name + ".replaced")
                if replaced.exists() and not final.exists():
                    replaced.rename(final)
            shutil.rmtree(temp, ignore_errors=True)
            epochs = self.complete_epochs()
            there_are = f"Intact ones are of epochs {epochs}" if epochs else "There is no earlier one"
            raise OSError(
                f"The checkpoint of epoch {epoch} could not be written to {self.states_dir}: {error}. "
                f"{there_are}. Fix: make space on that disk, or restore the folder and its permissions, and "
                f"{'go on with --resume' if epochs else 'start again'}."
            ) from error

    # ---- policy files ----

    def better_score(self, figures: Mapping[str, Any], best: float | None) -> float | None:
        """The score among logged figures, if there is one and it is better than `best`; else None."""
        score = float(figures.get(self.best_by, math.nan))
        if math.isnan(score):
            return None
        is_better = best is None or (score < best if self.lowest_is_best else score > best)
        return score if is_better else None

    def save_policy(self, path: Path, model: nn.Module, info: PolicyInfo) -> None:
        """Replace a weights file atomically. Raises: OSError if it cannot be written."""
        write_policy(path, plain_tensors(model), policy_header(info, self.facts()))

    def policy_info(self, path: Path) -> PolicyInfo | None:
        """Header of a policy file, or None when there is no file."""
        return read_info(path)

    def write_config(self, text: str) -> None:
        """Write `config.txt` atomically."""
        write_text(self.config_path, text)


def about(folder: Path) -> dict[str, Any]:
    """The metadata of a checkpoint; empty if there is none that can be read."""
    return _json_of(folder / "metadata.json")


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a complete checkpoint; None if they are as they were written."""
    try:
        files = json.loads((folder / MARKER).read_text())["files"].items()
        for name, (num_bytes, checksum) in files:
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != num_bytes:
                return f"{name} has {path.stat().st_size} bytes instead of {num_bytes}"
            if _crc32(path) != checksum:
                return f"the content of {name} does not have the checksum it was written with"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its marker {MARKER} cannot be read ({error})"
    except OSError as error:
        return str(error)
    return None


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size in bytes and CRC-32 of every file of a folder, by name."""
    return {path.name: (path.stat().st_size, _crc32(path)) for path in sorted(folder.iterdir())}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
