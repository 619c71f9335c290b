"""Checkpoints and policy files of a run: complete or absent, never half.

Folders, all in `<run_dir>/ckpts/`:
  training_states/<run_name>_epoch_<n>/: model.safetensors, trainer.pt, state.json,
    rank_<r>.pt, rank_<r>.json and COMPLETE
  policy_weights/policy_epoch_<n>.safetensors
  latest/policy.safetensors: atomically replaced, carries a version number
  best/policy.safetensors: best validation score so far
  config.txt: the operative gin config
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MARKER = "COMPLETE"
_SHOWN_PROBLEMS = 5


@dataclass
class TrainingState:
    """Everything a run needs to go on, beside the model.

    trainer: optimizer and scaler (tensors and plain values). shared: JSON values, equal for all processes.
    rank_tensors, rank_values: what each process has for itself, the second as JSON values.
    """

    trainer: dict[str, Any]
    shared: dict[str, Any]
    rank_tensors: dict[str, Any]
    rank_values: dict[str, Any]


@dataclass(frozen=True)
class PolicyInfo:
    """What the header of a policy file says."""

    version: int
    epoch: int
    is_final: bool


class CheckpointManager:
    """Reads and writes the `ckpts` folder of one run. Only the main process writes shared files."""

    def __init__(self, run_dir: Path, run_name: str, *, rank: int = 0, num_ranks: int = 1) -> None:
        self.root, self.run_name, self.rank, self.num_ranks = run_dir / "ckpts", run_name, rank, num_ranks
        self.states_dir = self.root / "training_states"
        self.weights_dir = self.root / "policy_weights"
        self.latest_path = self.root / "latest" / "policy.safetensors"
        self.best_path = self.root / "best" / "policy.safetensors"

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

    # ---- full training states ----

    def state_dir(self, epoch: int) -> Path:
        """Folder of the checkpoint after epoch `epoch`."""
        return self.states_dir / f"{self.run_name}_epoch_{epoch}"

    def complete_epochs(self) -> list[int]:
        """Epochs that have a complete checkpoint, ascending."""
        pattern = re.compile(re.escape(self.run_name) + r"_epoch_(\d+)")
        epochs = []
        for folder in self.states_dir.glob("*_epoch_*"):
            match = pattern.fullmatch(folder.name)
            if match and (folder / MARKER).exists():
                epochs.append(int(match[1]))
        return sorted(epochs)

    def newest_epoch(self) -> int:
        """Epoch of the newest complete checkpoint.

        Raises: FileNotFoundError when there is none.
        """
        epochs = self.complete_epochs()
        if not epochs:
            raise FileNotFoundError(
                f"{self.states_dir} has no complete checkpoint. Fix: start without --resume, or check that "
                "run_name and ckpt_base_dir are those of the run to continue."
            )
        return epochs[-1]

    def write_rank_files(self, epoch: int, state: TrainingState) -> None:
        """First half of a save, called by every process: its own part, into the temporary folder."""
        temp = self._temp_dir(epoch)
        temp.mkdir(parents=True, exist_ok=True)
        torch.save(state.rank_tensors, temp / f"rank_{self.rank}.pt")
        (temp / f"rank_{self.rank}.json").write_text(json.dumps(state.rank_values))

    def commit(self, epoch: int, model: nn.Module, state: TrainingState) -> Path:
        """Second half, called by the main process when all have written: model, optimizer, marker, rename."""
        temp, final = self._temp_dir(epoch), self.state_dir(epoch)
        save_file(_plain_tensors(model), temp / "model.safetensors", metadata={"format": "pt"})
        torch.save(state.trainer, temp / "trainer.pt")
        (temp / "state.json").write_text(json.dumps(state.shared, indent=1))
        for path in temp.iterdir():
            _fsync(path)
        (temp / MARKER).write_text("all files above are whole\n")
        _fsync(temp / MARKER)
        _fsync(temp)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            final.rename(replaced)
        temp.rename(final)
        _fsync(self.states_dir)
        shutil.rmtree(replaced, ignore_errors=True)
        weights = self.weights_dir / f"policy_epoch_{epoch}.safetensors"
        self.save_policy(weights, model, PolicyInfo(0, epoch, False))
        return final

    def prune(self, keep: int | None) -> None:
        """Delete all but the newest `keep` training states; None keeps all. Policy weights stay."""
        if keep is not None:
            for epoch in self.complete_epochs()[:-keep]:
                shutil.rmtree(self.state_dir(epoch), ignore_errors=True)

    def read(self, folder: Path, model: nn.Module) -> TrainingState:
        """Load the model's weights in place and return the rest of a complete checkpoint.

        Raises: FileNotFoundError if the folder is missing or incomplete; ValueError if the weights do not fit
        or the number of processes differs.
        """
        if not (folder / MARKER).exists():
            found = "is incomplete" if folder.exists() else "does not exist"
            raise FileNotFoundError(
                f"The checkpoint {folder} {found}. Complete ones are of epochs {self.complete_epochs()}. "
                "Fix: choose one of these."
            )
        own = folder / f"rank_{self.rank}.json"
        if not own.exists() or (folder / f"rank_{self.num_ranks}.json").exists():
            saved = len(list(folder.glob("rank_*.json")))
            raise ValueError(
                f"The checkpoint {folder} was saved by {saved} process(es), this run has {self.num_ranks}. "
                f"Fix: launch {saved} process(es), or load the weights only (resume_training_state=False)."
            )
        load_weights(model, folder / "model.safetensors")
        return TrainingState(
            trainer=torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True),
            shared=json.loads((folder / "state.json").read_text()),
            rank_tensors=torch.load(own.with_suffix(".pt"), map_location="cpu", weights_only=True),
            rank_values=json.loads(own.read_text()),
        )

    def _temp_dir(self, epoch: int) -> Path:
        return self.states_dir / f"{self.run_name}_epoch_{epoch}.tmp"

    # ---- policy files ----

    def save_policy(self, path: Path, model: nn.Module, info: PolicyInfo) -> None:
        """Replace a weights file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "format": "pt",
            "version": str(info.version),
            "epoch": str(info.epoch),
            "is_final": str(int(info.is_final)),
        }
        temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        save_file(_plain_tensors(model), temp, metadata=metadata)
        _fsync(temp)
        temp.replace(path)

    def policy_info(self, path: Path) -> PolicyInfo | None:
        """Header of a policy file, or None when there is no file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            raise _unreadable(path, error) from error
        return PolicyInfo(
            version=int(metadata.get("version", 0)),
            epoch=int(metadata.get("epoch", 0)),
            is_final=metadata.get("is_final") == "1",
        )

    def write_config(self, text: str) -> None:
        """Write `config.txt` atomically."""
        write_text(self.root / "config.txt", text)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into the model.

    Raises: FileNotFoundError; ValueError naming the tensors that are missing, unknown or of another shape.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"There are no weights at {path}. Fix: check the epoch, run_name and ckpt_base_dir."
        )
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise _unreadable(path, error) from error
    own = model.state_dict()
    problems = [f"{name} is missing in the file" for name in own.keys() - weights.keys()]
    problems += [f"{name} is unknown to the agent" for name in weights.keys() - own.keys()]
    problems += [
        f"{name} is {tuple(weights[name].shape)} in the file and {tuple(own[name].shape)} in the agent"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if problems:
        shown, num_more = "; ".join(sorted(problems)[:_SHOWN_PROBLEMS]), len(problems) - _SHOWN_PROBLEMS
        more = f"; and {num_more} more" if num_more > 0 else ""
        raise ValueError(
            f"The weights in {path} do not fit this agent: {shown}{more}. Fix: use the gin config the run "
            "was trained with (ckpts/config.txt of its folder), or another run_name for a new one."
        )
    model.load_state_dict(weights)


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temp.write_text(text, encoding="utf-8")
    temp.replace(path)


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a module with nothing shared: safetensors refuses tensors that share memory."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}


def _unreadable(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(
        f"{path} is not a readable safetensors file ({error}). Fix: delete it or use another one."
    )


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
