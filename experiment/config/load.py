"""The way from config files and overrides to a configuration that gin holds, checked as a whole before.

The order: read every file and override; look every name up, compare values with annotations, look for missing
values; only then bind. Bindings that nothing reads are found when everything is built, from gin's own record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gin

from . import checks, registry
from .checks import Node, Table, shown
from .reading import COMMAND_LINE, Binding, Origin, raise_if_any, read_source, with_references
from .registry import MACRO, MISSING, Param

_COMMENT_COLUMN = 60


@dataclass(frozen=True)
class LoadedConfig:
    """A sound configuration that gin holds now.

    Attributes:
        bindings: in order, with full selectors; later ones replace earlier ones.
        root: what will be called.
        files: the config files, as shown to the user.
        imports: import statements of the files.
        warnings: texts for the user about what is legal and probably not meant.
    """

    bindings: tuple[Binding, ...]
    root: Node
    files: tuple[str, ...]
    imports: tuple[str, ...]
    warnings: tuple[str, ...]

    def text(self) -> str:
        """A gin text that sets the same values; each line says where its value comes from.

        It has the defaults of what references lead to. What they led to before a later source replaced a part
        is a comment.
        """
        table = Table(self.bindings)
        found = checks.reach(table, [self.root])
        earlier = [Table(self.bindings[:end]) for end in checks.replacements(self.bindings, found)]
        gone = {key for before in earlier for key in checks.reach(before, [self.root]).seen} - found.seen
        kept = [b for b in table.remaining() if id(b) not in gone]
        blocks = [
            list(dict.fromkeys(self.imports)),
            [_bound(b) for b in kept if b.selector == MACRO],
            *(_block(node, table) for node in found.nodes.values()),
            [_bound(b) for b in kept if b.selector != MACRO and id(b) not in found.seen],
            [f"# unused: {shown(b)}" for b in table.remaining() if id(b) in gone],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"

    def redirect(self, param: str, value: Any) -> None:
        """Bind `param` anew for everything in gin that has a parameter of this name, in every scope."""
        scopes = {("", known.selector) for known in registry.all_known() if param in known.params}
        scopes |= {(b.scope, b.selector) for b in self.bindings if b.param == param}
        for scope, selector in scopes:
            gin.bind_parameter((scope, selector, param), value)

    def check_unused(self) -> str:
        """After `start()`, before training: stop if gin's record shows that a value was never read.

        Returns: what is unused without being a mistake, for the user; "" without any.
        Raises: ConfigError listing each binding that its own source should not have set.
        """
        problems, left_over, not_yet = checks.unread(self.bindings)
        raise_if_any(problems)
        notes = [f"{shown(b)} was not read yet; it counts if code calls it later." for b in not_yet]
        if num := len(left_over):
            notes.append(
                f"{num} {'setting is' if num == 1 else 'settings are'} unused, because a later file or the "
                "command line replaced what used them (--print-config lists them)."
            )
        return "\n".join(notes)


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
    table, start = Table(bindings), Node(registry.find(root)[0], (), is_called=True)
    missing = checks.missing_required(table, start, source.files)
    # a misspelt name is not also a missing value
    raise_if_any([*unknown, *checks.wrong_types(bindings, table), *([] if unknown else missing)])
    for b in bindings:
        value = with_references(b.value, lambda ref: gin.config.parse_value(repr(ref)))
        gin.bind_parameter((b.scope, b.selector, b.param), value)
    return LoadedConfig(
        tuple(bindings), start, tuple(source.files), tuple(source.imports), tuple(source.warnings)
    )


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


def _block(node: Node, table: Table) -> list[str]:
    """All parameters of one configurable."""
    target = node.configurable
    scoped = "/".join([*node.scope, target.name])
    bound = table.effective(node.scope, target.selector)
    lines = []
    for name, param in target.params.items():
        if name in bound:
            lines.append(_line(f"{scoped}.{name}", repr(bound[name].value), str(bound[name].origin)))
        elif param.is_settable and param.default is not MISSING:
            lines.append(_default_line(f"{scoped}.{name}", param))
    return lines + [_bound(b) for name, b in bound.items() if name not in target.params]


def _bound(binding: Binding) -> str:
    return _line(checks.short_key(binding), repr(binding.value), str(binding.origin))


def _line(key: str, value: str, comment: str) -> str:
    return f"{f'{key} = {value}':<{_COMMENT_COLUMN}}  # {comment}"


def _default_line(key: str, param: Param) -> str:
    """A default: as gin would write it, or as a comment where gin has no way to write it."""
    configurable = registry.find_object(param.default)
    if configurable is not None:
        return _line(key, f"@{configurable.name}", "default")
    if registry.can_be_written(param.default):
        return _line(key, repr(param.default), "default")
    name = getattr(param.default, "__name__", type(param.default).__name__)
    return f"# {key}: the code's own choice ({name.strip('<>')})"


# --- errors of what is built ------------------------------------------------------------------------------


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
    return f"{', '.join(_places(message, callers, config) or config.files)}: {message}"


def _places(message: str, callers: Sequence[str], config: LoadedConfig) -> list[str]:
    """Where the parameter is set that the message names first and in full, such as Experiment.mode.

    Without any: where parameters of the failing configurable are set, those that the message mentions if it
    does.
    """
    remaining = Table(config.bindings).remaining()
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
