"""What tells two states of a dataset apart, for caches of what was made from one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .dataset import RLDataset
from .disk_dataset import DiskTrajDataset
from .memory import MemoryTrajDataset
from .minari import MinariDataset
from .mixture import MixtureOfDatasets


def dataset_fingerprint(dataset: RLDataset) -> str | None:
    """A text that changes with the data and with how they are drawn; None where that is not known.

    Files count by name and size, as of the last refresh; the folder does not, so a copy is the same. A
    dataset of your own says so itself with a method `fingerprint() -> str`.
    """
    own = getattr(dataset, "fingerprint", None)
    if callable(own):
        return str(own())
    content: Any
    if isinstance(dataset, DiskTrajDataset):
        if dataset.priorities is not None or dataset.relabeler is not None:
            return None
        content = sorted([file.name, Path(file.path).stat().st_size] for file in dataset._store.files)
    elif isinstance(dataset, MinariDataset):
        files = [Path(path) for path in dataset._paths]
        content = [dataset.dataset_id, [[file.name, file.stat().st_size] for file in files]]
    elif isinstance(dataset, MemoryTrajDataset) and dataset.relabeler is None:
        content = [_digest(traj) for traj in dataset._trajs]
    elif isinstance(dataset, MixtureOfDatasets):
        content = [dataset_fingerprint(part) for part in dataset.datasets]
        if None in content:
            return None
        weights = dataset._final.tolist(), dataset._initial.tolist()
        content = [content, *weights, dataset.smooth_sudden_starts]
    else:
        return None
    settings = {name: getattr(dataset, name, None) for name in ("sample_by", "recent_fraction")}
    return json.dumps([type(dataset).__name__, settings, content])


def _digest(traj: Any) -> str:
    """Of all arrays of a trajectory."""
    found = hashlib.sha256()
    arrays = [
        *sorted(traj.obs.items()),
        *((n, getattr(traj, n)) for n in ("rl2s", "rews", "dones", "actions")),
    ]
    for name, array in arrays:
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()
