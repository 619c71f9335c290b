"""The command line of `python -m loxodon.data`: words in, exit status out.

ls              what a folder of trajectories holds
show            one trajectory as a table, and as a picture
check           read every file completely, and compare what they look like
convert         the same trajectories in another file format
export-minari   and import-minari: to and from Farama's standard for offline data
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .buffer import Quarantine
from .convert import convert
from .errors import BrokenTrajectoryError, visible
from .files import FILE_FORMATS, check_file, load_trajectory
from .find import Found, FoundFile, age_text, find_files, require_files, size_text
from .minari import export_minari, import_episodes, open_minari
from .trajectory import Array, Layout, Trajectory, action_indices

OK, FOUND_PROBLEMS, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
_COMMANDS = ("ls", "show", "check", "convert", "export-minari", "import-minari")
_MIN_PLAIN_WIDTH = 160  # of the console where it is no terminal
MAX_OPENED = 10_000  # files that ls opens; beyond, a random sample of as many
_QUANTILES = (0.0, 0.2, 0.5, 0.8, 1.0)
_MAX_NAMED = 5
_COMPRESSION_AT, _STORED = 8, b"\0\0"  # of the first member of a zip: byte offset, and "not compressed"
_DEFAULT_ROWS = 20
_MAX_SHOWN_NUMBERS = 4  # of an observation or action in the table; of more, the first three and the last
MAX_LOW_DIMENSIONS = 64  # numbers per timestep; an observation with more is only named
_DEFAULT_PLOT = Path("<FILE>.png")
_MAX_LINES = 8  # curves in one panel; more become an image, one line of pixels each
_MAX_PANELS = 8  # of observations
_MAX_MARKED = 60  # transitions; in longer trajectories points would cover each other
_WIDTH_INCHES, _PANEL_INCHES = 9.0, 1.9
_REWARD_COLOR, _RETURN_COLOR = "#4c72b0", "#c44e52"
MAX_MOVED_SHARE = 0.05  # of files of another layout; beyond, the folder is a mixture on purpose
_FOLDERS = ("fifo", "protected")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error says how to mend it."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("invalid choice: '")[2].partition("'")[0]
        near = difflib.get_close_matches(unknown, [*_COMMANDS, *FILE_FORMATS], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"error: {message}.{hint} Fix: {self.prog} --help lists what is allowed.\n")
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns: 0 if all is well, 1 if broken files were found, 2 if the command could not do its work.
    """
    args = _parser().parse_args(argv)
    try:
        has_problems = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, TypeError, OSError, ImportError) as error:
        hint = "" if "Fix:" in str(error) else " Fix: check the path, its permissions and the free space."
        sys.stderr.write(f"error: {visible(str(error))}{hint}\n")
        return USAGE_ERROR
    return FOUND_PROBLEMS if has_problems else OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m loxodon.data",
        description="Look at trajectory files, check, convert and exchange them.",
        epilog="Exit status: 0 all is well, 1 broken files were found, 2 the command could not do its work.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    ls = commands.add_parser("ls", help="what a run, dataset, buffer or other folder holds")
    ls.add_argument("folder", type=Path, metavar="FOLDER")
    amount = ls.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="open no file: no timesteps and returns")
    amount.add_argument("--all", action="store_true", help=f"open every file, also beyond {MAX_OPENED:,}")
    ls.set_defaults(run=run_ls)

    show = commands.add_parser("show", help="one trajectory as a table, and as a picture")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=_DEFAULT_PLOT,
        metavar="OUT.png",
        help="draw rewards, actions and low-dimensional observations, here if no name is given",
    )
    show.add_argument("--rows", type=int, default=_DEFAULT_ROWS, metavar="N", help="rows of the table")
    show.set_defaults(run=run_show)

    check = commands.add_parser("check", help="read every file completely and list the broken ones")
    check.add_argument("places", type=Path, nargs="+", metavar="FOLDER|FILE")
    check.add_argument(
        "--quarantine", action="store_true", help="move broken files to quarantine/, each with its reason"
    )
    check.set_defaults(run=run_check)

    turn = commands.add_parser("convert", help="write the same trajectories in another format")
    turn.add_argument("source", type=Path, metavar="SRC", help="a trajectory file, or a folder of them")
    turn.add_argument("target", type=Path, metavar="DST", help="a folder; made if it is missing")
    turn.add_argument("--to", choices=FILE_FORMATS, required=True, help="format to write")
    turn.add_argument("--force", action="store_true", help="overwrite files that exist")
    turn.set_defaults(run=run_convert)

    export = commands.add_parser("export-minari", help="make a Minari dataset of a folder")
    export.add_argument("folder", type=Path, metavar="FOLDER")
    export.add_argument("dataset_id", metavar="DATASET_ID", help="such as maze/collected-v0")
    export.add_argument("--env", metavar="ENV", help="gymnasium id of the environment, for its spaces")
    export.set_defaults(run=run_export)

    take = commands.add_parser("import-minari", help="make trajectory files of a Minari dataset")
    take.add_argument("dataset_id", metavar="DATASET_ID", help="such as D4RL/door/human-v2")
    take.add_argument("folder", type=Path, metavar="FOLDER")
    take.add_argument("--format", choices=FILE_FORMATS, default="npz", help="of the files")
    take.add_argument(
        "--download", action="store_true", help="fetch the dataset if it is not on this machine"
    )
    take.set_defaults(run=run_import)
    return parser


