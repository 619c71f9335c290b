"""gin configurations: read, checked as a whole, then handed to gin, before anything is built.

The order: read every file and override; look every name up; compare values with annotations, look for
missing values and for bindings that nothing reads; only then bind. `check_all_used` looks once more after
building, with gin's own record of what was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gin

from .gin_check import problems, registry
from .gin_check.errors import ConfigError, raise_if_any
from .gin_check.graph import Node, Reach, Table, reach
from .gin_check.registry import MACRO, Configurable
from .gin_check.render import render
from .gin_check.source import Binding, Macro, Reference, parse_statements, read_source

__all__ = ["ConfigError", "LoadedConfig", "check_all_used", "explain_build_error", "load_config"]


@dataclass(frozen=True)
class LoadedConfig:
    """A sound configuration that gin holds now.

    Attributes:
        bindings: in order, with full selectors; later ones replace earlier ones.
        found: what the root uses.
        files: the config files, as shown to the user.
        imports: import statements of the files.
        warnings: texts for the user about what is legal and probably not meant.
        unused: bindings that nothing uses any more, as far as can be told before anything is built.
        excused: ids of the bindings that may be unused, because a later source replaced parts.
    """

    bindings: tuple[Binding, ...]
    found: Reach
    files: tuple[str, ...]
    imports: tuple[str, ...]
    warnings: tuple[str, ...]
    unused: tuple[Binding, ...]
    excused: frozenset[int]

    def text(self) -> str:
        """The resolved configuration as a gin text, each line with its origin."""
        left_over = [f"# unused: {problems.shown(binding)}" for binding in self.unused]
        return "\n".join([render(self.bindings, self.found, self.imports), *left_over])

    def nodes_with(self, param: str) -> list[Node]:
        """What the root uses and has a parameter of this name."""
        return [node for node in self.found.nodes.values() if param in node.configurable.params]


def load_config(
    configs: Sequence[str], overrides: Iterable[str | tuple[str, str]] = (), *, root: str = "Experiment"
) -> LoadedConfig:
    """Replace gin's configuration by config files (paths or preset names), in order, and overrides on top.

    Args:
        configs: paths of .gin files or names of presets.
        overrides: `Name.param=value`, or a pair of that and the argument to name in errors.
        root: the configurable that will be called, with nothing but what gin supplies.
    Raises: ConfigError, before anything is built.
    """
    gin.clear_config()
    pairs = [(text, text) if isinstance(text, str) else text for text in overrides]
    source = read_source(configs, pairs)
    raise_if_any(problems.unknown_names(source.bindings))
    bindings = problems.resolved(source.bindings)
    (start,) = registry.find(root)
    by_world, last = _worlds(bindings, start)
    excused = problems.excused(bindings, by_world, last)
    mistaken, unused = problems.unused(bindings, by_world, excused)
    missing = problems.missing_required(bindings, by_world[-1], source.files)
    raise_if_any([*problems.wrong_types(bindings), *missing, *mistaken])
    _bind(bindings)
    return LoadedConfig(
        tuple(bindings),
        by_world[-1],
        tuple(source.files),
        tuple(source.imports),
        tuple(source.warnings),
        tuple(unused),
        excused,
    )


def _worlds(bindings: Sequence[Binding], start: Configurable) -> tuple[list[Reach], list[int]]:
    """What is used when each source was read to its end, and the number of bindings then; the last is all."""
    ends = {binding.source: number + 1 for number, binding in enumerate(bindings)}
    last = sorted({*ends.values(), len(bindings)})
    return [reach(bindings[:end], start) for end in last], last


def _bind(bindings: Sequence[Binding]) -> None:
    for b in bindings:
        gin.bind_parameter((b.scope, b.selector, b.param), _gin_value(b.value))


def _gin_value(value: Any) -> Any:
    """The value with our references replaced by gin's."""
    if isinstance(value, (Reference, Macro)):
        return gin.config.parse_value(repr(value))
    if isinstance(value, dict):
        return {_gin_value(k): _gin_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_gin_value(item) for item in value)
    return value


# --- after building -------------------------------------------------------------------------------------


