"""`export-minari` and `import-minari`: trajectories from and to Farama's standard for offline data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..files import FILE_FORMATS
from .find import require_files
from .terminal import make_console, progress, say


def add_parsers(commands: Any) -> None:
    """Describe these commands to argparse."""
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


def run_export(args: argparse.Namespace) -> bool:
    """Export, and say what became of pieces."""
    from ..minari_export import export_minari

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
    from ..minari import import_episodes, open_minari

    dataset = open_minari(args.dataset_id, download=args.download)
    with progress("importing") as show:
        written, num_present = import_episodes(dataset, args.folder, args.format, show)
    console = make_console()
    num_timesteps = sum(length for _, length in written)
    say(console, f"{args.folder}: {len(written):,} new files, {num_timesteps:,} timesteps, as {args.format}")
    if num_present:
        say(console, f"{num_present:,} episodes were there already and stay as they are")
    return False
