"""Checks of a config: names, types, missing values and, once all is built, settings that nothing reads.

Each check returns a list of problem texts. Unless it says otherwise it takes resolved bindings, see
`resolved`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import tokenize
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import numpy as np

from ...gin_configs.presets import did_you_mean, preset_root
from . import registry
from .reading import (
    COMMAND_LINE,
    Binding,
    Macro,
    Reference,
    bindings_in,
    raise_if_any,
    references_in,
    without_macros,
)
from .registry import MACRO, MISSING, Configurable

OF_AMAGO: dict[str, str] = {
    "Experiment.sample_actions_train": "Experiment.sample_actions",
    "Experiment.always_load_latest": "Experiment.mode = 'collect', which always loads the newest policy",
    "Agent.n_step": "NStep.n (with Agent.returns = @NStep())",
    "Agent.num_critics_td": "RandomSubset.size (with Agent.critic_subset = @RandomSubset())",
    "Agent.popart": "Agent.values = @PlainValues()",
}
"""Parameters with another name in AMAGO: AMAGO's name -> the name here, or another line to write instead."""


# --- bindings as gin sees them --------------------------------------------------------------------------


def resolved(bindings: Iterable[Binding]) -> list[Binding]:
    """The bindings of known classes, each with the shortest name of its class."""
    found = ((b, registry.find(b.selector)) for b in bindings)
    return [dataclasses.replace(b, selector=matches[0].name) for b, matches in found if len(matches) == 1]


def remaining(bindings: Iterable[Binding]) -> list[Binding]:
    """The bindings that were not replaced by a later one of the same key."""
    return list({b.key: b for b in bindings}.values())


def is_seen_in(scope: str, name: str, binding: Binding) -> bool:
    """True if a call of `name` in `scope` (such as `a/b`) gets the value of this binding."""
    return binding.selector == name and (not binding.scope or f"{scope}/".startswith(f"{binding.scope}/"))


def bound_in(scope: str, name: str, bindings: Iterable[Binding]) -> dict[str, Binding]:
    """Bindings that a call of `name` in `scope` gets, by parameter; the longest scope wins."""
    found = [b for b in bindings if is_seen_in(scope, name, b)]
    return {b.param: b for b in sorted(found, key=lambda b: len(b.scope))}


def macros_of(bindings: Iterable[Binding]) -> dict[str, Any]:
    """The values of macros by their names."""
    return {b.scope: b.value for b in bindings if b.selector == MACRO}


def line_of_value(binding: Binding, bindings: Iterable[Binding]) -> Binding:
    """The line `NAME = value` that defines a binding to `%NAME`; otherwise the binding itself."""
    lines = {b.scope: b for b in bindings if b.selector == MACRO}
    while isinstance(binding.value, Macro) and binding.value.name in lines:
        binding = lines.pop(binding.value.name)  # each line only once, as macros may form a cycle
    return binding


def shown(binding: Binding) -> str:
    """A binding and its place."""
    return f"{binding.origin}: {binding.key} = {binding.value!r}"


# --- targets of references --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A configurable in a scope. `via` is the binding that leads here; None at the root and its defaults."""

    configurable: Configurable
    scope: str = ""
    via: Binding | None = None
    is_called: bool = False
    """True if it is called with only the arguments that gin supplies: `@Name()`, the root, an environment."""


def reach(
    bindings: Sequence[Binding], starts: Iterable[Node], unread: Collection[str] = ()
) -> dict[tuple[str, str], Node]:
    """All targets of references, macros and defaults from `starts`, by scope and name.

    As in gin, `%NAME` leads to `gin.macro` in the scope NAME.

    unread: parameters, such as "Experiment.dataset", whose values lead nowhere.
    """
    nodes: dict[tuple[str, str], Node] = {}
    queue = list(starts)
    while queue:
        node = queue.pop()
        key = (node.scope, node.configurable.name)
        if key in nodes and nodes[key].is_called >= node.is_called:
            continue
        nodes[key] = node
        bound, is_macro = bound_in(*key, bindings), node.configurable.name == MACRO
        for name, binding in bound.items():
            if f"{node.configurable.name}.{name}" in unread:
                continue
            is_env_factory = name.startswith("make_") and name.endswith("env")
            is_called = is_env_factory or (is_macro and node.is_called)
            for ref in references_in(binding.value):
                if isinstance(ref, Macro):
                    queue.append(Node(registry.find(MACRO)[0], ref.name, binding, is_called))
                elif len(matches := registry.find(ref.name)) == 1:
                    scope = ref.scope or ("" if is_macro else node.scope)
                    queue.append(Node(matches[0], scope, binding, ref.is_called or is_called))
        for param in node.configurable.params.values():
            child = registry.find_object(param.default) if param.name not in bound else None
            if child is not None and f"{node.configurable.name}.{param.name}" not in unread:
                queue.append(Node(child, node.scope, node.via))
    return nodes


