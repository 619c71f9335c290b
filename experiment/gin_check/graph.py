"""What a configuration uses: a walk from the root along references, macros, defaults and annotations."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import registry
from .registry import MACRO, Configurable
from .source import Binding, Macro, Reference

Scope = tuple[str, ...]


class Table:
    """Bindings by scope, configurable and parameter; of equal keys the later one counts, as in gin.

    The bindings must be resolved: `selector` is a full one. A macro's selector is `gin.macro`,
    its scope the macro's name.
    """

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._rows: dict[tuple[str, str], dict[str, Binding]] = {}
        for binding in bindings:
            self._rows.setdefault((binding.scope, binding.selector), {})[binding.param] = binding

    def all_for(self, scope: Scope, selector: str) -> list[Binding]:
        """Bindings that a call in `scope` reads, outermost scope first."""
        scopes = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        return [b for s in scopes for b in self._rows.get((s, selector), {}).values()]

    def effective(self, scope: Scope, selector: str) -> dict[str, Binding]:
        """The binding that counts for each parameter in a call in `scope`."""
        return {b.param: b for b in self.all_for(scope, selector)}

    def macro(self, name: str) -> Binding | None:
        """The binding of a macro."""
        return self._rows.get((name, MACRO), {}).get("value")

    def remaining(self) -> list[Binding]:
        """The bindings that were not replaced by a later one of the same key."""
        return [b for row in self._rows.values() for b in row.values()]


@dataclass
class Node:
    """A configurable in a scope. `via` is the binding that leads here; None at the root and its defaults."""

    configurable: Configurable
    scope: Scope
    via: Binding | None
    is_certain: bool
    """True if a reference or a default leads here; False if only an annotation or a mention in code does."""
    is_called: bool = False
    """True if it is called with nothing but what gin supplies: `@Name()`, the root, an environment."""


@dataclass
class Reach:
    """What the walk found. Bindings are kept by identity."""

    nodes: dict[tuple[Scope, str], Node] = field(default_factory=dict)
    certain: set[int] = field(default_factory=set)
    possible: set[int] = field(default_factory=set)

    def certain_parts(self) -> set[tuple[Scope, str]]:
        """Keys of the nodes that references and defaults lead to."""
        return {key for key, node in self.nodes.items() if node.is_certain}

    def uses(self, binding: Binding) -> bool:
        """Whether something reads the binding, certainly or possibly."""
        return id(binding) in self.certain or id(binding) in self.possible


def references_in(value: Any) -> Iterator[Reference | Macro]:
    """References and macros anywhere inside a bound value."""
    if isinstance(value, (Reference, Macro)):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from references_in(key)
            yield from references_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references_in(item)


def reach(bindings: Sequence[Binding], root: Configurable) -> Reach:
    """Everything that constructing `root` reads: certain ways first, then what annotations and code say."""
    found, table = Reach(), Table(bindings)
    queue = [Node(root, (), None, is_certain=True, is_called=True)]
    later: list[Node] = []
    while queue or later:
        node = queue.pop() if queue else later.pop()
        key = (node.scope, node.configurable.selector)
        known = found.nodes.get(key)
        if known is not None and known.is_certain >= node.is_certain and known.is_called >= node.is_called:
            continue
        if known is not None:
            node.is_called |= known.is_called
            node.is_certain |= known.is_certain
        found.nodes[key] = node
        queue += _certain_children(node, table, found)
        later += _possible_children(node)
    return found


def _mark(binding: Binding, node: Node, found: Reach) -> None:
    (found.certain if node.is_certain else found.possible).add(id(binding))


def _certain_children(node: Node, table: Table, found: Reach) -> Iterator[Node]:
    selector = node.configurable.selector
    for binding in table.all_for(node.scope, selector):
        _mark(binding, node, found)
    bound = table.effective(node.scope, selector)
    for binding in bound.values():
        yield from _children_of_value(binding.value, binding, node, table, found, ())
    for param in node.configurable.params.values():
        child = registry.find_object(param.default) if param.name not in bound else None
        if child is not None:
            yield Node(child, node.scope, node.via, node.is_certain)


def _children_of_value(
    value: Any, binding: Binding, node: Node, table: Table, found: Reach, macros: tuple[str, ...]
) -> Iterator[Node]:
    """Nodes that a bound value leads to; a macro's value is evaluated in a scope of the macro's name."""
    for ref in references_in(value):
        if isinstance(ref, Macro):
            target = table.macro(ref.name)
            if target is not None and ref.name not in macros:
                _mark(target, node, found)
                yield from _children_of_value(target.value, binding, node, table, found, (*macros, ref.name))
            continue
        matches = registry.find(ref.name)
        if len(matches) != 1:
            continue  # reported as an unknown name elsewhere
        inherited = tuple(macros[-1].split("/")) if macros and ref.is_called else node.scope
        is_called = ref.is_called or is_env_factory(binding.param)
        yield Node(matches[0], ref.scope or inherited, binding, node.is_certain, is_called)


def is_env_factory(param: str) -> bool:
    """Whether a parameter holds something that is called with nothing to make an environment."""
    return param.startswith("make_") and param.endswith("env")


def _possible_children(node: Node) -> Iterator[Node]:
    children = registry.mentioned(node.configurable) + registry.methods_of(node.configurable)
    for param in node.configurable.params.values():
        children += [c for part in _parts_of(param.hint) if (c := registry.find_object(part)) is not None]
    for child in children:
        yield Node(child, node.scope, node.via, is_certain=False)


def _parts_of(hint: Any) -> Iterator[Any]:
    """An annotation and everything inside its brackets."""
    yield hint
    for part in typing.get_args(hint):
        yield from _parts_of(part)
