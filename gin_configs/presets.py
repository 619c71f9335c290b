"""The presets: where they are, what each of them is, and `loxodon presets`, which lists them.

A preset begins with comments of this form; what it includes from `encoders/` is its encoder:

    # What the task is, in a sentence.
    #   python examples/run.py --config <its name>
    # Measured: what it reached and how long that took, in a sentence. More about it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_PLAIN_WIDTH = 300  # of the table where it goes to no terminal: one line each
_INCLUDE = re.compile(r"^include '(.+)'", re.MULTILINE)


@dataclass(frozen=True)
class Preset:
    """What the file of a preset says about it. encoder: the file in `encoders/` that counts; "" for none."""

    name: str
    task: str
    encoder: str
    measured: str


def preset_root() -> Path:
    """The folder of the installed presets."""
    return Path(__file__).parent


def preset_names() -> list[str]:
    """Names of all presets without their suffix, such as `tmaze` or `ppo/cartpole`, sorted."""
    root = preset_root()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.gin"))


def runnable_names() -> list[str]:
    """Those of `preset_names` that name a run; the others are parts, to be included or put on top of one."""
    return [name for name in preset_names() if "\nExperiment.run_name" in _text_of(name)]


def about(name: str) -> Preset:
    """What the header of a preset says; a part that is missing is empty."""
    text = _text_of(name)
    header = re.match(r"(#.*\n)*", text)
    words = " ".join(line.strip("# ") for line in header[0].splitlines()) if header else ""
    measured = re.search(r"Measured: (.+?)\.(?: |$)", words)
    task = text.partition("\n")[0].strip("# .")
    return Preset(name, task, _encoder_in(text), measured[1] if measured else "")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A sentence ` Did you mean 'a' or 'b'?` with a leading space, or nothing when no name is near."""
    near = difflib.get_close_matches(name, sorted(candidates))
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """List the presets, or print one; returns the exit status, 2 for a name that is none."""
    parser = argparse.ArgumentParser(
        prog="loxodon presets", description="What can be run as it is, and what that reached."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this preset, and where its parts are")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)
    if args.name is None:
        presets = [about(name) for name in runnable_names()]
        if args.json:
            sys.stdout.write(f"{json.dumps([asdict(one) for one in presets])}\n")
        else:
            _print_table(presets)
    elif args.name not in preset_names():
        meant = did_you_mean(args.name, preset_names())
        sys.stderr.write(
            f"error: there is no preset {args.name!r}.{meant} Fix: loxodon presets lists them.\n"
        )
        return 2
    elif args.json:
        sys.stdout.write(f"{json.dumps(asdict(about(args.name)))}\n")
    else:
        root = preset_root()
        text = _INCLUDE.sub(lambda found: f"{found[0]}  # {root / found[1]}", _text_of(args.name))
        sys.stdout.write(f"# {root / args.name}.gin\n{text}")
    return 0


def _text_of(name: str) -> str:
    return (preset_root() / f"{name}.gin").read_text(encoding="utf-8")


def _encoder_in(text: str) -> str:
    """The last encoder that a file includes, be it through another file."""
    for part in reversed(_INCLUDE.findall(text)):
        folder, _, name = part.removesuffix(".gin").rpartition("/")
        if found := name if folder == "encoders" else _encoder_in(_text_of(part.removesuffix(".gin"))):
            return found
    return ""


def _print_table(presets: Sequence[Preset]) -> None:
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    table = Table("preset", "task", "encoder", "measured", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for one in presets:
        table.add_row(one.name, one.task, one.encoder, one.measured or "not yet")
    Console(width=width, highlight=False, markup=False).print(table)
