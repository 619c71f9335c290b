"""Interface of an artifact store, its names, and two stores: a URL or folder, and Weights & Biases.

An artifact is named `<run>/<what>`, such as `tmaze/state`, and has versions v0, v1, ...; an alias names one
of them and moves. `tmaze/state:v3` and `tmaze/state:latest` are references.

Neither fsspec nor wandb is imported before it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin

from ..output.logs import wandb_files_in
from ..process.files import atomic_folder, check_inside, check_tree, parse_json

STATE, POLICY = "state", "policy"  # artifacts of an experiment: full training states, policy weights
CONTENT = {STATE: "training_state", POLICY: "policy.safetensors"}  # the folder or file in the artifact
METADATA = "metadata.json"  # UrlStore writes it last
_PART = r"[^/:.][^/:]*"
_NAME = re.compile(f"{_PART}/{_PART}")
_MOST_BYTES = 128  # limit on a run's name: names of folders and files append to it
_VERSION = re.compile(r"v\d+")
_SHOWN = 12
_WANDB_TYPES = {STATE: "training-state", POLICY: "model"}  # other artifacts have the type of their name
_WANDB_NAME = "loxodon_name"  # key in the metadata: W&B's own names allow fewer characters


@dataclass(frozen=True)
class ArtifactInfo:
    """One version of an artifact. `metadata` holds JSON values."""

    name: str
    version: str
    aliases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The argument for `ArtifactStore.get`."""
        return f"{self.name}:{self.version}"


@dataclass(frozen=True)
class RunAccess:
    """Information for a store about the run it serves.

    start_wandb: returns the run of Weights & Biases, which the first call starts.
    """

    run_dir: Path
    run_name: str
    wandb_project: str | None
    wandb_entity: str | None
    start_wandb: Callable[[], Any]


