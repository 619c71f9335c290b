"""The reference of all settings matches the code and explains everything."""

from __future__ import annotations

from pathlib import Path

from loxodon.tools.reference import documented, page, settings, summary


def test_the_page_matches_the_code() -> None:
    path = Path(__file__).parents[2] / "docs" / "reference.md"
    fix = "Fix: python -m loxodon.tools.reference > docs/reference.md"
    assert path.read_text(encoding="utf-8") == page(), fix


def test_every_configurable_and_every_setting_is_explained() -> None:
    known = [one for group in documented().values() for one in group]
    assert len(known) > 90
    assert [one.name for one in known if not summary(one)] == []
    silent = {
        f"{one.name}.{name}" for one in known for name, (_, meaning) in settings(one).items() if not meaning
    }
    assert silent == set()