# ---- how the commands talk ----


class _Console(Console):
    """A console that leaves it to the command line what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, to_stderr: bool = False) -> Console:
    """A console that does not cut what goes into a file or a pipe."""
    console = _Console(highlight=False, stderr=to_stderr)
    if not console.is_terminal:
        console = _Console(highlight=False, stderr=to_stderr, width=max(_MIN_PLAIN_WIDTH, console.width))
    return console


def say(console: Console, line: str) -> None:
    """Print one line as it is, without markup."""
    console.print(visible(line), markup=False, soft_wrap=True)


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1
) -> None:
    """Print aligned columns.

    Args:
        console: where to.
        columns: headings.
        rows: cells, shown as they are, without markup.
        num_left: so many first columns are aligned to the left, the others to the right.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            Text(visible(column)), justify="left" if index < num_left else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal; yields a function of finished and total number."""
    console = make_console(to_stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ---- ls ----


@dataclass
class EnvSummary:
    """What the opened files of one environment say. One entry per file in each list."""

    lengths: list[int] = field(default_factory=list)  # transitions
    returns: list[float] = field(default_factory=list)
    num_pieces: int = 0  # files that begin in mid-episode


@dataclass
class Summary:
    """What the opened files say."""

    envs: dict[str, EnvSummary] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    extras: Counter[str] = field(default_factory=Counter)
    policy_versions: set[int] = field(default_factory=set)
    num_without_version: int = 0
    broken: list[str] = field(default_factory=list)
    num_opened: int = 0

    def add(self, file: FoundFile) -> None:
        """Open one file; a broken one is noted, one that was deleted meanwhile is passed over."""
        try:
            traj = load_trajectory(file.path)
            self.formats[format_of(file.path)] += 1
        except FileNotFoundError:
            return
        except (BrokenTrajectoryError, OSError) as error:
            self.broken.append(str(error))
            self.num_opened += 1
            return
        self.num_opened += 1
        env = self.envs.setdefault(traj.env_name, EnvSummary())
        env.lengths.append(len(traj))
        env.returns.append(float(traj.rews.sum(dtype=np.float64)))
        self.extras.update(traj.extras.keys())
        env.num_pieces += int(traj.time_idxs[0, 0]) > 0
        if traj.policy_version is None:
            self.num_without_version += 1
        else:
            self.policy_versions.add(traj.policy_version)


def format_of(path: Path) -> str:
    """The format of a trajectory file: its suffix, and for npz whether it is compressed."""
    if path.suffix == ".traj":
        return "traj"
    with path.open("rb") as file:
        compression = file.read(_COMPRESSION_AT + len(_STORED))[_COMPRESSION_AT:]
    return "npz" if compression == _STORED else "npz-compressed"


def run_ls(args: argparse.Namespace) -> bool:
    """Print the listing; True if a broken file was found."""
    console = make_console()
    found = find_files(args.folder)
    if not found.files:
        say(console, f"{args.folder} holds no trajectory files.")
        _print_rest(console, found)
        return False
    _print_places(console, found)
    _print_rest(console, found)
    if args.quick:
        _print_names(console, found.files)
        return False
    summary = _summarise(found.files if args.all else _sample(found.files))
    _print_summary(console, summary, len(found.files))
    return bool(summary.broken)


def _sample(files: Sequence[FoundFile]) -> Sequence[FoundFile]:
    if len(files) <= MAX_OPENED:
        return files
    return random.Random(0).sample(files, MAX_OPENED)


def _summarise(files: Sequence[FoundFile]) -> Summary:
    summary = Summary()
    with progress("opening") as report:
        for number, file in enumerate(files):
            summary.add(file)
            report(number + 1, len(files))
    return summary


def _print_places(console: Console, found: Found) -> None:
    rows = []
    for place, files in found.by_place().items():
        size = size_text(sum(file.size_bytes for file in files))
        oldest, newest = files[0].name.unix_time, files[-1].name.unix_time
        rows.append([place, f"{len(files):,}", size, age_text(oldest), age_text(newest)])
    print_table(console, ["folder", "files", "size", "oldest", "newest"], rows)


def _print_rest(console: Console, found: Found) -> None:
    for place, count in sorted((+found.set_aside).items()):
        say(console, f"{place}: {count:,} files set aside, not counted above")
    if found.num_temporary:
        say(console, f"unfinished: {found.num_temporary:,} files that a writer has not completed")
    if found.foreign:
        named = ", ".join(sorted(found.foreign)[:_MAX_NAMED])
        more = ", ..." if len(found.foreign) > _MAX_NAMED else ""
        say(
            console,
            f"ignored: {len(found.foreign):,} files that are not named like trajectories: {named}{more}",
        )
    console.print()


def _print_names(console: Console, files: Sequence[FoundFile]) -> None:
    """What file names alone tell."""
    envs = Counter(file.name.env_name for file in files)
    print_table(console, ["env", "files"], [[name, f"{count:,}"] for name, count in envs.most_common()])
    suffixes = Counter(file.path.suffix.removeprefix(".") for file in files)
    say(console, "formats: " + ", ".join(f"{name} {count:,}" for name, count in suffixes.most_common()))


def _print_summary(console: Console, summary: Summary, num_files: int) -> None:
    is_sample = summary.num_opened < num_files
    scale = num_files / max(summary.num_opened, 1)
    rows = []
    for name, env in sorted(summary.envs.items()):
        shortest, median, longest = np.quantile(env.lengths, (0.0, 0.5, 1.0))
        returns = np.quantile(env.returns, _QUANTILES)
        about = "~" if is_sample else ""
        rows.append(
            [
                name,
                f"{about}{len(env.lengths) * scale:,.0f}",
                f"{about}{sum(env.lengths) * scale:,.0f}",
                f"{shortest:.0f} / {median:.0f} / {longest:.0f}",
                *(f"{value:.4g}" for value in returns),
            ]
        )
    columns = ["env", "files", "timesteps", "length min / median / max"]
    print_table(console, [*columns, *(f"return {share:.0%}" for share in _QUANTILES)], rows)
    if is_sample:
        say(
            console,
            f"from a random sample of {summary.num_opened:,} of {num_files:,} files; --all opens every one",
        )
    if num_pieces := sum(env.num_pieces for env in summary.envs.values()):
        say(
            console,
            f"pieces: {num_pieces:,} files begin in mid-episode; lengths and returns are those of files",
        )
    say(console, "formats: " + ", ".join(f"{name} {n:,}" for name, n in summary.formats.most_common()))
    if summary.extras:
        say(console, "extras: " + ", ".join(f"{name} {n:,}" for name, n in summary.extras.most_common()))
    if versions := summary.policy_versions:
        unknown = f", unknown in {summary.num_without_version:,} files" if summary.num_without_version else ""
        say(
            console,
            f"policy versions: {min(versions)} to {max(versions)} ({len(versions)} different){unknown}",
        )
    if summary.broken:
        say(console, f"broken: {len(summary.broken):,} files, such as: {summary.broken[0]}")
        say(
            console,
            "list them all, or move them away, with: python -m loxodon.data check FOLDER [--quarantine]",
        )


# ---- show ----


def run_show(args: argparse.Namespace) -> bool:
    """Print the table, and draw the picture if asked."""
    if args.file.is_dir():
        files = require_files(args.file).files
        raise ValueError(
            f"{args.file} is a folder, but show takes one file. Fix: {files[-1].path} is the newest of "
            f"{len(files):,} in it; `ls` describes them all."
        )
    if args.rows < 0:
        raise ValueError(f"--rows is {args.rows}, but must be at least 0. Fix: --rows {_DEFAULT_ROWS}.")
    found = require_files(args.file).files[0]
    traj = load_trajectory(args.file)
    console = make_console()
    version = "unknown" if traj.policy_version is None else str(traj.policy_version)
    say(console, f"{args.file}")
    say(
        console,
        f"env {traj.env_name}   {len(traj):,} transitions   return {traj.rews.sum(dtype=np.float64):.6g}   "
        f"{ending_text(traj)}   policy version {version}   {format_of(args.file)}, "
        f"{size_text(found.size_bytes)}, {age_text(found.name.unix_time)} old",
    )
    say(console, f"layout {traj.layout}")
    if traj.extras:
        say(
            console,
            f"extras {', '.join(f'{k} {v.dtype}{list(v.shape[1:])}' for k, v in traj.extras.items())}",
        )
    say(console, "")
    if args.rows:
        print_table(console, ["time", *_columns(traj), "action", "reward", "done"], _rows(traj, args.rows))
        say(console, "")
        say(console, "a row holds o_t, the action taken there, and the reward and done flag that came of it")
    if args.plot is not None:
        target = Path(f"{args.file.stem}.png") if args.plot == _DEFAULT_PLOT else args.plot
        say(console, f"plot written to {plot_trajectory(traj, target, title=args.file.name)}")
    return False


def ending_text(traj: Trajectory) -> str:
    """Where in its episode a trajectory begins and how it ends."""
    begin = "" if traj.time_idxs[0, 0] == 0 else f"begins at time {traj.time_idxs[0, 0]}, "
    return begin + ("ends with termination" if traj.dones[-1, 0] else "ends without termination")


def low_dimensional(traj: Trajectory) -> dict[str, Array]:
    """Observations with few numbers per timestep, each (T+1, numbers)."""
    flat = {key: value.reshape(len(value), -1) for key, value in sorted(traj.obs.items())}
    return {key: value for key, value in flat.items() if value.shape[1] <= MAX_LOW_DIMENSIONS}


def _columns(traj: Trajectory) -> list[str]:
    low = low_dimensional(traj)
    return [f"{key} ({value.shape[1]})" if value.shape[1] > 1 else key for key, value in low.items()]


def _rows(traj: Trajectory, num_rows: int) -> list[list[str]]:
    """The first and the last timesteps; the final one has no action."""
    low, indices = low_dimensional(traj), action_indices(traj)
    num_timesteps = len(traj) + 1
    shown: list[int | None] = list(range(num_timesteps))
    if num_timesteps > num_rows:
        num_last = num_rows // 2
        shown = [*range(num_rows - num_last), None, *range(num_timesteps - num_last, num_timesteps)]
    rows = []
    for i in shown:
        if i is None:
            rows.append(["..."] * (len(low) + 4))
            continue
        row = [str(traj.time_idxs[i, 0]), *(numbers_text(value[i]) for value in low.values())]
        if i < len(traj):
            row += [
                numbers_text((traj.actions if indices is None else indices)[i]),
                f"{traj.rews[i, 0]:.4g}",
                "yes" if traj.dones[i, 0] else "",
            ]
        rows.append(row)
    return rows


def numbers_text(values: Array) -> str:
    """Few numbers as they are, of many the first three and the last."""

    def text(value: Any) -> str:
        return f"{value:.3g}" if values.dtype.kind == "f" else str(int(value))

    if len(values) <= _MAX_SHOWN_NUMBERS:
        return " ".join(map(text, values))
    return " ".join([*map(text, values[: _MAX_SHOWN_NUMBERS - 1]), "..", text(values[-1])])


# ---- as a picture: rewards, actions, and observations of few numbers over time ----


def plot_trajectory(traj: Trajectory, target: Path, *, title: str) -> Path:
    """Draw a trajectory into a file whose suffix decides the format; returns that path.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If matplotlib does not know the suffix.
        OSError: If the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("Plots need matplotlib, which is not installed. Fix: pip install matplotlib.")
    # The object interface: pyplot would keep global state and may look for a screen.
    from matplotlib.figure import Figure

    low = dict(list(low_dimensional(traj).items())[:_MAX_PANELS])
    num_panels = 2 + len(low)
    figure = Figure(figsize=(_WIDTH_INCHES, _PANEL_INCHES * num_panels + 0.6), layout="constrained")
    axes = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    times = traj.time_idxs[:, 0]
    _draw_rewards(axes[0], times[1:], traj)
    _draw_actions(axes[1], times[:-1], traj)
    for axis, (key, value) in zip(axes[2:], low.items(), strict=True):
        _draw_numbers(axis, times, value)
        axis.set_title(key, fontsize=10, loc="left")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        if traj.dones[-1, 0]:
            axis.axvline(times[-1], color="black", linewidth=1, linestyle=":")
    axes[-1].set_xlabel("time index in the episode (dotted line: termination)", fontsize=9)
    axes[-1].set_xlim(times[0] - 0.5, times[-1] + 0.5)
    figure.suptitle(f"{title}\n{len(traj):,} transitions, {ending_text(traj)}", fontsize=10)
    try:
        figure.savefig(target, dpi=120)
    except ValueError as error:
        raise ValueError(f"{target} cannot be drawn: {error}. Fix: end the name with .png.") from error
    return target


