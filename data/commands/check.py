"""`check`: read every file completely, and compare what they look like."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BrokenTrajectoryError
from ..files import check_file, open_trajectory
from ..layout import Layout
from .find import FoundFile, require_files, size_text
from .terminal import make_console, progress, say

MAX_MOVED_SHARE = 0.05  # of files of another layout; beyond, the folder is a mixture on purpose
_FOLDERS = ("fifo", "protected")


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
            layout = open_trajectory(path).layout
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


def add_parsers(commands: Any) -> None:
    """Describe this command to argparse."""
    parser = commands.add_parser("check", help="read every file completely and list the broken ones")
    parser.add_argument("places", type=Path, nargs="+", metavar="FOLDER|FILE")
    parser.add_argument(
        "--quarantine", action="store_true", help="move broken files to quarantine/, each with its reason"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> bool:
    """Print what is broken; True if anything is."""
    console = make_console()
    files = [file for place in args.places for file in require_files(place).files]
    report = _read(files)
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


def _read(files: Sequence[FoundFile]) -> Report:
    report = Report()
    with progress("checking") as show:
        for number, file in enumerate(files):
            report.add(file.path)
            show(number + 1, len(files))
    return report


def _quarantine(console: Any, report: Report, odd: dict[Path, str], num_good: int) -> None:
    """Move what is broken, and what differs unless that is a good part of the folder."""
    from ..quarantine import Quarantine

    doomed = dict(report.broken)
    if len(odd) <= max(1, MAX_MOVED_SHARE * (num_good + len(odd))) < num_good:
        doomed |= odd
    elif odd:
        say(
            console,
            f"{len(odd):,} files of another layout stay: they are too many to be a mistake. Fix: give each "
            "kind of environment a dataset of its own.",
        )
    quarantines: dict[Path, Quarantine] = {}
    moved: Counter[Path] = Counter()
    with _without_warnings():  # every reason was printed above
        for path, reason in doomed.items():
            buffer = path.parent.parent if path.parent.name in _FOLDERS else path.parent
            quarantine = quarantines.setdefault(buffer, Quarantine(buffer, may_move=True))
            quarantine.put(path, reason)
            moved[quarantine.folder] += not path.exists()
    for folder, count in moved.items():
        say(console, f"{count:,} files moved to {folder}, each with its reason in a text file beside it")


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("loxodon")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _without_path(reason: str, path: Path) -> str:
    return reason.removeprefix(str(path)).strip()
