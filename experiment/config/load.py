"""Load config files and overrides into gin, after checking them as a whole.

The order: read every file and override; look every name up, compare values with annotations, look for missing
values; only then bind. Bindings that nothing reads are found when everything is built, from gin's own record.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gin

from ...gin_configs.presets import RECOMMENDED
from ...gin_configs.start import GinText
from . import checks, registry
from .checks import Node, shown
from .reading import Binding, ConfigError, Source, raise_if_any, read_source, with_references

_COMMENT_COLUMN = 60
_LACKING = re.compile(r"Required bindings for `(.+?)` not provided in config: \[(.+?)\]")  # gin's words
_loaded: LoadedConfig | None = None


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration that gin holds now.

    Attributes:
        bindings: in order, with the shortest names; later ones replace earlier ones.
        root: the configurable that will be called.
        source: everything that was read, with its files, imports, and warnings for the user.
    """

    bindings: tuple[Binding, ...]
    root: Node
    source: Source

    def text(self) -> str:
        """A gin text that sets the same values; each line shows where its value comes from.

        It includes the defaults of referenced configurables. Settings of a part that a later source replaced
        are comments.
        """
        left_over = checks.left_over(self.bindings, [self.root])
        used = [b for b in checks.remaining(self.bindings) if b not in left_over]
        blocks = [
            list(dict.fromkeys(self.source.imports)),
            [_line(b.key, repr(b.value), str(b.origin)) for b in used],
            *(self._defaults(node) for node in checks.reach(self.bindings, [self.root]).values()),
            [f"# unused: {shown(b)}" for b in left_over],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"

    def _defaults(self, node: Node) -> list[str]:
        """Parameters of a configurable that nothing binds; as a comment if gin cannot write the value."""
        target, lines = node.configurable, []
        own = {(node.scope, target.name): node}
        bound = {b.param for b in self.bindings if checks.is_applied(b, own)}
        for name, param in target.params.items():
            if name in bound or not target.can_set(name) or param.default is registry.MISSING:
                continue
            default = registry.find_object(param.default)
            value = repr(param.default) if default is None else f"@{default.name}"
            key = f"{node.scope}/{target.name}.{name}" if node.scope else f"{target.name}.{name}"
            if default is None and not registry.can_be_written(param.default):
                lines.append(f"# {key}: chosen by the code")
            else:
                lines.append(_line(key, value, "default"))
        return lines

    def is_set_by_user(self, key: str) -> bool:
        """True if the command line or a file other than a preset sets this parameter, even if to None."""
        return any(binding.key == key and not checks.is_in_preset(binding) for binding in self.bindings)

    def is_in_gin(self) -> bool:
        """False if gin was cleared since this config was loaded."""
        return all(map(_is_in_gin, self.bindings))

    def check_unused(self, unread: Collection[str] = ()) -> str:
        """Check after `start()`, before training; raises if gin's record shows that a value was never read.

        unread: parameters whose parts were not built, see `Experiment.unread_parts`.

        Returns: a text on settings that were not read yet and may be read later; "" without any.
        Raises: ConfigError listing each setting that has no effect.
        """
        return checks.check_unused(self.bindings, self.root, unread)


def load_config(
    configs: str | Sequence[str | GinText],
    overrides: Mapping[str, Any] | Iterable[str | tuple[str, str]] = (),
    *,
    root: str = "Experiment",
    is_complete: bool = False,
    is_ignored: Callable[[Binding], bool] = lambda _: False,
) -> LoadedConfig:
    """Replace gin's configuration by config files (paths or preset names), in order, and overrides on top.

    Args:
        configs: paths of .gin files, names of presets, or texts; or a single path or name.
        overrides: `Name.param=value`, or a pair of that and the argument to name in errors; or values by
            `Name.param`, where a text that begins with @ or % is a reference.
        root: the configurable that will be called.
        is_complete: True if it will be called with only the arguments that gin supplies, so that required
            ones have to be there.
        is_ignored: returns True for a binding to leave out.
    Raises: ConfigError, before anything is built, with all problems of all files.
    """
    global _loaded  # noqa: PLW0603 - gin's configuration is global, too
    gin.clear_config()
    _loaded = None
    configs = [configs] if isinstance(configs, str) else configs
    if isinstance(overrides, Mapping):
        overrides = [f"{name}={_in_gin(name, value)}" for name, value in overrides.items()]
    overrides = [overrides] if isinstance(overrides, str) else overrides
    source = read_source(configs, [(text, text) if isinstance(text, str) else text for text in overrides])
    source.bindings = [binding for binding in source.bindings if not is_ignored(binding)]
    unknown = checks.unknown_names(source.bindings)
    bindings = checks.resolved(source.bindings)
    start = Node(registry.find(root)[0], is_called=is_complete)
    missing = checks.missing_required(bindings, start, source.files)
    # a misspelt name is not reported as a missing value too
    raise_if_any([*unknown, *checks.wrong_types(bindings), *([] if unknown else missing)])
    for b in bindings:
        value = with_references(b.value, lambda ref: gin.config.parse_value(repr(ref)))
        gin.bind_parameter((b.scope, b.selector, b.param), value)
    _loaded = LoadedConfig(tuple(bindings), start, source)
    return _loaded


def _in_gin(name: str, value: Any) -> str:
    """A value as gin writes it. Raises: ConfigError for an object, which gin cannot write."""
    if isinstance(value, str) and value.startswith(("@", "%")):
        return value
    if not registry.can_be_written(value):
        raise ConfigError(
            f"{name} is {value!r}, but load_config takes numbers, texts, lists and dicts. Fix: write a "
            f'reference, such as {{"{name}": "@NStep()", "NStep.n": 3}}.'
        )
    return repr(value)


def unused_settings(unread: Collection[str] = ()) -> str:
    """Text about settings that nothing has read when everything is built; "" if there are none.

    Only of a config that Python code has loaded: commands raise such errors by `LoadedConfig.check_unused`.

    unread: see there.
    """
    if _loaded is None or _loaded.root.is_called or not _loaded.is_in_gin():
        return ""
    try:
        return _loaded.check_unused(unread)
    except ConfigError as error:
        return str(error)


def _is_in_gin(binding: Binding) -> bool:
    """False if gin was cleared since the binding was made."""
    if binding.selector == registry.MACRO:
        return True
    try:
        gin.query_parameter(binding.key)
    except ValueError:
        return False
    return True


def loaded() -> LoadedConfig | None:
    """The config that was loaded last; None if none was, or it has mistakes."""
    return _loaded


def starts_from_recommended() -> bool:
    """True if gin holds settings of Experiment that a recommended preset is part of."""
    try:
        gin.query_parameter("Experiment.agent_type")
    except ValueError:  # gin was cleared since, or nothing was loaded
        return False
    return _loaded is not None and not _loaded.source.presets.isdisjoint(RECOMMENDED)


def _line(key: str, value: str, comment: str) -> str:
    return f"{f'{key} = {value}':<{_COMMENT_COLUMN}}  # {comment}"


# --- errors of built objects ------------------------------------------------------------------------------


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise errors of built objects as ConfigErrors, without gin's trace of calls.

    An error without `Fix:` is not about the configuration and passes through.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        text = str(error)
        if lacking := _LACKING.search(text):
            name, params = lacking[1], [param.strip("' ") for param in lacking[2].split(",")]
            settings = " and ".join(f"{name}.{param}" for param in params)
            text = f"{name} needs a value for {', '.join(params)}, and nothing sets it. Fix: set {settings}."
        if "Fix:" not in text:
            raise
        raise_if_any([re.sub(r"\n\s+In call to configurable .*", "", text, flags=re.DOTALL).strip()])