def _draw_rewards(axis: Any, times: npt.NDArray[np.int64], traj: Trajectory) -> None:
    """Rewards as bars (as a line where bars would be thinner than a pixel), their sum as a second axis."""
    rewards = traj.rews[:, 0]
    returns = np.cumsum(rewards, dtype=np.float64)
    if len(rewards) <= 10 * _MAX_MARKED:
        axis.bar(times, rewards, width=0.8, color=_REWARD_COLOR, alpha=0.55)
    else:
        axis.plot(times, rewards, color=_REWARD_COLOR, linewidth=0.7)
    axis.set_ylabel("reward", fontsize=9, color=_REWARD_COLOR)
    axis.set_title(f"reward and cumulative return (final {returns[-1]:.4g})", fontsize=10, loc="left")
    cumulative = axis.twinx()
    cumulative.plot(times, returns, color=_RETURN_COLOR, linewidth=1.5, marker=_marker(times), markersize=3)
    cumulative.set_ylabel("return", fontsize=9, color=_RETURN_COLOR)
    cumulative.tick_params(labelsize=8)


def _draw_actions(axis: Any, times: npt.NDArray[np.int64], traj: Trajectory) -> None:
    indices = action_indices(traj)
    if indices is None or traj.nvec is not None:
        _draw_numbers(axis, times, traj.actions if indices is None else indices)
        axis.set_title("action", fontsize=10, loc="left")
        return
    num_actions = traj.rl2s.shape[1] - 1
    axis.step(times, indices, where="mid", color="0.8", linewidth=0.8)
    axis.scatter(times, indices, s=14 if len(times) <= 10 * _MAX_MARKED else 3, color=_REWARD_COLOR, zorder=3)
    axis.set_ylim(-0.5, num_actions - 0.5)
    if num_actions <= 2 * _MAX_LINES:
        axis.set_yticks(range(num_actions))
    axis.set_title(f"action (one of {num_actions})", fontsize=10, loc="left")


