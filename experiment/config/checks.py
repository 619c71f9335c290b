"""What can be wrong with a config: names, types, missing values, and, once all is built, what nothing reads.

Each check returns problem texts, none when all is well. Unless it says otherwise it takes resolved bindings,
see `resolved`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import re
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gin

from . import registry
from .reading import (
    COMMAND_LINE,
    Binding,
    Macro,
    Reference,
    did_you_mean,
    parse_statements,
    raise_if_any,
    references_in,
    without_macros,
)
from .registry import MACRO, MISSING, Configurable

MOVED: dict[str, str] = {
    "Experiment.sample_actions_train": "Experiment.sample_actions",  # in AMAGO
    "Experiment.log_to_tensorboard": "MetricLogger.tensorboard",
    "Experiment.lr_multipliers": "AdamW.lr_multipliers",
    "Experiment.adam_eps": "AdamW.eps",
    "Experiment.bad_grad": "Learner.bad_grad",
    "Experiment.freeze": "Experiment.callbacks = [@ParamFreezer]",
    "Experiment.pretraining": "Experiment.callbacks = [@Pretraining]",
    "Experiment.max_wall_clock_s": "WallClockLimit.seconds",
    "Experiment.test_timesteps": "FinalTest.timesteps",
    "Experiment.make_test_env": "FinalTest.make_env",
    "Experiment.profile_epoch": "ProfileEpoch.epoch",
    "Experiment.save_env_state": "Collector.save_env_state",
    "Experiment.exact_resume": "CheckpointManager.exact_resume",
    "Experiment.keep_checkpoints": "CheckpointManager.keep",
    "Experiment.keep_every_epochs": "CheckpointManager.keep_every",
    "Experiment.ckpt_minutes": "CheckpointManager.every_minutes",
    "Experiment.reward_shaper": "RewardShaping.shaper",
    "Experiment.artifact_store": "Artifacts.store",
    "Experiment.warm_start": "WarmStart.source",
    "Experiment.async_env_workers": "AsyncVectorEnv.num_workers",
    "Experiment.replay_ratio_tolerance": "ReplayRatio.tolerance",
    "Experiment.actor_processes": "ReplayRatio.actor_processes",
}
"""Parameters that have another name now: old `Name.param` -> new one, or another line to write instead."""


# --- bindings as gin sees them --------------------------------------------------------------------------


def resolved(bindings: Iterable[Binding]) -> list[Binding]:
    """The bindings of known classes, with full selectors."""
    found = ((b, registry.find(b.selector)) for b in bindings)
    return [dataclasses.replace(b, selector=matches[0].selector) for b, matches in found if len(matches) == 1]


def remaining(bindings: Iterable[Binding]) -> list[Binding]:
    """The bindings that were not replaced by a later one of the same key."""
    return list({b.key: b for b in bindings}.values())


def seen_by(bindings: Iterable[Binding], scope: str, selector: str) -> list[Binding]:
    """Bindings that a call in `scope` (such as `a/b`) sees, those that count last."""
    found = [b for b in bindings if b.selector == selector and is_seen_in(scope, b)]
    return sorted(found, key=lambda b: len(b.scope))


def is_seen_in(scope: str, binding: Binding) -> bool:
    """Whether a call in `scope` of what this configures gets the value."""
    return not binding.scope or f"{scope}/".startswith(f"{binding.scope}/")


def macros_of(bindings: Iterable[Binding]) -> dict[str, Binding]:
    """The bindings of macros by their names."""
    return {b.scope: b for b in bindings if b.selector == MACRO}


def short_key(binding: Binding) -> str:
    """The left side of a binding with the shortest name of its class."""
    if binding.selector == MACRO:
        return binding.key
    return dataclasses.replace(binding, selector=registry.find(binding.selector)[0].name).key


def shown(binding: Binding) -> str:
    """A binding and where it stands."""
    return f"{binding.origin}: {short_key(binding)} = {binding.value!r}"


# --- where references lead ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A configurable in a scope. `via` is the binding that leads here; None at the root and its defaults."""

    configurable: Configurable
    scope: str = ""
    via: Binding | None = None
    is_called: bool = False
    """True if it is called with nothing but what gin supplies: `@Name()`, the root, an environment."""


