"""All figures of one GPU, in at most ten minutes. Writes one JSON document.

    python benchmarks/gpu.py                                 # benchmarks/results/gpu.json
    python benchmarks/gpu.py learner rollout_64 --limit-s 120 --output gpu.json
    python benchmarks/gpu.py --device cpu --output gpu.json  # a rehearsal without a GPU, about 2 minutes

Sections run one after another, the most useful first, each in a process of its own with a time limit; one
that fails stops none of the others. The file is written after each section. Ceilings are measured speeds of
large operations: matrix products in float32, TF32 and bfloat16, and copies.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clock import seconds_of
from provenance import ROOT, provenance

LAST_CHARACTERS = 3000  # limit for the output of a section that failed


MIN_SECTION_S = 10.0


@dataclass(frozen=True)
class Section:
    """A command and its time limit, and its command without a GPU; None if it needs one."""

    command: str
    limit_s: int
    rehearsal: str | None = None


RUN = "examples/run.py --seed 0 Experiment.verbose=False Experiment.env_mode='sync' --config"
LEARNER = "benchmarks/learner.py --device cuda --precision bf16 --seconds 3"
ROLLOUT = "benchmarks/rollout.py --device cuda --env null --context 512 --prefill"
BF16 = "Experiment.mixed_precision='bf16'"
SECTIONS = {
    "tests": Section("-m pytest -q -m gpu -p no:cacheprovider tests", 150),
    "tmaze": Section(
        f"{RUN} tmaze {BF16} Experiment.epochs=12", 75, f"{RUN} tmaze {BF16} Experiment.epochs=4"
    ),
    "popgym_repeat": Section(f"{RUN} popgym_repeat {BF16} Experiment.epochs=12", 75),
    "learner": Section(
        f"{LEARNER} base base_masked mid", 60, "benchmarks/learner.py discrete --precision bf16 --seconds 0.1"
    ),
    "learner_kinds": Section(f"{LEARNER} base_box base_gru base_multi_task", 60),
    "learner_large": Section(f"{LEARNER} large", 40),
    "rollout_64": Section(
        f"{ROLLOUT} --num-envs 64", 30, "benchmarks/rollout.py --env null --context 8 --prefill --seconds 0.5"
    ),
    "rollout_512": Section(f"{ROLLOUT} --num-envs 512", 40),
    "rollout_gru_512": Section(f"{ROLLOUT} --num-envs 512 --encoder gru", 30),
    "learner_2048": Section(f"{LEARNER} base_2048", 40),
    "learner_profile": Section(f"{LEARNER} base --profile", 40),
    "learner_compiled": Section(f"{LEARNER} base --compile", 90),
    "encoders": Section(
        "benchmarks/encoders.py --device cuda --width 256 --timesteps 32768 --lengths 512 2048 "
        "--contexts 512 --seconds 0.3",
        90,
        "benchmarks/encoders.py --width 32 --timesteps 64 --lengths 32 --contexts 32 --seconds 0.01",
    ),
    "nccl": Section(
        f"-m torch.distributed.run --standalone --nproc_per_node=1 {RUN} tmaze {BF16} Experiment.epochs=4", 60
    ),
    "deterministic": Section(f"{RUN} tmaze Experiment.deterministic=True Experiment.epochs=3", 40),
    "fp16": Section(f"{RUN} tmaze Experiment.mixed_precision='fp16' Experiment.epochs=4", 40),
    "learner_large_others": Section(f"{LEARNER} large_masked large_2048", 60),
}
KEPT_METRICS = (
    "epoch",
    "env_steps",
    "gradient_steps",
    "train/loss",
    "val/return",
    "time/updates_per_s",
    "time/env_steps_per_s",
    "time/policy_ms_per_step",
    "time/update_ms",
)


def ceilings(device: torch.device) -> dict[str, float]:
    """Speeds that nothing can exceed."""
    n, megabytes = (256, 1) if device.type == "cpu" else (8192, 1024)

    def fastest_s(call: Callable[[], object]) -> float:
        call()
        return min(seconds_of(call, device) for _ in range(10))

    x = torch.randn(n, n, device=device)
    half = x.bfloat16()
    found = {"bf16_tflop_per_s": 2 * n**3 / fastest_s(lambda: half @ half) / 1e12}
    for name, precision in (("fp32", "highest"), ("tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        found[f"{name}_tflop_per_s"] = 2 * n**3 / fastest_s(lambda: x @ x) / 1e12
    block = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    found["memory_gb_per_s"] = 2 * block.nbytes / fastest_s(block.clone) / 1e9
    if device.type == "cuda":
        pageable = torch.empty(256 << 20, dtype=torch.uint8)
        for name, host in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
            found[f"{name}_to_gpu_gb_per_s"] = host.nbytes / fastest_s(partial(host.to, device)) / 1e9
    return {name: round(value, 3) for name, value in found.items()}


def result_of(command: Sequence[str], output: str, folder: Path) -> Any:
    """The JSON document that a section printed, or the last metrics of its run, or its last line."""
    if command[0].startswith("benchmarks/"):
        return json.loads(output[output.index("{") :])
    metrics = next(folder.rglob("metrics.jsonl"), None)
    if metrics is None:
        return output.strip().rpartition("\n")[2]
    last: dict[str, Any] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        last.update({key: value for key, value in json.loads(line).items() if key in KEPT_METRICS})
    return last


def run_section(name: str, line: str, limit_s: float) -> dict[str, Any]:
    """Run one section in a process of its own."""
    command = line.split()
    with tempfile.TemporaryDirectory() as folder:
        if "examples/run.py" in command:
            command += ["--run-name", name, f"Experiment.ckpt_base_dir='{folder}'"]
        output, errors = Path(folder, "output"), Path(folder, "errors")
        start_s = time.perf_counter()
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=out, stderr=err, start_new_session=True
            )
            try:
                status: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its workers, too
                process.wait()
                status = "time limit"
        found: dict[str, Any] = {
            "command": line,
            "exit_status": status,
            "seconds": round(time.perf_counter() - start_s, 1),
        }
        if status == 0:
            return {**found, "result": result_of(command, output.read_text(), Path(folder))}
        last = {"output": output.read_text(), "errors": errors.read_text()}
        return {**found, **{key: text[-LAST_CHARACTERS:] for key, text in last.items()}}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"sections, from {list(SECTIONS)} (default: all)")
    parser.add_argument("--limit-s", type=float, default=570.0, help="time limit of all sections together")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only rehearse")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}, choose from {list(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device. Fix: rehearse with --device cpu.")
    end_s = time.perf_counter() + args.limit_s
    sections: dict[str, Any] = {}
    found = {**provenance(args.device), "ceilings": ceilings(torch.device(args.device)), "sections": sections}
    for name in args.names or SECTIONS:
        section, left_s = SECTIONS[name], end_s - time.perf_counter()
        line = section.command if args.device == "cuda" else section.rehearsal
        if line is None:
            continue
        if left_s < MIN_SECTION_S:
            sections[name] = {"command": line, "exit_status": "no time left"}
        else:
            sections[name] = run_section(name, line, min(left_s, section.limit_s))
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: sections[name]})[:LAST_CHARACTERS], flush=True)


if __name__ == "__main__":
    main()
