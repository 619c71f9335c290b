"""A plain folder as a store of artifacts: complete versions or none, any number of writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from ..policy_files import write_text
from .store import ArtifactInfo, ArtifactStore, check_name, split_reference, unknown_artifact, version_number

METADATA, ALIASES = "metadata.json", "aliases.json"
FORMAT_VERSION = 1
_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)
_ABANDONED_S = 24 * 3600.0  # a temporary folder of another machine that is older was left by a dead writer
_CHUNK_BYTES = 1 << 20


@gin.configurable
class FolderStore(ArtifactStore):
    """Artifacts in a folder, which several runs and machines may share.

    Layout: `<root>/<run>/<what>/v0/`, `v1/`, ... with the artifact's files and `metadata.json` in each, and
    `aliases.json` beside them. A version appears by a rename when all of it is on disk, and never changes.

    Args:
        root: the folder; it is made when something is stored.
    """

    def __init__(self, root: str = gin.REQUIRED) -> None:
        self.root = Path(root).expanduser()

    def __repr__(self) -> str:
        return f"FolderStore({str(self.root)!r})"

    def put(
        self, name: str, files: Path, *, metadata: Mapping[str, Any], aliases: Sequence[str] = ()
    ) -> str | None:
        """Copy, sync, rename, then move the aliases."""
        check_name(name, aliases)
        home = self.root / name
        home.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(home)
        temp = home / f".tmp-{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            sizes = _copy(files, temp)
            facts = {
                "format_version": FORMAT_VERSION,
                "name": name,
                "unix_time": time.time(),
                "metadata": dict(metadata),
                "files": sizes,
            }
            (temp / METADATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            _sync_tree(temp)
            version = self._claim(home, temp)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        _sync(home)
        self._move_aliases(home, version, aliases)
        return version

    def get(self, reference: str, folder: Path) -> Path:
        """Copy the files of a version, and compare them with what was stored."""
        name, wanted = split_reference(reference)
        home = self.root / name
        aliases = _read_aliases(home)
        version = aliases.get(wanted, wanted)
        source = home / version
        if version_number(version) is None or not (source / METADATA).is_file():
            run = name.partition("/")[0]
            raise unknown_artifact(reference, run, self.list(run), self)
        facts = json.loads((source / METADATA).read_text(encoding="utf-8"))
        temp = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temp, ignore_errors=True)
        try:
            copied = _copy(source, temp, skips=METADATA)
            if copied != facts["files"]:
                changed = sorted(
                    file
                    for file in {*copied, *facts["files"]}
                    if copied.get(file) != facts["files"].get(file)
                )
                raise ValueError(
                    f"{source} is damaged: {', '.join(changed)} differ(s) from what was stored. "
                    f"Fix: delete that folder and use another version of {name}."
                )
            temp.rename(folder)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        return folder

    def list(self, run: str | None = None) -> list[ArtifactInfo]:
        """Look at what is in the folder now."""
        infos: list[ArtifactInfo] = []
        for home in sorted(self.root.glob("*/*") if run is None else self.root.glob(f"{_literal(run)}/*")):
            name = f"{home.parent.name}/{home.name}"
            aliases = _read_aliases(home)
            for number in _version_numbers(home):
                version = f"v{number}"
                own = tuple(sorted(alias for alias, target in aliases.items() if target == version))
                facts = json.loads((home / version / METADATA).read_text(encoding="utf-8"))
                infos.append(ArtifactInfo(name, version, own, facts["metadata"]))
        return infos

    def _claim(self, home: Path, temp: Path) -> str:
        """Give the finished folder the next free version; of two writers each gets its own."""
        # An alias may outlive a version that somebody deleted: its number is not used again.
        used = [*_version_numbers(home), *map(version_number, _read_aliases(home).values())]
        number = max((n for n in used if n is not None), default=-1) + 1
        while True:
            try:
                temp.rename(home / f"v{number}")  # fails if it exists, because no version is empty
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                number += 1
            else:
                return f"v{number}"

    def _move_aliases(self, home: Path, version: str, aliases: Sequence[str]) -> None:
        """Let aliases name `version`, unless another writer has put a newer one there meanwhile."""
        if not aliases:
            return
        with _locked(home / ".aliases.lock"):
            known = _read_aliases(home)
            own = version_number(version) or 0
            for alias in aliases:
                if own >= (version_number(known.get(alias, "")) or 0):
                    known[alias] = version
            write_text(home / ALIASES, json.dumps(known, indent=1, sort_keys=True) + "\n")


def _version_numbers(home: Path) -> list[int]:
    """Numbers of the versions in a folder, ascending."""
    numbers = (version_number(path.parent.name) for path in home.glob(f"v*/{METADATA}"))
    return sorted(number for number in numbers if number is not None)


def _read_aliases(home: Path) -> dict[str, str]:
    try:
        aliases: dict[str, str] = json.loads((home / ALIASES).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return aliases


def _copy(source: Path, target: Path, *, skips: str | None = None) -> dict[str, str]:
    """Copy a file or the content of a folder into the new folder `target`.

    Returns: `<bytes> <SHA-256>` of each file by its name within the folder.
    """
    target.mkdir()
    found: dict[str, str] = {}
    paths = [source] if source.is_file() else sorted(source.rglob("*"))
    base = source.parent if source.is_file() else source
    for path in paths:
        name = path.relative_to(base).as_posix()
        if name == skips:
            continue
        if name == METADATA:
            raise ValueError(
                f"{path} cannot be stored: {METADATA} is the name of the store's own file. Fix: rename it."
            )
        copy = target / name
        if path.is_dir():
            copy.mkdir()
            continue
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as reader, copy.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                writer.write(chunk)
        found[name] = f"{size} {digest.hexdigest()}"
    return found


def _remove_abandoned(home: Path) -> None:
    """Remove the temporary folders of writers that are dead: of this machine by their id, others by age."""
    for temp in home.glob(".tmp-*"):
        host, _, rest = temp.name.removeprefix(".tmp-").rpartition("-")[0].rpartition("-")
        if host == platform.node() and rest.isdigit():
            is_dead = not _is_alive(int(rest))
        else:
            try:
                is_dead = time.time() - temp.stat().st_mtime > _ABANDONED_S
            except FileNotFoundError:  # it has just become a version
                continue
        if is_dead:
            shutil.rmtree(temp, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which a kill frees too; none where the file system has no locks."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _literal(run: str) -> str:
    """A glob pattern that matches this name only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in run)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
