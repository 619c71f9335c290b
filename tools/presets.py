"""`loxodon presets`: lists the presets, or prints one of them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from ..gin_configs.presets import (
    INCLUDE,
    Preset,
    about,
    did_you_mean,
    preset_names,
    preset_root,
    runnable_names,
    text_of,
)
from .arguments import Parser

_NARROWEST = 40  # minimum number of columns for wrapped text


def main(argv: Sequence[str] | None = None) -> int:
    """List the presets, or print one; returns the exit status, 2 for an unknown name."""
    parser = Parser(
        prog="loxodon presets", description="List the presets that can be run, with their measured results."
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="print this preset and the paths of its parts"
    )
    parser.add_argument("--json", action="store_true", help="print the presets as a JSON list")
    args = parser.parse_args(argv)
    if args.name is None:
        presets = [about(name) for name in runnable_names()]
        if args.json:
            sys.stdout.write(f"{json.dumps([asdict(one) for one in presets])}\n")
        else:
            with contextlib.suppress(BrokenPipeError):  # a reader such as `head` closed the pipe
                _print_wrapped(presets)
    elif args.name not in preset_names():
        meant = did_you_mean(args.name, preset_names())
        sys.stderr.write(
            f"error: there is no preset {args.name!r}.{meant} Fix: see loxodon presets for the list.\n"
        )
        return 2
    elif args.json:
        sys.stdout.write(f"{json.dumps(asdict(about(args.name)))}\n")
    else:
        sys.stdout.write(_details(args.name))
    return 0


def _details(name: str) -> str:
    """Format a preset as gin text: purpose, usage and results as comments, then its settings."""
    preset, root = about(name), preset_root()
    is_runnable = name in runnable_names()
    facts = {
        "run": f"loxodon run {name}"
        if is_runnable
        else f"loxodon run PRESET {name}   (a part, on top of a preset)",
        "encoder": preset.encoder,
        "measured": preset.measured,
        "file": f"{root / name}.gin",
    }
    lines = [preset.task, *(f"  {fact:<10}{text}" for fact, text in facts.items() if text)]
    indent, width = "# " + " " * 12, max(shutil.get_terminal_size().columns, _NARROWEST)
    wrapped = [
        textwrap.fill(
            f"# {line}", width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    ]
    body = re.sub(r"\A(#.*\n)*", "", text_of(name))
    settings = INCLUDE.sub(lambda found: f"{found[0]}  # {root / found[1]}", body)
    return "\n".join(wrapped) + f"\n\n{settings}"


def _print_wrapped(presets: Sequence[Preset]) -> None:
    """Print one entry per preset, wrapped to the terminal's width."""
    indent = max(len(one.name) for one in presets) + 2
    width = max(shutil.get_terminal_size().columns, _NARROWEST) - indent
    for one in presets:
        about_it = (one.task, f"{one.encoder}; {one.measured or 'not measured yet'}")
        lines = [line for text in about_it for line in textwrap.wrap(text, width, break_on_hyphens=False)]
        for start, line in zip([one.name, *[""] * len(lines)], lines, strict=False):
            sys.stdout.write(f"{start:<{indent}}{line}\n")
    sys.stdout.write("\nloxodon presets NAME shows one preset; loxodon run NAME trains it.\n")