def _draw_numbers(axis: Any, times: npt.NDArray[np.int64], value: Array) -> None:
    """A few numbers per timestep as curves, many as an image."""
    if value.shape[1] <= _MAX_LINES:
        for index in range(value.shape[1]):
            axis.plot(
                times, value[:, index], linewidth=1.1, marker=_marker(times), markersize=3, label=str(index)
            )
        if value.shape[1] > 1:
            axis.legend(
                fontsize=7, ncols=value.shape[1], loc="lower right", bbox_to_anchor=(1, 1), frameon=False
            )
        return
    extent = (times[0] - 0.5, times[-1] + 0.5, value.shape[1] - 0.5, -0.5)
    image = axis.imshow(value.T, aspect="auto", interpolation="nearest", extent=extent, cmap="viridis")
    axis.set_ylabel("index", fontsize=9)
    axis.figure.colorbar(image, ax=axis, pad=0.01).ax.tick_params(labelsize=7)


def _marker(times: npt.NDArray[np.int64]) -> str:
    return "o" if len(times) <= _MAX_MARKED else ""


# ---- check ----


@dataclass
class Report:
    """What was found.

    Attributes:
        layouts: the files of each layout, by its text.
        broken: reason by file.
    """

    layouts: dict[str, tuple[Layout, list[Path]]] = field(default_factory=dict)
    broken: dict[Path, str] = field(default_factory=dict)
    num_vanished: int = 0

    def add(self, path: Path) -> None:
        """Read one file."""
        try:
            check_file(path)
            layout = load_trajectory(path).layout
        except FileNotFoundError:  # deleted since it was listed, by a process that trains
            self.num_vanished += 1
        except (BrokenTrajectoryError, OSError) as error:
            self.broken[path] = str(error)
        else:
            self.layouts.setdefault(str(layout), (layout, []))[1].append(path)

    def odd(self) -> dict[Path, str]:
        """Files that could not be trained on together with the most common layout, and why."""
        if not self.layouts:
            return {}
        common, _ = max(self.layouts.values(), key=lambda entry: len(entry[1]))
        reasons: dict[Path, str] = {}
        for layout, paths in self.layouts.values():
            mismatch = common.describe_mismatch(layout)
            if mismatch is not None:
                reasons |= dict.fromkeys(paths, f"it does not look like most files here: {mismatch}")
        return reasons