def left_over(bindings: Sequence[Binding], starts: Sequence[Node]) -> list[Binding]:
    """Settings of parts that a later source replaced, such as those of an agent that was switched.

    They were in use at the end of a source (a file, or the command line), but no longer at the end of all.
    """
    ends = {binding.source: number + 1 for number, binding in enumerate(bindings)}
    used: set[int] = set()
    for end in ends.values():
        nodes = _with_bases(reach(bindings[:end], starts))
        used.update(id(b) for b in bindings[:end] if is_seen(b, nodes))
    final = reach(bindings, starts)
    return [b for b in remaining(bindings) if id(b) in used and not is_applied(b, final)]


def _with_bases(nodes: Mapping[tuple[str, str], Node]) -> set[tuple[str, str]]:
    """Scopes and names of nodes, and those of their base classes."""
    return {(scope, name) for (scope, _), node in nodes.items() for name in _names_of(node.configurable)}


def is_applied(binding: Binding, nodes: Mapping[tuple[str, str], Node]) -> bool:
    """True if one of these nodes gets the value of a binding, for itself or for its base class.

    gin also applies the bindings of a base class, unless a constructor that declares the parameter itself
    comes before.
    """
    return any(
        is_seen_in(scope, name, binding)
        for (scope, _), node in nodes.items()
        for name in _names_of(node.configurable, binding.param)
    )


def _names_of(configurable: Configurable, param: str | None = None) -> list[str]:
    """The name of a configurable and those of its base classes; of those that may supply a parameter."""
    names = [configurable.name]
    for cls in getattr(configurable.wrapped, "__mro__", ()):
        if cls is not configurable.wrapped and (known := registry.find_object(cls)):
            names.append(known.name)
        made = inspect.unwrap(vars(cls).get("__init__", object))  # gin wraps inherited constructors, too
        code = getattr(made, "__code__", None)
        if code is None or made.__qualname__ != f"{cls.__qualname__}.__init__":
            continue
        if param in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            break
    return names


def is_seen(binding: Binding, nodes: Iterable[tuple[str, str]]) -> bool:
    """True if one of these pairs of scope and name would get the value of this binding."""
    return any(is_seen_in(*key, binding) for key in nodes)


# --- names ----------------------------------------------------------------------------------------------


def unknown_names(bindings: Sequence[Binding]) -> list[str]:
    """Problems with unknown classes, parameters and references, in bindings as read."""
    macros = macros_of(bindings)
    in_files = macros_of(b for b in bindings if b.origin.file != COMMAND_LINE)
    found: list[str] = []
    absent: set[str] = set()  # a class that cannot be found is reported only where it is named first
    for binding in bindings:
        classes = []
        if binding.selector != MACRO:
            classes.append((binding.selector, f"{binding.origin}"))
            found += _unknown_param(binding)
        elif binding.scope not in in_files:
            found.append(_unknown_override(binding, macros))
        for ref in references_in(binding.value):
            if isinstance(ref, Reference):
                classes.append((ref.name, f"{binding.origin}: {binding.key} = {ref!r}"))
            else:
                found += _unknown_macro(ref, binding, macros)
        for name, place in classes:
            if name not in absent and len(matches := registry.find(name)) != 1:
                absent.add(name)
                found.append(f"{place}: {_no_such_class(name, matches)}")
    return found


def _unknown_override(binding: Binding, macros: Iterable[str]) -> str:
    """Text for `epochs=5` on the command line when no file has a macro of this name."""
    name = binding.key
    owners = sorted(owner.name for owner in registry.all_known() if name in owner.params)
    owner = "Experiment" if "Experiment" in owners else next(iter(owners), None)
    meant = f" Did you mean '{owner}.{name}'?" if owner else did_you_mean(name, set(macros) - {name})
    return f"{binding.origin}: no config file defines {name}.{meant} Fix: write Name.param=value."


