"""Write docs/results.md from stored runs: a table, what is not learned, and a picture per suite.

python benchmarks/learning.py --suite popgym --seeds 0 1 2 3 4 --jobs 2
python benchmarks/results_page.py

Targets are those of learning_tasks.py; a run that stopped at a lower one counts if it reached the target.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from learning_tasks import CONTROL, SUITES, Task

from loxodon.tools.report.estimates import iqm, with_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
REFERENCES = ROOT / "benchmarks" / "reference_values.json"
PAPER = "https://arxiv.org/abs/2303.01859"  # source of all published values
HEADER = (
    "task",
    "random play",
    "optimum",
    "best published",
    "ours: IQM [95 %] (seeds)",
    "target: reached",
    "env steps",
    "seconds",
    "without memory",
)
VERDICTS = NONE, SOME, NOT_RUN = "Not learned", "Learned with some seeds only", "Not run as far as the target"
ENV_STEPS, _, SECONDS, VALUE = range(4)  # entries of a point of a stored curve


@dataclass(frozen=True)
class Row:
    """One task: its stored runs, those of the control without memory, and reference values."""

    name: str
    task: Task
    stopped_at: float  # target of the stored runs
    runs: list[dict[str, Any]]
    controls: list[dict[str, Any]]
    known: dict[str, Any]

    def arrivals(self) -> list[list[float] | None]:
        """First point at the target of each run; None for a run that used its budget without reaching it."""
        found = [next((p for p in run["curve"] if p[VALUE] >= self.task.target), None) for run in self.runs]
        stopped = [run["reached"] and self.stopped_at < self.task.target for run in self.runs]
        return [point for point, is_cut in zip(found, stopped, strict=True) if point or not is_cut]

    def cells(self) -> list[str]:
        """Cells of the table; costs are medians over the seeds that reached the target."""
        arrivals = self.arrivals()
        points = [point for point in arrivals if point]
        reached = f"{len(points)} of {len(arrivals)}" if arrivals else "not run that far"
        optimum, published = self.known.get("optimum"), self.known.get("published")
        return [
            self.name,
            shown(self.known["random"]["value"]),
            ("" if optimum["is_exact"] else "≥ ") + shown(optimum["value"]) if optimum else "",
            f"[{shown(published['value'])}]({PAPER}) {published['model']}" if published else "",
            f"{estimate(self.runs)} ({len(self.runs)})",
            f"{self.task.target:g}: {reached}",
            *(f"{median(p[key] for p in points):,.0f}" if points else "" for key in (ENV_STEPS, SECONDS)),
            estimate(self.controls) if self.controls else "",
        ]

    def verdict(self) -> str:
        """One of `VERDICTS` where not every seed reached the target; empty otherwise."""
        arrivals = self.arrivals()
        if not arrivals:
            return NOT_RUN
        return "" if all(arrivals) else SOME if any(arrivals) else NONE

    def remark(self) -> str:
        """The task, with a note if random play or the policy without memory is better."""
        ours, random = float(iqm(finals(self.runs))), self.known["random"]["value"]
        notes = ["below random play"] if ours < random else []
        if self.controls and ours < float(iqm(finals(self.controls))):
            notes.append("below the policy without memory")
        return f"{self.name} ({', '.join(notes)})" if notes else self.name


def finals(runs: list[dict[str, Any]]) -> np.ndarray:
    """Last evaluations of runs."""
    return np.array([run["final"] for run in runs])


def estimate(runs: list[dict[str, Any]]) -> str:
    """Interquartile mean of the last evaluations, with its bootstrap interval for two or more seeds."""
    value, low, high = with_interval(iqm, finals(runs))
    return shown(value) + ("" if np.isnan(low) else f" [{shown(low)}, {shown(high)}]")


def shown(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.3g}" if abs(value) < 1_000 else f"{value:.0f}"  # noqa: PLR2004


def rows_of(suite: str) -> list[Row]:
    """Tasks of a suite that have stored runs."""
    stored = json.loads((RESULTS / f"learning_{suite}.json").read_text(encoding="utf-8"))["tasks"]
    known = json.loads(REFERENCES.read_text(encoding="utf-8"))["tasks"]
    return [
        Row(
            name,
            task,
            stored[name]["task"]["target"],
            stored[name]["runs"],
            stored.get(name + CONTROL, {"runs": []})["runs"],
            known[name],
        )
        for name, task in SUITES[suite].items()
        if name in stored and stored[name]["runs"] and not task.is_control
    ]


def section(suite: str, rows: list[Row]) -> str:
    """The generated part of a suite."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    groups = {verdict: [row.remark() for row in rows if row.verdict() == verdict] for verdict in VERDICTS}
    faults = [f"**{verdict}:** {', '.join(names)}." for verdict, names in groups.items() if names]
    summary = "\n".join(textwrap.fill(fault, 120) for fault in faults)
    summary = summary or "Every seed reaches the target of every task."
    return "\n".join([*table, "", summary, "", f"![learning curves](results_{suite}.png)"])


def filled(page: str) -> str:
    """The page with the present tables between its marks."""
    return re.sub(
        r"(<!-- (\w+): begin -->\n).*?(\n<!-- \2: end -->)",
        lambda found: found[1] + section(found[2], rows_of(found[2])) + found[3],
        page,
        flags=re.DOTALL,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Plot learning curves over env steps, one panel per task, legible at the width of a phone."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    num_lines = -(-len(rows) // 2)
    figure, panels = plt.subplots(
        num_lines, 2, figsize=(5.0, 1.7 * num_lines + 0.8), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(rows) :]:
        panel.remove()
    thin: dict[str, Any] = {"color": "0.4", "linewidth": 1}
    for panel, row in zip(panels.flat, rows, strict=False):
        for runs, color, dashes, label in (
            (row.runs, "#0072b2", "-", "ours"),
            (row.controls, "#d55e00", "--", "without memory"),
        ):
            for i, run in enumerate(runs):
                steps, values = np.array(run["curve"])[:, [ENV_STEPS, VALUE]].T
                panel.plot(steps / 1e3, values, dashes, color=color, linewidth=1.2, label="" if i else label)
        panel.axhline(row.task.target, **thin, label="target")
        panel.axhline(row.known["random"]["value"], **thin, linestyle=":", label="random play")
        panel.set_title(re.sub("(?<=Only)", "\n", row.name), fontsize=9)
        panel.tick_params(labelsize=8)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel("thousand env steps", fontsize=9)
    figure.supylabel("greedy evaluation", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=144)
    Image.open(picture).convert("RGB").quantize(32).save(path, optimize=True)


def main() -> None:
    """Rewrite the parts of the page between the marks of each suite, and its pictures."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page), encoding="utf-8")
    for suite in re.findall(r"<!-- (\w+): begin -->", page):
        draw(rows_of(suite), PAGE.parent / f"results_{suite}.png")


if __name__ == "__main__":
    main()
