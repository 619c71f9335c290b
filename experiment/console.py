"""What people see while a run goes: one progress line, and plain text where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_LINE_EVERY_S = 20.0


class ConsoleView:
    """Progress of `learn`; silent when `verbose` is False. `with view.progress(epoch):` shows a bar.

    Args:
        verbose: False prints nothing.
        epochs: last epoch of the run (exclusive), or None when the run has no end.
    """

    def __init__(self, verbose: bool, epochs: int | None) -> None:
        self.verbose, self.epochs = verbose, epochs
        self.console = Console(highlight=False, soft_wrap=True)
        self._figures: dict[str, str] = {}
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last_line_s = -float("inf")

    @contextlib.contextmanager
    def progress(self, first_epoch: int) -> Iterator[None]:
        """Show a progress bar, where there is a terminal, that begins at this epoch."""
        if self.verbose and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]epoch {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=4,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self.epochs, completed=first_epoch)

        try:
            yield
        finally:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def show(self, epoch: int, phase: str, figures: Mapping[str, float]) -> None:
        """Phase of the epoch and the newest figures; older figures of other names stay visible."""
        if not self.verbose:
            return
        self._figures |= {name: f"{value:.4g}" for name, value in figures.items()}
        text = "  ".join([phase, *(f"{name} {value}" for name, value in self._figures.items())])
        if self._progress is not None:
            self._progress.update(self._task, description=text, completed=epoch)
        elif phase == "done" and time.monotonic() - self._last_line_s >= _PLAIN_LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            total = "" if self.epochs is None else f"/{self.epochs}"
            self.console.print(f"epoch {epoch}{total}  {text.removeprefix('done').strip()}", markup=False)

    def say(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self.verbose:
            self.console.print(line, markup=False)
