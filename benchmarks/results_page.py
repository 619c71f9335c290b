"""Write results of the general preset into docs/results.md: a table and a picture per suite.

python benchmarks/learning.py --suite memory --seeds 0 1 2 3 4 --jobs 2
python benchmarks/learning.py --suite popgym --seeds 0 1 2 3 4 --jobs 2
python benchmarks/learning.py --suite popgym_ppo --seeds 0                # for comparison, other settings
python benchmarks/results_page.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from loxodon.tools.report.estimates import iqm, with_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
CONTROL = "/without_memory"
COLUMNS = 2  # readable on a phone
HEADER = (
    "task",
    "target",
    "reached",
    "IQM of the end [95 %]",
    "env steps",
    "updates",
    "seconds",
    "no memory",
)


def estimate(runs: list[dict[str, Any]]) -> str:
    """Interquartile mean of the last evaluations, with its bootstrap interval for two or more seeds."""
    value, low, high = with_interval(iqm, np.array([run["final"] for run in runs]))
    return f"{value:.3g}" + ("" if np.isnan(low) else f" [{low:.3g}, {high:.3g}]")


def row(name: str, entry: dict[str, Any], control: dict[str, Any] | None) -> list[str]:
    """The table row of one task; medians are over the seeds that reached the target."""
    runs = entry["runs"]
    reached = [run["reached"] for run in runs if run["reached"]]
    costs = (
        median(one[key] for one in reached) if reached else None
        for key in ("env_steps", "updates", "seconds")
    )
    return [
        name,
        f"{entry['task']['target']:g}",
        f"{len(reached)} of {len(runs)}",
        estimate(runs),
        *("" if cost is None else f"{cost:,.0f}" for cost in costs),
        estimate(control["runs"]) if control and control["runs"] else "",
    ]


def draw(tasks: dict[str, Any], path: Path) -> None:
    """Plot learning curves over env steps, one panel per task; the control is dashed."""
    names = [name for name in tasks if not name.endswith(CONTROL)]
    num_columns = min(len(names), COLUMNS)
    num_rows = -(-len(names) // num_columns)
    size = 3.2 * num_columns, 2.3 * num_rows
    figure, panels = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat[len(names) :]:
        panel.remove()
    for panel, name in zip(panels.flat, names, strict=False):
        for key, color, dashes in ((name, "#0072b2", "-"), (name + CONTROL, "#d55e00", "--")):
            for run in tasks.get(key, {"runs": []})["runs"]:
                steps, values = np.array(run["curve"])[:, [0, 3]].T
                panel.plot(steps / 1e3, values, color=color, linestyle=dashes, linewidth=1)
        panel.axhline(tasks[name]["task"]["target"], color="0.7", linewidth=1)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
    figure.supxlabel("thousand env steps", fontsize=9)
    figure.supylabel("greedy evaluation", fontsize=9)
    figure.savefig(path, dpi=110)


def stored(suite: str) -> dict[str, Any]:
    """Tasks of a suite that have runs, by name."""
    path = RESULTS / f"learning_{suite}.json"
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.exists() else {}
    return {name: entry for name, entry in tasks.items() if entry["runs"]}


def main() -> None:
    """Rewrite the page between the marks of each suite with stored results."""
    page = PAGE.read_text(encoding="utf-8")
    for suite in re.findall(r"<!-- (\w+): begin -->", page):
        tasks, ppo = stored(suite), stored(f"{suite}_ppo")
        draw(tasks, PAGE.parent / f"results_{suite}.png")
        found = [
            row(name, entry, tasks.get(name + CONTROL))
            for name, entry in tasks.items()
            if not name.endswith(CONTROL)
        ]
        head = list(HEADER)
        if ppo:
            head.append("PPO, 1M env steps")
            for cells in found:
                cells.append(estimate(ppo[cells[0]]["runs"]) if cells[0] in ppo else "")
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *found)]
        text = "\n".join([f"<!-- {suite}: begin -->", *lines, "", f"![curves](results_{suite}.png)"])
        marks = f"<!-- {suite}: begin -->.*?(?=\n<!-- {suite}: end -->)"
        page = re.sub(marks, lambda _, text=text: text, page, flags=re.DOTALL)  # type: ignore[misc]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
