"""The way from config files and overrides to a configuration that gin holds, checked as a whole before.

The order: read every file and override; look every name up, compare values with annotations, look for missing
values; only then bind. Bindings that nothing reads are found when everything is built, from gin's own record.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gin

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
    with_references,
)
from .registry import MACRO, MISSING

_COMMENT_COLUMN = 60


@dataclass(frozen=True)
class LoadedConfig:
    """A sound configuration that gin holds now.

    Attributes:
        bindings: in order, with full selectors; later ones replace earlier ones.
        root: what will be called.
        source: what was read, with its files, imports, and warnings for the user.
    """

    bindings: tuple[Binding, ...]
    root: Node
    source: Source

    def text(self) -> str:
        """A gin text that sets the same values; each line says where its value comes from.

        It has the defaults of what references lead to. What they led to before a later source replaced a part
        is a comment.
        """
        found = checks.reach(self.bindings, [self.root])
        earlier = checks.reach_by_source(self.bindings, self.root).values()
        gone = set().union(*(before.seen for before in earlier)) - found.seen
        remaining = checks.remaining(self.bindings)
        kept = [b for b in remaining if b.key not in gone]
        blocks = [
            list(dict.fromkeys(self.source.imports)),
            [_bound(b) for b in kept if b.selector == MACRO],
            *(self._block(node) for node in found.nodes.values()),
            [_bound(b) for b in kept if b.selector != MACRO and b.key not in found.seen],
            [f"# unused: {shown(b)}" for b in remaining if b.key in gone],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"

    def _block(self, node: Node) -> list[str]:
        """All parameters of one configurable."""
        target = node.configurable
        scoped = f"{node.scope}/{target.name}" if node.scope else target.name
        bound = {b.param: b for b in checks.seen_by(self.bindings, node.scope, target.selector)}
        lines = []
        for name, param in target.params.items():
            if name in bound:
                lines.append(_line(f"{scoped}.{name}", repr(bound[name].value), str(bound[name].origin)))
            elif target.can_set(name) and param.default is not MISSING:
                lines.append(_default_line(f"{scoped}.{name}", param.default))
        return lines + [_bound(b) for name, b in bound.items() if name not in target.params]

    def check_unused(self) -> str:
        """After `start()`, before training: stop if gin's record shows that a value was never read.

        Returns: what is unused without being a mistake, for the user; "" without any.
        Raises: ConfigError listing each binding that its own source should not have set.
        """
        return checks.check_unused(self.bindings, self.root)


def load_config(
    configs: Sequence[str], overrides: Iterable[str | tuple[str, str]] = (), *, root: str = "Experiment"
) -> LoadedConfig:
    """Replace gin's configuration by config files (paths or preset names), in order, and overrides on top.

    Args:
        configs: paths of .gin files or names of presets.
        overrides: `Name.param=value`, or a pair of that and the argument to name in errors.
        root: the configurable that will be called, with nothing but what gin supplies.
    Raises: ConfigError, before anything is built, with all problems of all files.
    """
    gin.clear_config()
    source = read_source(configs, [(text, text) if isinstance(text, str) else text for text in overrides])
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
    return LoadedConfig(tuple(bindings), start, source)


def _left_out(root: str, bindings: Sequence[Binding]) -> list[Binding]:
    """None for an encoder that no source names: the experiment then takes what fits the observations.

    In Python the field has no default, so that the order of the required fields stays that of AMAGO.
    """
    selector, param = registry.find(root)[0].selector, "tstep_encoder_type"
    if root != "Experiment" or any((b.selector, b.param) == (selector, param) for b in bindings):
        return []
    origin = Origin(COMMAND_LINE, 0, f"{root}.{param} is not set: what fits the observations")
    return [Binding("", selector, param, None, origin, 0)]


# --- as text --------------------------------------------------------------------------------------------


def _bound(binding: Binding) -> str:
    return _line(checks.short_key(binding), repr(binding.value), str(binding.origin))


def _line(key: str, value: str, comment: str) -> str:
    return f"{f'{key} = {value}':<{_COMMENT_COLUMN}}  # {comment}"


def _default_line(key: str, default: Any) -> str:
    """A default: as gin would write it, or as a comment where gin has no way to write it."""
    configurable = registry.find_object(default)
    if configurable is not None:
        return _line(key, f"@{configurable.name}", "default")
    if registry.can_be_written(default):
        return _line(key, repr(default), "default")
    name = getattr(default, "__name__", type(default).__name__)
    return f"# {key}: the code's own choice ({name.strip('<>')})"


# --- errors of what is built ------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(config: LoadedConfig) -> Iterator[None]:
    """Raise errors of what is built from a config as ConfigErrors, led by the place in it that they speak of.

    An error that names no `Fix:` is no error of the configuration and passes through.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        text = str(error)
        required = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*?)\]", text)
        if required:
            name, params = required[1], required[2].replace("'", "")
            first = params.split(",")[0]
            text = (
                f"{name} needs a value for {params}, and nothing sets it. Fix: add {name}.{first} = <value>."
            )
        elif "Fix:" not in text:
            raise
        callers = re.findall(r"In call to configurable '([\w.]+)'", text)
        message = re.sub(r"\n\s+In call to configurable .*", "", text, flags=re.DOTALL).strip()
        where = ", ".join(_places(message, callers, config) or config.source.files)
        raise_if_any([f"{where}: {message}"])


def _places(message: str, callers: Sequence[str], config: LoadedConfig) -> list[str]:
    """Where the parameter is set that the message names first and in full, such as Experiment.mode.

    Without any: where parameters of the failing configurable are set, those that the message mentions if it
    does.
    """
    remaining = checks.remaining(config.bindings)
    named = [(re.search(rf"{re.escape(checks.short_key(b))}\b", message), b) for b in remaining]
    in_full = [(match.start(), str(b.origin)) for match, b in named if match]
    if in_full:
        return [min(in_full)[1]]
    for caller in callers:
        own = [b for b in remaining if b.selector.endswith(caller) and b.selector != MACRO]
        mentioned = [b for b in own if re.search(rf"\b{b.param}\b", message)]
        if own:
            return [str(b.origin) for b in (mentioned or own)[:3]]
    return []
