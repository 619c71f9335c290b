"""Versioned artifacts: storage of checkpoints outside the run folder, and runs that begin from one.

stores.py defines the interface of a store and two stores; upload.py stores in the background.
"""

from .stores import ArtifactInfo, ArtifactStore, RunAccess, UrlStore, WandbStore

__all__ = ["ArtifactInfo", "ArtifactStore", "RunAccess", "UrlStore", "WandbStore"]
