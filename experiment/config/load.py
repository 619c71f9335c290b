"""The way from config files and overrides to a configuration that gin holds, checked as a whole before.

The order: read every file and override; look every name up, compare values with annotations, look for missing
values; only then bind. Bindings that nothing reads are found when everything is built, from gin's own record.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gin

from ...gin_configs.presets import RECOMMENDED
from ...gin_configs.start import GinText
from . import checks, registry
from .checks import Node, shown
from .reading import (
    COMMAND_LINE,
    Binding,
    ConfigError,
    Origin,
    Source,
    raise_if_any,
    read_source,
    references_in,
    with_references,
    without_macros,
)
from .registry import MACRO

_COMMENT_COLUMN = 60
_MOST_PLACES = 3  # named in an error
_presets_read: set[str] = set()


@dataclass(frozen=True)
class LoadedConfig:
    """A sound configuration that gin holds now.

    Attributes:
        bindings: in order, with the shortest names; later ones replace earlier ones.
        root: what will be called.
        source: what was read, with its files, imports, and warnings for the user.
    """

    bindings: tuple[Binding, ...]
    root: Node
    source: Source

    def text(self) -> str:
        """A gin text that sets the same values; each line says where its value comes from.

        The defaults of what references lead to are there, too. What was used before a later source replaced
        what used it is a comment.
        """
        final = checks.reach(self.bindings, [self.root])
        earlier = {
            key for nodes in checks.reach_by_source(self.bindings, [self.root]).values() for key in nodes
        }
        remaining = checks.remaining(self.bindings)
        gone = [b for b in remaining if checks.is_seen(b, earlier) and not checks.is_seen(b, final)]
        blocks = [
            list(dict.fromkeys(self.source.imports)),
            [_line(b.key, repr(b.value), str(b.origin)) for b in remaining if b not in gone],
            *(self._defaults(node) for node in final.values()),
            [f"# unused: {shown(b)}" for b in gone],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"

    def _defaults(self, node: Node) -> list[str]:
        """Parameters of a configurable that nothing binds; as a comment where gin has no way to write one."""
        target, lines = node.configurable, []
        bound = checks.bound_in(node.scope, target.name, self.bindings)
        for name, param in target.params.items():
            if name in bound or not target.can_set(name) or param.default is registry.MISSING:
                continue
            default = registry.find_object(param.default)
            value = repr(param.default) if default is None else f"@{default.name}"
            key = f"{node.scope}/{target.name}.{name}" if node.scope else f"{target.name}.{name}"
            if default is None and not registry.can_be_written(param.default):
                lines.append(f"# {key}: the code's own choice")
            else:
                lines.append(_line(key, value, "default"))
        return lines

    def is_set_by_user(self, key: str) -> bool:
        """Whether the command line or a file that is not a preset sets this parameter, be it to None."""
        return any(binding.key == key and not checks.is_in_preset(binding) for binding in self.bindings)

    def check_unused(self) -> str:
        """After `start()`, before training: stop if gin's record shows that a value was never read.

        Returns: what is unused without being a mistake, for the user; "" without any.
        Raises: ConfigError listing each binding that its own source should not have set.
        """
        return checks.check_unused(self.bindings, self.root)


def load_config(
    configs: Sequence[str | GinText],
    overrides: Iterable[str | tuple[str, str]] = (),
    *,
    root: str = "Experiment",
    is_ignored: Callable[[Binding], bool] = lambda _: False,
) -> LoadedConfig:
    """Replace gin's configuration by config files (paths or preset names), in order, and overrides on top.

    Args:
        configs: paths of .gin files, names of presets, or texts.
        overrides: `Name.param=value`, or a pair of that and the argument to name in errors.
        root: the configurable that will be called, with nothing but what gin supplies.
        is_ignored: says of a binding whether to leave it out.
    Raises: ConfigError, before anything is built, with all problems of all files.
    """
    gin.clear_config()
    source = read_source(configs, [(text, text) if isinstance(text, str) else text for text in overrides])
    source.bindings = [binding for binding in source.bindings if not is_ignored(binding)]
    unknown = checks.unknown_names(source.bindings)
    bindings = checks.resolved(source.bindings)
    bindings = [*_left_out(root, bindings), *bindings]
    start = Node(registry.find(root)[0], is_called=True)
    missing = checks.missing_required(bindings, start, source.files)
    # a misspelt name is not also a missing value
    raise_if_any([*unknown, *checks.wrong_types(bindings), *([] if unknown else missing)])
    for b in bindings:
        value = with_references(b.value, lambda ref: gin.config.parse_value(repr(ref)))
        gin.bind_parameter((b.scope, b.selector, b.param), value)
    _presets_read.clear()
    _presets_read.update(source.presets)
    return LoadedConfig(tuple(bindings), start, source)


def starts_from_recommended() -> bool:
    """Whether gin holds settings of Experiment that a recommended preset is part of."""
    try:
        gin.query_parameter("Experiment.agent_type")
    except ValueError:  # gin was cleared since, or nothing was loaded
        return False
    return not _presets_read.isdisjoint(RECOMMENDED)


def _left_out(root: str, bindings: Sequence[Binding]) -> list[Binding]:
    """None for an encoder that no source names: the experiment then takes what fits the observations.

    In Python the field has no default, so that the order of the required fields stays that of AMAGO.
    """
    param = "tstep_encoder_type"
    if root != "Experiment" or any((b.selector, b.param) == (root, param) for b in bindings):
        return []
    origin = Origin(COMMAND_LINE, 0, f"{root}.{param} is not set: what fits the observations")
    return [Binding("", root, param, None, origin, 0)]


def _line(key: str, value: str, comment: str) -> str:
    return f"{f'{key} = {value}':<{_COMMENT_COLUMN}}  # {comment}"


# --- errors of what is built ------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(config: LoadedConfig) -> Iterator[None]:
    """Raise errors of what is built from a config as ConfigErrors, led by the places that they are about.

    An error without `Fix:` is not about the configuration and passes through.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        text = str(error)
        if "Fix:" not in text:
            raise
        callers = re.findall(r"In call to configurable '([\w.]+)'", text)
        message = re.sub(r"\n\s+In call to configurable .*", "", text, flags=re.DOTALL).strip()
        where = ", ".join(_places(message, callers, config))
        raise_if_any([f"{where}: {message}" if where else message])


