"""Texts are plain English: no fragments, no words that readers stumble over, no overlong lines in pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# folders whose texts must follow the rules
HELD = (
    "agents",
    "benchmarks",
    "data",
    "envs",
    "examples",
    "experiment",
    "gin_configs",
    "nets",
    "tests",
    "tools",
)
FRAGMENT = r"(?:of|whose|likewise|else|what|whatever|which|in which|for which)\b"
AVOIDED = r"\b(?:likewise|mend(?:s|ed|ing)?|by heart|whatever|beside|in place of|goes on)\b"
BEGIN = re.compile(FRAGMENT, re.IGNORECASE)
WORD = re.compile(AVOIDED, re.IGNORECASE)
VARIABLE = re.compile(r"[A-Z] [(@]")
LONGEST_LINE = 120
NOT_WRAPPED = {"CHANGELOG.md", "docs/results.md"}
SUSPECT = re.compile(rf'(?:#|""")\s*(?:{FRAGMENT}|[A-Z] [(@])|{AVOIDED}', re.IGNORECASE)


def faults(source: str, is_python: bool = True) -> list[int]:
    """Lines of the comments and docstrings of `source` that break a rule."""
    found: set[int] = set()
    if not SUSPECT.search(source):  # a quick look spares most files the slow one
        return []
    for node in ast.walk(ast.parse(source)) if is_python else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if BEGIN.match(text) or VARIABLE.match(text) or WORD.search(text):
                found.add(node.body[0].lineno)
    block = 0  # the row of the last comment without code; a comment in the next row continues it
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, is_alone = token.start[0], token.line.lstrip().startswith("#")
            begins = not (is_alone and block == row - 1)
            if WORD.search(token.string) or (begins and any(map(BEGIN.match, token.string.split("# ")))):
                found.add(row)
            block = row if is_alone else 0
    return sorted(found)


def test_the_check_sees_comments_and_docstrings() -> None:
    source = (
        '"""Of two."""\nx = 1  # which is 1\n# A value,\n# of course.\ny = "# mend"  # noqa: E1  # else\n'
    )
    assert faults(source) == [1, 2, 5]
    assert faults("# A room beside it.\nA.b = 'of'  # the width\n", is_python=False) == [1]
    assert faults('def f():\n    """X (n,) -> (n,)"""\n\n\ndef g():\n    """A sum (n,)."""\n') == [2]


@pytest.mark.parametrize("folder", HELD)
def test_comments_and_docstrings_are_plain_english(folder: str) -> None:
    paths = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".gin"))
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    found = [f"{path}:{row}" for path, text in texts.items() for row in faults(text, path.suffix == ".py")]
    assert found == [], "Fix: write a sentence, or a noun phrase that begins with its noun, in plain words"


def overlong(page: str) -> list[int]:
    """Rows of prose in a Markdown page that should have been wrapped.

    Code blocks, tables, headings, comments, and lines of a single word, inline code or link may be long.
    """
    found, is_code = [], False
    for row, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif len(line) > LONGEST_LINE and not is_code and not line.lstrip().startswith(("|", "#", "<!--")):
            words = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "x", line)
            if " " in re.sub(r"^\s*([-*>] |\d+\. )?", "", words):
                found.append(row)
    return found


def test_the_check_of_pages_sees_prose_that_can_be_wrapped() -> None:
    long = "word " * 30
    page = f"# {long}\n{long}\n- `{long}`\n- `{long}` and\n```\n{long}\n```\n| {long} |\n[{long}](x)\n{long}"
    assert overlong(page) == [2, 4, 10]


def test_lines_of_pages_are_wrapped() -> None:
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}
    assert texts.keys() > NOT_WRAPPED
    found = [f"{name}:{row}" for name in texts.keys() - NOT_WRAPPED for row in overlong(texts[name])]
    assert sorted(found) == [], f"Fix: break lines of prose after at most {LONGEST_LINE} characters"
