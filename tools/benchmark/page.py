"""The page of a suite: a comparison of agents, and for each agent a table of tasks and learning curves."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...experiment.output.plots import COLORS
from ...experiment.process.files import atomic_write, write_text
from ...experiment.process.versions import import_extra
from ..report.estimates import iqm, mean, with_interval
from .results import ENV_STEPS, SECONDS, VALUE, Run, normalized, reference, references, scores, target_of
from .suites import SUITES, Suite, Task

Agents = dict[str, dict[str, list[Run]]]
"""Runs by name of the agent and by task."""
PAPER = "https://arxiv.org/abs/2303.01859"  # source of all published values
INTRODUCTION = """\
- **random play**: uniformly random actions. **optimum**: the best possible mean; ≥ marks that of a scripted
  player, which others may exceed. **published**: the best published value, with its source.
- **score**: mean of the evaluations in the last fifth of a run, averaged over seeds, with a 95 %
  bootstrap interval and the number of seeds. Runs that ended at their target count with the last evaluation,
  which favours them.
- **normalised score**: 0 for random play, 1 for the optimum or scripted player, or else for the published
  value; the interquartile mean (IQM) over tasks.
- **at published**: number of tasks with a score of at least the published value, of those that have one.
  **below random**: number of tasks with a score below random play. **env steps**, **hours** of an agent: sums
  over its runs.
- **target: reached**: number of seeds with an evaluation at the target. **env steps**, **seconds**: medians
  over these seeds until then, on one thread of the machine that ran them. **kept**: their score divided by
  their best evaluation, both as gains over random play; 1 if nothing is lost."""


@dataclass(frozen=True)
class Row:
    """The runs of one agent on one task."""

    name: str
    task: Task
    runs: Sequence[Run]

    @property
    def normalized(self) -> np.ndarray | None:
        """(n,) normalised scores; None without reference values."""
        found = [normalized(self.name, run.score) for run in self.runs]
        return None if None in found else np.array(found, dtype=float)

    def is_at_published(self) -> bool | None:
        """Whether the mean score is at the published value or above; None without one."""
        if (published := reference(self.name, "published")) is None:
            return None
        return round(float(mean(scores(self.runs))), 3) >= published  # published with 3 digits

    def is_below_random(self) -> bool:
        """Whether the mean score is below random play."""
        random = reference(self.name, "random")
        return random is not None and float(mean(scores(self.runs))) < random

    def score(self) -> str:
        """Mean score, its interval, and the number of seeds."""
        return f"{estimate(scores(self.runs))} ({len(self.runs)})"

    def arrivals(self) -> list[np.ndarray]:
        """Points (4,) at which seeds reached the target."""
        if (target := target_of(self.name, self.task)) is None:
            return []
        return [point for run in self._tried(target) if (point := run.arrival(target)) is not None]

    def learned(self) -> list[str]:
        """Cells about the seeds that reached the target, in the order of `LEARNED` without the agent."""
        target, points = target_of(self.name, self.task), self.arrivals()
        assert target is not None, "only tasks with a target are learned"
        tried = self._tried(target)
        medians = [f"{median(point[i] for point in points):,.0f}" for i in (ENV_STEPS, SECONDS)]
        whole = [run for run in tried if run.arrival(target) is not None and run.stopped_at is None]
        random = reference(self.name, "random") or 0.0
        kept = [share for run in whole if (share := run.retention(random)) is not None]
        reached = f"{target:g}: {len(points)} of {len(tried)}"
        return [reached, *medians, f"{np.mean(kept):.2f}" if kept else ""]

    def _tried(self, target: float) -> list[Run]:
        return [run for run in self.runs if run.tried(target)]

    def verdict(self) -> str:
        """The task and a remark, if no seed reached the target or scores are below random play."""
        target = target_of(self.name, self.task)
        remarks = ["below random play"] * self.is_below_random()
        if target is None or not self._tried(target):
            remarks += ["not run as far as the target"] * (target is not None)
            return f"{self.name} ({', '.join(remarks)})" if remarks else ""
        if self.arrivals():
            return ""
        return f"{self.name} ({', '.join(remarks)})" if remarks else self.name


SUMMARY = (
    "agent",
    "tasks",
    "normalised score, IQM over tasks [95 %]",
    "at published",
    "below random",
    "env steps",
    "hours",
)
SCORES = ("task", "random play", "optimum", "published")
LEARNED = ("task", "agent", "target: reached", "env steps", "seconds", "kept")


def known_of(task: str) -> list[str]:
    """The reference values of a task, in the order of `SCORES`."""
    entries = references()["tasks"].get(task, {})
    random, optimum, published = (entries.get(kind) for kind in ("random", "optimum", "published"))
    return [
        task,
        shown(random["value"]) if random else "",
        ("" if optimum["is_exact"] else "≥ ") + shown(optimum["value"]) if optimum else "",
        f"[{shown(published['value'])}]({PAPER}) {published['model']}" if published else "",
    ]


def rows_of(suite: Suite, found: dict[str, list[Run]]) -> list[Row]:
    """Rows of an agent, in the order of the suite."""
    return [Row(name, task, found[name]) for name, task in suite.tasks.items() if name in found]


def summary(name: str, rows: Sequence[Row]) -> list[str]:
    """Cells of an agent in the comparison, in the order of `SUMMARY`."""
    comparable = [own for row in rows if (own := row.normalized) is not None]
    score = ""
    if comparable:
        score = estimate_of(
            with_interval(lambda *tasks: iqm(np.stack([mean(one) for one in tasks], -1)), *comparable)
        )
    published = [at for row in rows if (at := row.is_at_published()) is not None]
    runs = [run for row in rows for run in row.runs]
    return [
        name,
        str(len(rows)),
        score,
        f"{sum(published)} of {len(published)}" if published else "",
        str(sum(row.is_below_random() for row in rows)),
        f"{sum(run.curve[-1][ENV_STEPS] for run in runs):,.0f}",
        f"{sum(run.curve[-1][SECONDS] for run in runs) / 3600:.1f}",
    ]


def estimate(values: np.ndarray) -> str:
    """Mean of values (n,), with its interval for two or more."""
    return estimate_of(with_interval(mean, values))


def estimate_of(found: np.ndarray) -> str:
    """A value and its interval (3,) as text."""
    value, low, high = found
    return shown(value) + ("" if np.isnan(low) else f" [{shown(low)}, {shown(high)}]")


def shown(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.3g}" if abs(value) < 1_000 else f"{value:.0f}"  # noqa: PLR2004


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def section_of(suite: Suite, agents: Agents, picture: str) -> str:
    """The comparison, the tables and the learning curves. picture: file of the latter; empty for none."""
    rows = {name: {row.name: row for row in rows_of(suite, found)} for name, found in agents.items()}
    tasks = [task for task in suite.tasks if any(task in found for found in rows.values())]
    of_tasks = [
        [*known_of(task), *(found[task].score() if task in found else "" for found in rows.values())]
        for task in tasks
    ]
    learned = [
        [task, name, *found[task].learned()]
        for task in tasks
        for name, found in rows.items()
        if task in found and found[task].arrivals()
    ]
    faults = [
        filled(f"**Not learned by {name}:** {', '.join(found_faults)}.")
        for name, found in rows.items()
        if (found_faults := [verdict for row in found.values() if (verdict := row.verdict())])
    ]
    return "\n\n".join(
        [
            table(SUMMARY, [summary(name, list(found.values())) for name, found in rows.items()]),
            table((*SCORES, *(f"score of {name}" for name in rows)), of_tasks),
            *([table(LEARNED, learned)] if learned else []),
            *faults,
            *([f"![learning curves]({picture})"] if picture else []),
        ]
    )


def page_of(suite_name: str, agents: Agents, picture: str) -> str:
    """A whole page."""
    suite = SUITES[suite_name]
    command = f"Runs of `loxodon benchmark {suite_name}`; their files name the settings and budgets."
    parts = [
        f"# {suite.title}",
        filled(suite.about),
        command,
        INTRODUCTION,
        section_of(suite, agents, picture),
    ]
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    """Wrap a paragraph."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def write_page(suite_name: str, agents: Agents, path: Path) -> None:
    """Write the page, and next to it a picture of the learning curves.

    If the file has the marks `<!-- SUITE: begin -->` and `<!-- SUITE: end -->`, only the text between them is
    replaced.

    Raises: ImportError without matplotlib, after the page was written without a picture.
    """
    suite, before = SUITES[suite_name], path.read_text(encoding="utf-8") if path.exists() else ""
    marks = re.compile(rf"(<!-- {suite_name}: begin -->\n).*?(\n<!-- {suite_name}: end -->)", re.DOTALL)
    is_part = marks.search(before) is not None
    picture = path.with_name(f"{path.stem}{f'_{suite_name}' if is_part else ''}.png")

    def write(name: str) -> None:
        if is_part:
            section = section_of(suite, agents, name)
            write_text(path, marks.sub(lambda found: found[1] + section + found[2], before))
        else:
            write_text(path, page_of(suite_name, agents, name))

    try:
        curves = draw(suite, agents)
    except ImportError:
        write("")
        raise
    with atomic_write(picture) as temp:
        temp.write_bytes(curves)
    write(picture.name)


