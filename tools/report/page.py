"""Parts of the page: HTML that does not need other files or the network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...data.errors import visible
from ...experiment.output.plots import Panel, draw, line_style
from ...experiment.process.files import short_name

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 80rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; } h2 { border-bottom: 1px solid #bbb; margin-top: 2.5rem; }
nav a { margin-right: 1rem; } a { color: #005a9c; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0; } img { width: 100%; height: auto; } figcaption { font-size: .875rem; color: #333; }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top;
  overflow-wrap: normal; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { background: #f3f3f3; } th:first-child, td:first-child { text-align: left; }
code { font-size: .875em; }
.note { background: #fff6e0; padding: .5rem 1rem; border-left: 4px solid #e69f00; }
"""


@dataclass(frozen=True)
class Html:
    """Text that is already HTML."""

    text: str


def text(value: object) -> str:
    """HTML of a cell or a sentence; special characters are escaped."""
    return value.text if isinstance(value, Html) else escape(visible(str(value)))


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and its contents; empty without parts."""
    kept = "\n".join(part for part in parts if part)
    return f'<h{level} id="{_slug(title)}">{text(title)}</h{level}>\n{kept}' if kept else ""


def table(caption: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls sideways if the screen is too narrow; empty without rows."""
    lines = ["".join(f"<td>{text(cell)}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    whole = f'<div class="scroll" tabindex="0"><table>\n<tr>{head}</tr>\n{body}</table></div>'
    return f"<p>{text(caption)}</p>\n{whole}" if lines else ""


def listing(title: str, lines: Sequence[object]) -> str:
    """A highlighted list; empty without lines."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<div class="note"><b>{text(title)}</b><ul>{items}</ul></div>' if lines else ""


def key(style: int) -> Html:
    """The line style that identifies a group in the figures."""
    color, dashes = line_style(style)
    dash = " ".join(f"{2 * length:g}" for length in dashes)
    path = f'<path d="M0 5H34" stroke="{color}" stroke-width="3" stroke-dasharray="{dash}"></path>'
    return Html(f'<svg width="34" height="10" role="presentation">{path}</svg>')


@dataclass(frozen=True)
class Gallery:
    """Draws figures into a folder and embeds them."""

    folder: Path

    def figure(self, panel: Panel, name: str, caption: str) -> str:
        """Draw the panel as `name`.png, and return its HTML; empty for a panel without lines."""
        if not panel.lines:
            return ""
        path = self.folder / f"{_slug(name)}.png"
        draw([panel], path, dpi=160)
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        image = f'<img alt="{text(panel.title)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{text(caption)}</figcaption></figure>"


def figures(*found: str) -> str:
    """Figures side by side if they fit."""
    kept = "\n".join(one for one in found if one)
    return f'<div class="figures">{kept}</div>' if kept else ""


def page(title: str, intro: str, sections: dict[str, str]) -> str:
    """The whole document; sections: HTML by title, of which empty ones are omitted."""
    kept = {name: body for name, body in sections.items() if body}
    links = " ".join(f'<a href="#{_slug(name)}">{text(name)}</a>' for name in kept)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{text(title)}</h1>\n{intro}\n<nav>{links}</nav>\n"
        + "\n".join(section(name, body) for name, body in kept.items())
        + "\n</body></html>\n"
    )


def _slug(name: str) -> str:
    """Reduce a name to letters, digits and underscores, short enough for a file name."""
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return short_name(plain, name)