def run_check(args: argparse.Namespace) -> bool:
    """Print what is broken; True if anything is."""
    console = make_console()
    files = [file for place in args.places for file in require_files(place).files]
    report = _check_all(files)
    odd = report.odd()
    for path, reason in report.broken.items():
        say(console, f"broken   {path}: {_without_path(reason, path)}")
    for path, reason in odd.items():
        say(console, f"differs  {path}: {reason}")
    num_good = sum(len(paths) for _, paths in report.layouts.values()) - len(odd)
    size = size_text(sum(file.size_bytes for file in files))
    say(
        console,
        f"{len(files):,} files ({size}) read: {num_good:,} good, {len(report.broken):,} broken, "
        f"{len(odd):,} of another layout"
        + (f", {report.num_vanished} deleted" if report.num_vanished else ""),
    )
    for layout, paths in sorted(report.layouts.values(), key=lambda entry: -len(entry[1])):
        say(console, f"layout of {len(paths):,}: {layout}")
    if args.quarantine:
        _quarantine(console, report, odd, num_good)
    return bool(report.broken or odd)


def _check_all(files: Sequence[FoundFile]) -> Report:
    report = Report()
    with progress("checking") as show:
        for number, file in enumerate(files):
            report.add(file.path)
            show(number + 1, len(files))
    return report


