"""Learning curves of a run as a picture: `python -m loxodon.experiment.plots RUN_DIR`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("loxodon")
ENV_STEPS, UPDATES = "env_steps", "gradient_steps"
# Title of a panel, its x axis, and the metrics drawn in it; a panel without any of them is left out.
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("return per episode", ENV_STEPS, ("val/return", "collect/return")),
    ("success rate", ENV_STEPS, ("val/success", "collect/success")),
    ("loss", UPDATES, ("train/actor_loss", "train/critic_loss", "ppo/actor_loss", "ppo/critic_loss")),
    ("value (acting discount)", UPDATES, ("train-update/q", "train-update/td_target")),
    ("value and return per step", UPDATES, ("ppo/value", "ppo/return")),
    ("policy entropy [nats]", UPDATES, ("train-update/policy_entropy", "ppo/entropy")),
    ("distance from the acting policy [nats]", UPDATES, ("ppo/kl", "ppo/kl_last")),
    ("env steps collected per second", ENV_STEPS, ("time/env_steps_per_s",)),
    ("updates per second", UPDATES, ("time/updates_per_s",)),
)
Curves = dict[str, list[dict[str, float]]]


def read_curves(metrics_file: Path) -> Curves:
    """For every figure of a metrics.jsonl, its points: `value`, `env_steps`, `gradient_steps`.

    Records in which a figure is no number are skipped.
    """
    curves: Curves = {}
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        place = {axis: float(record.get(axis, 0)) for axis in (ENV_STEPS, UPDATES)}
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(name, []).append({"value": float(value), **place})
    return curves


def curves_of(run_dir: Path) -> Path:
    """Where the picture of a run is drawn to."""
    return run_dir / "logs" / "curves.png"


def plot_run(run_dir: Path) -> Path:
    """Draw `logs/metrics.jsonl` of a run into `logs/curves.png`; returns that path.

    Raises: ValueError if there is no metrics file or nothing in it to draw, ImportError without matplotlib.
    """
    source = run_dir / "logs" / "metrics.jsonl"
    if not source.is_file():
        raise ValueError(f"{source} does not exist. Fix: give the folder of a run, such as runs/tmaze.")
    curves = read_curves(source)
    panels = [(title, axis, [n for n in names if n in curves]) for title, axis, names in PANELS]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError(f"{source} holds no figures to draw yet. Fix: train for at least one epoch.")
    _draw(run_dir, panels, curves)
    return curves_of(run_dir)


def draw_if_possible(run_dir: Path) -> None:
    """As plot_run, for a run that ends: curves that cannot be drawn are no reason to fail."""
    try:
        plot_run(run_dir)
    except (ValueError, ImportError):  # no figures yet, no matplotlib
        return
    except Exception as error:  # a full disk, a broken matplotlib: the end of a run has better things to say
        logger.warning("The learning curves could not be drawn: %s", error)


def _draw(run_dir: Path, panels: Sequence[tuple[str, str, list[str]]], curves: Curves) -> None:
    try:  # the object interface: pyplot would keep global state and may look for a screen
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib: {error}. Fix: pip install matplotlib.") from error

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, x_axis, names) in zip(axes, panels, strict=False):
        for name in names:
            points = curves[name]
            x, y = [point[x_axis] for point in points], [point["value"] for point in points]
            axis.plot(x, y, marker=".", markersize=4, linewidth=1, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x_axis.replace("_", " "), fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(run_dir.name)
    figure.savefig(curves_of(run_dir), dpi=110)


def main(words: Sequence[str]) -> int:
    """Plot the run folder named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loxodon.experiment.plots",
        description="Draw the learning curves of a run into its logs/curves.png.",
    )
    parser.add_argument("run_dir", type=Path, help="folder of a run, such as runs/tmaze")
    try:
        target = plot_run(parser.parse_args(words).run_dir)
    except (ValueError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
