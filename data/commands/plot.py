"""A trajectory as a picture: rewards, actions, and observations of few numbers over time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..action_forms import action_indices
from ..trajectory import Array, Trajectory
from .show import ending_text, low_dimensional

_MAX_LINES = 8  # curves in one panel; more become an image, one line of pixels each
_MAX_PANELS = 8  # of observations
_MAX_MARKED = 60  # transitions; in longer trajectories points would cover each other
_WIDTH_INCHES, _PANEL_INCHES = 9.0, 1.9
_REWARD_COLOR, _RETURN_COLOR = "#4c72b0", "#c44e52"


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
