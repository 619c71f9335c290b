"""Console output of a run: two bars and metrics, or plain lines without a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN_LINE_EVERY_S = 20.0


class ConsoleView:
    """Progress of `learn`; silent when `verbose` is False. `with view.progress(epoch):` shows bars.

    Args:
        verbose: False prints nothing.
        epochs: last epoch of the run (exclusive), or None when the run has no end.
        console: console to print on; None for standard output.
    """

    def __init__(self, verbose: bool, epochs: int | None, console: Console | None = None) -> None:
        self.verbose, self.epochs = verbose, epochs
        self.console = Console(highlight=False, soft_wrap=True) if console is None else console
        self._metrics: dict[str, str] = {}
        self._bars: tuple[Progress, TaskID, TaskID] | None = None
        self._share_done: Callable[[], float] | None = None
        self._last_line_s = -float("inf")

    @contextlib.contextmanager
    def progress(self, first_epoch: int) -> Iterator[None]:
        """Show bars on a terminal: one for the run from this epoch on, and one for its current phase."""
        if not (self.verbose and self.console.is_terminal):
            yield
            return
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        of_run = bars.add_task("", total=self.epochs, completed=first_epoch)
        self._bars = bars, of_run, bars.add_task("", total=1.0)
        try:
            with Live(get_renderable=self._view, console=self.console, refresh_per_second=4):
                yield
        finally:
            self._bars = self._share_done = None

    def show(self, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Show the phase of the epoch and the newest metrics; older metrics of other names stay visible."""
        if not self.verbose:
            return
        self._metrics |= {name: _short(value) for name, value in metrics.items()}
        total = "" if self.epochs is None else f"/{self.epochs}"
        if self._bars is not None:
            bars, of_run, of_phase = self._bars
            bars.update(of_run, description=f"[bold]epoch {epoch}{total}", completed=epoch)
            if bars.tasks[1].description != phase:
                self._share_done = None
                bars.reset(of_phase, description=phase, total=None)
        elif phase == "done" and time.monotonic() - self._last_line_s >= _PLAIN_LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.console.print(f"epoch {epoch}{total}  {self._text()}", markup=False)

    def measure(self, share_done: Callable[[], float]) -> None:
        """Give the current phase a bar; share_done: returns a number between 0 and 1, called now and then."""
        self._share_done = share_done

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        if self.verbose:
            self.console.print(line, markup=False)

    def _text(self) -> str:
        return "  ".join(f"{name} {value}" for name, value in self._metrics.items())

    def _view(self) -> Group:
        """The display below the lines; called four times a second, in a separate thread."""
        if self._bars is None:
            return Group()
        bars, _, of_phase = self._bars
        if (share_done := self._share_done) is not None:
            bars.update(of_phase, total=1.0, completed=share_done())
        return Group(bars, Text(self._text(), no_wrap=False, overflow="fold"))


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 and not isinstance(value, int) else f"{value:,.0f}"  # noqa: PLR2004
