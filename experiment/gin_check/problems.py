"""The checks themselves: each function returns problem texts, an empty list when all is well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin

from . import registry
from .advice import describe, describe_value, mend
from .annotations import fits
from .errors import did_you_mean
from .graph import Node, Reach, Table, references_in
from .registry import MACRO, MISSING, Configurable
from .source import COMMAND_LINE, Binding, Macro, Reference


def unknown_names(bindings: Sequence[Binding]) -> list[str]:
    """Bindings of unknown classes and parameters, and values that refer to unknown classes and macros."""
    macros = {macro_name(b) for b in bindings if not b.param}
    found: list[str] = []
    for binding in bindings:
        if binding.param:
            found += _unknown_target(binding)
        elif binding.origin.file == COMMAND_LINE and _is_only_macro(binding, bindings):
            found.append(_unknown_override(binding, macros))
        for ref in references_in(binding.value):
            found += _unknown_reference(ref, binding, macros)
    return found


def macro_name(binding: Binding) -> str:
    """Name of the macro that a binding without parameter sets."""
    return f"{binding.scope}/{binding.selector}" if binding.scope else binding.selector


def resolved(bindings: Sequence[Binding]) -> list[Binding]:
    """The same bindings with full selectors; macros become bindings of `gin.macro`. Names must be known."""
    found = []
    for b in bindings:
        if b.param:
            found.append(dataclasses.replace(b, selector=registry.find(b.selector)[0].selector))
        else:
            found.append(dataclasses.replace(b, scope=macro_name(b), selector=MACRO, param="value"))
    return found


def _is_only_macro(binding: Binding, bindings: Sequence[Binding]) -> bool:
    name = macro_name(binding)
    return not any(macro_name(b) == name for b in bindings if not b.param and b.origin.file != COMMAND_LINE)


def _unknown_override(binding: Binding, macros: set[str]) -> str:
    """Text for `epochs=5` on the command line when no file has a macro of this name."""
    name = macro_name(binding)
    owners = [known for known in registry.names_known() if name in registry.find(known)[0].params]
    meant = sorted(f"{owner}.{name}" for owner in owners)[:3]
    hint = f" Did you mean '{meant[0]}'?" if meant else did_you_mean(name, macros - {name})
    if not meant and not hint:
        experiment = next((c for c in registry.find("Experiment")), None)
        hint = did_you_mean(name, experiment.params, "Experiment.") if experiment else ""
    return f"{binding.origin}: no config file defines {name}.{hint} Fix: write Name.param=value."


def _unknown_target(binding: Binding) -> Iterator[str]:
    matches = registry.find(binding.selector)
    if len(matches) != 1:
        yield f"{binding.origin}: {_no_such_class(binding.selector, matches)}"
        return
    target, param = matches[0], binding.param
    known = target.params.get(param)
    settable = [name for name, p in target.params.items() if p.is_settable]
    if known is not None and not known.is_settable:
        yield (
            f"{binding.origin}: {target.name}.{param} is given by the code, not by configs, which can set: "
            f"{', '.join(settable) or 'nothing'}. Fix: remove this line."
        )
    elif known is None and not target.takes_any:
        meant = did_you_mean(param, settable)
        listed = "" if meant else f" It has: {', '.join(settable) or 'no parameters'}."
        mend_text = "correct it" if settable else "remove this line, or give its __init__ this parameter"
        yield f"{binding.origin}: {target.name} has no parameter '{param}'.{meant}{listed} Fix: {mend_text}."


def _no_such_class(name: str, matches: Sequence[Configurable]) -> str:
    if matches:
        full = ", ".join(c.selector for c in matches)
        return f"'{name}' can mean {full}. Fix: write one of these full names."
    known = registry.names_known()
    meant = did_you_mean(name.rsplit(".", 1)[-1], known)
    mend_text = "correct the name" if meant else "correct the name, or import its module: import my_module"
    return f"no class or function '{name}' is known to gin.{meant} Fix: {mend_text}."


def _unknown_reference(ref: Reference | Macro, binding: Binding, macros: set[str]) -> Iterator[str]:
    if isinstance(ref, Macro):
        if ref.name not in macros and registry.constant_value(ref.name) is MISSING:
            meant = did_you_mean(ref.name, macros, "%")
            yield (
                f"{binding.origin}: {binding.key} = {ref!r}, but nothing defines {ref.name}.{meant} "
                f"Fix: correct the name, or add a line {ref.name} = value."
            )
        return
    matches = registry.find(ref.name)
    if len(matches) != 1:
        yield f"{binding.origin}: {binding.key} = {ref!r}: {_no_such_class(ref.name, matches)}"


# --- types ----------------------------------------------------------------------------------------------


def wrong_types(bindings: Sequence[Binding]) -> list[str]:
    """Resolved bindings whose value does not fit the parameter's annotation."""
    table, found = Table(bindings), []
    for binding in bindings:
        if binding.selector == MACRO:
            continue
        target = registry.find(binding.selector)[0]
        param = target.params.get(binding.param)
        if param is None:
            continue
        value = without_macros(binding.value, table)
        hint = param.hint
        if fits(value, hint) or (value is None and param.default is None):
            continue
        key, advice = short_key(binding), mend(value, hint)
        shown = f"{key} = {binding.value!r}"
        if binding.origin.file == COMMAND_LINE and advice.startswith("put quotes"):
            advice = f"quote it for gin and for the shell: {key}=\"'{value}'\""
        found.append(
            f"{binding.origin}: {shown} is {describe_value(value)}, but {describe(hint)} is allowed."
            f"{_near_choice(value, hint)} Fix: {advice}."
        )
    return found


