"""The command line of `python -m loxodon.data`: words in, exit status out."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import visible
from ..files import FILE_FORMATS
from . import check, convert, exchange, listing, show

OK, FOUND_PROBLEMS, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
_COMMANDS = ("ls", "show", "check", "convert", "export-minari", "import-minari")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error says how to mend it."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("invalid choice: '")[2].partition("'")[0]
        near = difflib.get_close_matches(unknown, [*_COMMANDS, *FILE_FORMATS], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"error: {message}.{hint} Fix: {self.prog} --help lists what is allowed.\n")
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns: 0 if all is well, 1 if broken files were found, 2 if the command could not do its work.
    """
    args = _parser().parse_args(argv)
    try:
        has_problems = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, TypeError, OSError, ImportError) as error:
        hint = "" if "Fix:" in str(error) else " Fix: check the path, its permissions and the free space."
        sys.stderr.write(f"error: {visible(str(error))}{hint}\n")
        return USAGE_ERROR
    return FOUND_PROBLEMS if has_problems else OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m loxodon.data",
        description="Look at trajectory files, check, convert and exchange them.",
        epilog="Exit status: 0 all is well, 1 broken files were found, 2 the command could not do its work.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for module in (listing, show, check, convert, exchange):
        module.add_parsers(commands)
    return parser
