"""Artifacts of a run: linked into a folder, stored by a thread, kept until that succeeded."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gin

from ..process.files import atomic_folder, check_tree, remove_left_over
from .stores import CONTENT, POLICY, STATE, ArtifactStore, RunAccess

logger = logging.getLogger("loxodon")
CONFIG_FILE = "config.txt"
_FILES, _NOTE = "files", "pending.json"
_HURRY_S = 5.0  # a preempted process has only seconds; the rest waits on disk


@gin.configurable("Artifacts", allowlist=["store"])
class Uploads:
    """Hands checkpoints (alias `latest`) and the best policy (alias `best`) to a store, without waiting.

    A failing store causes a warning; the next artifact tries again. Only the newest version of each artifact
    waits, so that a long outage of the store does not fill the disk. Files of a killed process are stored
    with the next artifact, or by `close`.

    Args:
        run: information for the store about this run; None in a process that does not use it. Waiting files
            are in its `ckpts/artifacts_pending/`, on the file system of the originals, which then need no
            copy.
        facts: current JSON values for the metadata of an artifact.
        store: makes the store, such as UrlStore; None for no store.

    Raises: TypeError if it makes anything else.
    """

    def __init__(
        self,
        run: RunAccess | None,
        facts: Callable[[], Mapping[str, Any]] = dict,
        *,
        store: Callable[[], ArtifactStore] | None = None,
    ) -> None:
        if store is not None and (isinstance(store, ArtifactStore) or not callable(store)):
            raise TypeError(
                f"Artifacts.store is {store!r}, but must be a class or function that creates a store. "
                "Fix: set Artifacts.store = @UrlStore (without parentheses) and UrlStore.url."
            )
        self.store: ArtifactStore | None = None
        if store is not None and run is not None:
            self._run_name, self._folder = run.run_name, run.run_dir / "ckpts" / "artifacts_pending"
            self.store = store()
            self.store.run = run
            remove_left_over(self._folder)
        self._facts = facts
        self._lock = threading.Lock()  # protects the waiting files
        self._active: Path | None = None  # the parcel that is being stored
        # The newest; each begins when the previous one has ended.
        self._thread: threading.Thread | None = None
        self._warned: set[tuple[type[Exception], str]] = set()

    def store_state(self, folder: Path, epoch: int) -> None:
        """Store a complete training state, after `epoch`; it may be deleted as soon as this returns."""
        self._submit(STATE, folder, "latest", {"checkpoint_epoch": epoch})

    def store_best(self, path: Path) -> None:
        """Store the weights that have just had the best evaluation so far."""
        self._submit(POLICY, path, "best", {})

    def close(self, is_urgent: bool = False) -> None:
        """Try once more to store waiting files; is_urgent: for a few seconds at most."""
        if self.store is None:
            return
        if self._waiting():
            self._store_waiting()
        if self._thread is not None:
            self._thread.join(_HURRY_S if is_urgent else None)
        if left := len(self._waiting()):
            logger.warning(
                "%d artifact(s) could not be stored in %r yet. They are kept in %s, and the next process "
                "of this run will try again.",
                left,
                self.store,
                self._folder,
            )

    def _submit(self, what: str, source: Path, alias: str, facts: Mapping[str, Any]) -> None:
        if self.store is None:
            return
        metadata = {"what": what, "run": self._run_name, **self._facts(), **facts}
        try:
            self._pack(what, source, {"metadata": metadata, "aliases": [alias]})
            self._waiting()
            self.store.prepare()
        except Exception as error:  # an error of a store must not end the training; it is reported
            self._warn(what, error)
        else:
            self._store_waiting()

    def _pack(self, what: str, source: Path, note: Mapping[str, Any]) -> None:
        """Link the files into a parcel: a folder `<time>_<what>`, which appears when it is complete."""
        check_tree(source)
        with atomic_folder(self._folder / f"{time.time_ns():020d}_{what}") as temp:
            files = temp / _FILES
            files.mkdir()
            if source.is_dir():
                shutil.copytree(source, files / CONTENT[what], copy_function=_link)
            else:
                _link(source, files / CONTENT[what])
            (files / CONFIG_FILE).write_text(gin.operative_config_str(), encoding="utf-8")
            (temp / _NOTE).write_text(json.dumps(note), encoding="utf-8")

    def _waiting(self) -> list[Path]:
        """The newest parcel of each artifact, oldest first; others are removed."""
        newest: list[Path] = []
        with self._lock:
            for what in CONTENT:
                parcels = sorted(self._folder.glob(f"*_{what}"))
                newest += parcels[-1:]
                for path in parcels[:-1]:
                    if path != self._active:
                        shutil.rmtree(path, ignore_errors=True)
        return sorted(newest)

    def _store_waiting(self) -> None:
        """Let a thread store everything that waits, after the thread that may be at work.

        It is a daemon thread, so the end of the process does not wait for it, unlike for an executor.
        """
        self._thread = threading.Thread(target=self._run, args=(self._thread,), name="artifacts", daemon=True)
        self._thread.start()

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        assert self.store is not None
        for parcel in self._waiting():
            with self._lock:
                if not parcel.exists():  # replaced by a newer one
                    continue
                self._active = parcel
            what = parcel.name.partition("_")[2]
            try:
                note = json.loads((parcel / _NOTE).read_text(encoding="utf-8"))
                self.store.put(f"{self._run_name}/{what}", parcel / _FILES, **note)
            except Exception as error:  # an error of a store must not end the training; it is reported
                self._warn(what, error)
            else:
                self._warned -= {kind for kind in tuple(self._warned) if kind[1] == what}
                shutil.rmtree(parcel, ignore_errors=True)
            self._active = None

    def _warn(self, what: str, error: Exception) -> None:
        kind = (type(error), what)
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "The artifact %s/%s could not be stored in %r: %s: %s. The local checkpoint is complete, "
                "and the run will try again at the next one.",
                self._run_name,
                what,
                self.store,
                type(error).__name__,
                error,
            )


def _link(source: str | Path, target: str | Path) -> None:
    """Make a second name for a file, or a copy if the file system does not support that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
