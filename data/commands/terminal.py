"""How the commands talk: one console, tables, and a progress bar where there is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..errors import visible

_MIN_PLAIN_WIDTH = 160


class _Console(Console):
    """A console that leaves it to the command line what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, to_stderr: bool = False) -> Console:
    """A console that does not cut what goes into a file or a pipe."""
    console = _Console(highlight=False, stderr=to_stderr)
    if not console.is_terminal:
        console = _Console(highlight=False, stderr=to_stderr, width=max(_MIN_PLAIN_WIDTH, console.width))
    return console


def say(console: Console, line: str) -> None:
    """Print one line as it is, without markup."""
    console.print(visible(line), markup=False, soft_wrap=True)


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1
) -> None:
    """Print aligned columns.

    Args:
        console: where to.
        columns: headings.
        rows: cells, shown as they are, without markup.
        num_left: so many first columns are aligned to the left, the others to the right.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            Text(visible(column)), justify="left" if index < num_left else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal; yields a function of finished and total number."""
    console = make_console(to_stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
