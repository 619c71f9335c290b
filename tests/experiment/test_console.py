"""The output of a running experiment."""

from __future__ import annotations

import io
import re

from rich.console import Console

from loxodon.experiment.output.console import ConsoleView


def view_of(is_terminal: bool) -> tuple[ConsoleView, io.StringIO]:
    file = io.StringIO()
    return ConsoleView(True, 5, Console(file=file, force_terminal=is_terminal, width=100)), file


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_one_bar_for_the_run_and_one_for_the_current_phase() -> None:
    view, file = view_of(is_terminal=True)
    done = [0.0]
    with view.progress(2):
        view.show(2, "learning", {"env steps": 12_240, "val return": 0.51853})
        view.measure(lambda: done[0])
        frames = []
        for done[0] in (0.1, 0.9):
            console = Console(file=io.StringIO(), force_terminal=True, width=100)
            console.print(view._view())
            frames.append(plain(console.file.getvalue()))  # type: ignore[attr-defined]
        view.say("a line above")
        view.show(2, "evaluating", {})  # a phase of unknown duration
    first, second = (frame.splitlines() for frame in frames)
    assert first[0].startswith("epoch 2/5")
    assert first[1].startswith("learning")
    assert first[2].split("  ")[:2] == ["env steps 12,240", "val return 0.5185"]
    assert first[1] != second[1]  # the bar advanced
    assert "a line above" in plain(file.getvalue())


def test_without_a_terminal_there_are_plain_lines() -> None:
    view, file = view_of(is_terminal=False)
    with view.progress(0):
        view.show(1, "learning", {"loss": 0.25})
        view.measure(lambda: 0.5)
        view.show(1, "done", {"updates": 1500})
        view.show(2, "done", {"updates": 3000})  # too soon after the last line
    assert file.getvalue() == "epoch 1/5  loss 0.25  updates 1,500\n"
