"""Learning curves: the figures of a run over its steps, and panels that show them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.errors import visible
from ..process.files import parse_json
from ..process.versions import import_extra

logger = logging.getLogger("loxodon")
ENV_STEPS, UPDATES, WALL = "env_steps", "gradient_steps", "wall_s"
AXES = {ENV_STEPS: "env steps", UPDATES: "updates", WALL: "wall time [s]"}
STAGES = ("time/collect_s", "time/learn_s", "time/val_s")  # their sum is the wall time
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
# Okabe and Ito's colours without yellow, which is too light for a line. Every line also has its own dash.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))
_LONGEST_LINE = 1 << 20  # largest size of a record in bytes
_LARGEST = 1e100  # largest figure: sums and squares of larger ones would overflow
_LONGEST_NAME = 80  # letters in a name
_FEW = 15  # largest number of points of a line with markers
Curves = dict[str, list[dict[str, float]]]


def metrics_of(run_dir: Path) -> Path:
    """The file with the figures of a run."""
    return run_dir / "logs" / "metrics.jsonl"


def read_curves(metrics_file: Path) -> Curves:
    """For every figure of a metrics.jsonl, its points: `value`, `epoch`, and the keys of AXES.

    wall_s: seconds of collecting, learning and evaluating up to there. Records in which a figure is not a
    number are skipped, and so is a last line that is still being written. A warning counts other lines that
    are not records, or have numbers that cannot be drawn.

    Raises: OSError if the file cannot be read.
    """
    curves: Curves = {}
    wall_s, num_bad = 0.0, 0
    for line in _lines(metrics_file):
        try:
            record = parse_json(line)
        except ValueError:
            num_bad += line.endswith(b"\n")
            continue
        figures, is_odd = _numbers(record)
        num_bad += is_odd
        wall_s += sum(figures.get(stage, 0.0) for stage in STAGES)
        place = {axis: figures.get(axis, 0.0) for axis in ("epoch", ENV_STEPS, UPDATES)} | {WALL: wall_s}
        for name, value in figures.items():
            curves.setdefault(name, []).append({"value": value, **place})
    if num_bad:
        logger.warning(
            "%d lines of %s are skipped, entirely or in part: they are not records of figures.",
            num_bad,
            metrics_file,
        )
    return curves


def curves_if_readable(run_dir: Path) -> Curves:
    """Curves of a run; if they cannot be read, none, with a warning unless the file is missing."""
    path = metrics_of(run_dir)
    try:
        return read_curves(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("The figures in %s cannot be read and are skipped: %s.", path, error)
        return {}


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file; one that is too long for a record is not held in memory and is returned empty."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise OSError(f"{path} is not a plain file")
    with path.open("rb") as file:
        is_whole = True
        while line := file.readline(_LONGEST_LINE):
            was_whole, is_whole = is_whole, line.endswith(b"\n") or len(line) < _LONGEST_LINE
            if is_whole:
                yield line if was_whole else b"\n"


def is_number(value: Any) -> bool:
    """True if a JSON value is a number that can be drawn: not a text or boolean, finite, not huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _numbers(record: Any) -> tuple[dict[str, float], bool]:
    """Figures of a record, and whether it has values other than figures, texts, booleans and None."""
    if not isinstance(record, dict):
        return {}, True
    figures = {name: float(value) for name, value in record.items() if is_number(value)}
    others = (value for name, value in record.items() if name not in figures)
    return figures, not all(value is None or isinstance(value, bool | str) for value in others)


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    points: (n, 2), x and y. band: (n, 2), an interval around y. single: fainter lines, (n, 2) each.
    style: number of its colour and dash.
    """

    points: np.ndarray
    style: int
    band: np.ndarray | None = None
    single: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Panel:
    """Content of one pair of axes; lines: by name. ticks: texts for x = 0, 1, ..."""

    title: str
    x_label: str
    lines: Mapping[str, Line]
    y_label: str = ""
    ticks: Sequence[str] = ()


def line_style(style: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes (points on and off) of a style; 28 of them differ."""
    return COLORS[style % len(COLORS)], DASHES[style % len(DASHES)]


def draw(panels: Sequence[Panel], target: Any, *, title: str = "", dpi: int = 110) -> None:
    """Draw panels in rows of up to three into a PNG, a path or a binary file.

    Raises: ImportError without matplotlib.
    """
    # The object interface: pyplot would keep global state and may need a screen.
    matplotlib_figure = import_extra("matplotlib.figure", "loxodon[plots]")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = matplotlib_figure.Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(_words(title), parse_math=False)
    figure.savefig(target, dpi=dpi, format="png")


def _draw_panel(axis: Any, panel: Panel) -> None:
    for name, line in panel.lines.items():
        color, dashes = line_style(line.style)
        for x, y in (one.T for one in line.single):
            axis.plot(x, y, color=color, linewidth=0.7, alpha=0.35)
        if line.band is not None:
            axis.fill_between(line.points[:, 0], *line.band.T, color=color, alpha=0.18, linewidth=0)
        marker = "." if len(line.points) <= _FEW else None
        style = (0, dashes) if dashes else "-"
        axis.plot(
            *line.points.T, color=color, linestyle=style, marker=marker, linewidth=1.6, label=_words(name)
        )
    if panel.ticks:
        axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    else:
        axis.xaxis.get_major_locator().set_params(integer=panel.x_label != AXES[WALL])
    axis.set_title(_words(panel.title), fontsize=10, parse_math=False)  # names may have dollar signs
    axis.set_xlabel(_words(panel.x_label), fontsize=9, parse_math=False)
    axis.set_ylabel(_words(panel.y_label), fontsize=9, parse_math=False)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    legend = axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for text in legend.get_texts():
        text.set_parse_math(False)


def _words(name: str) -> str:
    """Label of a figure, shortened if long; a space precedes `_`, which would hide it from the legend."""
    text = visible(f" {name}" if name.startswith("_") else name)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def curves_of(run_dir: Path) -> Path:
    """Path of the picture of a run."""
    return run_dir / "logs" / "curves.png"


def plot_run(run_dir: Path) -> None:
    """Draw `logs/metrics.jsonl` of a run into `logs/curves.png`, if there is anything to draw.

    Raises: OSError without such a file, ImportError without matplotlib.
    """
    curves = read_curves(metrics_of(run_dir))
    has_env_steps = any(point[ENV_STEPS] for points in curves.values() for point in points)
    panels = []
    for title, wanted, names in PANELS:
        axis = wanted if has_env_steps else UPDATES  # offline runs take no env steps
        found = [name for name in names if name in curves]
        lines = {name: Line(points_of(curves, name, axis), i) for i, name in enumerate(found)}
        panels += [Panel(title, AXES[axis], lines)] if lines else []
    if panels:
        draw(panels, curves_of(run_dir), title=run_dir.name)


def points_of(curves: Curves, name: str, axis: str) -> np.ndarray:
    """Points (n, 2) of a figure over one of AXES, sorted; of several values at one place, the last one."""
    last = {point[axis]: point["value"] for point in curves.get(name, ())}
    return np.array(sorted(last.items()), dtype=float).reshape(-1, 2)


def draw_if_possible(run_dir: Path) -> None:
    """Draw like plot_run, at the end of a run: an error in drawing is not a reason to fail."""
    try:
        plot_run(run_dir)
    except (FileNotFoundError, ImportError):  # no figures yet, or no matplotlib
        return
    except Exception as error:  # a full disk or a broken matplotlib must not hide the end of the run
        logger.warning("The learning curves could not be drawn: %s", error)
