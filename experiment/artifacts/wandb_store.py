"""Weights & Biases as a store of artifacts; nothing of wandb is imported before it is used."""

from __future__ import annotations

import builtins
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gin

from ..wandb_run import wandb_files_in
from .store import POLICY, STATE, ArtifactInfo, ArtifactStore, RunAccess, check_name, split_reference

Result = TypeVar("Result")
TYPES = {STATE: "training-state", POLICY: "model"}  # of W&B's artifacts; others are of the type of their name
_NAME_KEY = "loxodon_name"  # in the metadata: W&B's own names allow fewer characters
_OFF = ("offline", "disabled", "dryrun")


@gin.configurable
class WandbStore(ArtifactStore):
    """Artifacts of the W&B run of an experiment, as `<run>-<what>` in its project.

    With WANDB_MODE=offline, `put` records the artifact in the offline run, for `wandb sync` to upload, and
    only versions that were downloaded before can be fetched. With WANDB_MODE=disabled `put` does nothing.
    Project and entity are Experiment.wandb_project and Experiment.wandb_entity.
    """

    needs_wandb = True

    def __init__(self) -> None:
        self._access: RunAccess | None = None

    def __repr__(self) -> str:
        access = self._access
        return f"WandbStore({access.wandb_entity}/{access.wandb_project})" if access else "WandbStore()"

    def attach(self, run: RunAccess) -> None:
        """Remember the run."""
        self._access = run

    def prepare(self) -> None:
        """Start the run of W&B."""
        self._run_access.start_wandb()

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        """Log the artifact to the run; online, wait until the server has it."""
        check_name(name, aliases)
        run = self._run_access.start_wandb()
        if getattr(run, "disabled", False):
            return None
        import wandb

        facts = {**metadata, _NAME_KEY: name}
        artifact = wandb.Artifact(_collection(name), type=_type(name), metadata=facts)
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
        """Download, or take what was downloaded before."""
        name, wanted = split_reference(reference)
        known = self._downloads / f"{_collection(name)}-{wanted}"
        if known.is_dir():  # only versions have such a folder, and versions never change
            return Path(shutil.copytree(known, folder))
        path = self._project_path(f"{_collection(name)}:{wanted}")
        artifact = self._ask(lambda api: api.artifact(path), f"artifact {path}")
        temp = self._downloads / f".{os.getpid()}.tmp"
        shutil.rmtree(temp, ignore_errors=True)
        temp.parent.mkdir(parents=True, exist_ok=True)
        with wandb_files_in(self._folder):
            artifact.download(root=str(temp))
        kept = self._downloads / f"{_collection(name)}-{artifact.version}"
        shutil.rmtree(kept, ignore_errors=True)
        temp.rename(kept)
        return Path(shutil.copytree(kept, folder))

    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """Ask the server; offline, name what was downloaded before, if anything was."""
        if _is_off() and (downloaded := self._downloaded(run)):
            return downloaded
        infos: list[ArtifactInfo] = []
        for what, type_name in TYPES.items():
            if run is not None:
                collections = [self._project_path(_collection(f"{run}/{what}"))]
            else:
                collections = self._ask(self._collections_of(type_name), f"artifacts of type {type_name}")
            for collection in collections:
                infos += self._ask(_versions(type_name, collection), f"artifacts {collection}")
        return infos

    def _collections_of(self, type_name: str) -> Callable[[Any], builtins.list[str]]:
        def ask(api: Any) -> builtins.list[str]:
            found = api.artifact_collections(self._project_path(""), type_name)
            return [self._project_path(one.name) for one in found]

        return ask

    def _ask(self, question: Callable[[Any], Result], what: str) -> Result:
        """Ask W&B's server.

        Raises: RuntimeError if W&B is offline, FileNotFoundError if the server does not give the answer.
        """
        if _is_off():
            raise RuntimeError(
                f"W&B is offline (WANDB_MODE={os.environ['WANDB_MODE']}), and {what}: nothing of that was "
                f"downloaded before to {self._downloads}. Fix: set WANDB_MODE=online and `wandb login`, or"
                " restore from a folder: Experiment.restore_from = '/path/to/a/checkpoint' or a FolderStore."
            )
        import wandb

        try:
            return question(wandb.Api())
        except (wandb.Error, ValueError, OSError) as error:
            raise FileNotFoundError(
                f"W&B did not give {what}: {error}. Fix: check Experiment.wandb_project and wandb_entity, "
                "the name and version (an offline run has none before `wandb sync`), and `wandb login`."
            ) from error

    def _downloaded(self, run: str | None) -> builtins.list[ArtifactInfo]:
        """Versions in the folder of downloads, of the two artifacts of `run`."""
        found = []
        for what in TYPES if run is not None else ():
            name = f"{run}/{what}"
            for path in sorted(self._downloads.glob(f"{_collection(name)}-v*")):
                found.append(ArtifactInfo(name, path.name.rpartition("-")[2]))
        return found

    def _project_path(self, name: str) -> str:
        access = self._run_access
        parts = (access.wandb_entity, access.wandb_project or "uncategorized", name)
        return "/".join(part for part in parts if part)

    @property
    def _run_access(self) -> RunAccess:
        if self._access is None:
            raise ValueError(
                "This WandbStore serves no run yet. Fix: set Experiment.artifact_store = @WandbStore, or "
                "call attach(...) first."
            )
        return self._access

    @property
    def _folder(self) -> Path:
        return self._run_access.run_dir / "wandb_logs"

    @property
    def _downloads(self) -> Path:
        return self._folder / "downloads"


def _is_off() -> bool:
    return os.environ.get("WANDB_MODE", "online") in _OFF


def _collection(name: str) -> str:
    """W&B's name for an artifact: letters, digits and '_.-' are allowed there."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _type(name: str) -> str:
    what = name.partition("/")[2]
    return TYPES.get(what, what)


def _versions(type_name: str, collection: str) -> Callable[[Any], list[ArtifactInfo]]:
    def ask(api: Any) -> list[ArtifactInfo]:
        if not api.artifact_collection_exists(collection, type_name):
            return []
        found = []
        for artifact in reversed(list(api.artifacts(type_name, collection))):  # W&B has the newest first
            metadata = {key: value for key, value in artifact.metadata.items() if key != _NAME_KEY}
            name = artifact.metadata.get(_NAME_KEY)
            if name is not None:
                aliases = tuple(alias for alias in artifact.aliases if alias != artifact.version)
                found.append(ArtifactInfo(name, artifact.version, aliases, metadata))
        return found

    return ask
