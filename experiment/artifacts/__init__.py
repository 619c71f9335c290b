"""Versioned artifacts: where checkpoints go beside the run folder, and how a run begins from one.

store.py says what a store is; folder.py and wandb_store.py are two of them. outbox.py stores in the
background, publishing.py says what an experiment stores, restoring.py how it starts from it.
"""

from .folder import FolderStore
from .store import ArtifactInfo, ArtifactStore, RunAccess
from .wandb_store import WandbStore

__all__ = ["ArtifactInfo", "ArtifactStore", "FolderStore", "RunAccess", "WandbStore"]
