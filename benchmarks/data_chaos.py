"""Check that no data are lost or torn if a writer is killed while a reader samples. Prints one JSON document.

    python benchmarks/data_chaos.py --rounds 50

Each round starts a process that writes trajectories and kills it with SIGKILL at a random moment, while
this process samples windows of the existing files. All numbers of a trajectory are functions of the key of
its episode and the time index, so a window that mixes two files, or is cut off, can be recognised. The writer
reports the SHA-256 of finished files; after the kill all of them must exist unchanged, and every file with a
final name must be complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from loxodon.data import DiskTrajDataset, Trajectory, TrajectoryWriter, load_trajectory

FORMATS = ("npz", "npz-compressed")
NUM_ENVS, SAVE_EVERY, MAX_SEQ_LEN, NUM_OBS = 4, (20, 200), 32, 16
START_TIMEOUT_S, MAX_LIFE_S = 60.0, 0.4


def columns(key: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
    """Observations as functions of the key of an episode and the time index: `key`, `hash` and `vector`.

    Args:
        key: (k,) int64.
        times: (k,) int64.
    """
    mixed = (key.astype(np.uint64) << np.uint64(20)) + times.astype(np.uint64)
    for shift in (33, 29, 32):  # mixes the bits, so that neighbours are unrelated
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(0x9E3779B97F4A7C15)
    vector = (mixed[:, None] >> np.arange(NUM_OBS, dtype=np.uint64)) & np.uint64(0xFFFF)
    return {"key": key[:, None].astype(np.int64), "hash": mixed[:, None], "vector": vector.astype(np.float32)}


def rewards_of(key: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(k,) float32 rewards for arriving at `times`."""
    return (columns(key, times)["hash"][:, 0] % np.uint64(1000)).astype(np.float32)


def fault_of(traj: Trajectory) -> str | None:
    """Describe a fault of a trajectory or a window of one; None if there is none."""
    times, keys = traj.time_idxs[:, 0], traj.obs["key"][:, 0]
    if (np.diff(times) != 1).any() or (keys != keys[0]).any():
        return "timesteps of several places"
    for name, expected in columns(keys, times).items():
        if not np.array_equal(traj.obs[name], expected):
            return f"observation {name!r} is not what was written"
    if not np.array_equal(traj.rews[:, 0], rewards_of(keys[1:], times[1:])):
        return "rewards are not what was written"
    actions = traj.actions[:, 0] if traj.actions.shape[1] == 1 else traj.actions.argmax(axis=1)
    if not np.array_equal(actions, times[:-1] % 3):
        return "actions are not what was written"
    return None


def write_until_killed(folder: Path, seed: int, save_as: str) -> None:
    """Write trajectories forever; print name and SHA-256 of finished files."""
    writer = TrajectoryWriter(folder, NUM_ENVS, save_every=SAVE_EVERY, save_as=save_as, seed=seed)
    keys = np.arange(NUM_ENVS, dtype=np.int64) + seed * NUM_ENVS
    rl2s, no_end = np.zeros((NUM_ENVS, 4), np.float32), np.zeros(NUM_ENVS, np.bool_)
    times = np.zeros(NUM_ENVS, np.int64)
    writer.begin(np.arange(NUM_ENVS), columns(keys, times), rl2s, times, ["chaos"] * NUM_ENVS)
    reported: set[str] = set()
    while True:
        for _ in range(25):
            actions = times % 3
            times = times + 1
            rewards = rewards_of(keys, times)
            rl2s = np.concatenate([rewards[:, None], np.eye(3, dtype=np.float32)[actions]], axis=1)
            writer.add(actions, rewards, no_end, no_end, columns(keys, times), rl2s, times)
        for path in sorted(folder.iterdir()):
            if path.suffix != ".tmp" and path.name not in reported:
                reported.add(path.name)
                print(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)


def run_round(folder: Path, dataset: DiskTrajDataset, seed: int) -> dict[str, Any]:
    """Run one writer and kill it at a random moment. Return counts; `faults` is empty if all is well."""
    rng = np.random.default_rng(seed)
    save_as, faults, num_windows = FORMATS[seed % len(FORMATS)], [], 0
    command = [sys.executable, __file__, "--write", str(folder), "--seed", str(seed), "--save-as", save_as]
    num_before = len(list(folder.iterdir()))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(list(folder.iterdir())) == num_before and time.monotonic() < deadline_s:
            time.sleep(0.005)
        killed_at_s = time.monotonic() + rng.uniform(0, MAX_LIFE_S)
        while time.monotonic() < killed_at_s:
            dataset.refresh()
            if dataset.num_files:
                windows = dataset.sample_windows(24, rng)
                num_windows += len(windows)
                faults += [fault for window in windows if (fault := fault_of(window))]
        writer.kill()
        reported = [
            line.split() for line in writer.communicate()[0].splitlines(keepends=True) if "\n" in line
        ]
    for name, digest in reported:
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            faults.append(f"{name} has changed")
    num_files, num_temporary = 0, 0
    for path in folder.iterdir():
        if path.suffix == ".tmp":
            num_temporary += 1
            continue
        num_files += 1
        if fault := fault_of(load_trajectory(path)):
            faults.append(f"{path.name}: {fault}")
    return {
        "save_as": save_as,
        "windows": num_windows,
        "files": num_files - num_before,
        "reported": len(reported),
        "temporary_left": num_temporary,
        "faults": faults,
    }


def run_rounds(num_rounds: int, first_seed: int) -> dict[str, Any]:
    """Run all rounds on one dataset; each round has its own files."""
    rounds = []
    with tempfile.TemporaryDirectory() as root:
        dataset = DiskTrajDataset(dset_max_size=10**9)
        dataset.configure(
            max_seq_len=MAX_SEQ_LEN,
            padded_sampling="both",
            has_edit_rights=True,
            default_root=root,
            default_name="chaos",
        )
        folder = dataset.save_new_trajs_to
        assert folder is not None
        for seed in range(first_seed, first_seed + num_rounds):
            rounds.append(run_round(folder, dataset, seed))
            for path in folder.iterdir():
                path.unlink()
            dataset.on_end_of_collection()
        broken = int(dataset.metrics()["broken_files"])
        dataset.close()
    faults = [fault for one in rounds for fault in one["faults"]]
    return {
        "rounds": num_rounds,
        "windows": sum(one["windows"] for one in rounds),
        "finished_files": sum(one["files"] for one in rounds),
        "reported_files": sum(one["reported"] for one in rounds),
        "temporary_files_left": sum(one["temporary_left"] for one in rounds),
        "broken_files": broken,
        "faults": faults,
        "is_passed": not faults and not broken,
    }


def main() -> int:
    """Run the rounds, or the writer of one round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save-as", choices=FORMATS, default="npz", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write_until_killed(args.write, args.seed, args.save_as)
    result = run_rounds(args.rounds, args.seed)
    print(json.dumps(result, indent=2))
    return 0 if result["is_passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