def _unknown_param(binding: Binding) -> Iterator[str]:
    matches = registry.find(binding.selector)
    if len(matches) != 1:
        return
    target, param = matches[0], binding.param
    where, settable = f"{binding.origin}: {target.name}", [n for n in target.params if target.can_set(n)]
    if ours := OF_AMAGO.get(f"{target.name}.{param}"):
        yield f"{where}.{param} is AMAGO's name for {ours}. Fix: write that instead."
    elif param in target.params and not target.can_set(param):
        yield (
            f"{where}.{param} is set by the code, not by configs. They can set: "
            f"{', '.join(settable) or 'nothing'}. Fix: remove this line."
        )
    elif param not in target.params and (others := target.passed_on) is not None and param not in others:
        settable += [name for name in others if target.can_set(name)]
        meant = did_you_mean(param, settable) or _elsewhere(param)
        listed = "" if meant else f" It has: {', '.join(settable) or 'no parameters'}."
        advice = "correct the name" if settable else "remove this line, or give its __init__ this parameter"
        yield f"{where} has no parameter '{param}'.{meant}{listed} Fix: {advice}."


def _elsewhere(param: str) -> str:
    """A sentence that names parameters of this name in other classes, if they are few."""
    owners = [known.name for known in registry.all_known() if param in known.params and known.can_set(param)]
    meant = " or ".join(f"'{owner}.{param}'" for owner in sorted(owners))
    return f" Did you mean {meant}?" if 0 < len(owners) <= MAX_CHOICES else ""


def _no_such_class(name: str, matches: Sequence[Configurable]) -> str:
    if matches:
        full = ", ".join(str(c.entry.selector) for c in matches)
        return f"'{name}' is ambiguous; it can mean {full}. Fix: write one of these full names."
    bare, known_names = name.rpartition(".")[2], sorted(known.name for known in registry.all_known())
    meant = did_you_mean(bare, known_names)
    longer = [known for known in known_names if bare.lower() in known.lower()]
    if not meant and 0 < len(longer) <= MAX_CHOICES:
        meant = f" Did you mean {' or '.join(map(repr, longer))}?"
    advice = "correct the name"
    if not meant:
        advice += ", or import its module: import my_module (a class of a script needs a module of its own)"
    return f"no class or function '{name}' is known to gin.{meant} Fix: {advice}."


def _unknown_macro(ref: Macro, binding: Binding, macros: Iterable[str]) -> Iterator[str]:
    if ref.name not in macros and registry.constant_value(ref.name) is MISSING:
        meant = did_you_mean(repr(ref), [f"%{macro}" for macro in macros])
        yield (
            f"{binding.origin}: {binding.key} = {ref!r}, but nothing defines {ref.name}.{meant} "
            f"Fix: correct the name, or add a line {ref.name} = value."
        )


# --- types ----------------------------------------------------------------------------------------------

MAX_CHOICES = 6
_CALLABLES = (type, Callable)
_PLAIN_RESULTS = (bool, int, float, str, np.ndarray)  # results of functions, not of classes in gin


def wrong_types(bindings: Sequence[Binding]) -> list[str]:
    """Bindings whose value does not fit the parameter's annotation."""
    found, macros = [], macros_of(bindings)
    for binding in bindings:
        target = registry.find(binding.selector)[0]
        param = {**(target.passed_on or {}), **target.params}.get(binding.param)
        if param is None:
            continue
        value, hint = without_macros(binding.value, macros), param.annotation
        if fits(value, hint) or (value is None and param.default is None):
            continue
        choices = [arg for kind, args in _alternatives(hint) if kind is typing.Literal for arg in args]
        near = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        line = line_of_value(binding, bindings)
        found.append(
            f"{line.origin}: {binding.key} = {binding.value!r} is {_kind_of(value)}, but must be "
            f"{describe(hint)}.{near} Fix: {_fix(value, hint)}."
        )
    return found


def _alternatives(hint: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The annotated class and the arguments in its brackets; for a union, those of every member."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return [one for arg in args for one in _alternatives(arg)]
    return [(kind, args)]


def _is_unchecked(kind: Any) -> bool:
    """True if every value fits: Any, object, and hints without an isinstance check (a protocol)."""
    return kind in (Any, object) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False)


def fits(value: Any, hint: Any) -> bool:
    """True if `value`, as written in a config, may be passed to a parameter with this annotation.

    Only a certain mismatch counts: an unknown hint accepts everything. A bool does not fit int, an int fits
    float, a str does not fit a sequence, and a text fits a path. Macros must have been replaced by their
    values; those that remain are gin constants, which may be anything.
    """
    if isinstance(value, Macro):
        return True
    fits_one = _reference_fits if isinstance(value, Reference) else _literal_fits
    return any(fits_one(value, kind, args) for kind, args in _alternatives(hint))


