"""Checkpoints and policy files of a run: complete or absent, never half.

Folders, all in `<run_dir>/ckpts/`:
  training_states/<name>_epoch_<n>/: model.safetensors, shared.pt, rank_<r>.pt of each process, metadata.json,
    and COMPLETE with the sizes and checksums of the others; <name> is that of the run when it was written
  policy_weights/policy_epoch_<n>.safetensors
  latest/policy.safetensors: atomically replaced, carries a version number
  best/policy.safetensors: best value so far of the metric `CheckpointManager.best_by`
  config.txt: the operative gin config; versions.json: the id of the run, and other facts

The folder belongs to one run, from a fresh start through all its resumptions. Another fresh start under its
name moves everything to `<run_dir>/ckpts_old<n>/`.

Reading does not run code: weights are safetensors, states are tensors and plain values that torch.load
accepts with weights_only=True.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ...data.errors import FormatError, check_number, visible
from ..artifacts.stores import CONTENT, POLICY, STATE
from ..process.files import fsync, json_object, parse_json, remove_left_over, write_text
from .policy_file import PolicyInfo, plain_tensors, policy_header, write_policy

logger = logging.getLogger("loxodon")
FORMAT_VERSION = 8  # version of training states
MARKER = "COMPLETE"
EVALUATIONS, VIDEOS = "evaluations", "videos"
"""Folders of a run that `loxodon evaluate` fills."""
_SHARED = "shared.pt"
_PLAIN_KINDS = "biufc"  # NumPy kinds: booleans and numbers
_CHUNK_BYTES = 1 << 20
_STATE_NAME = re.compile(r".+_epoch_(\d+)")


@dataclass(frozen=True)
class TrainingState:
    """Everything a run needs to continue, besides the model.

    shared: the states of parts by their names, equal for all processes. own: the separate states of this
    process. metadata: JSON values that describe how the run was made; see record.py. num_ranks: number of
    processes that saved the state. If n processes load it and n differs, process r inherits from the saved
    processes r, r + n, ...: own is from the first one, and inherited holds the states of all of them. If
    there is none, own is from process 0.
    """

    shared: dict[str, Any]
    own: dict[str, Any]
    metadata: dict[str, Any]
    num_ranks: int
    inherited: list[dict[str, Any]]


@gin.configurable(denylist=["run_dir", "run_name", "rank", "num_ranks", "facts"])
class CheckpointManager:
    """Reads and writes the `ckpts` folder of one run. Only the main process writes shared files.

    Args:
        run_dir: folder of the run.
        run_name: part of the names of checkpoints.
        rank: number of this process. num_ranks: number of processes that train together.
        facts: called when a policy file is written; returns header entries besides version and epoch.
        best_by: name of the logged metric that selects the best policy, which is saved when the metric is
            logged.
        lowest_is_best: whether a lower metric is a better one.
        keep: number of newest training states that stay; None for all. keep_every: those after a multiple of
            this many epochs stay too. Policy weights always stay.
        every_minutes: after this many minutes without a checkpoint, and after the first epoch of a run, the
            running epoch ends with one, which is deleted when the next is written. None writes no such
            checkpoints.
        exact_resume: if the training environments are not stored, begin new episodes at every checkpoint. A
            run that was killed and resumed then equals an uninterrupted one, to the last bit, unless
            trajectory files were deleted since the checkpoint (`DiskTrajDataset.dset_max_size`). The price:
            every running episode is cut, and none that is longer than Experiment.ckpt_interval epochs ever
            ends.

    Attributes:
        run_id: name of one run, from its fresh start on. None before the run has begun or resumed from a
            checkpoint; until then, the run on disk counts as this one.
        has_begun: True if `begin_run` was called since then, so this folder may be written to.

    Raises: ValueError or TypeError for a setting that cannot work.
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
        keep: int | None = None,
        keep_every: int | None = None,
        every_minutes: float | None = 5.0,
        exact_resume: bool = False,
    ) -> None:
        check_number("CheckpointManager.keep", keep, lowest=1, whole=True, optional=True)
        check_number("CheckpointManager.keep_every", keep_every, lowest=1, whole=True, optional=True)
        check_number("CheckpointManager.every_minutes", every_minutes, above=0, optional=True)
        self.keep, self.keep_every = keep, keep_every
        self.every_minutes, self.exact_resume = every_minutes, exact_resume
        self.best_by, self.lowest_is_best = best_by, lowest_is_best
        self.root, self.run_name, self.rank, self.num_ranks = run_dir / "ckpts", run_name, rank, num_ranks
        self.facts = facts
        self.run_id: str | None = None
        self.has_begun = False
        self._resumed_at: int | None = None  # epoch of the loaded checkpoint, until the run has begun
        self.states_dir = self.root / "training_states"
        self.weights_dir = self.root / "policy_weights"
        self.latest_path = self.root / "latest" / "policy.safetensors"
        self.best_path = self.root / "best" / "policy.safetensors"
        self._folders = self.states_dir, self.weights_dir, self.latest_path.parent, self.best_path.parent
        self.config_path, self.requested_path = self.root / "config.txt", self.root / "config_requested.txt"
        self.versions_path = self.root / "versions.json"

    def make_folders(self, *, clean: bool) -> None:
        """Make the folders; with `clean`, finish or remove the files of an interrupted save."""
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:  # also for a broken link
                place = next(one for one in (folder, *folder.parents) if one.is_symlink() or one.is_file())
                what = (
                    f"a link to {place.readlink()}, which does not exist" if place.is_symlink() else "a file"
                )
                raise FileExistsError(
                    f"The folder {folder} cannot be created: {place} is {what}. Fix: remove {place}, or "
                    "create the folder that it points to."
                ) from error
        if clean and self.rank == 0:
            self._finish_replacing()
            for folder in self._folders:
                remove_left_over(folder)

    def _finish_replacing(self) -> None:
        """Finish replacing a checkpoint by one of the same epoch: keep the new one if it is complete."""
        for old in self.states_dir.glob("*.replaced"):
            final = old.with_suffix("")
            shutil.rmtree(old) if final.exists() else old.rename(final)

    # ---- ownership of the folder ----

    def begin_run(self) -> Path | None:
        """Make sure that only this run's files are here; a learner calls this before anything is written.

        Returns the folder to which those of an earlier run were moved; None if there were none.
        """
        self.has_begun = True
        if self.rank != 0:
            return None
        is_fresh, found = self.run_id is None, self._run_on_disk()
        self.run_id = self.run_id or uuid.uuid4().hex
        self._set_aside_later()
        has_files = any(folder.is_dir() and any(folder.iterdir()) for folder in self._folders)
        if not has_files or not (is_fresh or found not in (None, self.run_id)):
            return None
        number = 1
        while (old := self.root.with_name(f"ckpts_old{number}")).exists():
            number += 1
        old.mkdir()
        texts = self.config_path, self.requested_path, self.versions_path
        by_policies = self.root.with_name(EVALUATIONS), self.root.with_name(VIDEOS)
        for path in (*self._folders, *texts, *by_policies):  # artifacts that wait for their upload stay
            if path.exists():
                path.rename(old / path.name)
        self.make_folders(clean=False)
        return old

    def continue_run(self, run_id: str | None, folder: Path) -> None:
        """Become the run of the checkpoint that was loaded from a folder; None begins a new run."""
        self.run_id, self.has_begun = run_id, False
        own = {path.resolve(): epoch for epoch, path in self._states().items()}
        self._resumed_at = None if run_id is None else own.get(folder.resolve())

    def _set_aside_later(self) -> None:
        """Move training states after the loaded one to `superseded/`.

        They are damaged, or of a course that the run has left. Otherwise the next resumption would continue
        from there, and `prune` would keep them instead of newer ones.
        """
        epoch, self._resumed_at = self._resumed_at, None
        later = [path for number, path in self._states().items() if epoch is not None and number > epoch]
        for path in later:
            place = self.states_dir / "superseded" / path.name
            place.parent.mkdir(exist_ok=True)
            number = 1
            while place.exists():
                place, number = place.with_name(f"{path.name}_old{number}"), number + 1
            path.rename(place)
        if later:
            logger.info(
                "%d training states after epoch %d are now in %s, because the run continues from there. They "
                "may be deleted.",
                len(later),
                epoch,
                self.states_dir / "superseded",
            )

    def _run_on_disk(self) -> str | None:
        return json_object(self.versions_path).get("run_id")

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
            # Include unreadable checkpoints so that the damage is reported.
            if match and own in (None, read_metadata(marker.parent).get("run_id", own)):
                found[int(match[1])] = marker.parent
        return found

    def newest_epoch(self) -> int:
        """Epoch of the newest complete checkpoint.

        Raises: FileNotFoundError when there is none.
        """
        epochs = self.complete_epochs()
        if not epochs:
            old = sorted(path.name for path in self.root.parent.glob("ckpts_old*"))
            earlier = f" (checkpoints of previous runs are in {', '.join(old)})" if old else ""
            if others := sorted(marker.parent.name for marker in self.states_dir.glob(f"*_epoch_*/{MARKER}")):
                raise FileNotFoundError(
                    f"{self.states_dir} has only checkpoints of another run than {self.versions_path} names: "
                    f"{', '.join(others)}. Fix: copy the versions.json of that run too, or name one of them "
                    "in Experiment.restore_from."
                )
            raise FileNotFoundError(
                f"{self.states_dir} has no complete checkpoint{earlier}. Fix: start without --resume, or "
                "check that run_name and ckpt_base_dir are those of the run to continue."
            )
        return epochs[-1]

    def newest_intact_epoch(self) -> tuple[int, list[str]]:
        """Epoch of the newest checkpoint with undamaged files, and the problems of newer ones.

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
            f"No checkpoint can be resumed. {'; '.join(problems)}. Fix: restore one from a copy, load only "
            f"weights from {self.weights_dir}, or start anew without --resume."
        )

    def write_own(self, epoch: int, own: dict[str, Any]) -> None:
        """First half of a save, called by every process: writes its separate states to the temporary folder.

        Raises: OSError if it cannot be written; earlier checkpoints then stay as they were. TypeError
            as in `write_values`.
        """
        with self._saving(epoch) as temp:
            temp.mkdir(parents=True, exist_ok=True)
            write_values(temp / f"rank_{self.rank}.pt", own)

    def commit(
        self,
        epoch: int,
        model: nn.Module,
        policy: nn.Module,
        shared: dict[str, Any],
        metadata: Mapping[str, Any],
    ) -> Path:
        """Second half, called by the main process when all have written: the rest, marker, rename.

        Training continues with the weights of `model`; the policy file has those of `policy`. A checkpoint
        with `is_interim` in its metadata has no policy file and is deleted when there is a newer one.

        Raises: the errors of `write_own`.
        """
        final, header = self.state_dir(epoch), policy_header(PolicyInfo(0, epoch, False), self.facts())
        own = {"format_version": FORMAT_VERSION, "run_id": self.run_id, "best_by": self.best_by}
        with self._saving(epoch) as temp:
            if not metadata.get("is_interim"):
                path = self.weights_dir / f"policy_epoch_{epoch}.safetensors"
                write_policy(path, plain_tensors(policy), header)
            save_file(plain_tensors(model), temp / "model.safetensors", metadata=header)
            write_values(temp / _SHARED, shared)
            (temp / "metadata.json").write_text(json.dumps({**metadata, **own}, indent=1))
            for path in temp.iterdir():
                fsync(path)
            (temp / MARKER).write_text(json.dumps({"files": contents(temp)}, indent=1))
            fsync(temp / MARKER)
            fsync(temp)
            replaced = final.with_name(final.name + ".replaced")
            if final.exists():
                final.rename(replaced)
            temp.rename(final)
            fsync(self.states_dir)
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def prune(self) -> None:
        """Delete interim training states except the newest one, and others that need not be kept."""
        states = sorted(self._states().items())
        doomed = [one for one in states[:-1] if read_metadata(one[1]).get("is_interim")]
        lasting = [one for one in states if one not in doomed]
        for epoch, folder in lasting[: -self.keep if self.keep is not None else 0]:
            if self.keep_every is None or (epoch + 1) % self.keep_every != 0:
                doomed.append((epoch, folder))
        for _, folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)

    def read(self, folder: Path) -> TrainingState:
        """Everything in a complete checkpoint except the weights, which are in its `model.safetensors`.

        Raises: FileNotFoundError if the folder is missing or incomplete; ValueError if it is damaged or
            has another format.
        """
        complete = f"Complete checkpoints exist for the epochs {self.complete_epochs()}"
        if not (folder / MARKER).is_file():
            found = "is incomplete" if folder.exists() else "does not exist"
            raise FileNotFoundError(f"The checkpoint {folder} {found}. {complete}. Fix: choose one of these.")
        if (problem := damage(folder)) is not None:
            raise ValueError(
                f"The checkpoint {folder} is damaged: {problem}. {complete}. Fix: choose another "
                "checkpoint, or name none to load the newest intact one."
            )
        metadata = read_metadata(folder)
        if (version := metadata.get("format_version", "below 4")) != FORMAT_VERSION:
            raise ValueError(
                f"The checkpoint has format version {version}, but this Loxodon reads {FORMAT_VERSION}. "
                "Fix: use the version of Loxodon that wrote it, or load the weights only "
                "(resume_training_state=False)."
            )
        num_ranks = len(list(folder.glob("rank_*.pt")))
        inherited = [
            read_values(folder / f"rank_{rank}.pt") for rank in range(num_ranks)[self.rank :: self.num_ranks]
        ]
        own = inherited[0] if inherited else read_values(folder / "rank_0.pt")
        return TrainingState(read_values(folder / _SHARED), own, metadata, num_ranks, inherited)

    @contextlib.contextmanager
    def _saving(self, epoch: int) -> Iterator[Path]:
        """The temporary folder of a save; a failed save leaves earlier checkpoints and raises OSError."""
        temp = self.states_dir / f"{self.run_name}_epoch_{epoch}.tmp"
        try:
            yield temp
        except (OSError, SafetensorError, RuntimeError) as error:  # the last comes from torch.save
            with contextlib.suppress(OSError):
                self._finish_replacing()
            shutil.rmtree(temp, ignore_errors=True)
            epochs = self.complete_epochs()
            there_are = (
                f"Intact checkpoints exist for the epochs {epochs}"
                if epochs
                else "There is no earlier checkpoint"
            )
            raise OSError(
                f"The checkpoint of epoch {epoch} could not be written to {self.states_dir}: {error}. "
                f"{there_are}. Fix: free space on that disk, or restore the folder and its permissions, and "
                f"{'continue with --resume' if epochs else 'start again'}."
            ) from error

    # ---- policy files ----

    def better_score(self, metrics: Mapping[str, Any], best: float | None) -> float | None:
        """The score among logged metrics, if there is one and it is better than `best`; else None."""
        score = float(metrics.get(self.best_by, math.nan))
        if math.isnan(score):
            return None
        is_better = best is None or (score < best if self.lowest_is_best else score > best)
        return score if is_better else None

    def save_policy(self, path: Path, model: nn.Module, info: PolicyInfo) -> None:
        """Replace a weights file atomically. Raises: OSError if it cannot be written."""
        write_policy(path, plain_tensors(model), policy_header(info, self.facts()))

    def write_record(self, config: str, requested: str, facts: Mapping[str, Any]) -> None:
        """Write `config.txt`, `config_requested.txt`, and `versions.json` with facts and the run's id."""
        write_text(self.config_path, config)
        write_text(self.requested_path, requested)
        write_text(self.versions_path, json.dumps({**facts, "run_id": self.run_id}, indent=1) + "\n")


