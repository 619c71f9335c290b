"""The resolved config as a gin text: every value of everything the experiment uses, and where it was set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import registry
from .graph import Node, Reach, Table
from .registry import MACRO, MISSING, Param
from .source import Binding

_COMMENT_COLUMN = 60


def render(bindings: Sequence[Binding], found: Reach, imports: Sequence[str]) -> str:
    """A gin text that sets the same values; each line says where its value comes from."""
    table = Table(bindings)
    blocks = ["\n".join(dict.fromkeys(imports))] if imports else []
    macros = [b for b in table.remaining() if b.selector == MACRO and found.uses(b)]
    if macros:
        blocks.append("\n".join(_line(b.scope, b.value, str(b.origin)) for b in macros))
    for node in found.nodes.values():
        if block := _block(node, table):
            blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _block(node: Node, table: Table) -> str:
    """All parameters of one configurable; if it is only possibly used, those that are bound."""
    scoped = "/".join([*node.scope, node.configurable.name])
    bound = table.effective(node.scope, node.configurable.selector)
    lines = []
    for name, param in node.configurable.params.items():
        if name in bound:
            lines.append(_line(f"{scoped}.{name}", bound[name].value, str(bound[name].origin)))
        elif param.is_settable and node.is_certain and param.default is not MISSING:
            lines.append(_default_line(f"{scoped}.{name}", param))
    lines += [
        _line(f"{scoped}.{n}", b.value, str(b.origin))
        for n, b in bound.items()
        if n not in node.configurable.params
    ]
    return "\n".join(lines)


def _line(key: str, value: Any, comment: str) -> str:
    return f"{f'{key} = {value!r}':<{_COMMENT_COLUMN}}  # {comment}"


def _default_line(key: str, param: Param) -> str:
    """A default: as gin would write it, or as a comment where gin has no way to write it."""
    configurable = registry.find_object(param.default)
    if configurable is not None:
        return _line(key, _Bare(f"@{configurable.name}"), "default")
    if _is_literal(param.default):
        return _line(key, param.default, "default")
    shown = getattr(param.default, "__name__", type(param.default).__name__)
    return f"# {key}: the code's own choice ({shown.strip('<>')})"


class _Bare(str):
    """A text that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_literal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(_is_literal(k) and _is_literal(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
