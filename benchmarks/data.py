"""Speed of sampling windows from trajectory files, as JSON.

Run: python benchmarks/data.py --set long --format npz     one workload
     python benchmarks/data.py --all                        the table, into benchmarks/results/data.json
     python benchmarks/data.py --memory                     resident memory over 200 epochs
     python benchmarks/data.py --refresh                    an epoch's listing with 100,000 files

Data sets: 1,000 trajectories of 200 timesteps ("short") and 200 of 10,000 ("long"), with 16 float32
observations and 4 actions; windows of 128 transitions in batches of 24. Speeds are windows per second in
padded batches, in the learner's process. Files are in the page cache, like files that collectors have just
written.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from loxodon.data import BatchLoader, DiskTrajDataset, Trajectory, save_trajectory

ROOT = Path(__file__).resolve().parents[1]
OBS_DIM, NUM_ACTIONS, SEQ_LEN, BATCH = 16, 4, 128, 24
SETS = {"short": (1000, 200), "long": (200, 10_000)}
FORMATS = ("npz", "npz-compressed")
NUM_REFRESH_FILES, NUM_EPOCHS = 100_000, 200
MAX_REFRESH_S, MAX_GROWTH = 0.2, 1.05
# Required windows per second with 0 loader workers.
TARGETS = {
    ("short", "npz"): 15_000,
    ("long", "npz"): 15_000,
    ("short", "npz-compressed"): 5_000,
    ("long", "npz-compressed"): 1_000,
}


def make_trajectory(length: int, seed: int) -> Trajectory:
    """Noise in the shape of a trajectory of a discrete environment."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(NUM_ACTIONS, size=(length, 1))
    rews = rng.standard_normal((length, 1)).astype(np.float32)
    rl2s = np.zeros((length + 1, 1 + NUM_ACTIONS), np.float32)
    rl2s[1:, :1] = rews
    rl2s[np.arange(1, length + 1), 1 + actions[:, 0]] = 1.0
    return Trajectory(
        obs={"observation": rng.standard_normal((length + 1, OBS_DIM)).astype(np.float32)},
        rl2s=rl2s,
        time_idxs=np.arange(length + 1)[:, None],
        actions=actions,
        rews=rews,
        dones=np.zeros((length, 1), np.bool_),
        env_name="Noise",
    )


def write_set(folder: Path, num_trajs: int, length: int, save_as: str) -> int:
    """Write one data set; return its bytes on disk."""
    fifo = folder / "noise" / "buffer" / "fifo"
    fifo.mkdir(parents=True)
    trajs = [make_trajectory(length, seed) for seed in range(min(num_trajs, 50))]
    num_bytes = 0
    for i in range(num_trajs):
        traj = trajs[i % len(trajs)]
        path = save_trajectory(fifo, traj, save_as=save_as, traj_id=f"{i:08x}", unix_time=1e9 + i)
        num_bytes += path.stat().st_size
    return num_bytes


def open_dataset(folder: Path) -> DiskTrajDataset:
    """Open the data set like an experiment."""
    dataset = DiskTrajDataset(dset_root=str(folder), dset_name="noise", dset_max_size=10**9)
    dataset.configure(
        max_seq_len=SEQ_LEN,
        padded_sampling="none",
        has_edit_rights=True,
        default_root=str(folder),
        default_name="noise",
    )
    dataset.expect(make_trajectory(1, seed=0).layout)
    return dataset


def resident_mb() -> float:
    """Resident memory of this process, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def anonymous_mb() -> float:
    """Resident memory of this process without mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def measure_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Windows per second: in the first epoch (200 batches), and later, with all files open."""
    with tempfile.TemporaryDirectory() as name:
        num_bytes = write_set(Path(name), *SETS[args.set], args.format)
        dataset = open_dataset(Path(name))
        loader = BatchLoader(dataset, batch_size=BATCH, num_workers=args.workers, seed=0)
        speeds = []
        for epoch in range(2):  # the first epoch opens most files
            start_s = time.perf_counter()
            num_batches = 200
            for _ in loader.epoch(epoch, num_batches):
                pass
            speeds.append(num_batches / (time.perf_counter() - start_s))
        speed = speeds[-1]
        num_batches = max(int(args.seconds * speed), 20)
        start_s = time.perf_counter()
        for _ in loader.epoch(2, num_batches):
            pass
        elapsed_s = time.perf_counter() - start_s
        result = {
            "windows_per_s": round(num_batches * BATCH / elapsed_s, 1),
            "first_windows_per_s": round(speeds[0] * BATCH, 1),
            "mb_on_disk": round(num_bytes / 1e6, 1),
            "anonymous_mb": round(anonymous_mb(), 1),
            "open_descriptors": len(list(Path("/proc/self/fd").iterdir())),
            **loader.metrics(),
        }
        loader.close()
        dataset.close()
    return result


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory after the tenth and after the last of 200 epochs of refreshing and sampling."""
    with tempfile.TemporaryDirectory() as name:
        write_set(Path(name), *SETS[args.set], args.format)
        dataset = open_dataset(Path(name))
        loader = BatchLoader(dataset, batch_size=BATCH, num_workers=args.workers, seed=0)
        sizes = []
        for epoch in range(NUM_EPOCHS):
            dataset.on_end_of_collection()
            for _ in loader.epoch(epoch, 100):
                pass
            gc.collect()
            sizes.append((resident_mb(), anonymous_mb()))
        loader.close()
        dataset.close()
    (tenth, tenth_own), (last, last_own) = sizes[9], sizes[-1]
    return {
        "epochs": NUM_EPOCHS,
        "resident_mb": {"epoch_10": round(tenth, 1), "last": round(last, 1), "largest": max(sizes)[0]},
        "growth": round(last / tenth - 1, 4),
        "growth_without_mapped_files": round(last_own / tenth_own - 1, 4),
        "passed": last <= MAX_GROWTH * tenth,
    }


