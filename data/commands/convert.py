"""`convert`: the same trajectories in another file format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..action_forms import action_indices
from ..errors import BrokenTrajectoryError
from ..files import FILE_FORMATS, format_name, load_trajectory, parse_name, save_trajectory
from ..trajectory import Trajectory
from .find import Found, FoundFile, require_files, size_text
from .terminal import make_console, progress, say

_SUFFIXES = (".npz", ".traj")


def add_parsers(commands: Any) -> None:
    """Describe this command to argparse."""
    parser = commands.add_parser("convert", help="write the same trajectories in another format")
    parser.add_argument("source", type=Path, metavar="SRC", help="a trajectory file, or a folder of them")
    parser.add_argument("target", type=Path, metavar="DST", help="a folder; made if it is missing")
    parser.add_argument("--to", choices=FILE_FORMATS, required=True, help="format to write")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> bool:
    """Convert, and read every new file back; True if a source was broken."""
    found = require_files(args.source)
    targets = _targets(found, args.target, args.to)
    _refuse_to_overwrite(found, targets, args.force)
    console = make_console()
    broken: dict[Path, str] = {}
    num_bytes = 0
    with progress("converting") as report:
        for number, (file, folder) in enumerate(targets):
            try:
                num_bytes += convert_file(file, folder, args.to).stat().st_size
            except BrokenTrajectoryError as error:
                broken[file.path] = str(error)
            report(number + 1, len(targets))
    for reason in broken.values():
        say(console, f"broken, left out: {reason}")
    before = sum(file.size_bytes for file in found.files if file.path not in broken)
    say(
        console,
        f"{len(targets) - len(broken):,} files written to {args.target} as {args.to} and read back: "
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


def convert_file(file: FoundFile, folder: Path, save_as: str) -> Path:
    """Write one trajectory in another format, under the same env name, id and time, and read it back.

    Raises:
        BrokenTrajectoryError: If the source is broken.
        OSError: If the new file cannot be written, or does not hold what was written.
    """
    traj = load_trajectory(file.path)
    folder.mkdir(parents=True, exist_ok=True)
    name = file.name
    path = save_trajectory(folder, traj, save_as=save_as, traj_id=name.traj_id, unix_time=name.unix_time)
    if difference := describe_difference(traj, load_trajectory(path)):
        path.unlink()
        raise OSError(
            f"{path}, written from {file.path}, came back with a different {difference}, and was deleted. "
            "Fix: check the disk; if it is sound, this is a bug."
        )
    for suffix in _SUFFIXES:  # with --force, the same trajectory may be there in another format
        if suffix != path.suffix:
            path.with_suffix(suffix).unlink(missing_ok=True)
    return path


def describe_difference(one: Trajectory, other: Trajectory) -> str | None:
    """The first array in which two trajectories differ, or None; forms of discrete actions count as equal."""
    for kind, keys, other_keys in (
        ("observations", one.obs.keys(), other.obs.keys()),
        ("extras", one.extras.keys(), other.extras.keys()),
    ):
        if keys != other_keys:
            return f"set of {kind}"
    pairs = {key: (one.obs[key], other.obs[key]) for key in one.obs}
    pairs |= {
        name: (getattr(one, name), getattr(other, name)) for name in ("rl2s", "time_idxs", "rews", "dones")
    }
    pairs |= {f"extra {name}": (one.extras[name], other.extras[name]) for name in one.extras}
    for name, (value, other_value) in pairs.items():
        if (value.dtype, value.shape) != (
            other_value.dtype,
            other_value.shape,
        ) or value.tobytes() != other_value.tobytes():
            return name
    if one.nvec != other.nvec:
        return "set of action factors"
    indices, other_indices = action_indices(one), action_indices(other)
    if indices is None or other_indices is None:
        indices, other_indices = one.actions, other.actions
    return None if np.array_equal(indices, other_indices, equal_nan=indices.dtype.kind == "f") else "actions"


def _targets(found: Found, target: Path, save_as: str) -> list[tuple[FoundFile, Path]]:
    """Each file and the folder it goes to, in the same subfolder as before."""
    if target.suffix in _SUFFIXES or target.is_file():
        raise ValueError(
            f"{target} looks like a file, but convert writes into a folder, where every file keeps its name. "
            f"Fix: give {target.parent / 'converted'}, for example."
        )
    root = found.root if found.root.is_dir() else found.root.parent
    if os.path.realpath(root) == os.path.realpath(target):
        raise ValueError(
            f"{target} is where the files are: it would hold every trajectory twice. Fix: give another "
            "folder, and delete or move the old one afterwards."
        )
    for file in found.files:
        if parse_name(file.path.name) is None:
            raise ValueError(
                f"{file.path} is not named <env>_<id>_<unix time>.npz or .traj, so it has no id and time to "
                "keep. Fix: rename it, for example to "
                f"{format_name('env', '00000001', file.name.unix_time, save_as)}."
            )
    return [(file, target / os.path.relpath(file.path.parent, root)) for file in found.files]


def _refuse_to_overwrite(found: Found, targets: Sequence[tuple[FoundFile, Path]], is_forced: bool) -> None:
    """Raise FileExistsError if a trajectory (whatever its format) is in its target folder already."""
    if is_forced:
        return
    present: dict[Path, set[str]] = {}
    for file, folder in targets:
        if folder not in present:
            names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 (only names are needed)
            present[folder] = {_identity(name) for name in names}
        if _identity(file.path.name) in present[folder]:
            raise FileExistsError(
                f"{folder} holds {file.path.stem} already. Fix: give an empty folder, or overwrite with "
                "--force."
            )


def _identity(name: str) -> str:
    """What two files of one trajectory have in common, whatever their format."""
    parsed = parse_name(name)
    return f"{parsed.traj_id} {parsed.unix_time:.6f}" if parsed else name