def check_all_used(config: LoadedConfig) -> str:
    """After `start()`: stop if gin's operative config shows that a bound value was never read.

    That is so if the class was constructed and its caller gave the argument itself, or if only an annotation
    or a mention in code made its use likely and it was not constructed. Classes that a reference leads to may
    be constructed later, and functions called later.

    Returns: a line about the bindings that a later source made unused, which is no mistake; "" without any.
    Raises: ConfigError listing each binding that its own source should not have set.
    """
    used = _bound_names(gin.operative_config_str())
    texts, num_left_over, known = [], 0, {id(binding) for binding in config.unused}
    for binding in Table(config.bindings).remaining():
        target = registry.find(binding.selector)[0]
        read = {p for scope, s, p in used if s == target.selector and _reads(scope, binding.scope)}
        if binding.param in read:
            continue
        is_class = isinstance(target.wrapped, type) and binding.selector != MACRO
        is_unread = is_class and (bool(read) or id(binding) not in config.found.certain)
        shown = problems.shown(binding)
        if id(binding) in known or (is_unread and id(binding) in config.excused):
            num_left_over += 1
        elif is_unread and read:
            texts.append(
                f"{shown} has no effect: the code that makes {target.name} gives it. Fix: remove this line."
            )
        elif is_unread:
            texts.append(
                f"{shown} is set, but building the experiment never read it. "
                f"Fix: remove it, or choose {target.name} where it belongs."
            )
    raise_if_any(texts)
    if not num_left_over:
        return ""
    return (
        f"{num_left_over} {'setting is' if num_left_over == 1 else 'settings are'} unused, because a later "
        "file or the command line replaced what used them (--print-config lists them)."
    )


def _reads(scope: str, bound_in: str) -> bool:
    """Whether a call in `scope` sees what is bound in `bound_in`."""
    return not bound_in or scope == bound_in or scope.startswith(f"{bound_in}/")


def _bound_names(config_text: str) -> set[tuple[str, str, str]]:
    """(scope, full selector, parameter) of every binding in a config text of gin."""
    found = set()
    for statement in parse_statements(config_text):
        if getattr(statement, "arg_name", ""):
            matches = registry.find(statement.selector)
            found |= {(statement.scope, match.selector, statement.arg_name) for match in matches}
    return found


def explain_build_error(error: Exception, config: LoadedConfig) -> str | None:
    """A text for an error that building the experiment raised, led by the place in the config it speaks of.

    None if the error names no `Fix:`, and so is no error of the configuration.
    """
    text = str(error)
    required = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*?)\]", text)
    if required:
        name, params = required[1], required[2].replace("'", "")
        first = params.split(",")[0]
        text = f"{name} needs a value for {params}, and nothing sets it. Fix: add {name}.{first} = <value>."
    elif "Fix:" not in text:
        return None
    callers = re.findall(r"In call to configurable '([\w.]+)'", text)
    message = re.sub(r"\n\s+In call to configurable .*", "", text, flags=re.DOTALL).strip()
    places = _places_named(message, config.bindings) or _places_of(callers, message, config.bindings)
    return f"{', '.join(places) or ', '.join(config.files)}: {message}"


def _places_named(message: str, bindings: Sequence[Binding]) -> list[str]:
    """Where the first parameters that the message names in full, such as Experiment.mode, are set."""
    keys = {problems.short_key(b): str(b.origin) for b in Table(bindings).remaining()}
    named = sorted((message.find(key), key) for key in keys if re.search(rf"{re.escape(key)}\b", message))
    return [keys[key] for _, key in named[:1]]


def _places_of(callers: Sequence[str], message: str, bindings: Sequence[Binding]) -> list[str]:
    """Where parameters of the failing configurable are set that the message mentions; else where all are."""
    for caller in callers:
        own = [b for b in Table(bindings).remaining() if b.selector.endswith(caller) and b.selector != MACRO]
        mentioned = [b for b in own if re.search(rf"\b{b.param}\b", message)]
        if own:
            return [str(b.origin) for b in (mentioned or own)[:3]]
    return []
