"""The subcommands of `loxodon data`.

ls              what a folder of trajectories holds
show            one trajectory as a table
check           read every file completely, and compare their layouts
convert         the same trajectories in another file format
export-minari   and import-minari: to and from Farama's standard for offline data
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
from rich import box, filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...data.buffer import MAX_BROKEN_SHARE, Quarantine
from ...data.episodes import best_files
from ...data.errors import BrokenTrajectoryError, visible, with_fix
from ...data.files import FILE_FORMATS, TrajectoryReader, check_file, load_trajectory, parse_name
from ...data.minari import dataset_folder, export_minari, import_episodes, open_minari
from ...data.trajectory import Array, Layout, Trajectory, action_indices
from ..arguments import USAGE_ERROR, Parser
from .convert import convert
from .find import Found, FoundFile, age_text, find_files, require_files

OK, FOUND_PROBLEMS, INTERRUPTED = 0, 1, 130
_MIN_PLAIN_WIDTH = 160  # minimum width of the console if it is not a terminal
MAX_OPENED = 10_000  # maximum number of files that ls opens; from more, a random sample of this size
_QUANTILES = (0.0, 0.2, 0.5, 0.8, 1.0)
_MAX_NAMED = 5
# First member of a zip: offset of its method, and the value for "not compressed".
_COMPRESSION_AT, _STORED = 8, b"\0\0"
_DEFAULT_ROWS = 20
# Numbers of an observation or action in the table; of more, the first three and the last.
_MAX_SHOWN_NUMBERS = 4
MAX_LOW_DIMENSIONS = 64  # maximum number of values per timestep; larger observations are only named


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
    except BrokenPipeError:  # a reader such as `head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {visible(with_fix(error))}\n")
        return USAGE_ERROR
    return FOUND_PROBLEMS if has_problems else OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="loxodon data",
        description="List, show, check, convert and exchange trajectory files.",
        epilog="Exit status: 0 if all is well, 1 if broken files were found, 2 if the command failed.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser(
        "ls", help="summarise the trajectories of a run, dataset, buffer or other folder"
    )
    ls.add_argument("folder", type=Path, metavar="FOLDER")
    ls.add_argument(
        "--all", action="store_true", help=f"open every file, even if there are more than {MAX_OPENED:,}"
    )
    ls.set_defaults(run=_ls)

    show = commands.add_parser("show", help="show one trajectory as a table")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument(
        "--rows",
        type=int,
        default=_DEFAULT_ROWS,
        metavar="N",
        help="number of rows of the table (default: %(default)s)",
    )
    show.set_defaults(run=_show)

    check = commands.add_parser("check", help="read every file completely and list the broken ones")
    check.add_argument("places", type=Path, nargs="+", metavar="FOLDER|FILE")
    check.add_argument(
        "--quarantine", action="store_true", help="move broken files to quarantine/, each with its reason"
    )
    check.set_defaults(run=_check)

    turn = commands.add_parser("convert", help="write the same trajectories in another format")
    turn.add_argument("source", type=Path, metavar="SRC", help="a trajectory file, or a folder of them")
    turn.add_argument("target", type=Path, metavar="DST", help="output folder; created if it does not exist")
    turn.add_argument("--to", choices=FILE_FORMATS, required=True, help="format of the new files")
    turn.add_argument("--force", action="store_true", help="overwrite existing files")
    turn.add_argument(
        "--best",
        type=float,
        metavar="SHARE",
        help="convert only this share of the episodes, those with the highest returns, e.g. 0.1",
    )
    turn.set_defaults(run=_convert)

    export = commands.add_parser("export-minari", help="create a Minari dataset from a folder")
    export.add_argument("folder", type=Path, metavar="FOLDER")
    export.add_argument(
        "dataset_id", metavar="DATASET_ID", help="id of the new dataset, such as maze/collected-v0"
    )
    export.add_argument("--env", metavar="ENV", help="gymnasium id of the environment, to store its spaces")
    export.set_defaults(run=_export)

    take = commands.add_parser("import-minari", help="create trajectory files from a Minari dataset")
    take.add_argument(
        "dataset_id", metavar="DATASET_ID", help="id of the dataset, such as D4RL/door/human-v2"
    )
    take.add_argument("folder", type=Path, metavar="FOLDER")
    take.add_argument("--format", choices=FILE_FORMATS, default="npz", help="format of the files")
    take.add_argument(
        "--download", action="store_true", help="download the dataset if it is not on this machine"
    )
    take.set_defaults(run=_import)
    return parser


# ---- output of the commands ----


class _Console(Console):
    """A console that leaves the handling of closed pipes to the command line."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _say(line: str) -> None:
    sys.stdout.write(visible(line) + "\n")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print unformatted cells in aligned columns, the first to the left; in a file, no cell is cut."""
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = max(_MIN_PLAIN_WIDTH, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(visible(column)), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)


def _track(what: str) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Return a wrapper that yields the items of a sequence, and shows progress on a terminal."""
    console = _Console(stderr=True)
    hide = not console.is_terminal
    return lambda items: rich.progress.track(items, what, console=console, transient=True, disable=hide)


