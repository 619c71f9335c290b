"""Learning curves of a run as a picture: `python -m loxodon.experiment.plots RUN_DIR`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Title of a panel, and the metrics drawn in it over env steps; a panel without any of them is left out.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("return per episode", ("val/return", "collect/return")),
    ("success rate", ("val/success", "collect/success")),
    ("loss", ("train/actor_loss", "train/critic_loss")),
    ("value (acting discount)", ("train-update/q", "train-update/td_target")),
    ("policy entropy [nats]", ("train-update/policy_entropy",)),
    ("throughput [1/s]", ("time/env_steps_per_s", "time/updates_per_s")),
)


def read_curves(metrics_file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Env steps and values of every figure in a metrics.jsonl; records that are no numbers are skipped."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(int(record.get("env_steps", 0)))
                values.append(float(value))
    return curves


def can_plot() -> bool:
    """True when matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_run(run_dir: Path) -> Path:
    """Draw `logs/metrics.jsonl` of a run into `logs/curves.png`; returns that path.

    Raises: ValueError if there is no metrics file, nothing in it to draw, or no matplotlib.
    """
    source = run_dir / "logs" / "metrics.jsonl"
    if not source.is_file():
        raise ValueError(f"{source} does not exist. Fix: give the folder of a run, such as runs/tmaze.")
    if not can_plot():
        raise ValueError("Plots need matplotlib, which is not installed. Fix: pip install 'loxodon[plots]'.")
    curves = read_curves(source)
    panels = [(title, [n for n in names if n in curves]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    if not panels:
        raise ValueError(f"{source} holds no figures to draw yet. Fix: train for at least one epoch.")
    return _draw(run_dir, panels, curves)


def _draw(
    run_dir: Path, panels: Sequence[tuple[str, list[str]]], curves: dict[str, tuple[list[int], list[float]]]
) -> Path:
    # The object interface: pyplot would keep global state and may look for a screen.
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, names) in zip(axes, panels, strict=False):
        for name in names:
            steps, values = curves[name]
            axis.plot(steps, values, marker=".", markersize=4, linewidth=1, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("env steps", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(run_dir.name)
    target = run_dir / "logs" / "curves.png"
    figure.savefig(target, dpi=110)
    return target


def main(words: Sequence[str]) -> int:
    """Plot the run folder named on the command line."""
    if len(words) != 1:
        sys.stderr.write("usage: python -m loxodon.experiment.plots RUN_DIR\n")
        return 2
    try:
        target = plot_run(Path(words[0]))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
