"""`show`: one trajectory as a table, and as a picture."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
_MAX_LINES = 8  # curves in one panel; more become an image, one line of pixels each
_MAX_PANELS = 8  # of observations
_MAX_MARKED = 60  # transitions; in longer trajectories points would cover each other
_WIDTH_INCHES, _PANEL_INCHES = 9.0, 1.9
_REWARD_COLOR, _RETURN_COLOR = "#4c72b0", "#c44e52"


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
