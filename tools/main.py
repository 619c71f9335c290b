"""The command `loxodon` with its subcommands. Modules are imported only when they are needed."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from ..gin_configs.presets import did_you_mean, preset_names
from .arguments import (
    USAGE_ERROR,
    parse_benchmark,
    parse_evaluate,
    parse_export,
    parse_report,
    parse_run,
    parse_status,
    parse_sweep,
)

INTERRUPTED = 130
COMMANDS = {
    "run": ("loxodon.tools.run:main", "train an agent: preset or .gin file, and settings on top"),
    "evaluate": (
        "loxodon.tools.evaluate:main",
        "evaluate a trained policy, with all or part of its memory",
    ),
    "report": ("loxodon.tools.report.main:main", "write an HTML page about one or more runs"),
    "status": ("loxodon.tools.status:main", "show the processes of a run, their speed, and its data"),
    "data": (
        "loxodon.tools.data.commands:main",
        "list, show, check, convert and exchange trajectory files",
    ),
    "presets": ("loxodon.tools.presets:main", "list the presets and their measured results"),
    "sweep": ("loxodon.tools.sweep:main", "search for good settings"),
    "benchmark": ("loxodon.tools.benchmark.main:main", "run a suite of tasks, and compare agents"),
    "export": ("loxodon.tools.export:main", "write a folder to share: policy, configuration, model card"),
}
"""Module, function and a one-line description of each command."""
_PARSERS: dict[str, Callable[[Sequence[str]], object]] = {
    "run": parse_run,
    "evaluate": parse_evaluate,
    "report": parse_report,
    "status": parse_status,
    "sweep": parse_sweep,
    "benchmark": parse_benchmark,
    "export": parse_export,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. If the words do not name a command, they belong to `run`."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    try:
        if name in ("-h", "--help", "--version"):
            sys.stdout.write(f"loxodon {version('loxodon')}\n" if name == "--version" else _help())
            return 0
        if name == "--completion":
            return _print_completion(words[1:])
        if name.startswith("-"):
            name, words = "run", ["run", *words]
        if name in COMMANDS:
            if name in _PARSERS:
                _PARSERS[name](words[1:])  # find mistakes before large imports
            return _function(name)(words[1:])
    except KeyboardInterrupt:  # the user may interrupt during imports, which take a second or two
        return INTERRUPTED
    meant = did_you_mean(name, COMMANDS)
    sys.stderr.write(f"error: unknown command {name!r}.{meant} Fix: see loxodon --help for all commands.\n")
    return USAGE_ERROR


def run() -> int:
    """Run `loxodon run` with this script's words. Processes of the same run are started in the same way."""
    try:
        parse_run(sys.argv[1:])
        return _function("run")(None)
    except KeyboardInterrupt:
        return INTERRUPTED


def _function(name: str) -> Callable[[Sequence[str] | None], int]:
    module, _, function = COMMANDS[name][0].partition(":")
    found: Callable[[Sequence[str] | None], int] = getattr(importlib.import_module(module), function)
    return found


def _help() -> str:
    lines = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: loxodon COMMAND ...",
            "",
            *lines,
            "",
            "loxodon COMMAND --help shows the options of a command. Without a COMMAND, options are those "
            "of run.",
            "loxodon --version prints the version.",
            "loxodon --completion bash|zsh prints a script for your shell.\n",
        ]
    )


# ---- completion ----

_BASH = """\
_loxodon() {{
  local words=""
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
    --config|presets) words="{presets}" ;;
    *) case "${{COMP_WORDS[1]}}" in
{options}
       esac ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _loxodon loxodon
"""


def _print_completion(words: Sequence[str]) -> int:
    shell = words[0] if words else ""
    if shell not in ("bash", "zsh"):
        sys.stderr.write(
            f"error: --completion got {shell!r}, but must be bash or zsh. Fix: write loxodon --completion "
            "bash, for example.\n"
        )
        return USAGE_ERROR
    cases = "\n".join(f'       {name}) words="{" ".join(_options(name))}" ;;' for name in COMMANDS)
    script = _BASH.format(presets=" ".join(preset_names()), options=cases, commands=" ".join(COMMANDS))
    sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh") + script)
    return 0


def _options(name: str) -> list[str]:
    """The options in the help of a command, which lists all of them."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        _function(name)(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue())))
