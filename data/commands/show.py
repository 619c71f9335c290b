"""`show`: one trajectory as a table, and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ..action_forms import action_indices
from ..extras import describe_extras
from ..files import load_trajectory
from ..trajectory import Array, Trajectory
from .find import age_text, require_files, size_text
from .listing import format_of
from .terminal import make_console, print_table, say

_DEFAULT_ROWS = 20
_MAX_SHOWN_NUMBERS = 4  # of an observation or action in the table; of more, the first three and the last
MAX_LOW_DIMENSIONS = 64  # numbers per timestep; an observation with more is only named
_DEFAULT_PLOT = Path("<FILE>.png")


def add_parsers(commands: Any) -> None:
    """Describe this command to argparse."""
    parser = commands.add_parser("show", help="one trajectory as a table, and as a picture")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=_DEFAULT_PLOT,
        metavar="OUT.png",
        help="draw rewards, actions and low-dimensional observations, here if no name is given",
    )
    parser.add_argument("--rows", type=int, default=_DEFAULT_ROWS, metavar="N", help="rows of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> bool:
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
        say(console, f"extras {describe_extras(traj.extras)}")
    say(console, "")
    if args.rows:
        print_table(console, ["time", *_columns(traj), "action", "reward", "done"], _rows(traj, args.rows))
        say(console, "")
        say(console, "a row holds o_t, the action taken there, and the reward and done flag that came of it")
    if args.plot is not None:
        from .plot import plot_trajectory

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
