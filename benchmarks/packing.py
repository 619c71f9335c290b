"""Training speed on short trajectories, by the layout of batches. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/packing.py                    # about 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/packing.py gru --rounds 1

Trajectories have 10 to 200 transitions, with equal probability; max_seq_len is 256, with 24 windows in a
batch; agent and encoders are those of `learner.py`; one torch thread, float32. Layouts of the same windows:

full: each window in a row of max_seq_len. padded: each in a row as long as the longest of its batch. sorted:
as padded, with windows of similar length in a batch (the default of BatchLoader). packed:
Experiment.packed_batches.

timesteps_per_s: transitions per CPU second of whole updates, from the fastest of several updates. gain: ratio
to full rows. share_without_loss: share of places that are padding or the end of a window.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from learner import BATCH, NUM_ACTIONS, OBS_DIM, Workload, make_learner
from provenance import provenance
from torch import Tensor
from torch.nn import functional as F

from loxodon.data import Batch, BatchLoader, MemoryTrajDataset, Sampler, Trajectory

SHORTEST, LONGEST, MAX_SEQ_LEN, POOL = 10, 200, 256, 8
ENCODERS = {
    "transformer": Workload(length=MAX_SEQ_LEN),
    "gru": Workload(encoder="gru", layers=2, length=MAX_SEQ_LEN),
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"pool_batches": 1},
    "padded": {"pool_batches": 1},
    "sorted": {"pool_batches": POOL},
    "packed": {"packs": True},
}


def make_trajectory(rng: np.random.Generator) -> Trajectory:
    """A trajectory of random numbers."""
    length = int(rng.integers(SHORTEST, LONGEST, endpoint=True))
    return Trajectory(
        obs={"observation": rng.standard_normal((length + 1, OBS_DIM), np.float32)},
        rl2s=rng.standard_normal((length + 1, 1 + NUM_ACTIONS), np.float32),
        time_idxs=np.arange(length + 1)[:, None],
        actions=rng.integers(NUM_ACTIONS, size=(length, 1)),
        rews=rng.standard_normal((length, 1), np.float32),
        dones=np.zeros((length, 1), bool),
    )


def make_batches(way: str) -> list[Batch]:
    """A pool of batches, with the same windows for every layout."""
    rng = np.random.default_rng(0)
    dataset = MemoryTrajDataset([make_trajectory(rng) for _ in range(500)], sampler=Sampler("timestep"))
    dataset.configure(
        max_seq_len=MAX_SEQ_LEN,
        padded_sampling="none",
        has_edit_rights=False,
        default_root="",
        default_name="",
    )
    loader = BatchLoader(dataset, batch_size=BATCH, num_workers=0, seed=0, **WAYS[way])
    batches = list(loader.epoch(0, POOL))
    return [at_full_length(batch) for batch in batches] if way == "full" else batches


def at_full_length(batch: Batch) -> Batch:
    """Pad the rows of a batch to max_seq_len transitions."""
    missing = MAX_SEQ_LEN - batch.mask.shape[1]

    def longer(x: Tensor) -> Tensor:
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])

    names = ("rl2s", "time_idxs", "actions", "rews", "dones", "mask")
    obs = {key: longer(x) for key, x in batch.obs.items()}
    return replace(batch, obs=obs, **{name: longer(getattr(batch, name)) for name in names})


def measure(encoder: str, rounds: int) -> dict[str, dict[str, float]]:
    """Measure one encoder by layout; layouts are interleaved."""
    learners = {way: make_learner(ENCODERS[encoder]) for way in WAYS}
    batches = {way: make_batches(way) for way in WAYS}
    taken: dict[str, list[list[float]]] = {way: [[] for _ in range(POOL)] for way in WAYS}
    for way, learner in learners.items():
        learner.update([batches[way][0]])
    for _ in range(rounds):
        for way, learner in learners.items():
            for batch, seconds in zip(batches[way], taken[way], strict=True):
                begin = time.process_time()
                learner.update([batch])
                seconds.append(time.process_time() - begin)
    timesteps = sum(int(batch.mask.sum()) for batch in batches["padded"])
    speed = {way: timesteps / sum(map(min, taken[way])) for way in WAYS}
    return {
        way: {
            "timesteps_per_s": round(speed[way]),
            "gain": round(speed[way] / speed["full"], 2),
            "share_without_loss": round(1 - timesteps / sum(b.mask.numel() for b in batches[way]), 3),
            "mean_rows": sum(len(batch.mask) for batch in batches[way]) / POOL,
        }
        for way in WAYS
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=list(ENCODERS),
        help=f"encoders to measure, from {list(ENCODERS)} (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help=f"rounds of the same {POOL} updates for each layout",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, args.rounds) for name in args.names}
    print(json.dumps({**provenance(), "encoders": found}, indent=2))


if __name__ == "__main__":
    main()
