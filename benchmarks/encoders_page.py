"""Write measurements of trajectory encoders into docs/results_encoders.md: a table and a picture.

OMP_NUM_THREADS=1 python benchmarks/encoders.py > benchmarks/results/encoders.json
python benchmarks/learning.py --suite encoders --jobs 2
python benchmarks/encoders_page.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURE = ROOT / "docs" / "results_encoders.md", "encoders.png"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->"
LENGTHS, CONTEXTS = ("128", "1024", "4096"), ("128", "1024", "8192")
LABELS = {
    "transformer": "Transformer",
    "gru": "GRU",
    "lstm": "LSTM",
    "min_gru": "MinGRU",
    "min_lstm": "MinLSTM",
    "lru": "LRU",
    "s5": "S5",
    "ffm": "FFM",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "gla": "GLA",
    "retnet": "GLA, fixed decay",
    "mlstm": "MLSTM",
    "gated_delta": "GatedDeltaNet",
    "hybrid": "Hybrid",
    "ff": "FF (control)",
}
COLUMNS = [
    "encoder",
    *(f"train {length}, k steps/s" for length in LENGTHS),
    *(f"act {context}, ms" for context in CONTEXTS),
    "state at 1,024, KiB",
    "T-maze 100",
    "T-maze 1,000",
    "RepeatPrevious",
]
TASKS = ("tmaze_100", "tmaze_1000", "repeat_previous")


def learned(runs: list[dict[str, Any]]) -> str:
    """Number of seeds that reached the target and the median of their updates, or the median result."""
    if not runs:
        return ""
    reached = sorted(run["reached"]["updates"] for run in runs if run["reached"])
    finals = sorted(run["final"] for run in runs)
    if not reached:
        return f"0/{len(runs)} ({finals[len(finals) // 2]:.2f})"
    return f"{len(reached)}/{len(runs)}, {reached[len(reached) // 2]:,}"


def table(cost: dict[str, Any], tasks: dict[str, Any]) -> str:
    """The Markdown table, with rows in the order of `LABELS`."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for name, label in LABELS.items():
        if name in cost:
            one = cost[name]
            figures = [f"{one['train'][length]['timesteps_per_s'] / 1e3:,.1f}" for length in LENGTHS]
            figures += [f"{one['act'][context]['ms']:.2f}" for context in CONTEXTS]
            figures.append(f"{one['act']['1024']['state_bytes'] / 1024:,.1f}")
        else:
            figures = [""] * (len(LENGTHS) + len(CONTEXTS) + 1)
        key = label.removesuffix(" (control)")
        runs = [tasks.get(f"{task}/{key}", {"runs": []})["runs"] for task in TASKS]
        if any(figures) or any(runs):
            rows.append([label, *figures, *map(learned, runs)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(cost: dict[str, Any], path: Path) -> None:
    """Plot training speed over length, and acting time over context, with one line per encoder."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, (name, one) in enumerate(cost.items()):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--")[number // 10], "marker": "o"}
        rates = [one["train"][length]["timesteps_per_s"] / 1e3 for length in LENGTHS]
        left.plot([int(x) for x in LENGTHS], rates, label=LABELS[name], markersize=3, **style)
        times = [one["act"][context]["ms"] for context in CONTEXTS]
        right.plot([int(x) for x in CONTEXTS], times, markersize=3, **style)
    left.set(xlabel="length of sequences", ylabel="thousand timesteps/s", title="training, one thread")
    right.set(xlabel="timesteps passed", ylabel="ms per step of 12 envs", title="acting, one thread")
    for axes, places in ((left, LENGTHS), (right, CONTEXTS)):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([int(x) for x in places], [f"{int(x):,}" for x in places])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Rewrite the page between its marks."""
    cost = json.loads((RESULTS / "encoders.json").read_text(encoding="utf-8"))["encoders"]
    tasks = json.loads((RESULTS / "learning_encoders.json").read_text(encoding="utf-8"))["tasks"]
    draw(cost, PAGE.parent / PICTURE)
    page = PAGE.read_text(encoding="utf-8")
    text = f"{BEGIN}{table(cost, tasks)}\n![training and acting]({PICTURE})\n{END}"
    new, count = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.DOTALL)
    if not count:
        raise SystemExit(
            f"{PAGE} has no {BEGIN.strip()} ... {END}. Fix: put these lines where the table belongs."
        )
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
