"""Code in the pages: `python docs/embed.py` copies each script of examples/ to where a page shows it.

A page names the file in a comment right above the block, `<!-- examples/act.py -->`. So the code can be read
wherever the page is shown, and a test compares it with the file.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- (\S+\.py) -->\n\n```python\n(.*?)```\n", flags=re.DOTALL)


def embedded(page: str) -> str:
    """The text of a page with the blocks as the files are."""

    def block(found: re.Match[str]) -> str:
        code = (ROOT / found[1]).read_text(encoding="utf-8")
        return f"<!-- {found[1]} -->\n\n```python\n{code}```\n"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := embedded(text)) != text:
            path.write_text(new, encoding="utf-8")