def _literal_fits(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    """Check a number, text, None or container against `kind[args]`."""
    if kind is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if kind in _CALLABLES:
        return False  # only a reference can fit
    if _is_unchecked(kind):
        return True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if isinstance(value, str) and issubclass(kind, (Iterable, os.PathLike)):
        return kind is str or issubclass(kind, os.PathLike)
    return isinstance(value, kind) and _items_fit(value, kind, args)


def _items_fit(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    """Check the items of a container against the arguments in the brackets; other values have no items."""
    if kind is tuple and args and args[1:] != (Ellipsis,):
        return len(args) == len(value) and all(map(fits, value, args))
    parts = (value.keys(), value.values()) if isinstance(value, dict) else (value,)
    return all(fits(item, arg) for arg, items in zip(args, parts, strict=False) for item in items)


def _reference_fits(ref: Reference, kind: Any, args: tuple[Any, ...]) -> bool:
    """Check a reference: `@Name()` gives the call's result, `@Name` the class or function itself."""
    matches = registry.find(ref.name)
    if len(matches) != 1:
        return True  # reported as an unknown name elsewhere
    made, wanted = matches[0].result_hint, args[-1] if args else Any
    if kind in _CALLABLES:
        if not ref.is_called:
            return not matches[0].is_class or _instance_fits(made, wanted)
        if not isinstance(made, type):
            return True
        # The result may be callable itself, but `@Agent()` is a mistake where an `@Agent` is expected.
        is_product = not _is_unchecked(wanted) and issubclass(made, wanted)
        return any("__call__" in vars(base) for base in made.__mro__) and not is_product
    if ref.is_called:
        return _instance_fits(made, kind)
    return kind is not typing.Literal and _is_unchecked(kind)


def _instance_fits(made: Any, hint: Any) -> bool:
    """True if an instance of `made` (a class, or a return annotation) fits `hint`."""
    return not isinstance(made, type) or any(
        _is_unchecked(kind) or issubclass(made, (int, float) if kind is float else kind)
        for kind, _ in _alternatives(hint)
    )


def describe(hint: Any) -> str:
    """A hint in words for an error text."""
    return " or ".join(_described(kind, args) for kind, args in _alternatives(hint))


def _described(kind: Any, args: tuple[Any, ...]) -> str:
    if kind is typing.Literal:
        return " or ".join(map(repr, args))
    if kind in _CALLABLES:
        wanted = args[-1] if args else Any
        if _is_unchecked(wanted):
            return "@Name"
        created = _with_article(wanted.__name__)
        returns = f"a function that returns {created}"
        return returns if wanted in _PLAIN_RESULTS else f"@Name that creates {created}"
    name = "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))
    inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
    return f"{name}[{inner}]" if inner else str(name)


def _kind_of(value: Any) -> str:
    """The kind of a value, in words."""
    if isinstance(value, Reference):
        return "the result of that call" if value.is_called else "the class or function itself"
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeiou' else 'a'} {name}"


def _fix(value: Any, hint: Any) -> str:
    """The change that most likely makes `value` fit `hint`."""
    alternatives = _alternatives(hint)
    wants_callable = any(kind in _CALLABLES for kind, _ in alternatives)
    wants_class = any(kind in _CALLABLES and not {*args} & {*_PLAIN_RESULTS} for kind, args in alternatives)
    for other in _respelled(value):
        is_call = isinstance(other, Reference) and other.is_called
        if fits(other, hint) and not (is_call and wants_class):  # it would fit by being callable
            return f"write {other!r}"
    choices = [
        repr(ref)
        for known in registry.all_known()
        if known.is_class or _surely_makes(known, hint)
        if fits(ref := Reference(known.name, not wants_callable), hint)
    ]
    if 0 < len(choices) <= MAX_CHOICES:
        return f"choose {' or '.join(choices)}"
    return f"give a value of type {describe(hint)}"


def _surely_makes(known: Configurable, hint: Any) -> bool:
    """True if a function's annotation says that it returns what a callable of this hint has to return."""
    made = known.result_hint
    wanted = [args[-1] for kind, args in _alternatives(hint) if kind in _CALLABLES and args]
    return isinstance(made, type) and any(isinstance(one, type) and issubclass(made, one) for one in wanted)


def _respelled(value: Any) -> Iterator[Any]:
    """The same reference with or without its call, also in a list; or a text without quotes, or with `@`."""
    if isinstance(value, Reference):
        other = Reference(value.scoped_name, not value.is_called)
        yield from (other, [value], [other])
    elif isinstance(value, (list, tuple)):
        yield [next(_respelled(item)) if isinstance(item, Reference) else item for item in value]
    elif isinstance(value, str):
        for text in (value, value.capitalize(), f"@{value}", f"@{value}()"):
            with contextlib.suppress(SyntaxError, tokenize.TokenError, ValueError):
                inner = bindings_in(f"x = {text}")[0].value
                if not isinstance(inner, Reference) or len(registry.find(inner.name)) == 1:
                    yield inner


# --- missing values -------------------------------------------------------------------------------------


def missing_required(bindings: Sequence[Binding], root: Node, files: Sequence[str]) -> list[str]:
    """Parameters without a value in the root, if only gin calls it, and where references lead to from it."""
    texts = []
    for (scope, name), node in reach(bindings, [root]).items():
        target, bound = node.configurable, bound_in(scope, name, bindings)
        missing = [param for param in target.params if _lacks_value(node, param, bound.get(param))]
        if not missing or name == MACRO or (node is root and not root.is_called):
            continue
        scoped = f"{scope}/{name}" if scope else name
        hints = {param: target.params[param].annotation for param in missing}
        examples = [
            f"{scoped}.{param} = <{describe(hint) if hint is not Any else 'value'}>"
            for param, hint in hints.items()
        ]
        via = f" It is used here: {node.via.key} = {node.via.value!r}." if node.via else ""
        where = str(node.via.origin) if node.via else ", ".join(files) or COMMAND_LINE
        texts.append(
            f"{where}: {scoped} needs a value for {', '.join(missing)}, and nothing sets "
            f"{'it' if len(missing) == 1 else 'them'}.{via} Fix: add {', '.join(examples)}."
        )
    return texts


def _lacks_value(node: Node, param: str, bound: Binding | None) -> bool:
    """True if only a config can give this parameter its value, and does not."""
    if bound is not None:
        value = bound.value
        return isinstance(value, Macro) and registry.constant_value(value.name) is gin.REQUIRED
    found = node.configurable.params[param]
    is_bare = found.default is MISSING and (node.is_called or found.kind is found.KEYWORD_ONLY)
    return node.configurable.can_set(param) and (found.default is gin.REQUIRED or is_bare)


# --- unused settings --------------------------------------------------------------------------------------


def check_unused(bindings: Sequence[Binding], root: Node, unread: Collection[str] = ()) -> str:
    """Find settings of the user that gin has not read by now, when everything is built.

    The following are not mistakes: targets of references and defaults of anything that was built, as they may
    be constructed later; settings of parts that a later source replaced; the settings of presets, which are
    for any task and any parts; and values that are the default anyway.

    unread: parameters that code does not look at in this case, such as those of another kind of agent.

    Returns: settings of the user's functions, which code may call while training; "" without any.

    Raises: ConfigError listing each setting that has no effect.
    """
    read = registry.was_read()
    built = [Node(registry.find(name)[0], scope) for scope, name in read]
    reached = reach(bindings, built, unread)
    # Code may still build targets of a replaced reference, so the second list lacks them.
    replaced = [*left_over(bindings, [root]), *left_over(bindings, [root, *built])]
    problems, notes = [], []
    for binding in remaining(bindings):
        target = registry.find(binding.selector)[0]
        calls = [params for key, params in read.items() if is_seen_in(*key, binding)]
        is_given = bool(calls) and target.is_class
        if any(binding.param in params for params in calls) or (is_seen(binding, reached) and not is_given):
            continue
        if is_in_preset(binding) or binding in replaced or _is_default(binding, target):
            continue
        if target.name == root.configurable.name and not root.is_called:  # arguments may replace it
            continue
        if is_given:
            problems.append(
                f"{shown(binding)} has no effect: the code that creates {target.name} sets it. Fix: remove "
                "this line."
            )
        elif _may_be_called_later(target):
            notes.append(f"{shown(binding)} has not been used so far; it takes effect if code uses it later.")
        else:
            owner = f"@{binding.key.rpartition('.')[0]}"
            problems.append(
                f"{shown(binding)} is set, but nothing in this experiment uses it. Fix: remove it, or refer "
                f"to it where it is needed: {Macro(binding.scope) if target.name == MACRO else owner}."
            )
    raise_if_any(problems)
    return "\n".join(notes)


def _is_default(binding: Binding, target: Configurable) -> bool:
    return binding.param in target.params and bool(binding.value == target.params[binding.param].default)


def is_in_preset(binding: Binding) -> bool:
    """True if a line is part of a shipped file."""
    return preset_root() in Path(binding.origin.file).resolve().parents


def _may_be_called_later(target: Configurable) -> bool:
    """True if code may call it without a reference; the library never does so with its own functions."""
    is_own = (target.wrapped.__module__ or "").startswith("loxodon.")
    return not (target.is_class or is_own or target.name == MACRO)
