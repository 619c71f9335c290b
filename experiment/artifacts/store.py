"""What a store of artifacts is, and the names it uses.

An artifact is named `<run>/<what>`, such as `tmaze/state`, and has versions v0, v1, ...; an alias names one
of them and moves. `tmaze/state:v3` and `tmaze/state:latest` are references.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE, POLICY = "state", "policy"  # what an experiment stores: full training states, policy weights
_PART = r"[^/:.][^/:]*"
_NAME = re.compile(f"{_PART}/{_PART}")
_MOST_BYTES = 128  # of a run's name: folders and files are named after it, with something added
_ALIAS = re.compile(r"[A-Za-z0-9_.-]+")
_VERSION = re.compile(r"v\d+")
_SHOWN = 12


@dataclass(frozen=True)
class ArtifactInfo:
    """One version of an artifact. `metadata` holds JSON values."""

    name: str
    version: str
    aliases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """What `ArtifactStore.get` takes."""
        return f"{self.name}:{self.version}"

    def answers_to(self, wanted: str) -> bool:
        """True if `wanted` is its version or one of its aliases."""
        return wanted == self.version or wanted in self.aliases


@dataclass(frozen=True)
class RunAccess:
    """What a store may want to know of the run it serves.

    start_wandb: returns the run of Weights & Biases and starts it if that has not happened.
    """

    run_dir: Path
    run_name: str
    wandb_project: str | None
    wandb_entity: str | None
    start_wandb: Callable[[], Any]


class ArtifactStore(ABC):
    """Keeps versions of named folders of files. It deletes nothing by itself.

    `put` may run on a thread of its own, but never twice at a time; everything else runs on the main thread.

    Attributes:
        needs_wandb: True for a store that uses `RunAccess.start_wandb`.
    """

    needs_wandb = False

    def attach(self, run: RunAccess) -> None:
        """Called once, before anything else, with the run that the store serves."""
        return None

    def prepare(self) -> None:
        """Called on the main thread before each `put`; for what may not happen on another."""
        return None

    @abstractmethod
    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        """Store a file, or the content of a folder, as the next version of an artifact.

        Args:
            name: `<run>/<what>`.
            files: the file or folder; it may be deleted as soon as this returns.
            metadata: JSON values.
            aliases: they name the new version from now on.
        Returns: the version; None if that is decided later, as when Weights & Biases is offline.
        """

    @abstractmethod
    def get(self, reference: str, folder: Path) -> Path:
        """Fetch the files of `<run>/<what>:<version or alias>` into `folder`, which must not exist yet.

        Raises: FileNotFoundError, listing what exists; ValueError if what is stored is damaged.
        """

    @abstractmethod
    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """Every version of every artifact of a run, or of all runs; the newest version of each comes last."""


def find_artifact(store: ArtifactStore, reference: str, own_run: str) -> ArtifactInfo:
    """The version that a short reference means.

    Args:
        store: where to look.
        reference: `[<run>[/<what>]:]<version or alias>`. Without `<what>` an alias is looked up among
            training states, then among policy weights; a version number is that of a training state.
        own_run: the run that is meant if none is named.
    Raises: FileNotFoundError, listing what exists.
    """
    head, _, wanted = reference.rpartition(":")
    run, _, what = (head or own_run).partition("/")
    searched = [STATE] if _VERSION.fullmatch(wanted) else [STATE, POLICY]
    infos = store.list(run)
    for name in [what] if what else searched:
        for info in reversed(infos):
            if info.name == f"{run}/{name}" and info.answers_to(wanted):
                return info
    raise unknown_artifact(reference, run, infos, store)


def unknown_artifact(
    reference: str, run: str, infos: Iterable[ArtifactInfo], store: ArtifactStore
) -> FileNotFoundError:
    """The error for an unknown reference; the store is asked for other runs if this one has nothing."""
    shown = [_shown(info) for info in infos]
    if shown:
        more = f" and {len(shown) - _SHOWN} older ones" if len(shown) > _SHOWN else ""
        exists = f"Run {run!r} has {', '.join(shown[-_SHOWN:])}{more}"
    else:
        runs = sorted({info.name.partition("/")[0] for info in store.list()})
        others = f"; runs that have some are {', '.join(runs[:_SHOWN])}" if runs else ", nor have others"
        exists = f"Run {run!r} has none{others}"
    return FileNotFoundError(
        f"There is no artifact {reference!r}. {exists}. Fix: choose one that exists, as "
        "'<run>/<what>:<version or alias>', or set Experiment.restore_from = None to start anew."
    )


def split_reference(reference: str) -> tuple[str, str]:
    """Name and version (or alias) of a full reference.

    Raises: ValueError if it is not of the form `<run>/<what>:<version or alias>`.
    """
    name, colon, wanted = reference.rpartition(":")
    if not (colon and wanted and _NAME.fullmatch(name)):
        raise ValueError(
            f"{reference!r} is no reference to an artifact, which looks like 'my-run/state:v3'. "
            "Fix: name run, artifact and version or alias."
        )
    return name, wanted


def is_run_name(name: Any) -> bool:
    """Whether this can name a run: its folder, its artifacts, and a word on a command line."""
    return (
        isinstance(name, str)
        and re.fullmatch(_PART, name) is not None
        and name.isprintable()
        and not name.startswith("-")
        and len(name.encode(errors="replace")) <= _MOST_BYTES
    )


def check_name(name: str, aliases: Sequence[str] = ()) -> None:
    """Raise ValueError for a name or an alias that could not be written in a reference."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name an artifact: it must be '<run>/<what>', without ':' and without '.' at "
            "the beginning of either. Fix: change Experiment.run_name."
        )
    for alias in aliases:
        if not _ALIAS.fullmatch(alias) or _VERSION.fullmatch(alias):
            raise ValueError(
                f"{alias!r} cannot be an alias: letters, digits and '_.-' are allowed, and not the form of a "
                "version (v3). Fix: choose another, such as 'best'."
            )


def version_number(version: str) -> int | None:
    """The number of a version such as "v3"; None for anything else."""
    return int(version[1:]) if _VERSION.fullmatch(version) else None


def _shown(info: ArtifactInfo) -> str:
    return info.reference + (f" ({', '.join(info.aliases)})" if info.aliases else "")
