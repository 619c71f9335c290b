"""The presets: where they are, what each of them is, and `loxodon presets`, which lists them.

A preset begins with comments of this form; what it includes from `encoders/` is its encoder:

    # What the task is, in a sentence.
    #   python examples/run.py --config <its name>
    # Measured: what it reached and how long that took, in a sentence. More about it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RECOMMENDED = ("base_offpolicy", "ppo/ppo", "amago")
"""Presets whose settings of the algorithm are complete; a run of any other settings says so."""
_NARROWEST = 40  # columns that texts are wrapped to
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


def find_preset(name: str) -> Path | None:
    """The file that `--config name` means: an existing path first, then a preset; None without either."""
    bare = name.removeprefix("./").removeprefix("gin_configs/").removesuffix(".gin")
    places = (Path(name), Path(f"{name}.gin"), preset_root() / f"{bare}.gin")
    return next((path for path in places if path.is_file()), None)


def no_such_config(name: str) -> str:
    """A sentence for what is neither a file nor a preset, with near names or all of them."""
    bare = name.removeprefix("./").removeprefix("gin_configs/").removesuffix(".gin")
    hint = did_you_mean(bare, preset_names()) or f" Presets: {', '.join(preset_names())}."
    return f"there is no such file or preset.{hint}"


def about(name: str) -> Preset:
    """What the header of a preset says; a part that is missing is empty."""
    text = _text_of(name)
    header = re.match(r"(#.*\n)*", text)
    words = " ".join(line.strip("# ") for line in header[0].splitlines()) if header else ""
    measured = re.search(r"Measured: (.+?)\.(?: |$)", words)
    task = text.partition("\n")[0].strip("# .")
    return Preset(name, task, _encoder_in(text), measured[1] if measured else "")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A sentence ` Did you mean 'a' or 'b'?` with a leading space, or nothing when no name is near.

    Capitals count as little as possible: names that differ in nothing else come first.
    """
    known = sorted(candidates)
    near = [one for one in known if one.lower() == name.lower()] or difflib.get_close_matches(name, known)
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
            with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
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
        sys.stdout.write(_details(args.name))
    return 0


def _details(name: str) -> str:
    """A gin text: what a preset is, how to run it and what it reached as comments, then its settings."""
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
    body = re.sub(r"\A(#.*\n)*", "", _text_of(name))
    settings = _INCLUDE.sub(lambda found: f"{found[0]}  # {root / found[1]}", body)
    return "\n".join(wrapped) + f"\n\n{settings}"


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
    """One line per preset if the output goes to a program, or lines that fit the terminal."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        _print_wrapped(presets, max(shutil.get_terminal_size().columns, _NARROWEST))
        return
    rows = [("preset", "task", "encoder", "measured")]
    rows += [(one.name, one.task, one.encoder, one.measured or "not yet") for one in presets]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _print_wrapped(presets: Sequence[Preset], width: int) -> None:
    indent = max(len(one.name) for one in presets) + 2
    for one in presets:
        for start, text in (
            (one.name, one.task),
            ("", f"{one.encoder}; {one.measured or 'not measured yet'}"),
        ):
            lines = textwrap.wrap(text, width - indent, break_on_hyphens=False)
            sys.stdout.write(
                "".join(f"{'' if i else start:<{indent}}{line}\n" for i, line in enumerate(lines))
            )
    sys.stdout.write("\nloxodon presets NAME shows one of them, loxodon run NAME trains it.\n")
