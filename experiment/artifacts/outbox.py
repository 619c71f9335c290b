"""What waits to be stored: linked into a folder of its own, stored by a thread, kept until that succeeded."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .store import ArtifactStore

logger = logging.getLogger("loxodon")
_FILES, _NOTE = "files", "pending.json"
_WAIT_S = 0.1


@dataclass(frozen=True)
class Parcel:
    """One artifact that waits, in a folder of the outbox."""

    folder: Path
    name: str
    metadata: Mapping[str, Any]
    aliases: Sequence[str]


class Outbox:
    """Stores artifacts on a thread. A store that fails costs a warning; the next submission tries again.

    Of each artifact only the newest one waits, so that a store which is away for long fills no disk. What a
    killed process left is stored with the next submission.

    Args:
        folder: where parcels wait; on the file system of the files, which then need not be copied.
        store: where they go.
    """

    def __init__(self, folder: Path, store: ArtifactStore) -> None:
        self._folder, self._store = folder, store
        self._pending: dict[str, Parcel] = {}
        self._changed = threading.Condition()
        self._active: Parcel | None = None
        self._has_work = self._is_stopping = False
        self._warned: set[tuple[type[Exception], str]] = set()
        self._thread: threading.Thread | None = None
        self._take_what_was_left()

    @property
    def num_pending(self) -> int:
        """Number of artifacts that are not stored yet."""
        with self._changed:
            return len(self._pending)

    def submit(
        self,
        name: str,
        files: Mapping[str, Path | str],
        *,
        metadata: Mapping[str, Any],
        aliases: Sequence[str],
    ) -> None:
        """Hand over an artifact. It returns at once; the files may be deleted or replaced afterwards.

        Args:
            name: `<run>/<what>`.
            files: by their name in the artifact: a file or folder to take, or a text to write.
            metadata: JSON values.
            aliases: of the new version.
        """
        try:
            parcel = self._pack(name, files, metadata, aliases)
            with self._changed:
                replaced = self._pending.get(name)
                self._pending[name] = parcel
                if replaced is not None and replaced is not self._active:
                    shutil.rmtree(replaced.folder, ignore_errors=True)
            self._store.prepare()
        except Exception as error:  # whatever a store raises must not end the training; it is reported
            self._warn(name, error)
            return
        with self._changed:
            self._wake()

    def close(self, wait_s: float | None = None) -> None:
        """Try once more what is left, for `wait_s` seconds at most (None: until done), and end the thread."""
        until_s = None if wait_s is None else time.monotonic() + wait_s
        with self._changed:
            if self._pending:
                self._wake()
            while self._has_work or self._active is not None:
                if until_s is not None and time.monotonic() > until_s:
                    break
                self._changed.wait(_WAIT_S)
            self._is_stopping = True
            self._changed.notify_all()
            left = len(self._pending)
        if left:
            logger.warning(
                "%d artifact(s) could not be stored in %r yet. They wait in %s, and the next process of this "
                "run tries again.",
                left,
                self._store,
                self._folder,
            )
        if self._thread is not None and self._active is None:
            self._thread.join()
        self._thread, self._is_stopping = None, False

    def _pack(
        self,
        name: str,
        files: Mapping[str, Path | str],
        metadata: Mapping[str, Any],
        aliases: Sequence[str],
    ) -> Parcel:
        """Link the files into a folder, which appears when it is complete."""
        final = self._folder / f"{time.time_ns():020d}"
        temp = final.with_suffix(".tmp")
        (temp / _FILES).mkdir(parents=True)
        try:
            for target, source in files.items():
                place = temp / _FILES / target
                if isinstance(source, str):
                    place.write_text(source, encoding="utf-8")
                elif source.is_dir():
                    shutil.copytree(source, place, copy_function=_link)
                else:
                    _link(source, place)
            note = {"name": name, "metadata": dict(metadata), "aliases": list(aliases)}
            (temp / _NOTE).write_text(json.dumps(note), encoding="utf-8")
            temp.rename(final)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return Parcel(final, name, metadata, aliases)

    def _take_what_was_left(self) -> None:
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            try:
                note = json.loads((path / _NOTE).read_text(encoding="utf-8"))
                parcel = Parcel(path, note["name"], note["metadata"], note["aliases"])
            except (OSError, ValueError, KeyError, TypeError):  # the process was killed while it packed this
                parcel = None
            if parcel is None or path.suffix:
                shutil.rmtree(path, ignore_errors=True)
                continue
            if (older := self._pending.get(parcel.name)) is not None:
                shutil.rmtree(older.folder, ignore_errors=True)
            self._pending[parcel.name] = parcel

    def _wake(self) -> None:
        """Let the thread try everything that waits; called holding the condition."""
        self._has_work = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="artifacts", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._has_work or self._is_stopping):
                    self._changed.wait()
                if self._is_stopping:
                    return
                self._has_work = False
                waiting = list(self._pending.values())
                self._active = waiting[0] if waiting else None
            for parcel in waiting:
                self._try(parcel)
            with self._changed:
                self._active = None
                self._changed.notify_all()

    def _try(self, parcel: Parcel) -> None:
        """Store one parcel, unless a newer one has taken its place meanwhile."""
        with self._changed:
            if self._pending.get(parcel.name) is not parcel:
                shutil.rmtree(parcel.folder, ignore_errors=True)
                return
            self._active = parcel
        try:
            version = self._store.put(
                parcel.name, parcel.folder / _FILES, metadata=parcel.metadata, aliases=parcel.aliases
            )
        except Exception as error:  # whatever a store raises must not end the training; it is reported
            self._warn(parcel.name, error)
            is_done = False
        else:
            logger.debug("%s:%s is stored in %r", parcel.name, version, self._store)
            self._warned.clear()
            is_done = True
        with self._changed:
            is_newest = self._pending.get(parcel.name) is parcel
            if is_done and is_newest:
                del self._pending[parcel.name]
            if is_done or not is_newest:
                shutil.rmtree(parcel.folder, ignore_errors=True)

    def _warn(self, name: str, error: Exception) -> None:
        kind = (type(error), name)
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "The artifact %s could not be stored in %r: %s: %s. The run goes on and tries again at its "
                "next checkpoint; its own checkpoint is complete.",
                name,
                self._store,
                type(error).__name__,
                error,
            )


def _link(source: str | Path, target: str | Path) -> None:
    """A second name for a file, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
