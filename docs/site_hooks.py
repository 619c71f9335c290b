"""For mkdocs: pages of the repository's root are part of the site, and links between the two lead there."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")},
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them; what they call docs/x.md is x.md in the site."""
    for name, target in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to the root lead to its pages in the site; to other files of the repository there is none."""
    for name, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{name}\b", f"]({target}", markdown)
    return re.sub(r"\[([^]]+)\]\((?:\.\./)?(?:LICENSE|examples/[\w.]+)\)", r"\1", markdown)