def _near_choice(value: Any, hint: Any) -> str:
    """Near matches if the hint lists its allowed strings."""
    choices = [part.strip("'") for part in describe(hint).split(" or ") if part.startswith("'")]
    return did_you_mean(value, choices) if isinstance(value, str) else ""


def without_macros(value: Any, table: Table, inside: tuple[str, ...] = ()) -> Any:
    """The value with every macro that the config defines replaced by what it stands for."""
    if isinstance(value, Macro):
        target = table.macro(value.name)
        if target is None or value.name in inside:
            return value
        return without_macros(target.value, table, (*inside, value.name))
    if isinstance(value, Mapping):
        return {k: without_macros(v, table, inside) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_macros(item, table, inside) for item in value)
    return value


def short_key(binding: Binding) -> str:
    """The left side of a resolved binding with the shortest name of its class."""
    if binding.selector == MACRO:
        return binding.scope
    name = registry.find(binding.selector)[0].name
    return f"{binding.scope}/{name}.{binding.param}" if binding.scope else f"{name}.{binding.param}"


# --- required and unused ----------------------------------------------------------------------------------


def missing_required(bindings: Sequence[Binding], found: Reach, files: Sequence[str]) -> list[str]:
    """Parameters without a value in configurables that will certainly be constructed."""
    table, texts = Table(bindings), []
    for node in found.nodes.values():
        if not node.is_certain or node.configurable.selector.startswith("gin."):
            continue
        bound = table.effective(node.scope, node.configurable.selector)
        missing = [
            name
            for name, param in node.configurable.params.items()
            if (_is_required_marker(bound[name].value) if name in bound else _needs_value(node, name))
        ]
        if missing:
            scoped = "/".join([*node.scope, node.configurable.name])
            examples = [
                f"{scoped}.{name} = {_example(node.configurable.params[name].hint)}" for name in missing
            ]
            via = f" It is used here: {short_key(node.via)} = {node.via.value!r}." if node.via else ""
            where = str(node.via.origin) if node.via else ", ".join(files) or COMMAND_LINE
            texts.append(
                f"{where}: {scoped} needs a value for {', '.join(missing)}, and nothing sets "
                f"{'it' if len(missing) == 1 else 'them'}.{via} Fix: add {', '.join(examples)}."
            )
    return texts


def _needs_value(node: Node, name: str) -> bool:
    """Whether only a config can give this parameter its value."""
    param = node.configurable.params[name]
    if not param.is_settable:
        return False
    if param.default is gin.REQUIRED:
        return True
    return param.default is MISSING and (node.is_called or param.is_keyword_only)


def _is_required_marker(value: Any) -> bool:
    return isinstance(value, Macro) and registry.constant_value(value.name) is gin.REQUIRED


def _example(hint: Any) -> str:
    return f"<{describe(hint)}>" if hint is not Any else "<value>"


def excused(bindings: Sequence[Binding], by_world: Sequence[Reach], last: Sequence[int]) -> frozenset[int]:
    """Ids of the bindings whose source had ended when a later one put parts out of use that there were.

    Args:
        bindings: resolved, in order.
        by_world: the walk over the config as it stood when each source was read to its end.
        last: number of bindings at the end of each of these sources, ascending.
    """
    final, remaining = by_world[-1], {id(b) for b in Table(bindings).remaining()}
    parts, macros_and_more = final.certain_parts(), remaining - final.certain
    before = 0
    for world, end in zip(by_world, last, strict=True):
        if not world.certain_parts() <= parts or world.certain & macros_and_more:
            before = end
    ends = {binding.source: number + 1 for number, binding in enumerate(bindings)}
    return frozenset(id(b) for b in bindings if ends[b.source] <= before)


def unused(
    bindings: Sequence[Binding], by_world: Sequence[Reach], may_be: frozenset[int]
) -> tuple[list[str], list[Binding]]:
    """Bindings that nothing reads: texts of problems, and those that are `excused` (their ids: may_be)."""
    problems, left_over = [], []
    final, remaining = by_world[-1], {id(b) for b in Table(bindings).remaining()}
    for binding in bindings:
        key = id(binding)
        if key not in remaining or key in final.certain:
            continue
        if key in may_be:
            if not final.uses(binding) or any(key in world.certain for world in by_world):
                left_over.append(binding)
        elif not final.uses(binding):
            problems.append(
                f"{shown(binding)} is set, but nothing in this experiment uses it. {_mend_unused(binding)}"
            )
    return problems, left_over


def shown(binding: Binding) -> str:
    """A resolved binding and where it stands."""
    return f"{binding.origin}: {short_key(binding)} = {binding.value!r}"


def _mend_unused(binding: Binding) -> str:
    if binding.selector == MACRO:
        return f"Fix: remove it, or refer to it as %{binding.scope}."
    if binding.scope:
        target = short_key(binding).rpartition(".")[0]
        return f"Fix: remove it, or refer to it as @{target} (with its scope)."
    return f"Fix: remove it, or choose it with @{registry.find(binding.selector)[0].name} where it belongs."
