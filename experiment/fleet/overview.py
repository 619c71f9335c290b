"""What is known of a run from its folder alone: its processes, totals, trajectories and checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.errors import visible
from ...data.files import parse_name
from .heartbeat import Beat, read_heartbeats
from .pace import Tally, read_tally

_FOLDERS = ("ckpts", "status", "buffer", "logs")
_COLUMNS = (
    *("role", "host", "pid", "state", "since", "epoch"),
    *("steps", "steps/s", "updates/s", "policy", "behind"),
)
_NUM_LEFT = 4  # columns of words; the others are numbers


@dataclass(frozen=True)
class Overview:
    """A run at one moment. env_steps: of all processes that ever collected for it. buffer: see _look_at."""

    run_dir: Path
    beats: Sequence[Beat]
    env_steps: int
    learner: Beat | None
    replay_ratio: float | None
    buffer: Mapping[str, Any]
    checkpoint_epochs: Sequence[int]

    @property
    def num_alive(self) -> int:
        """Processes at work."""
        return sum(beat.is_alive for beat in self.beats)

    def behind(self, beat: Beat) -> int | None:
        """How many policy versions an actor at work is behind; None for others."""
        if beat.role != "actor" or self.learner is None or not beat.is_alive:
            return None
        return max(0, self.learner.policy_version - beat.policy_version)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        hidden = ("path", "machine", "modified")
        return {
            "run_dir": str(self.run_dir),
            "time": time.time(),
            "alive": self.num_alive,
            "env_steps": self.env_steps,
            "env_steps_per_s": sum(beat.env_steps_per_s for beat in self.beats if beat.is_alive),
            "gradient_steps": 0 if self.learner is None else self.learner.gradient_steps,
            "policy_version": None if self.learner is None else self.learner.policy_version,
            "replay_ratio": self.replay_ratio,
            "processes": [
                {
                    **{name: value for name, value in vars(beat).items() if name not in hidden},
                    "versions_behind": self.behind(beat),
                }
                for beat in self.beats
            ],
            "buffer": self.buffer,
            "checkpoint_epochs": list(self.checkpoint_epochs),
        }

    def as_text(self) -> str:
        """A table and some lines, for people."""
        now, facts = time.time(), self.as_json()
        rows = [_COLUMNS, *(_row(beat, self.behind(beat), now) for beat in self.beats)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = [f"run {self.run_dir}: {self.num_alive} of {len(self.beats)} processes at work"]
        for i, row in enumerate(rows):
            left = [text.ljust(width) for text, width in zip(row[:_NUM_LEFT], widths, strict=False)]
            right = [text.rjust(w) for text, w in zip(row[_NUM_LEFT:], widths[_NUM_LEFT:], strict=True)]
            lines.append("  ".join([*left, *right]).rstrip())
            if i and (note := self.beats[i - 1].note):
                lines.append(f"    {note}")
        buffer, ratio = facts["buffer"], self.replay_ratio
        newest = buffer["newest_age_s"]
        epochs = self.checkpoint_epochs
        texts = {
            "env steps": f"{self.env_steps:,} ({facts['env_steps_per_s']:,.0f}/s)",
            "updates": f"{facts['gradient_steps']:,}"
            + ("" if ratio is None else f", {ratio:.4g} per env step since training began"),
            "buffer": f"{buffer['fifo_files']:,} + {buffer['protected_files']:,} protected files, "
            f"{buffer['bytes'] / 1e6:,.1f} MB in {buffer['folder']}",
            "newest": "no trajectory" if newest is None else f"trajectory is {_duration(newest)} old",
            "checkpoints": f"epochs {', '.join(map(str, epochs[-8:]))}" if epochs else "none",
        }
        lines += [f"{name:>11}  {text}" for name, text in texts.items()]
        return "\n".join(map(visible, lines))


def overview(run_dir: Path) -> Overview:
    """Look at a run.

    Raises: FileNotFoundError if the folder is missing or no run's.
    """
    if not any((run_dir / name).is_dir() for name in _FOLDERS):
        what = "holds no run" if run_dir.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{run_dir} {what}: a run's folder has {', '.join(f'{name}/' for name in _FOLDERS)}. "
            "Fix: give <ckpt_base_dir>/<run_name>."
        )
    beats = read_heartbeats(run_dir)
    tally = read_tally(run_dir) or Tally()
    tally.take_beats(beats)
    learners = [beat for beat in beats if beat.role != "actor" and beat.rank == 0]
    named = [beat for beat in learners if beat.id == tally.learner] or learners[-1:]
    learner = named[0] if named else None
    both_steps = learner.env_steps if learner is not None and learner.role == "both" else 0
    env_steps, ratio = tally.env_steps + both_steps, None
    if tally.began_at is not None and learner is not None and env_steps > tally.began_at[0]:
        ratio = (learner.gradient_steps - tally.began_at[1]) / (env_steps - tally.began_at[0])
    folders = [Path(beat.buffer) for beat in beats if beat.buffer]
    folder = next((path for path in reversed(folders) if path.is_dir()), run_dir / "buffer")
    return Overview(run_dir, beats, env_steps, learner, ratio, _look_at(folder), checkpoint_epochs(run_dir))


def _look_at(folder: Path) -> dict[str, Any]:
    """The trajectories on disk; newest_age_s by the time in the newest file's name, None without files."""
    counts, num_bytes, newest = {"fifo": 0, "protected": 0}, 0, None
    for part in counts:
        with contextlib.suppress(OSError), os.scandir(folder / part) as entries:  # there, and ours to read?
            for entry in entries:
                if (name := parse_name(entry.name)) is None:
                    continue
                counts[part] += 1
                newest = max(newest or name.unix_time, name.unix_time)
                with contextlib.suppress(OSError):  # deleted at this moment
                    num_bytes += entry.stat().st_size
    return {
        "folder": str(folder),
        **{f"{part}_files": count for part, count in counts.items()},
        "bytes": num_bytes,
        "newest_age_s": None if newest is None else time.time() - newest,
    }


def checkpoint_epochs(run_dir: Path) -> list[int]:
    """Epochs with a complete checkpoint, ascending."""
    found = []
    for marker in (run_dir / "ckpts" / "training_states").glob("*_epoch_*/COMPLETE"):
        number = marker.parent.name.rpartition("_epoch_")[2]
        found += [int(number)] if number.isdecimal() else []
    return sorted(found)


def _row(beat: Beat, behind: int | None, now: float) -> tuple[str, ...]:
    learns, collects = beat.role != "actor", beat.role != "learner"
    is_alive = beat.is_alive
    return (
        beat.role if beat.rank == 0 else f"{beat.role} {beat.rank}",
        beat.host,
        str(beat.pid),
        beat.state if beat.life != "dead" else "dead",
        _duration(now - beat.started if is_alive else now - beat.modified) + ("" if is_alive else " ago"),
        str(beat.epoch),
        f"{beat.env_steps:,}" if collects else "",
        f"{beat.env_steps_per_s:,.0f}" if collects and is_alive else "",
        f"{beat.updates_per_s:,.1f}" if learns and is_alive else "",
        str(beat.policy_version),
        "" if behind is None else str(behind),
    )


def _duration(seconds: float) -> str:
    """Two figures are enough: 12 s, 3 min, 5.1 h, 2.0 d."""
    seconds = max(0.0, seconds)
    for limit, unit, name in ((100.0, 1.0, "s"), (6000.0, 60.0, "min"), (48 * 3600.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} h" if name == "h" else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400.0:.1f} d"
