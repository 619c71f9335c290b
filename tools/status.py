"""`loxodon status RUN_DIR`: the processes of a run, their speed, and the contents of its folder."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import filesize

from ..data.errors import visible
from ..experiment.checkpoint.store import CheckpointManager
from ..experiment.fleet.heartbeat import RUN_FOLDERS, env_steps_of, newest_learner, read_heartbeats
from .arguments import parse_status
from .data.find import FoundFile, age_text, find_files

NO_RUN, NOBODY = 2, 3  # exit statuses; 0 means that the run has finished or a process works on it
_COLUMNS = (
    *("role", "host", "pid", "state", "since", "epoch"),
    *("steps", "steps/s", "updates/s", "policy", "behind"),
)
_NUM_LEFT = 4  # number of left-aligned columns, which hold words; the others hold numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status of a run; returns the exit status.

    It is 0 if the run has finished or a process is at work, 3 if it stopped before its end, 2 if it does not
    exist.
    """
    args = parse_status(argv)
    try:
        view = overview(args.run_dir.expanduser())
        sys.stdout.write(f"{json.dumps(view) if args.json else as_text(view)}\n")
        sys.stdout.flush()
    except FileNotFoundError as error:
        sys.stderr.write(f"error: {error}\n")
        return NO_RUN
    except BrokenPipeError:  # a reader such as `head` closed the pipe
        sys.stderr.close()
    return 0 if view["alive"] or view["is_finished"] else NOBODY


def overview(run_dir: Path) -> dict[str, Any]:
    """The present state of a run as plain values, for programs.

    Returns: "run_dir", "time", "is_finished"; for all processes together "alive", "env_steps" (including
        those of ended processes), "env_steps_per_s", "gradient_steps", "policy_version" and "replay_ratio"
        (None if undefined); "processes", each with the fields of its `Heartbeat` and "versions_behind" (None
        except for live actors); "buffer", see _buffer_facts; "checkpoint_epochs".
    Raises: FileNotFoundError if the folder is missing or does not hold a run.
    """
    if not any((run_dir / name).is_dir() for name in RUN_FOLDERS):
        what = "holds no run" if run_dir.is_dir() else "is a file" if run_dir.exists() else "does not exist"
        raise FileNotFoundError(
            f"{run_dir} {what}: a run's folder has {', '.join(f'{name}/' for name in RUN_FOLDERS)}. "
            "Fix: give <ckpt_base_dir>/<run_name>."
        )
    beats = read_heartbeats(run_dir)
    env_steps, learner, ratio = env_steps_of(beats), newest_learner(beats), None
    if learner is not None and learner.began_env_steps is not None and env_steps > learner.began_env_steps:
        updates = learner.gradient_steps - (learner.began_updates or 0)
        ratio = updates / (env_steps - learner.began_env_steps)
    processes = []
    for beat in beats:
        facts = {name: value for name, value in vars(beat).items() if name not in ("path", "machine")}
        follows = beat.role == "actor" and beat.is_alive and learner is not None
        behind = max(0, learner.policy_version - beat.policy_version) if follows and learner else None
        processes.append({**facts, "versions_behind": behind})
    # A run that was copied or renamed has its own buffer; that of a named dataset is elsewhere.
    folders = [run_dir / "buffer", *(Path(beat.buffer) for beat in reversed(beats) if beat.buffer)]
    return {
        "run_dir": str(run_dir),
        "time": time.time(),
        "is_finished": learner is not None and learner.state == "finished",
        "alive": sum(beat.is_alive for beat in beats),
        "env_steps": env_steps,
        "env_steps_per_s": sum(beat.env_steps_per_s for beat in beats if beat.is_alive),
        "gradient_steps": 0 if learner is None else learner.gradient_steps,
        "policy_version": None if learner is None else learner.policy_version,
        "replay_ratio": ratio,
        "processes": processes,
        "buffer": _buffer_facts(next((path for path in folders if path.is_dir()), run_dir / "buffer")),
        "checkpoint_epochs": CheckpointManager(run_dir, run_dir.name).complete_epochs(),
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """Format the result of `overview` for people, as a table and some lines."""
    processes = facts["processes"]
    rows = [_COLUMNS, *map(_row, processes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [f"run {facts['run_dir']}: {facts['alive']} of {len(processes)} processes running"]
    for row, note in zip(rows, [None, *(process["note"] for process in processes)], strict=True):
        left = [text.ljust(width) for text, width in zip(row[:_NUM_LEFT], widths, strict=False)]
        right = [text.rjust(w) for text, w in zip(row[_NUM_LEFT:], widths[_NUM_LEFT:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
        lines += [f"    {note}"] if note else []
    buffer, ratio, epochs = facts["buffer"], facts["replay_ratio"], facts["checkpoint_epochs"]
    newest = buffer["newest_age_s"]
    texts = {
        "env steps": f"{facts['env_steps']:,} ({facts['env_steps_per_s']:,.0f}/s)",
        "updates": f"{facts['gradient_steps']:,}"
        + ("" if ratio is None else f", {ratio:.4g} per env step since training began"),
        "buffer": f"{buffer['fifo_files']:,} + {buffer['protected_files']:,} protected files, "
        f"{filesize.decimal(buffer['bytes'])} in {buffer['folder']}"
        if Path(buffer["folder"]).is_dir()
        else "none in the run folder",
        "newest": "no trajectory"
        if newest is None
        else f"trajectory is {age_text(facts['time'] - newest)} old",
        "checkpoints": f"epochs {', '.join(map(str, epochs[-8:]))}" if epochs else "none",
    }
    lines += [f"{name:>11}  {text}" for name, text in texts.items()]
    return "\n".join(map(visible, lines))


def _buffer_facts(folder: Path) -> dict[str, Any]:
    """Facts about the trajectories on disk; newest_age_s is from the newest file's name, None if empty."""
    parts: dict[str, list[FoundFile]] = {"fifo": [], "protected": []}
    for part in parts:
        with contextlib.suppress(OSError):  # the folder may be missing or unreadable
            parts[part] = find_files(folder / part).files
    files = [file for some in parts.values() for file in some]
    return {
        "folder": str(folder),
        **{f"{part}_files": len(some) for part, some in parts.items()},
        "bytes": sum(file.size_bytes for file in files),
        "newest_age_s": time.time() - max(file.name.unix_time for file in files) if files else None,
    }


def _row(process: Mapping[str, Any]) -> tuple[str, ...]:
    learns, collects = process["role"] != "actor", process["role"] != "learner"
    is_alive, behind = process["life"] == "alive", process["versions_behind"]
    return (
        f"{process['role']} {process['rank']}" if process["rank"] else process["role"],
        process["host"],
        str(process["pid"]),
        "dead" if process["life"] == "dead" else process["state"],
        age_text(process["started"]) if is_alive else f"{age_text(process['modified'])} ago",
        str(process["epoch"]),
        f"{process['env_steps']:,}" if collects else "",
        f"{process['env_steps_per_s']:,.0f}" if collects and is_alive else "",
        f"{process['updates_per_s']:,.1f}" if learns and is_alive else "",
        str(process["policy_version"]),
        "" if behind is None else str(behind),
    )


if __name__ == "__main__":
    raise SystemExit(main())
