"""Versioned artifacts: where checkpoints go beside the run folder, and how a run begins from one.

stores.py says what a store is and has two of them; upload.py stores in the background.
"""

from .stores import ArtifactInfo, ArtifactStore, RunAccess, UrlStore, WandbStore

__all__ = ["ArtifactInfo", "ArtifactStore", "RunAccess", "UrlStore", "WandbStore"]
