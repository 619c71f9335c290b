"""`loxodon report RUN... -o report/`: one page about runs, to compare and show seeds."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from ...data.errors import visible, with_fix
from ...experiment.output.plots import AXES, ENV_STEPS, PANELS, STAGES, UPDATES, WALL, Line, Panel
from ...experiment.process.files import write_text
from ...gin_configs.presets import did_you_mean
from ..arguments import parse_report
from ..metrics import describe
from . import page
from .estimates import improvement, iqm, mean, mean_curve, with_interval
from .runs import Run, RunGroup, grouped, read_runs

_MOST_LINES = 8  # maximum number of lines in a figure
_BAND = (
    "Curves are means over the runs of a group with 95 % bootstrap intervals, up to the end of the "
    "shortest run; single runs are faint. Wall time is the time of collecting, learning and evaluating."
)
# Label of the y axis and x axis.
_LABELS = {name: (axis, title) for title, axis, names in PANELS for name in names}
_LEARNING = ("val/return", "collect/return", "val/success", "collect/success")


@dataclass(frozen=True)
class Report:
    """The sections about groups of runs, as parts of a page.

    metric: runs are compared by its last value. sign: -1 if lower is better.
    """

    groups: Sequence[RunGroup]
    gallery: page.Gallery
    metric: str
    sign: int = 1

    def sections(self) -> dict[str, str]:
        """Return the HTML of the sections by title."""
        tasks = list(dict.fromkeys(group.task for group in self.groups))
        return {
            **{task: self._task(task, [one for one in self.groups if one.task == task]) for task in tasks},
            "Speed": self._speed(),
            "Runs": self._runs(),
            "Versions and hardware": self._versions(),
        }

    # ---- one task ----

    def _task(self, task: str, groups: Sequence[RunGroup]) -> str:
        ranked = sorted((one for one in groups if len(one.scores(self.metric))), key=self._rank)
        shown = ranked[:_MOST_LINES] or groups[:_MOST_LINES]
        shown = [group for group in groups if group in shown]
        is_part = f" The figures show the best {len(shown)} of {len(groups)} groups." * (shown != groups)
        learning = list(dict.fromkeys([self.metric, *_LEARNING]))
        others = [
            self._curve(task, shown, name, axis)
            for name, (axis, _) in _LABELS.items()
            if name not in learning and not name.startswith("time/")
        ]
        return "\n".join(
            [
                f"<p>{_BAND}{is_part}</p>",
                page.figures(
                    self._curve(task, shown, self.metric, ENV_STEPS),
                    self._curve(task, shown, self.metric, WALL),
                    *(self._curve(task, shown, name, ENV_STEPS) for name in learning[1:]),
                    self._attempts(task, shown),
                    *(self._ablation(task, shown, env) for env in _evaluated_in(shown)),
                ),
                self._scores(ranked),
                self._comparison(ranked[:_MOST_LINES]),
                self._evaluations(groups),
                self._settings([*ranked, *(group for group in groups if group not in ranked)]),
                page.section(f"{task}: losses and diagnostics", page.figures(*others), level=3),
            ]
        )

    def _rank(self, group: RunGroup) -> float:
        return -self.sign * float(iqm(group.scores(self.metric)))

    def _curve(self, task: str, groups: Sequence[RunGroup], metric: str, axis: str) -> str:
        steps = (curve[:, 0] for group in groups for curve in group.curves(metric, axis))
        if axis == ENV_STEPS and not any(one.any() for one in steps):
            axis = UPDATES  # offline runs take no env steps
        lines = {}
        for group in groups:
            if curves := group.curves(metric, axis):
                points, band = mean_curve(curves)
                single = curves if len(curves) > 1 else ()
                lines[_counted(group.name, len(curves))] = Line(points, group.style, band, single)
        about = (describe(metric) or "").replace("`", "")
        panel = Panel(metric, AXES[axis], lines, _LABELS.get(metric, ("", metric))[1])
        caption = f"{metric} over {AXES[axis]}{about and f': {about}'}."
        return self.gallery.figure(panel, f"{task} {metric} {axis}", caption)

    def _attempts(self, task: str, groups: Sequence[RunGroup]) -> str:
        lines = {}
        for group in groups:
            if found := [run.attempts() for run in group.runs if len(run.attempts())]:
                points, band = mean_curve(found)
                lines[_counted(group.name, len(found))] = Line(points, group.style, band)
        panel = Panel("return by attempt", "attempt", lines, "return of the attempt")
        caption = "Mean return of each attempt of a trial in the last evaluation; 95 % intervals over runs."
        return self.gallery.figure(panel, f"{task} attempts", caption)

    def _ablation(self, task: str, groups: Sequence[RunGroup], env: str) -> str:
        found = {group.name: [one for run in group.runs if (one := run.ablation(env))] for group in groups}
        contexts = sorted(
            {context for runs in found.values() for run in runs for context in run},
            key=lambda context: (context is None, context),
        )
        lines = {}
        for group in groups:
            places = {c: [run[c] for run in found[group.name] if c in run] for c in contexts}
            stats = [(i, *with_interval(mean, np.array(v))) for i, v in enumerate(places.values()) if v]
            if stats:
                data = np.array(stats, dtype=float)
                name = _counted(group.name, len(found[group.name]))
                lines[name] = Line(data[:, :2], group.style, data[:, 2:])
        ticks = ["full" if context is None else str(context) for context in contexts]
        panel = Panel(f"memory cut, {env}", "context [timesteps]", lines, "mean return", ticks)
        caption = (
            f"The same policy in {env}, with its memory limited to this many timesteps. Where the line is "
            "flat, more memory makes no difference. Mean and 95 % interval over runs."
        )
        return self.gallery.figure(panel, f"{task} context {env}", caption)

    def _scores(self, groups: Sequence[RunGroup]) -> str:
        rows = []
        for group in groups:
            scores = group.scores(self.metric)
            estimates = [_interval(with_interval(statistic, scores)) for statistic in (mean, iqm)]
            steps = [run.last("env_steps") for run in group.runs]
            span = f"{scores.min():.4g} to {scores.max():.4g}"
            rows.append(
                (
                    page.key(group.style),
                    group.name,
                    len(scores),
                    *estimates,
                    span,
                    _count(float(np.mean(steps))),
                )
            )
        header = ("", "group", "runs", "mean [95 %]", "IQM [95 %]", "lowest to highest", "env steps")
        about = (
            f"Last {self.metric} of every run. IQM: interquartile mean, which leaves out the lowest and the "
            "highest quarter of the runs (none of fewer than four). Intervals: percentile bootstrap."
        )
        return page.table(about, header, rows)

    def _comparison(self, groups: Sequence[RunGroup]) -> str:
        groups = [group for group in groups if len(group.scores(self.metric)) > 1]
        scores = [self.sign * group.scores(self.metric) for group in groups]
        rows = [
            (
                group.name,
                *(
                    "" if i == j else _interval(with_interval(improvement, ours, theirs))
                    for j, theirs in enumerate(scores)
                ),
            )
            for i, (group, ours) in enumerate(zip(groups, scores, strict=True))
        ]
        about = (
            "Probability of improvement: the probability that a run of the row ends better than a run of "
            "the column, with its 95 % interval; 0.5 means no difference."
        )
        return page.table(about, ("", *(group.name for group in groups)), rows if len(groups) > 1 else [])

    def _evaluations(self, groups: Sequence[RunGroup]) -> str:
        found: dict[tuple[object, ...], list[np.ndarray]] = {}
        for group in groups:
            for one in (one for run in group.runs for results in run.evaluations for one in results):
                context = "full" if one.context is None else one.context
                policy = one.policy + ", sampled" * one.sampled
                found.setdefault((group.name, one.env, one.task, policy, context), []).append(one.returns)
        rows = [
            (*place, len(returns), sum(map(len, returns)), _interval(with_interval(mean, _means(returns))))
            for place, returns in found.items()
        ]
        header = ("group", "env", "task", "policy", "context", "evaluations", "episodes", "return [95 %]")
        return page.table("Evaluations of stored policies; intervals over evaluations.", header, rows)

    def _settings(self, groups: Sequence[RunGroup]) -> str:
        found = {
            name: [
                " | ".join(sorted({run.settings.get(name, "-") for run in group.runs})) for group in groups
            ]
            for name in sorted({name for group in groups for run in group.runs for name in run.settings})
        }
        differing = {
            name: values for name, values in found.items() if len({*values}) > 1 or " | " in values[0]
        }
        rows = [(group.name, *(values[i] for values in differing.values())) for i, group in enumerate(groups)]
        about = (
            "Settings that differ between the operative configurations; - where a run does not use the "
            "setting."
        )
        return page.table(about, ("group", *differing), rows if differing else [])

    # ---- all tasks ----

    def _speed(self) -> str:
        rows = []
        for group in self.groups:
            spent = {stage: sum(run.total(stage) for run in group.runs) for stage in STAGES}
            whole = sum(spent.values()) or 1.0
            waiting = sum(run.total("time/wait_for_actors_s") for run in group.runs)
            rates = [_typical(group, f"time/{name}") for name in ("env_steps_per_s", "updates_per_s")]
            steps = [
                _typical(group, f"time/{name}")
                for name in ("policy_ms_per_step", "env_ms_per_step", "store_ms_per_step", "update_ms")
            ]
            shares = [f"{100 * seconds / whole:.0f} %" for seconds in (*spent.values(), waiting)]
            rows.append(
                (page.key(group.style), group.name, f"{whole / len(group.runs):.4g}", *shares, *rates, *steps)
            )
        header = ["", "group", "wall time [s]", "collecting", "learning", "evaluating", "waiting"]
        header += ["env steps/s", "updates/s", "policy", "env", "storing", "update"]
        about = (
            "Wall time per run and its shares, then medians over the epochs: speed of collecting and of "
            "learning, ms per step of all environments (policy, env, storing) and per update."
        )
        shown = self.groups[:_MOST_LINES]
        return page.table(about, header, rows) + page.figures(
            *(
                self._curve("all tasks", shown, name, axis)
                for name, (axis, _) in _LABELS.items()
                if name.startswith("time/")
            )
        )

    def _runs(self) -> str:
        rows = [
            (
                *(run.name, group.name, run.versions.get("seed", "?"), run.state, _count(run.last("epoch"))),
                *(_count(run.last(axis)) for axis in (ENV_STEPS, UPDATES)),
                *(f"{sum(run.total(stage) for stage in STAGES):.4g}", f"{run.last(self.metric):.4g}"),
            )
            for group in self.groups
            for run in group.runs
        ]
        header = ("run", "group", "seed", "state", "epoch", "env steps", "updates", "wall time [s]")
        return page.table("All runs of this page.", (*header, f"last {self.metric}"), rows)

    def _versions(self) -> str:
        found: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for run in (run for group in self.groups for run in group.runs):
            facts = {"python": run.versions.get("python"), **run.versions.get("packages", {})}
            facts |= run.versions.get("hardware") or {"hardware": "not recorded"}
            found.setdefault(tuple((name, value) for name, value in facts.items() if value), []).append(
                run.name
            )
        return "".join(
            page.table(f"{len(names)} runs: {', '.join(names)}", ("what", "value"), facts)
            for facts, names in found.items()
        )


def _evaluated_in(groups: Sequence[RunGroup]) -> list[str]:
    results = (one for group in groups for run in group.runs for found in run.evaluations for one in found)
    return sorted({one.env for one in results})


def _means(samples: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.mean(one) for one in samples])


def _counted(name: str, number: int) -> str:
    return f"{name} ({number} runs)" if number > 1 else name


def _interval(estimate: np.ndarray) -> str:
    value, low, high = estimate
    return f"{value:.3g}" + ("" if np.isnan(low) else f" [{low:.3g}, {high:.3g}]")


def _count(number: float) -> str:
    return "-" if np.isnan(number) else f"{number:,.0f}"


def _typical(group: RunGroup, figure: str) -> str:
    values = [point["value"] for run in group.runs for point in run.curves.get(figure, ())]
    return f"{np.median(values):.4g}" if values else "-"


def write_report(
    folders: Sequence[Path],
    target: Path,
    *,
    metric: str | None = None,
    prefixes: Sequence[str] = (),
    is_less_better: bool = False,
) -> tuple[Path, dict[str, str]]:
    """Write `index.html`, and the figures as PNG files, into a folder.

    Args:
        folders: folders of runs, or folders that contain runs.
        target: the folder of the report.
        metric: logged metric by whose last value runs are compared; None for "val/return", or
            "collect/return" if that is missing.
        prefixes: runs whose names begin with the same prefix form a group.
        is_less_better: whether lower values of the metric are better.

    Returns: the page, and the reasons why some folders are omitted, by folder.
    Raises: ValueError without any run to show, ImportError without matplotlib.
    """
    runs, without = read_runs(folders)
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in without.items())
        raise ValueError(
            f"There is nothing to report: {reasons}. Fix: name folders of runs, e.g. runs/tmaze."
        )
    groups = sorted(grouped(runs, prefixes), key=lambda group: (group.task, group.name))
    groups = [replace(group, style=i) for i, group in enumerate(groups)]
    target.mkdir(parents=True, exist_ok=True)
    report = Report(groups, page.Gallery(target), _metric(runs, metric), -1 if is_less_better else 1)
    notes = [f"{folder}: {reason}" for folder, reason in without.items()]
    notes += [f"{run.name}: {note}" for run in runs for note in [*_unfinished(run), *run.notes]]
    notes += [f"{run.name}: has no {report.metric}" for run in runs if report.metric not in run.curves]
    made = datetime.now().astimezone().isoformat(" ", "minutes")
    intro = (
        f"<p>{len(runs)} runs in {len(groups)} groups, compared by the last <code>{page.text(report.metric)}"
    )
    intro += f"</code>. Made {made}.</p>" + page.listing("Notes", notes)
    path = target / "index.html"
    write_text(path, page.page("Report", intro, report.sections()))
    return path, without


def _unfinished(run: Run) -> Iterable[str]:
    return [] if run.state == "finished" else [f"{run.state}, at epoch {_count(run.last('epoch'))}"]


def _metric(runs: Sequence[Run], asked: str | None) -> str:
    known = {name for run in runs for name in run.curves}
    if asked is None:
        return "val/return" if "val/return" in known or "collect/return" not in known else "collect/return"
    if asked not in known:
        usual = [name for name in _LEARNING if name in known]
        examples = f", e.g. {', '.join(usual)}" if usual else ""
        meant = did_you_mean(asked, known)
        raise ValueError(f"No run has logged {asked!r}.{meant} Fix: choose another --metric{examples}.")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Make a report; returns the exit status."""
    args = parse_report(argv)
    try:
        path, without = write_report(
            args.runs, args.output, metric=args.metric, prefixes=args.group, is_less_better=args.minimize
        )
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"error: {with_fix(error)}\n")
        return 2
    for folder, reason in without.items():
        sys.stderr.write(visible(f"not in the report: {shlex.quote(folder)}: {reason}") + "\n")
    sys.stdout.write(f"{path}\n")
    return 0
