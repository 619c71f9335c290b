"""Gin files and command-line overrides as a list of bindings that know where they were written.

The parser is gin's own; only what it hands out for `@Name` and `%NAME` is ours, because nothing may be looked
up before every file has been read.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import tokenize
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from .errors import ConfigError
from .presets import find_config, find_include
from .syntax import override_value_error, syntax_error

COMMAND_LINE = "command line"
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Origin:
    """Where something was written. `line` counts from 1; it is 0 for an argument of the command line."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}, `{self.text}`" if self.file == COMMAND_LINE else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Reference:
    """`@scope/Name`, or `@scope/Name()` when `is_called`."""

    scoped_name: str
    is_called: bool

    @property
    def name(self) -> str:
        """The name without its scopes."""
        return self.scoped_name.rsplit("/", 1)[-1]

    @property
    def scope(self) -> tuple[str, ...]:
        """The scopes in front of the name, outermost first."""
        return tuple(self.scoped_name.split("/")[:-1])

    def __repr__(self) -> str:
        return f"@{self.scoped_name}{'()' if self.is_called else ''}"


@dataclass(frozen=True)
class Macro:
    """`%NAME`: the value bound to NAME, or a gin constant."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Binding:
    """One line `scope/selector.param = value`. A macro's line `NAME = value` has an empty `param`."""

    scope: str
    selector: str
    param: str
    value: Any
    origin: Origin
    source: int
    """Number of the file (or override list) it stands in, in the order in which these were opened."""

    @property
    def key(self) -> str:
        """The left side as text."""
        scoped = f"{self.scope}/{self.selector}" if self.scope else self.selector
        return f"{scoped}.{self.param}" if self.param else scoped

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}"


class _Delegate(config_parser.ParserDelegate):  # type: ignore[misc]  # gin ships no types
    """Keeps references and macros as they were written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def parse_statements(text: str) -> list[Any]:
    """Every statement of a gin text, in gin's own statement types.

    Raises: SyntaxError or tokenize.TokenError as gin's parser does.
    """
    return list(config_parser.ConfigParser(text, _Delegate()))


@dataclass
class Source:
    """Everything that was read, in order: later bindings replace earlier ones."""

    bindings: list[Binding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    num_opened: int = 0

    def read_file(self, path: Path, opened_by: tuple[Path, ...] = ()) -> None:
        """Append the bindings of one gin file and of what it includes.

        Raises: ConfigError naming file and line for syntax, missing files and imports, and circular includes.
        """
        shown, number = _shown(path), self._open()
        if not opened_by:
            self.files.append(shown)
        seen: dict[str, int] = {}
        text = _text_of(path, shown)
        try:
            for statement in config_parser.ConfigParser(text, _Delegate()):
                origin = Origin(shown, statement.location.line_num, statement.location.line_content.strip())
                if isinstance(statement, config_parser.IncludeStatement):
                    included = find_include(statement.filename, path, str(origin))
                    _refuse_circle(included, (*opened_by, path), origin)
                    self.read_file(included, (*opened_by, path))
                elif isinstance(statement, config_parser.ImportStatement):
                    _run_import(statement, origin)
                    self.imports.append(statement.format())
                elif isinstance(statement, config_parser.BindingStatement):
                    self._add(statement, origin, number, seen)
        except (SyntaxError, tokenize.TokenError) as error:
            raise syntax_error(error, shown, text) from None

    def read_overrides(self, overrides: Sequence[tuple[str, str]]) -> None:
        """Append overrides, each `(Name.param=value, the argument as the user typed it)`."""
        number = self._open()
        for text, typed in overrides:
            self.bindings.append(_parse_override(text, Origin(COMMAND_LINE, 0, typed), number))

    def _open(self) -> int:
        self.num_opened += 1
        return self.num_opened

    def _add(self, statement: Any, origin: Origin, number: int, seen: dict[str, int]) -> None:
        binding = Binding(
            statement.scope, statement.selector, statement.arg_name, statement.value, origin, number
        )
        if binding.key in seen:
            self.warnings.append(
                f"{origin}: {binding.key} was set in line {seen[binding.key]} too; the later line counts. "
                "Fix: remove one of them."
            )
        seen[binding.key] = origin.line
        self.bindings.append(binding)


def read_source(configs: Sequence[str], overrides: Sequence[tuple[str, str]] = ()) -> Source:
    """Read config files (paths or preset names) in order, then the overrides."""
    source = Source()
    for name in configs:
        source.read_file(find_config(name))
    source.read_overrides(overrides)
    return source


def _parse_override(text: str, origin: Origin, number: int) -> Binding:
    """One `Name.param=value`; a value that gin cannot parse is taken as a string.

    Raises: ConfigError if the left side is no name, or a reference is malformed.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"(\w+/)*[A-Za-z_][\w.]*", key) or not value:
        mend = f"for a config file write --config {text}" if not equals else "write Name.param=value"
        raise ConfigError(f"{origin}: an override must look like Name.param=value. Fix: {mend}.")
    try:
        (statement,) = parse_statements(f"{key} = {value}")
    except (SyntaxError, tokenize.TokenError, ValueError):
        if value[0] in "@%":
            raise override_value_error(str(origin), value) from None
        (statement,) = parse_statements(f"{key} = {value!r}")
    return Binding(statement.scope, statement.selector, statement.arg_name, statement.value, origin, number)


def _shown(path: Path) -> str:
    """The path as the user would write it: relative inside the working folder, else absolute."""
    relative = os.path.relpath(path)
    return str(path.resolve()) if relative.startswith("..") else relative


def _text_of(path: Path, shown: str) -> str:
    """The text of a file.

    Raises: ConfigError if it cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}: cannot be read ({error}). Fix: give a UTF-8 text file.") from None


def _refuse_circle(included: Path, opened: tuple[Path, ...], origin: Origin) -> None:
    """Raise ConfigError if a file would be included from within itself."""
    if included.resolve() in {path.resolve() for path in opened}:
        raise ConfigError(f"{origin}: `{origin.text}` leads back to itself. Fix: remove this line.")


def _run_import(statement: Any, origin: Origin) -> None:
    """Import a module that a config names, so that its classes are known; the working folder is searched too.

    Raises: ConfigError if it cannot be imported, led by the place in the module that is wrong.
    """
    if statement.module.startswith("__gin__"):
        raise ConfigError(
            f"{origin}: dynamic registration is not supported. Fix: decorate the class with "
            "@gin.configurable and import its module."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # at the end, so that nothing installed is hidden
    try:
        importlib.import_module(statement.module)
    except Exception as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{statement.module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{origin}: importing '{statement.module}' failed: {error}. Fix: install it, or start from "
                "the folder that holds it."
            ) from None
        file, line = _place_of(error)
        raise ConfigError(
            f"{_shown(Path(file))}:{line}: {type(error).__name__}: {getattr(error, 'msg', error)}, while "
            f"importing {statement.module} for {origin}. Fix: correct that line."
        ) from None
    gin.parse_config(statement.format())  # recorded, so that a saved config repeats the import


def _place_of(error: Exception) -> tuple[str, int]:
    """File and line of the user's code that raised `error`: what is installed is not where the mistake is."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the import in this file
    own = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<"))]
    return (own or frames)[-1].filename, (own or frames)[-1].lineno or 1