def _places(message: str, callers: Sequence[str], config: LoadedConfig) -> list[str]:
    """Where the values are set that the message is about; none where that is not certain.

    A message is about a binding if it names it in full before "Fix:", such as Experiment.mode. Otherwise it
    must show the value there and name the parameter: in full in the advice, or alone if it also names the
    class or comes from a call of it. A text that is not a plain word, such as an id or a path, names itself.
    What was typed goes before files, which are mostly right.
    """
    remaining = checks.remaining(config.bindings)
    body, _, advice = message.partition("Fix:")
    words = set(re.findall(r"\w+", body))
    macros = checks.macros_of(remaining)
    in_full, shown, quoted = [], [], []
    for binding in remaining:
        if binding.selector == MACRO:
            continue
        key, value = f"{binding.selector}.{binding.param}", without_macros(binding.value, macros)
        owns = binding.selector in words or any(binding.selector.endswith(caller) for caller in callers)
        if match := _found(key, body):
            in_full.append((match.start(), binding))
        elif not any(_found(text, body) for text in _as_texts(value)):
            continue
        elif _found(key, advice) or (owns and binding.param in words):
            shown.append(binding)
        elif isinstance(value, str) and not re.fullmatch("[a-z_]+", value) and binding.param != "run_name":
            quoted.append(binding)
    first = [binding for _, binding in sorted(in_full, key=lambda pair: pair[0])[:1]]
    origins = [checks.line_of_value(binding, remaining).origin for binding in [*first, *(shown or quoted)]]
    typed = [origin for origin in origins if origin.file == COMMAND_LINE and (first or shown)]
    certain = typed[:1] or origins[: 1 if first else _MOST_PLACES]
    return list(dict.fromkeys(map(str, certain)))


def _found(text: str, where: str) -> re.Match[str] | None:
    """`text` as words of its own, not as a part of longer ones or of a longer number."""
    return re.search(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\w)", where)


def _as_texts(value: Any) -> set[str]:
    """How a message may show a value; nothing for references."""
    if isinstance(value, float):
        return {repr(value), f"{value:g}"}
    if isinstance(value, int):
        return {repr(value), f"{value:,}"}
    return set() if references_in(value) else {repr(value)}