# ---- values of a training state ----


def write_values(path: Path, values: Any) -> None:
    """Write dicts, lists and tuples of tensors, NumPy arrays, numbers, texts, booleans and None.

    Raises: TypeError for anything else, such as an object of a class.
    """
    torch.save(_to_torch(values), path)


def read_values(path: Path) -> Any:
    """Read the result of write_values; tensors are on the CPU, and all together no larger than the file.

    Raises: ValueError if the file is not of this form.
    """
    try:
        # Mapped memory cannot go beyond the end of the file, even if a crafted file claims larger sizes.
        values = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        return _from_torch(values, _SizeBudget(path.stat().st_size))
    except Exception as error:  # torch may raise any error for a damaged or crafted file
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is not a readable part of a checkpoint ({visible(reason)}). Fix: use another checkpoint."
        ) from error


def _to_torch(value: Any) -> Any:
    """The value in types that torch.load accepts with weights_only=True; an array becomes a dict of None."""
    if isinstance(value, Tensor):  # a copy, because a view would be stored with its whole base tensor
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {_key(key): _to_torch(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_to_torch, value))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _PLAIN_KINDS:
        shape = value.shape if isinstance(value, np.ndarray) else None
        flat = np.array(value, order="C").reshape(-1)
        return {None: (value.dtype.str, shape, torch.from_numpy(flat.view(np.uint8)))}
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise TypeError(
        f"A checkpoint cannot hold {value!r} ({type(value).__name__}); allowed are tensors, arrays of "
        "numbers, numbers, strings, booleans, None, and dicts, lists and tuples of these. Fix: convert the "
        "state to such values."
    )