def _quarantine(console: Any, report: Report, odd: dict[Path, str], num_good: int) -> None:
    """Move what is broken, and what differs unless that is a good part of the folder."""
    doomed = dict(report.broken)
    if len(odd) <= max(1, MAX_MOVED_SHARE * (num_good + len(odd))) < num_good:
        doomed |= odd
    elif odd:
        say(
            console,
            f"{len(odd):,} files of another layout stay: they are too many to be a mistake. Fix: give each "
            "kind of environment a dataset of its own.",
        )
    moved: Counter[Path] = Counter()
    for path, reason in doomed.items():
        buffer = path.parent.parent if path.parent.name in _FOLDERS else path.parent
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, by a process that trains
            moved[Quarantine(buffer, may_move=True).move(path, reason).parent] += 1
    for folder, count in moved.items():
        say(console, f"{count:,} files moved to {folder}, each with its reason in a text file beside it")


def _without_path(reason: str, path: Path) -> str:
    return reason.removeprefix(str(path)).strip()


# ---- convert ----


def run_convert(args: argparse.Namespace) -> bool:
    """Convert, and read every new file back; True if a source was broken."""
    found = require_files(args.source)
    with progress("converting") as report:
        num_bytes, broken = convert(found, args.target, args.to, force=args.force, report=report)
    console = make_console()
    for reason in broken.values():
        say(console, f"broken, left out: {reason}")
    before = sum(file.size_bytes for file in found.files if file.path not in broken)
    say(
        console,
        f"{len(found.files) - len(broken):,} files written to {args.target} as {args.to} and read back: "
        f"{size_text(before)} became {size_text(num_bytes)}",
    )
    if args.to != "traj":
        say(
            console,
            "AMAGO 3.x reads these files, but not all that is in them: it takes no policy version, no "
            "extras, no difference between one-hot and continuous actions, and env names as they are in the "
            "file names (docs/data.md)",
        )
    return bool(broken)