# ---- ls ----


@dataclass
class _Summary:
    """Summary of the opened files.

    Attributes:
        envs: (transitions, return, whether it begins in mid-episode) of each file, by environment.
        broken: reasons why some files could not be read.
    """

    envs: dict[str, list[tuple[int, float, bool]]] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    extras: Counter[str] = field(default_factory=Counter)
    versions: Counter[int | None] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    @property
    def num_opened(self) -> int:
        """Number of files that were read or found to be broken."""
        return len(self.broken) + sum(map(len, self.envs.values()))

    def add(self, path: Path) -> None:
        """Open one file. A broken file is recorded, and one that was deleted meanwhile is skipped."""
        try:
            traj = TrajectoryReader().load(str(path))  # large observations are not read
            self.formats[format_of(path)] += 1
        except FileNotFoundError:
            return
        except (BrokenTrajectoryError, OSError) as error:
            self.broken.append(str(error))
            return
        figures = len(traj), float(traj.rews.sum(dtype=np.float64)), bool(traj.time_idxs[0, 0] > 0)
        self.envs.setdefault(traj.env_name, []).append(figures)
        self.extras.update(traj.extras.keys())
        self.versions[traj.policy_version] += 1


def format_of(path: Path) -> str:
    """Determine the format of a trajectory file from the compression of its first array."""
    with path.open("rb") as file:
        compression = file.read(_COMPRESSION_AT + len(_STORED))[_COMPRESSION_AT:]
    return "npz" if compression == _STORED else "npz-compressed"


def _ls(args: argparse.Namespace) -> bool:
    found = find_files(args.folder)
    _print_places(found)
    if not found.files:
        return False
    files: Sequence[FoundFile] = found.files
    if len(files) > MAX_OPENED and not args.all:
        files = random.Random(0).sample(files, MAX_OPENED)
    summary = _Summary()
    for file in _track("opening")(files):
        summary.add(file.path)
    _print_summary(summary, len(found.files))
    return bool(summary.broken)


def _print_places(found: Found) -> None:
    rows = []
    for place, files in found.by_place().items():
        size = filesize.decimal(sum(file.size_bytes for file in files))
        ages = (age_text(files[end].name.unix_time) for end in (0, -1))
        rows.append([place, f"{len(files):,}", size, *ages])
    if rows:
        _print_table(["folder", "files", "size", "oldest", "newest"], rows)
    else:
        _say(f"{found.root} holds no trajectory files.")
    for place, count in sorted((+found.set_aside).items()):
        _say(f"{place}: {count:,} files set aside, not counted above")
    if found.num_temporary:
        _say(f"unfinished: {found.num_temporary:,} files that are still being written, or were abandoned")
    _say_foreign(found.foreign)
    _say("")