class _SizeBudget:
    """Bytes that the values of a file may still take; otherwise, many views could repeat one tensor."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def spend(self, num_bytes: int, what: str) -> None:
        """Raises: FormatError if less than that is left."""
        self.left -= num_bytes
        if self.left < 0:
            raise FormatError(f"{what} larger than the file")


def _from_torch(value: Any, budget: _SizeBudget) -> Any:
    """The inverse of _to_torch."""
    budget.spend(1, "its values are")  # the least that a value takes in a file
    if isinstance(value, Tensor):
        budget.spend(value.numel() * value.element_size(), "a tensor is")
        return value.clone()
    if isinstance(value, dict) and value.keys() == {None}:
        dtype, shape, raw = value[None]
        flat = np.frombuffer(_from_torch(raw, budget).numpy(), dtype)
        return flat[0] if shape is None else flat.reshape(shape)
    if isinstance(value, dict):
        return {key: _from_torch(item, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_from_torch(item, budget) for item in value)
    return value


def _key(key: Any) -> Any:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise TypeError(
        f"A checkpoint cannot hold a dict with the key {key!r}; allowed are strings and whole numbers. "
        "Fix: use such keys in the state."
    )


# ---- content of a folder ----


def find_files(path: Path, name: str) -> Path:
    """The training state (a folder) or weights (a file) at `path`.

    The folder of an artifact means its content; that of a run means its best policy, or else its latest.

    name: name of the setting or function, for the error.

    Raises: FileNotFoundError if there is neither.
    """
    if path.is_file():
        return path
    for folder in (path, path / CONTENT[STATE]):
        if (folder / MARKER).is_file():
            return folder
    root = path / "ckpts" if (path / "ckpts").is_dir() else path
    for file in (path / CONTENT[POLICY], *(root / kind / CONTENT[POLICY] for kind in ("best", "latest"))):
        if file.is_file():
            return file
    holds = ", ".join(sorted(one.name for one in path.iterdir())) if path.is_dir() else ""
    found = f"holds neither a training state nor {CONTENT[POLICY]}; it holds: {holds or 'nothing'}"
    raise FileNotFoundError(
        f"{name}: '{path}' {found if path.is_dir() else 'does not exist'}. Fix: name a .safetensors file, or "
        "the folder of a checkpoint, of an artifact's version, or of a run (for its ckpts/best, else "
        "ckpts/latest)."
    )


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a checkpoint; empty if they cannot be read."""
    return json_object(folder / "metadata.json")


def damage(folder: Path) -> str | None:
    """Faults in the files of a complete checkpoint; None if they are as they were written."""
    try:
        files = parse_json((folder / MARKER).read_bytes())["files"].items()
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


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size in bytes and CRC-32 of every file of a folder, by name."""
    return {path.name: (path.stat().st_size, _crc32(path)) for path in sorted(folder.iterdir())}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
