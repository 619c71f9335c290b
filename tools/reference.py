"""The reference of all gin settings, made from signatures and docstrings.

`python -m loxodon.tools.reference` prints the page docs/reference.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import gin

from ..experiment.config.registry import MISSING, Configurable, all_known

_FOLDERS = {
    "experiment": "The run: `Experiment` and its parts",
    "agents": "Agents, losses and schedules",
    "nets": "Encoders, heads and normalisation",
    "envs": "Environments and exploration",
    "data": "Datasets and relabelling",
}
_OF_CODE = ("Attributes:", "Raises:", "Returns:", "Source:", "Shapes:")  # sections that describe no settings


def documented() -> dict[str, list[Configurable]]:
    """The library's configurables by folder, sorted by name; users' own are not included."""
    known = [one for one in all_known() if one.wrapped.__module__.startswith("loxodon.")]
    known.sort(key=lambda one: str(one.entry.name).lower())
    return {top: [one for one in known if one.wrapped.__module__.split(".")[1] == top] for top in _FOLDERS}


def settings(one: Configurable) -> dict[str, tuple[str, str]]:
    """Default and meaning of each parameter that gin may set, as Markdown."""
    found = {name: p for name, p in one.params.items() if one.can_set(name)}
    sources: list[Any] = [one.wrapped]
    if one.mixer_settings:
        found |= {p.name: p for p in one.mixer_settings}
        sources.append(one.wrapped.mixer_type)  # type: ignore[attr-defined]
    bases = _with_bases(sources)
    meanings = [_meanings(inspect.getdoc(kind) or "", frozenset(found)) for kind in bases]
    meanings += [_documented_fields(kind) for kind in bases if dataclasses.is_dataclass(kind)]
    return {name: (_default(p), _first(meanings, name)) for name, p in found.items()}


def summary(one: Configurable) -> str:
    """The first paragraph of the docstring; empty if it has none."""
    return _line((inspect.getdoc(one.wrapped) or "").split("\n\n")[0])


def entry(one: Configurable) -> str:
    """Format one configurable as Markdown."""
    lines = [f"### {one.entry.name}", "", summary(one)]
    if rows := settings(one):
        lines += ["", "| setting | default | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {default} | {meaning} |" for name, (default, meaning) in rows.items()]
    return "\n".join(lines)


def page() -> str:
    """Format all configurables as Markdown."""
    parts = [
        "# Reference of all settings",
        "What a gin file or the command line can set: `Agent.gamma = 0.99`; in Python it is the keyword\n"
        "`gamma` of `Agent`. A type is named with `@`: `Experiment.agent_type = @PPOAgent`. This page is\n"
        "the output of `python -m loxodon.tools.reference`; `--print-config` shows the values of one run\n"
        "and where each comes from.",
    ]
    for top, known in documented().items():
        parts += [f"## {_FOLDERS[top]}", *(entry(one) for one in known)]
    return "\n\n".join(parts) + "\n"


def _with_bases(kinds: list[Any]) -> list[Any]:
    return [base for kind in kinds for base in (kind.__mro__ if isinstance(kind, type) else [kind])]


@cache
def _meanings(doc: str, names: frozenset[str]) -> Mapping[str, str]:
    """The descriptions of these parameters in the sections of a docstring."""
    found: dict[str, str] = {}
    sections = re.findall(r"^(\w[^\n]*:)\n((?:    .*\n?|\n(?=    ))+)", doc, flags=re.MULTILINE)
    for text in [
        one for head, body in sections if head not in _OF_CODE for one in re.split(r"\n {4}(?! )", body)
    ]:
        # A line may describe several: "grad_clip: largest norm. l2_coeff: weight decay."
        parts = re.split(rf"(?:^|(?<=\s))((?:{_either(names)})(?:, \w+)*): ", _line(text))
        for owners, meaning in zip(parts[1::2], parts[2::2], strict=True):
            found |= dict.fromkeys(owners.split(", "), meaning.strip().removesuffix("."))
    return found


def _documented_fields(kind: Any) -> Mapping[str, str]:
    """The descriptions of a dataclass's fields, with the allowed strings."""
    found = {}
    for one in dataclasses.fields(kind):
        doc = one.metadata.get("doc", "")
        if one.type == "str" and (choices := one.metadata.get("choices")):
            doc += f" ({', '.join(choices)})"
        found[one.name] = _line(doc)
    return found


def _either(names: frozenset[str]) -> str:
    return "|".join(sorted(names)) or "(?!)"


def _first(meanings: list[Mapping[str, str]], name: str) -> str:
    """The first text that is more than a reference to another class."""
    texts = [found[name] for found in meanings if found.get(name)]
    return next(
        (text for text in texts if not re.fullmatch(r"(?:[Ss]ee|as) `?\w+`?", text)), "".join(texts[:1])
    )


def _default(p: inspect.Parameter) -> str:
    if p.default is MISSING or p.default is gin.REQUIRED:
        return "required"
    value = p.default
    if isinstance(value, type) or inspect.isroutine(value):
        return f"`@{value.__name__}`"
    if type(value).__module__.startswith("loxodon."):  # a part with its own defaults, or few changes to them
        return f"`@{value!r}`"
    return "computed" if "factory" in repr(value) else f"`{value!r}`"


def _line(text: str) -> str:
    """Put a text on one line of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