# ---- Minari ----


def run_export(args: argparse.Namespace) -> bool:
    """Export, and say what became of pieces."""
    files = require_files(args.folder).files
    with progress("exporting") as show:
        report = export_minari([file.path for file in files], args.dataset_id, args.env, show)
    console = make_console()
    say(
        console,
        f"{args.dataset_id}: {report.num_episodes:,} episodes, {report.num_timesteps:,} timesteps, from "
        f"{len(files):,} files",
    )
    if report.num_joined:
        say(
            console, f"{report.num_joined:,} files were joined to the piece of the episode that precedes them"
        )
    if report.num_headless:
        say(console, f"{report.num_headless:,} episodes begin in the middle: their first pieces are not here")
    if report.num_truncated:
        say(
            console,
            f"{report.num_truncated:,} episodes end without termination and are marked as truncated there",
        )
    if args.env is None:
        say(
            console,
            "without --env, observations are unbounded in the dataset and actions are those of the policy "
            "(indices from 0, or numbers in [-1, 1])",
        )
    return False


def run_import(args: argparse.Namespace) -> bool:
    """Import, and say how much it was."""
    dataset = open_minari(args.dataset_id, download=args.download)
    with progress("importing") as show:
        written, num_present = import_episodes(dataset, args.folder, args.format, show)
    console = make_console()
    num_timesteps = sum(length for _, length in written)
    say(console, f"{args.folder}: {len(written):,} new files, {num_timesteps:,} timesteps, as {args.format}")
    if num_present:
        say(console, f"{num_present:,} episodes were there already and stay as they are")
    return False