def _say_foreign(names: Sequence[str]) -> None:
    if names:
        named = ", ".join(sorted(names)[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
        _say(f"ignored: {len(names):,} files that are not named like trajectories: {named}")


def _say_counts(what: str, counts: Counter[str]) -> None:
    if counts:
        _say(f"{what}: " + ", ".join(f"{name} {count:,}" for name, count in counts.most_common()))


def _print_summary(summary: _Summary, num_files: int) -> None:
    is_sample = summary.num_opened < num_files
    scale, about = num_files / max(summary.num_opened, 1), "~" if is_sample else ""
    rows = []
    for name, figures in sorted(summary.envs.items()):
        lengths, returns, _ = zip(*figures, strict=True)
        shortest, median, longest = np.quantile(lengths, (0.0, 0.5, 1.0))
        row = [name, *(f"{about}{number * scale:,.0f}" for number in (len(figures), sum(lengths)))]
        row.append(f"{shortest:.0f} / {median:.0f} / {longest:.0f}")
        rows.append(row + [f"{value:.4g}" for value in np.quantile(returns, _QUANTILES)])
    columns = ["env", "files", "timesteps", "length min / median / max"]
    _print_table([*columns, *(f"return {share:.0%}" for share in _QUANTILES)], rows)
    if is_sample:
        _say(
            f"from a random sample of {summary.num_opened:,} of {num_files:,} files; --all opens all of them"
        )
    if num_pieces := sum(begins_late for env in summary.envs.values() for _, _, begins_late in env):
        _say(
            f"pieces: {num_pieces:,} files begin in the middle of an episode; lengths and returns are those "
            "of the files, not of episodes"
        )
    _say_counts("formats", summary.formats)
    _say_counts("extras", summary.extras)
    num_unknown = summary.versions.pop(None, 0)
    if versions := [version for version in summary.versions if version is not None]:
        unknown = f", unknown in {num_unknown:,} files" if num_unknown else ""
        _say(f"policy versions: {min(versions)} to {max(versions)} ({len(versions)} different){unknown}")
    if summary.broken:
        _say(f"broken: {len(summary.broken):,} files, such as: {summary.broken[0]}")
        _say("to list all of them, or move them away: loxodon data check FOLDER [--quarantine]")


# ---- show ----


def _show(args: argparse.Namespace) -> bool:
    if args.file.is_dir():
        files = require_files(args.file).files
        raise ValueError(
            f"{args.file} is a folder, but show takes one file. Fix: choose one, such as {files[-1].path}, "
            f"the newest of {len(files):,}; `ls` summarises all of them."
        )
    if args.rows < 0:
        raise ValueError(
            f"--rows is {args.rows}, but must be at least 0. Fix: write --rows {_DEFAULT_ROWS}, for example."
        )
    found = require_files(args.file).files[0]
    try:
        traj = load_trajectory(args.file)
    except BrokenTrajectoryError as error:
        if parse_name(args.file.name) is not None:
            raise
        raise ValueError(
            f"{str(error).partition(' Fix: ')[0]} Fix: give a trajectory file, named <env>_<id>_<unix "
            "time>.npz, such as those in the folder buffer/fifo of a run."
        ) from error
    version = "unknown" if traj.policy_version is None else str(traj.policy_version)
    _say(f"{args.file}")
    _say(
        f"env {traj.env_name}   {len(traj):,} transitions   return {traj.rews.sum(dtype=np.float64):.6g}   "
        f"{_ending_text(traj)}   policy version {version}   {format_of(args.file)}, "
        f"{filesize.decimal(found.size_bytes)}, {age_text(found.name.unix_time)} old"
    )
    _say(f"layout {traj.layout}")
    if traj.extras:
        _say(f"extras {', '.join(f'{k} {v.dtype}{list(v.shape[1:])}' for k, v in traj.extras.items())}")
    _say("")
    if args.rows:
        _print_rows(traj, args.rows)
        _say("")
        _say("each row holds o_t, the action taken at it, and the reward and done flag that followed")
    return False


def _ending_text(traj: Trajectory) -> str:
    begin = "" if traj.time_idxs[0, 0] == 0 else f"begins at time {traj.time_idxs[0, 0]}, "
    return begin + ("ends with termination" if traj.dones[-1, 0] else "ends without termination")


def _low_dimensional(traj: Trajectory) -> dict[str, Array]:
    """Observations with few numbers per timestep, each (T+1, numbers)."""
    flat = {key: value.reshape(len(value), -1) for key, value in sorted(traj.obs.items())}
    return {key: value for key, value in flat.items() if value.shape[1] <= MAX_LOW_DIMENSIONS}


def _actions(traj: Trajectory) -> Array:
    """Actions (T, columns): indices if discrete, otherwise numbers."""
    indices = action_indices(traj)
    return traj.actions if indices is None else indices


def _print_rows(traj: Trajectory, num_rows: int) -> None:
    low, actions, num_timesteps = _low_dimensional(traj), _actions(traj), len(traj) + 1
    num_last = num_rows // 2 if num_timesteps > num_rows else 0
    num_first = min(num_rows - num_last, num_timesteps)
    rows = []
    for i in (*range(num_first), *range(num_timesteps - num_last, num_timesteps)):
        if num_last and i == num_timesteps - num_last:
            rows.append(["..."] * (len(low) + 4))
        row = [str(traj.time_idxs[i, 0]), *(_numbers_text(value[i]) for value in low.values())]
        if i < len(traj):
            row += [_numbers_text(actions[i]), f"{traj.rews[i, 0]:.4g}", "yes" if traj.dones[i, 0] else ""]
        rows.append(row)
    names = [f"{key} ({value.shape[1]})" if value.shape[1] > 1 else key for key, value in low.items()]
    _print_table(["time", *names, "action", "reward", "done"], rows)


def _numbers_text(values: Array) -> str:
    """Format a few numbers in full, and of many the first three and the last."""
    texts = [f"{value:.3g}" if values.dtype.kind == "f" else str(int(value)) for value in values]
    if len(texts) > _MAX_SHOWN_NUMBERS:
        texts[_MAX_SHOWN_NUMBERS - 1 : -1] = [".."]
    return " ".join(texts)


# ---- check ----


def _check(args: argparse.Namespace) -> bool:
    places = [require_files(place) for place in args.places]
    files = [file for place in places for file in place.files]
    kinds, broken, num_vanished = _read_all(files)
    odd: dict[Path, str] = {}
    for layout, paths in kinds[1:]:
        if mismatch := kinds[0][0].describe_mismatch(layout):
            odd |= dict.fromkeys(paths, f"its layout differs from that of most files here: {mismatch}")
    for path, reason in broken.items():
        _say(f"broken   {path}: {reason.removeprefix(str(path)).strip()}")
    for path, reason in odd.items():
        _say(f"differs  {path}: {reason}")
    num_good = len(files) - num_vanished - len(broken) - len(odd)
    size = filesize.decimal(sum(file.size_bytes for file in files))
    _say(
        f"{len(files):,} files ({size}) read: {num_good:,} good, {len(broken):,} broken, "
        f"{len(odd):,} of another layout" + (f", {num_vanished} deleted" if num_vanished else "")
    )
    for layout, paths in kinds:
        _say(f"layout of {len(paths):,}: {layout}")
    _say_foreign([name for place in places for name in place.foreign])
    if args.quarantine:
        _quarantine(broken, odd, num_good)
    return bool(broken or odd)


def _read_all(files: Sequence[FoundFile]) -> tuple[list[tuple[Layout, list[Path]]], dict[Path, str], int]:
    """Return the files of each layout, most common first; broken files with reasons; number of gone ones."""
    layouts: dict[str, tuple[Layout, list[Path]]] = {}  # keys: texts of the layouts
    broken: dict[Path, str] = {}
    num_vanished = 0
    for file in _track("checking")(files):
        try:
            layout = check_file(file.path).layout
        except FileNotFoundError:  # deleted by a training process since it was listed
            num_vanished += 1
        except (BrokenTrajectoryError, OSError) as error:
            broken[file.path] = str(error)
        else:
            layouts.setdefault(str(layout), (layout, []))[1].append(file.path)
    return sorted(layouts.values(), key=lambda kind: -len(kind[1])), broken, num_vanished


def _quarantine(broken: dict[Path, str], odd: dict[Path, str], num_good: int) -> None:
    """Move broken files, and those that differ unless they are a large part of the folder."""
    doomed = dict(broken)
    if len(odd) <= max(1, MAX_BROKEN_SHARE * (num_good + len(odd))) < num_good:
        doomed |= odd
    elif odd:
        _say(
            f"{len(odd):,} files of another layout stay: there are too many of them to be a mistake. "
            "Fix: give each kind of environment its own dataset."
        )
    moved: Counter[Path] = Counter()
    for path, reason in doomed.items():
        buffer = path.parent.parent if path.parent.name in ("fifo", "protected") else path.parent
        with contextlib.suppress(FileNotFoundError):  # deleted by a training process meanwhile
            moved[Quarantine(buffer, may_move=True).move(path, reason).parent] += 1
    for folder, count in moved.items():
        _say(f"{count:,} files moved to {folder}, each with a text file that states the reason")


# ---- convert ----


def _convert(args: argparse.Namespace) -> bool:
    found = require_files(args.source)
    if args.best is not None:
        best = set(best_files([file.path for file in found.files], args.best, _track("reading")))
        found.files = [file for file in found.files if file.path in best]
    num_bytes, broken = convert(found, args.target, args.to, force=args.force, track=_track("converting"))
    for reason in broken.values():
        _say(f"broken, skipped: {reason}")
    before = sum(file.size_bytes for file in found.files if file.path not in broken)
    _say(
        f"{len(found.files) - len(broken):,} files written to {args.target} as {args.to}: "
        f"{filesize.decimal(before)} became {filesize.decimal(num_bytes)}"
    )
    return bool(broken)


# ---- Minari ----


def _export(args: argparse.Namespace) -> bool:
    files = require_files(args.folder).files
    paths = [file.path for file in files]
    episodes, timesteps = export_minari(paths, args.dataset_id, args.env, _track("exporting"))
    _say(f"{args.dataset_id}: {episodes:,} episodes, {timesteps:,} timesteps, from {len(files):,} files")
    _say(f"written to {dataset_folder(args.dataset_id)}")
    if args.env is None:
        _say(
            "without --env, observations are unbounded in the dataset and actions have the policy's form "
            "(indices from 0, or numbers in [-1, 1])"
        )
    return False


def _import(args: argparse.Namespace) -> bool:
    dataset = open_minari(args.dataset_id, download=args.download)
    written, num_present = import_episodes(dataset, args.folder, args.format, _track("importing"))
    num_timesteps = sum(length for _, length in written)
    _say(f"{args.folder}: {len(written):,} new files, {num_timesteps:,} timesteps, as {args.format}")
    if num_present:
        _say(f"{num_present:,} episodes already existed and were left unchanged")
    return False