_MOST_IN_TWO_COLUMNS = 16


def draw(suite: Suite, agents: Agents) -> bytes:
    """A PNG with one panel per task; up to 16 panels are legible at the width of a phone.

    Raises: ImportError without matplotlib.
    """
    matplotlib_figure = import_extra("matplotlib.figure", "loxodon[plots]")
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    names = [name for name in suite.tasks if any(name in found for found in agents.values())]
    num_columns, dpi = (2, 144) if len(names) <= _MOST_IN_TWO_COLUMNS else (4, 84)
    num_lines = -(-len(names) // num_columns)
    size = (2.5 * num_columns, 1.7 * num_lines + 0.8)
    figure = matplotlib_figure.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(num_lines, num_columns, squeeze=False)
    for panel in panels.flat[len(names) :]:
        panel.remove()
    thin: dict[str, Any] = {"color": "0.4", "linewidth": 1}
    for panel, task in zip(panels.flat, names, strict=False):
        for i, (name, found) in enumerate(agents.items()):
            for k, run in enumerate(found.get(task, ())):
                steps, values = run.values[:, [ENV_STEPS, VALUE]].T
                panel.plot(
                    steps / 1e3, values, color=COLORS[i % len(COLORS)], linewidth=1.2, label="" if k else name
                )
        for value, dash, label in (
            (target_of(task, suite.tasks[task]), "-", "target"),
            (reference(task, "random"), ":", "random play"),
        ):
            if value is not None:
                panel.axhline(value, **thin, linestyle=dash, label=label)
        panel.set_title(task.replace("Only", "Only\n"), fontsize=9)
        panel.tick_params(labelsize=8)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel("thousand env steps", fontsize=9)
    figure.supylabel("evaluation", fontsize=9)
    labels = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, dpi=dpi)
    # Other methods merge the colors of thin lines.
    few = Image.open(picture).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()