class ArtifactStore(ABC):
    """Keeps versions of named folders of files. It deletes nothing by itself.

    `put` may run on a separate thread, but never twice at a time; everything else runs on the main thread.

    Attributes:
        needs_wandb: True for a store that uses `RunAccess.start_wandb`.
        run: the run that the store serves; set before any method is called.
    """

    needs_wandb = False
    run: RunAccess

    def prepare(self) -> None:
        """Called on the main thread before each `put`, for work that other threads may not do."""
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
            aliases: names of the new version from now on.
        Returns: the version; None if it is decided later, for example when Weights & Biases is offline.
        """

    @abstractmethod
    def get(self, reference: str, folder: Path) -> Path:
        """Fetch the files of `<run>/<what>:<version or alias>` into `folder`, which must not exist yet.

        Raises: FileNotFoundError, listing what exists; ValueError if the stored files are damaged.
        """

    @abstractmethod
    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """Every version of every artifact of a run, or of all runs; the newest version of each comes last."""


def find_artifact(store: ArtifactStore, reference: str, own_run: str) -> ArtifactInfo:
    """The version that a short reference refers to.

    Args:
        store: the store to search.
        reference: `[<run>[/<what>]:]<version or alias>`. Without `<what>` an alias is looked up among
            training states, then among policy weights; a version number is that of a training state.
        own_run: the default run.
    Raises: FileNotFoundError, listing what exists.
    """
    head, _, wanted = reference.rpartition(":")
    run, _, what = (head or own_run).partition("/")
    searched = [STATE] if _VERSION.fullmatch(wanted) else [STATE, POLICY]
    infos = store.list(run)
    for name in [what] if what else searched:
        for info in reversed(infos):
            if info.name == f"{run}/{name}" and wanted in (info.version, *info.aliases):
                return info
    shown = [one.reference + (f" ({', '.join(one.aliases)})" if one.aliases else "") for one in infos]
    if shown:
        more = f" and {len(shown) - _SHOWN} older ones" if len(shown) > _SHOWN else ""
        exists = f"Run {run!r} has {', '.join(shown[-_SHOWN:])}{more}"
    else:
        runs = sorted({info.name.partition("/")[0] for info in store.list()})
        others = (
            f"; runs with artifacts are {', '.join(runs[:_SHOWN])}" if runs else ", and no other run has any"
        )
        exists = f"Run {run!r} has no artifacts{others}"
    raise FileNotFoundError(
        f"There is no artifact {reference!r}. {exists}. Fix: choose one that exists, as "
        "'<run>/<what>:<version or alias>', or set Experiment.restore_from = None to start a new run."
    )


def split_reference(reference: str) -> tuple[str, str]:
    """Name and version (or alias) of a full reference.

    Raises: ValueError if it is not of the form `<run>/<what>:<version or alias>`.
    """
    name, colon, wanted = reference.rpartition(":")
    if not (colon and wanted and _NAME.fullmatch(name)):
        raise ValueError(
            f"{reference!r} is not a reference to an artifact, such as 'my-run/state:v3'. Fix: name the "
            "run, the artifact, and a version or alias."
        )
    return name, wanted


def is_run_name(name: Any) -> bool:
    """True if this can be the name of a run: a folder, a part of artifact names, a word on a command line."""
    return (
        isinstance(name, str)
        and re.fullmatch(_PART, name) is not None
        and name.isprintable()
        and not name.startswith("-")
        and len(name.encode(errors="replace")) <= _MOST_BYTES
    )


def version_number(version: str) -> int | None:
    """The number of a version such as "v3"; None for anything else."""
    return int(version[1:]) if _VERSION.fullmatch(version) else None


# ---- a folder or a URL ----


@gin.configurable
class UrlStore(ArtifactStore):
    """Artifacts in a folder, or at any URL that fsspec knows, which several runs and machines may share.

    Layout: `<url>/<run>/<what>/v0/`, `v1/`, ... with the artifact's files and `metadata.json` in each. That
    file is written last, so a version without it is incomplete and does not count.

    Args:
        url: a folder, or an address such as `s3://bucket/artifacts`, whose package (here s3fs) must be
            installed and finds the credentials by itself.

    Raises: ValueError if fsspec cannot open the address.
    """

    def __init__(self, url: str = gin.REQUIRED) -> None:
        import fsspec  # a dependency of torch
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        try:
            self._fs, self._root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"UrlStore.url = {url!r} cannot be opened: {error}. Fix: install the package for this kind "
                "of address (s3fs for s3://), or give a folder."
            ) from error
        self._is_folder = isinstance(self._fs, LocalFileSystem)

    def __repr__(self) -> str:
        return f"UrlStore({self.url!r})"

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        """Copy the files, then write their list."""
        split_reference(f"{name}:latest")  # a name only has to fit in a reference
        check_tree(files)
        numbers = [number for one in self._names(name) if (number := version_number(one)) is not None]
        version = f"v{max(numbers, default=-1) + 1}"
        home = self._path(name, version)
        self._fs.makedirs(home, exist_ok=False)  # in a folder, one of two simultaneous writers fails here
        try:
            sizes = {}
            for path in sorted(files.rglob("*")) if files.is_dir() else [files]:
                if path.is_file():
                    inner = path.relative_to(files if files.is_dir() else files.parent).as_posix()
                    self._fs.makedirs(f"{home}/{inner}".rpartition("/")[0], exist_ok=True)
                    self._fs.put_file(str(path), f"{home}/{inner}")
                    sizes[inner] = path.stat().st_size
            facts = {"aliases": [*aliases], "metadata": dict(metadata), "bytes": sizes}
            self._fs.pipe_file(f"{home}/{METADATA}", json.dumps(facts, indent=1).encode())
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is more useful than this one
                self._fs.rm(home, recursive=True)
            raise
        return version

    def get(self, reference: str, folder: Path) -> Path:
        """Copy the files of a version, and compare their sizes with the stored ones."""
        name, _ = split_reference(reference)
        version = find_artifact(self, reference, own_run="").version
        source = self._path(name, version)
        if self._is_folder:
            check_tree(Path(source), Path(self._root))
        with atomic_folder(folder) as temp:
            for inner, size in self._facts(name, version)["bytes"].items():
                path = temp / inner
                check_inside(path, temp)
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    self._fs.get_file(f"{source}/{inner}", str(path))
                if not path.is_file() or path.stat().st_size != size:
                    raise ValueError(
                        f"{source} is damaged: {inner} differs from what was stored. "
                        f"Fix: delete that folder and use another version of {name}."
                    )
        return folder

    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """List the present content. An alias belongs to the newest version that it was given to."""
        self._fs.invalidate_cache()
        runs = self._names() if run is None else [run]
        infos: list[ArtifactInfo] = []
        for name in (f"{one}/{what}" for one in runs for what in self._names(one)):
            numbers = (version_number(version) for version in self._names(name))
            found, taken = [], set[str]()
            for number in sorted((n for n in numbers if n is not None), reverse=True):
                if facts := self._facts(name, f"v{number}"):
                    aliases = {str(alias) for alias in facts["aliases"]} - taken
                    taken |= aliases
                    info = ArtifactInfo(name, f"v{number}", tuple(sorted(aliases)), facts["metadata"])
                    found.append(info)
            infos += reversed(found)
        return infos

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    def _names(self, *parts: str) -> Sequence[str]:
        """List a folder of the store; an empty list if the folder does not exist."""
        try:
            found = self._fs.ls(self._path(*parts), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def _facts(self, name: str, version: str) -> Mapping[str, Any]:
        """The facts that `put` stored about a version; empty if it is incomplete or the file is damaged."""
        try:
            facts = parse_json(self._fs.cat_file(self._path(name, version, METADATA)))
            kinds = {"aliases": list, "metadata": dict, "bytes": dict}
            return facts if all(isinstance(facts[key], kind) for key, kind in kinds.items()) else {}
        except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
            return {}


# ---- Weights & Biases ----


@gin.configurable
class WandbStore(ArtifactStore):
    """Artifacts of the W&B run of an experiment, as `<run>-<what>` in its project.

    With WANDB_MODE=offline, `put` records the artifact in the offline run, for `wandb sync` to upload; with
    WANDB_MODE=disabled it does nothing. In both, nothing can be fetched.
    Project and entity are Experiment.wandb_project and Experiment.wandb_entity.
    """

    needs_wandb = True

    def __repr__(self) -> str:
        return f"WandbStore({self.run.wandb_entity}/{self.run.wandb_project})"

    def prepare(self) -> None:
        """Start the run of W&B."""
        self.run.start_wandb()

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        """Log the artifact to the run; online, wait until the server has it."""
        run = self.run.start_wandb()
        if getattr(run, "disabled", False):
            return None
        import wandb

        what = name.partition("/")[2]
        facts = {**metadata, _WANDB_NAME: name}
        check_tree(files)
        artifact = wandb.Artifact(_collection(name), type=_WANDB_TYPES.get(what, what), metadata=facts)
        with wandb_files_in(self._folder):
            if files.is_dir():
                artifact.add_dir(str(files), skip_cache=True)
            else:
                artifact.add_file(str(files), skip_cache=True)
        logged = run.log_artifact(artifact, aliases=[*aliases])
        if run.offline:
            return None
        logged.wait()
        return str(logged.version)

    def get(self, reference: str, folder: Path) -> Path:
        """Download."""
        name, wanted = split_reference(reference)
        path = self._project_path(f"{_collection(name)}:{wanted}")
        with (
            self._server(f"artifact {path}") as api,
            wandb_files_in(self._folder),
            atomic_folder(folder) as temp,
        ):
            api.artifact(path).download(root=str(temp))
        return folder

    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """Ask the server."""
        infos: list[ArtifactInfo] = []
        for what, kind in _WANDB_TYPES.items():
            with self._server(f"artifacts of type {kind}") as api:
                if run is None:
                    names = [one.name for one in api.artifact_collections(self._project_path(""), kind)]
                else:
                    names = [_collection(f"{run}/{what}")]
                for path in map(self._project_path, names):
                    if api.artifact_collection_exists(path, kind):
                        # The newest comes first
                        infos += map(_info, reversed(list(api.artifacts(kind, path))))
        return [info for info in infos if info.name]

    @contextlib.contextmanager
    def _server(self, what: str) -> Iterator[Any]:
        """W&B's API for a query.

        Raises: RuntimeError if W&B is offline, FileNotFoundError if the server does not answer.
        """
        if (mode := os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun"):
            raise RuntimeError(
                f"W&B is offline (WANDB_MODE={mode}) and cannot provide {what}. Fix: set WANDB_MODE=online "
                "and run `wandb login`, or restore from a folder: Experiment.restore_from = "
                "'/path/to/a/checkpoint' or a UrlStore."
            )
        import wandb

        try:
            yield wandb.Api()
        except (wandb.Error, ValueError, OSError) as error:
            raise FileNotFoundError(
                f"W&B did not provide {what}: {error}. Fix: check Experiment.wandb_project and "
                "wandb_entity, the name and version (an offline run has none before `wandb sync`), and run "
                "`wandb login`."
            ) from error

    def _project_path(self, name: str) -> str:
        parts = (self.run.wandb_entity, self.run.wandb_project or "uncategorized", name)
        return "/".join(part for part in parts if part)

    @property
    def _folder(self) -> Path:
        return self.run.run_dir / "wandb_logs"


def _collection(name: str) -> str:
    """W&B's name for an artifact: letters, digits and '_.-' are allowed there."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _info(artifact: Any) -> ArtifactInfo:
    """Server data of a version; without a name if it was not stored from here."""
    metadata = dict(artifact.metadata)
    name = metadata.pop(_WANDB_NAME, "")
    aliases = tuple(alias for alias in artifact.aliases if alias != artifact.version)
    return ArtifactInfo(name, artifact.version, aliases, metadata)