@dataclass
class Reach:
    """What a walk along references meets: configurables by scope and selector, keys of what these see."""

    nodes: dict[tuple[str, str], Node] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def lacks_any_of(self, other: Reach) -> bool:
        """Whether the other one has met something that this one has not."""
        return not (other.nodes.keys() <= self.nodes.keys() and other.seen <= self.seen)


def reach(bindings: Sequence[Binding], starts: Iterable[Node]) -> Reach:
    """Everything that references, macros and defaults lead to from `starts`."""
    found, queue, macros = Reach(), list(starts), macros_of(bindings)
    while queue:
        node = queue.pop()
        key = (node.scope, node.configurable.selector)
        if key in found.nodes and found.nodes[key].is_called >= node.is_called:
            continue
        found.nodes[key] = node
        visible = seen_by(bindings, *key)
        found.seen |= {b.key for b in visible}
        bound = {b.param: b for b in visible}
        for name, binding in bound.items():
            is_env_factory = name.startswith("make_") and name.endswith("env")
            for thing in _followed(binding.value, macros):
                if isinstance(thing, Binding):
                    found.seen.add(thing.key)
                elif len(matches := registry.find(thing.name)) == 1:
                    is_called = thing.is_called or is_env_factory
                    queue.append(Node(matches[0], thing.scope or node.scope, binding, is_called))
        for param in node.configurable.params.values():
            child = registry.find_object(param.default) if param.name not in bound else None
            if child is not None:
                queue.append(Node(child, node.scope, node.via))
    return found


def reach_by_source(bindings: Sequence[Binding], root: Node) -> dict[int, Reach]:
    """What the config led to from the root when a source had ended, for the number of each."""
    ends = {binding.source: number + 1 for number, binding in enumerate(bindings)}
    return {source: reach(bindings[:end], [root]) for source, end in ends.items()}


def _followed(
    value: Any, macros: Mapping[str, Binding], inside: tuple[str, ...] = ()
) -> Iterator[Reference | Binding]:
    """References in a value, and the bindings of the macros in it with all that these lead to."""
    for ref in references_in(value):
        if isinstance(ref, Reference):
            yield ref
        elif ref.name in macros and ref.name not in inside:
            yield macros[ref.name]
            yield from _followed(macros[ref.name].value, macros, (*inside, ref.name))


# --- names ----------------------------------------------------------------------------------------------


def unknown_names(bindings: Sequence[Binding]) -> list[str]:
    """Bindings, as read, of unknown classes and parameters, and values that refer to what is unknown."""
    macros = set(macros_of(bindings))
    in_files = set(macros_of(b for b in bindings if b.origin.file != COMMAND_LINE))
    found: list[str] = []
    for binding in bindings:
        if binding.selector != MACRO:
            found += _unknown_target(binding)
        elif binding.scope not in in_files:
            found.append(_unknown_override(binding, macros))
        for ref in references_in(binding.value):
            found += _unknown_reference(ref, binding, macros)
    return found


def _unknown_override(binding: Binding, macros: set[str]) -> str:
    """Text for `epochs=5` on the command line when no file has a macro of this name."""
    name = binding.key
    meant = sorted(f"{owner.name}.{name}" for owner in registry.all_known() if name in owner.params)[:3]
    hint = f" Did you mean '{meant[0]}'?" if meant else did_you_mean(name, macros - {name})
    if not hint and (experiment := registry.find("Experiment")):
        hint = did_you_mean(name, experiment[0].params, "Experiment.")
    return f"{binding.origin}: no config file defines {name}.{hint} Fix: write Name.param=value."


def _unknown_target(binding: Binding) -> Iterator[str]:
    matches = registry.find(binding.selector)
    if len(matches) != 1:
        yield f"{binding.origin}: {_no_such_class(binding.selector, matches)}"
        return
    target, param = matches[0], binding.param
    known = target.params.get(param)
    settable = [name for name in target.params if target.can_set(name)]
    if new := MOVED.get(f"{target.name}.{param}"):
        line = f"{new} = {binding.value!r}" if re.fullmatch(r"[\w.]+", new) else new
        yield f"{binding.origin}: {target.name}.{param} is now {new}. Fix: write {line}."
    elif known is not None and not target.can_set(param):
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
    meant = did_you_mean(name.rsplit(".", 1)[-1], [known.name for known in registry.all_known()])
    mend_text = "correct the name" if meant else "correct the name, or import its module: import my_module"
    return f"no class or function '{name}' is known to gin.{meant} Fix: {mend_text}."