def measure_refresh(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an epoch's listing with 100,000 existing files, and none or ten new ones."""
    with tempfile.TemporaryDirectory() as name:
        write_set(Path(name), NUM_REFRESH_FILES, 2, args.format)
        start_s = time.perf_counter()
        dataset = open_dataset(Path(name))
        dataset.on_end_of_collection()
        first_s = time.perf_counter() - start_s
        fifo, seconds = Path(name) / "noise" / "buffer" / "fifo", {}
        for num_new in (0, 10):
            times = []
            for i in range(5):
                for j in range(num_new):
                    number = NUM_REFRESH_FILES + num_new * i + j
                    traj = make_trajectory(2, number)
                    save_trajectory(fifo, traj, save_as=args.format, traj_id=f"{number:08x}", unix_time=2e9)
                start_s = time.perf_counter()
                dataset.on_end_of_collection()  # the learner does this once per epoch
                dataset.refresh()  # and its loader does this
                times.append(time.perf_counter() - start_s)
            seconds[str(num_new)] = round(statistics.median(times), 4)
        dataset.close()
    return {
        "files": NUM_REFRESH_FILES,
        "first_s": round(first_s, 3),
        "epoch_s_by_new_files": seconds,
        "passed": max(seconds.values()) < MAX_REFRESH_S,
    }


def run_self(*words: str) -> dict[str, Any]:
    """Measure in a new process."""
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}\nFix: run it by hand.")
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def run_table(repeats: int, seconds: float) -> dict[str, Any]:
    """Run every workload `repeats` times and report medians."""
    rows = []
    for workers in (0, 2):
        for name in SETS:
            for save_as in FORMATS:
                words = ("--set", name, "--format", save_as, "--workers", str(workers))
                runs = [run_self(*words, "--seconds", str(seconds)) for _ in range(repeats)]
                runs.sort(key=lambda run: float(run["windows_per_s"]))
                target = TARGETS[name, save_as] if workers == 0 else None
                median = runs[len(runs) // 2]
                passed = None if target is None else median["windows_per_s"] >= target
                workload = {"set": name, "format": save_as, "workers": workers}
                spread = [run["windows_per_s"] for run in runs]
                rows.append({**workload, "target": target, "passed": passed, "all_runs": spread, **median})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    others = {"memory": run_self("--memory", "--set", "long"), "refresh": run_self("--refresh")}
    return {"provenance": provenance(), "repeats": repeats, "rows": rows, **others}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--all", action="store_true", help="measure the whole table and write benchmarks/results/data.json")
    add("--memory", action="store_true", help="measure the resident memory over 200 epochs")
    add("--refresh", action="store_true", help="measure the listing of 100,000 files")
    add("--repeats", type=int, default=3, help="repeats of each workload with --all")
    add("--set", choices=tuple(SETS), default="short")
    add("--format", choices=FORMATS, default="npz")
    add("--workers", type=int, default=0, help="loader processes")
    add("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    if args.all:
        text = json.dumps(run_table(args.repeats, args.seconds), indent=1)
        print(text)
        (ROOT / "benchmarks" / "results" / "data.json").write_text(text + "\n", encoding="utf-8")
        return
    measure = measure_sampling
    if args.memory or args.refresh:
        measure = measure_memory if args.memory else measure_refresh
    print(json.dumps({"settings": vars(args), "result": measure(args)}, indent=1))


if __name__ == "__main__":
    main()
