"""`ls`: what a folder of trajectories holds."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..errors import BrokenTrajectoryError
from ..files import open_trajectory
from .find import Found, FoundFile, age_text, find_files, size_text
from .terminal import make_console, print_table, progress, say

MAX_OPENED = 10_000  # files; beyond, a random sample of as many is opened
_QUANTILES = (0.0, 0.2, 0.5, 0.8, 1.0)
_MAX_NAMED = 5
_COMPRESSION_AT, _STORED = 8, b"\0\0"  # of the first member of a zip: byte offset, and "not compressed"


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
            stored = open_trajectory(file.path)
            traj = stored.slice(0, len(stored))
            self.formats[format_of(file.path)] += 1
        except FileNotFoundError:
            return
        except (BrokenTrajectoryError, OSError) as error:
            self.broken.append(str(error))
            self.num_opened += 1
            return
        self.num_opened += 1
        env = self.envs.setdefault(stored.env_name, EnvSummary())
        env.lengths.append(len(stored))
        env.returns.append(float(traj.rews.sum(dtype=np.float64)))
        self.extras.update(list(traj.extras))
        env.num_pieces += int(traj.time_idxs[0, 0]) > 0
        if stored.policy_version is None:
            self.num_without_version += 1
        else:
            self.policy_versions.add(stored.policy_version)


def format_of(path: Path) -> str:
    """The format of a trajectory file: its suffix, and for npz whether it is compressed."""
    if path.suffix == ".traj":
        return "traj"
    with path.open("rb") as file:
        compression = file.read(_COMPRESSION_AT + len(_STORED))[_COMPRESSION_AT:]
    return "npz" if compression == _STORED else "npz-compressed"


def add_parsers(commands: Any) -> None:
    """Describe this command to argparse."""
    parser = commands.add_parser("ls", help="what a run, dataset, buffer or other folder holds")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="open no file: no timesteps and returns")
    amount.add_argument("--all", action="store_true", help=f"open every file, also beyond {MAX_OPENED:,}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> bool:
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