def _unknown_reference(ref: Reference | Macro, binding: Binding, macros: set[str]) -> Iterator[str]:
    if isinstance(ref, Reference):
        matches = registry.find(ref.name)
        if len(matches) != 1:
            yield f"{binding.origin}: {binding.key} = {ref!r}: {_no_such_class(ref.name, matches)}"
    elif ref.name not in macros and registry.constant_value(ref.name) is MISSING:
        meant = did_you_mean(ref.name, macros, "%")
        yield (
            f"{binding.origin}: {binding.key} = {ref!r}, but nothing defines {ref.name}.{meant} "
            f"Fix: correct the name, or add a line {ref.name} = value."
        )


# --- types ----------------------------------------------------------------------------------------------

MAX_CHOICES = 6
_UNIONS = (typing.Union, types.UnionType)
_CALLABLES = (Callable, typing.Callable)
_ITEM_HOLDERS: dict[Any, Any] = {
    Sequence: (list, tuple),
    collections.abc.Iterable: (list, tuple),
    collections.abc.Collection: (list, tuple),
    list: (list,),
    tuple: (tuple,),
    set: (set,),
    frozenset: (frozenset,),
}


def wrong_types(bindings: Sequence[Binding]) -> list[str]:
    """Bindings whose value does not fit the parameter's annotation."""
    found, macros = [], {name: b.value for name, b in macros_of(bindings).items()}
    for binding in bindings:
        param = registry.find(binding.selector)[0].params.get(binding.param)
        if param is None or binding.selector == MACRO:
            continue
        value, hint = without_macros(binding.value, macros), param.annotation
        if fits(value, hint) or (value is None and param.default is None):
            continue
        advice = mend(value, hint)
        if binding.origin.file == COMMAND_LINE and advice.startswith("put quotes"):
            advice = f"quote it for gin and for the shell: {short_key(binding)}=\"'{value}'\""
        choices = [part.strip("'") for part in describe(hint).split(" or ") if part.startswith("'")]
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        found.append(
            f"{shown(binding)} is {_kind_of(value)}, but {describe(hint)} is allowed.{near} Fix: {advice}."
        )
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether `value`, as written in a config, may be passed where `hint` is annotated.

    Only a certain misfit counts: an unknown hint accepts everything. bool is no int, an int is a fine float,
    a str is no sequence, text is a fine path. Macros must have been replaced by their values; those that
    remain are gin constants, which may be anything.
    """
    hint = _bare(hint)
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _UNIONS:
        return any(fits(value, part) for part in args)
    if isinstance(value, Macro) or _accepts_all(hint):
        return True
    if isinstance(value, Reference):
        return _reference_fits(value, kind, args)
    if kind is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    return _literal_fits(value, kind, args)


def _literal_fits(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    """A number, text, None or container against `kind[args]`."""
    if kind is type or kind in _CALLABLES:
        return False  # only a reference can be one
    if kind is tuple and args and args[1:] != (Ellipsis,):
        return isinstance(value, tuple) and len(args) == len(value) and all(map(fits, value, args))
    if kind in _ITEM_HOLDERS:
        return isinstance(value, _ITEM_HOLDERS[kind]) and all(fits(v, args[0]) for v in value if args)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        pairs = value.items() if isinstance(value, dict) and args else ()
        return isinstance(value, dict) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in pairs)
    return _is_unchecked(kind) or isinstance(value, str if issubclass(kind, os.PathLike) else kind)


def _bare(hint: Any) -> Any:
    """The hint without `Annotated` and `NewType` around it."""
    while typing.get_origin(hint) is typing.Annotated or isinstance(hint, typing.NewType):
        hint = hint.__supertype__ if isinstance(hint, typing.NewType) else typing.get_args(hint)[0]
    return hint


def _accepts_all(hint: Any) -> bool:
    return hint in (Any, object) or isinstance(hint, (typing.TypeVar, str))


def _is_unchecked(kind: Any) -> bool:
    """Whether isinstance and issubclass have no answer: no class, or a protocol."""
    return not isinstance(kind, type) or getattr(kind, "_is_protocol", False)


def _reference_fits(ref: Reference, kind: Any, args: tuple[Any, ...]) -> bool:
    """`@Name()` is what the call returns; `@Name` the class or function, which `type` and `Callable` want."""
    matches = registry.find(ref.name)
    if len(matches) != 1:
        return True  # reported as an unknown name elsewhere
    made, wanted = matches[0].result_hint, args[-1] if args else Any
    if kind is type or kind in _CALLABLES:
        if not ref.is_called:
            return not matches[0].is_class or _instance_fits(made, wanted)
        if not isinstance(made, type):
            return True
        # What it makes may be callable itself; but `@Agent()` is not meant where an `@Agent` is to be.
        is_product = wanted is not object and not _is_unchecked(wanted) and issubclass(made, wanted)
        return any("__call__" in vars(base) for base in made.__mro__) and not is_product
    if ref.is_called:
        return _instance_fits(made, kind)
    return kind is not typing.Literal and _is_unchecked(kind)


def _instance_fits(made: Any, hint: Any) -> bool:
    """Whether an instance of `made` (a class, or a return annotation) fits `hint`."""
    hint = _bare(hint)
    kind = typing.get_origin(hint) or hint
    if kind in _UNIONS:
        return any(_instance_fits(made, part) for part in typing.get_args(hint))
    if not isinstance(made, type) or _accepts_all(hint) or _is_unchecked(kind):
        return True
    return issubclass(made, (int, float) if kind is float else kind)


def describe(hint: Any) -> str:
    """A hint in words for an error text."""
    hint = _bare(hint)
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if kind is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if kind is type or kind in _CALLABLES:
        made = _bare(args[-1]) if args else None
        names_result = isinstance(made, type) and made not in (object, Any, type(None))
        return f"@Name of a {made.__name__}" if names_result and made else "@Name"
    name = "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
    inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
    return f"{name}[{inner}]" if inner else str(name)


def _kind_of(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Reference):
        return "what that call returns" if value.is_called else "the class or function itself"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def mend(value: Any, hint: Any) -> str:
    """The change that most likely makes `value` fit `hint`."""
    wants_callable = "@Name" in describe(hint)
    for other, text in _respelled(value):
        is_call = isinstance(other, Reference) and other.is_called
        if fits(other, hint) and not (is_call and wants_callable):  # which would fit by being callable
            return text
    classes = [known.name for known in registry.all_known() if known.is_class]
    choices = [repr(ref) for name in classes if fits(ref := Reference(name, not wants_callable), hint)]
    if 0 < len(choices) <= MAX_CHOICES:
        return f"choose {' or '.join(choices)}"
    return f"give it {describe(hint)}"


def _respelled(value: Any) -> Iterator[tuple[Any, str]]:
    """Other spellings of a value, each with the advice that leads to it."""
    if isinstance(value, Reference):
        other = Reference(value.scoped_name, not value.is_called)
        yield other, f"write {other!r}"
        return
    if isinstance(value, str):
        yield from ((inner, f"write {inner!r} without quotes") for inner in _inside_quotes(value))
    elif isinstance(value, (int, float)) or value is None:
        if value in (0, 1):
            yield bool(value), f"write {bool(value)}"
        if isinstance(value, float) and value.is_integer():
            yield int(value), f"write {int(value)}"
        yield str(value), f"put quotes around it: '{value}'"
    is_several = isinstance(value, (list, tuple))
    for items in (list(value), tuple(value)) if is_several else ([value], (value,)):
        yield items, f"write {items!r}"


def _inside_quotes(value: str) -> Iterator[Any]:
    """What gin would read without the quotes, or with an `@` in their place."""
    for text in (value, value.capitalize(), f"@{value}", f"@{value}()"):
        try:
            (statement,) = parse_statements(f"x = {text}")
        except (SyntaxError, tokenize.TokenError, ValueError):
            continue
        inner = statement.value
        if not isinstance(inner, Reference) or len(registry.find(inner.name)) == 1:
            yield inner


# --- missing values -------------------------------------------------------------------------------------


def missing_required(bindings: Sequence[Binding], root: Node, files: Sequence[str]) -> list[str]:
    """Parameters without a value in configurables that references lead to from the root."""
    texts = []
    for node in reach(bindings, [root]).nodes.values():
        target = node.configurable
        bound = {b.param: b for b in seen_by(bindings, node.scope, target.selector)}
        missing = [name for name in target.params if _lacks_value(node, name, bound.get(name))]
        if not missing or target.selector.startswith("gin."):
            continue
        scoped = f"{node.scope}/{target.name}" if node.scope else target.name
        hints = {name: target.params[name].annotation for name in missing}
        examples = [
            f"{scoped}.{name} = <{describe(hint) if hint is not Any else 'value'}>"
            for name, hint in hints.items()
        ]
        via = f" It is used here: {short_key(node.via)} = {node.via.value!r}." if node.via else ""
        where = str(node.via.origin) if node.via else ", ".join(files) or COMMAND_LINE
        texts.append(
            f"{where}: {scoped} needs a value for {', '.join(missing)}, and nothing sets "
            f"{'it' if len(missing) == 1 else 'them'}.{via} Fix: add {', '.join(examples)}."
        )
    return texts


def _lacks_value(node: Node, name: str, bound: Binding | None) -> bool:
    """Whether only a config can give this parameter its value, and does not."""
    if bound is not None:
        value = bound.value
        return isinstance(value, Macro) and registry.constant_value(value.name) is gin.REQUIRED
    param = node.configurable.params[name]
    is_bare = param.default is MISSING and (node.is_called or param.kind is param.KEYWORD_ONLY)
    return node.configurable.can_set(name) and (param.default is gin.REQUIRED or is_bare)


# --- what nothing reads ---------------------------------------------------------------------------------


def check_unused(bindings: Sequence[Binding], root: Node) -> str:
    """What gin has not read by now, when everything is built.

    What a reference or default leads to, from anything that was built, may be constructed later and is fine.
    So are bindings of a source that led, when it had ended, to something that a later source has replaced,
    and those of functions of the user's, which code may call while training.

    Returns: what is unused without being a mistake, for the user; "" without any.

    Raises: ConfigError listing each binding that its own source should not have set.
    """
    read, final = registry.was_read(), reach(bindings, [root])
    built = [Node(registry.find(selector)[0], scope) for scope, selector in read]
    later = reach(bindings, built).seen
    earlier = reach_by_source(bindings, root)
    problems, notes, num_left_over = [], [], 0
    for binding in remaining(bindings):
        target = registry.find(binding.selector)[0]
        calls = [
            params
            for (scope, selector), params in read.items()
            if selector == binding.selector and is_seen_in(scope, binding)
        ]
        is_given = bool(calls) and target.is_class
        if any(binding.param in params for params in calls) or (binding.key in later and not is_given):
            continue
        if final.lacks_any_of(earlier[binding.source]):
            num_left_over += 1
        elif is_given:
            problems.append(
                f"{shown(binding)} has no effect: the code that makes {target.name} gives it. "
                "Fix: remove this line."
            )
        elif _may_be_called_later(target):
            notes.append(f"{shown(binding)} was not read yet; it counts if code calls it later.")
        else:
            problems.append(
                f"{shown(binding)} is set, but nothing in this experiment uses it. {_mend_unused(binding)}"
            )
    raise_if_any(problems)
    if num_left_over:
        notes.append(
            f"{num_left_over} {'setting is' if num_left_over == 1 else 'settings are'} unused, because a "
            "later file or the command line replaced what used them (--print-config lists them)."
        )
    return "\n".join(notes)


def _may_be_called_later(target: Configurable) -> bool:
    """Whether code may call it without a reference; the library itself calls no function of its own so."""
    is_own = (target.wrapped.__module__ or "").startswith("loxodon.")
    return not (target.is_class or is_own or target.selector == MACRO)


def _mend_unused(binding: Binding) -> str:
    if binding.selector == MACRO:
        return f"Fix: remove it, or refer to it as %{binding.scope}."
    name = short_key(binding).rpartition(".")[0]
    if binding.scope:
        return f"Fix: remove it, or refer to it as @{name} (with its scope)."
    return f"Fix: remove it, or choose it with @{name} where it belongs."
