"""Check that nothing is lost when a learner and two actors are killed at random. Prints one JSON document.

    python benchmarks/chaos.py --rounds 50

Three processes share one T-maze run. Each round waits a random time, kills one of them with SIGKILL and
starts it again, the learner with --resume. Meanwhile this process records the SHA-256 of every finished
trajectory file. At the end all files must exist, unchanged and readable; every learner must have resumed
quickly; and the policy must be as good as after an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from provenance import provenance

from loxodon.data import check_file

ROOT = Path(__file__).resolve().parents[1]
RUN_NAME = "chaos"
SETTINGS = [
    "HORIZON=10",
    "Experiment.max_seq_len=11",
    "BilevelEpsilonGreedy.steps_anneal=1000",
    "Experiment.train_timesteps_per_epoch=11",
    "Experiment.train_batches_per_epoch=20",
    "Experiment.val_timesteps_per_epoch=44",
    "Experiment.val_interval=20",
    "Experiment.ckpt_interval=2",
    "CheckpointManager.keep=3",
    "Experiment.stop_at_val_return=None",
    "Experiment.replay_ratio=0.15",  # 20 updates for the 12 x 11 env steps of an epoch
    "MetricLogger.tensorboard=False",
    "Experiment.torch_threads=1",
    "DiskTrajDataset.dset_max_size=1000000",
]
MAX_RESUME_S, MAX_WAIT_S = 5.0, 900.0


class Member:
    """One process of the run, started again after every death."""

    def __init__(self, folder: Path, mode: str, number: int, epochs: int) -> None:
        self.folder, self.mode = folder, mode
        self.log = folder / f"{mode}_{number}.log"
        self.settings = [*SETTINGS, f"Experiment.epochs={epochs}"]
        self.process: subprocess.Popen[bytes] | None = None
        self.resume_s: list[float] = []

    def start(self) -> None:
        """Start the process; a learner resumes from its newest checkpoint, if there is one."""
        command = [
            sys.executable,
            str(ROOT / "examples" / "run.py"),
            "--config",
            "tmaze",
            "--mode",
            self.mode,
        ]
        has_checkpoint = any(
            (self.folder / RUN_NAME / "ckpts" / "training_states").glob("*_epoch_*/COMPLETE")
        )
        resumes = self.mode == "learn" and has_checkpoint
        command += ["--run-name", RUN_NAME, *(["--resume"] if resumes else []), *self.settings]
        command.append(f"Experiment.ckpt_base_dir='{self.folder}'")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        if resumes:
            threading.Thread(target=self._time_resume, args=(self.process,), daemon=True).start()

    def kill(self) -> bool:
        """Kill the process with SIGKILL; return False if it had already ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            return False
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return True

    def _time_resume(self, process: subprocess.Popen[bytes]) -> None:
        """Record the seconds until the log reports that the run has resumed."""
        start_s, seen = time.perf_counter(), self.log.read_bytes().count(b"Resuming at epoch")
        while process.poll() is None:
            if self.log.read_bytes().count(b"Resuming at epoch") > seen:
                self.resume_s.append(time.perf_counter() - start_s)
                return
            time.sleep(0.02)


class Witness(threading.Thread):
    """Records the hash of every finished trajectory file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.hashes, self.is_done = folder, dict[str, str](), False

    def run(self) -> None:
        """Look for new files until `is_done`."""
        while not self.is_done:
            self.look()
            time.sleep(0.1)

    def look(self) -> None:
        """Hash new files."""
        for path in self.folder.glob("*.npz"):
            if path.name not in self.hashes:
                self.hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()

    def faults(self) -> list[str]:
        """Descriptions of recorded files that are missing, differ, or cannot be read."""
        found = []
        for name, digest in self.hashes.items():
            path = self.folder / name
            if not path.exists():
                found.append(f"{name} is gone")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                found.append(f"{name} has changed")
        for path in self.folder.glob("*.npz"):
            try:
                check_file(path)
            except ValueError as error:
                found.append(str(error))
        return found


def final_success(folder: Path) -> float | None:
    """Success in the last evaluation of the run."""
    found = None
    for line in (folder / RUN_NAME / "logs" / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line).get("val/success", found)
    return found


def run_once(rounds: int, epochs: int, seed: int) -> dict[str, Any]:
    """Train with `rounds` kills; the learner then finishes its epochs."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = [
            Member(folder, "learn", 0, epochs),
            *(Member(folder, "collect", i, epochs) for i in (1, 2)),
        ]
        witness = Witness(folder / RUN_NAME / "buffer" / "fifo")
        witness.start()
        start_s, kills = time.perf_counter(), {"learn": 0, "collect": 0}
        for member in members:
            member.start()
        for _ in range(rounds):
            time.sleep(rng.uniform(0.5, 4.0))
            victim = rng.choice(members)
            kills[victim.mode] += victim.kill()
            victim.start()
        learner = members[0].process
        assert learner is not None
        code = learner.wait(MAX_WAIT_S)
        for member in members[1:]:
            member.kill()
        witness.is_done = True
        witness.join()
        witness.look()
        faults = witness.faults()
        return {
            "seconds": round(time.perf_counter() - start_s, 1),
            "kills": kills,
            "learner_exit_code": code,
            "trajectories": len(witness.hashes),
            "faults": faults,
            "resume_s": [round(seconds, 2) for seconds in members[0].resume_s],
            "final_success": final_success(folder),
            "learner_log_tail": "" if code == 0 else members[0].log.read_text()[-2000:],
        }


def import_seconds() -> float:
    """Seconds that a process needs to start and to import the modules of a run."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import loxodon.experiment"], check=True)
    return time.perf_counter() - start_s


def main() -> int:
    """Run with and without kills, and print the results; return 1 if something was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-reference", action="store_true", help="skip the undisturbed run")
    args = parser.parse_args()
    imports_s = import_seconds()
    chaos = run_once(args.rounds, args.epochs, args.seed)
    undisturbed = {} if args.no_reference else run_once(0, args.epochs, args.seed)
    slowest_s = max(chaos["resume_s"], default=0.0) - imports_s
    is_as_good = (chaos["final_success"] or 0.0) >= undisturbed.get("final_success", 0.0) - 0.05
    passed = (
        not chaos["faults"] and chaos["learner_exit_code"] == 0 and is_as_good and slowest_s < MAX_RESUME_S
    )
    result = {
        "provenance": provenance(),
        "rounds": args.rounds,
        "imports_s": round(imports_s, 2),
        "slowest_resume_beyond_imports_s": round(slowest_s, 2),
        "undisturbed": undisturbed,
        "chaos": chaos,
        "passed": passed,
    }
    print(json.dumps(result, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
