"""Gin files, presets and command-line overrides as a list of bindings with their places.

The parser is gin's own; only its results for `@Name` and `%NAME` are ours, because nothing may be looked up
before every file has been read. Syntax errors are explained in words.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import tokenize
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from ...gin_configs.presets import (
    did_you_mean,
    find_preset,
    no_such_config,
    override_problem,
    preset_names,
    preset_root,
)
from ...gin_configs.start import GinText
from .registry import MACRO, all_known

COMMAND_LINE = "command line"
MAX_LISTED = 8
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


# --- errors ---------------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A configuration that cannot be used. Each problem has its place, the value found, and `Fix:`."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = list(self.problems)
        if len(lines) > 1:
            more = [f"... and {len(lines) - MAX_LISTED} more."] if len(lines) > MAX_LISTED else []
            head = f"{len(lines)} problems in the configuration. Fix: correct each of these."
            lines = [head, *(f"  {line}" for line in [*lines[:MAX_LISTED], *more])]
        super().__init__("\n".join(lines))


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists `problems`, if there are any."""
    if problems:
        error = ConfigError(problems)
        raise error


# --- statements -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Place where something was written. `line` counts from 1; it is 0 for a command-line argument."""

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
        return self.scoped_name.rpartition("/")[2]

    @property
    def scope(self) -> str:
        """The scopes in front of the name, outermost first, such as `a/b`; "" without any."""
        return self.scoped_name.rpartition("/")[0]

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
    """One line `scope/selector.param = value`. For `NAME = value` it is `NAME/gin.macro.value`, as in gin."""

    scope: str
    selector: str
    param: str
    value: Any
    origin: Origin
    source: int
    """Number of its file (or override list), in the order of opening."""

    @property
    def key(self) -> str:
        """The left side as text."""
        if self.selector == MACRO:
            return self.scope
        scoped = f"{self.scope}/{self.selector}" if self.scope else self.selector
        return f"{scoped}.{self.param}"


def references_in(value: Any) -> list[Reference | Macro]:
    """References and macros anywhere inside a bound value."""
    found: list[Reference | Macro] = []
    with_references(value, found.append)
    return found


def with_references(value: Any, change: Callable[[Reference | Macro], Any]) -> Any:
    """The value with `change` applied to each reference and macro in it."""
    if isinstance(value, (Reference, Macro)):
        return change(value)
    if isinstance(value, Mapping):
        return {with_references(k, change): with_references(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_references(item, change) for item in value)
    return value


def without_macros(value: Any, macros: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """The value with every macro of `macros` (values by names) replaced by its value."""

    def meant(ref: Reference | Macro) -> Any:
        if isinstance(ref, Reference) or ref.name not in macros or ref.name in inside:
            return ref
        return without_macros(macros[ref.name], macros, (*inside, ref.name))

    return with_references(value, meant)


class _Delegate(config_parser.ParserDelegate):  # type: ignore[misc]  # gin ships no types
    """Keeps references and macros as they were written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def parse_statements(text: str) -> list[Any]:
    """Every statement of a gin text, in gin's own statement types; nothing is imported or looked up.

    Raises: SyntaxError or tokenize.TokenError, as in gin's parser.
    """
    return list(config_parser.ConfigParser(text, _Delegate()))


def bindings_in(text: str) -> list[Binding]:
    """The bindings of a gin text without a file. Raises: the errors of parse_statements."""
    return [_binding(one, Origin("", 0, ""), 0) for one in parse_statements(text) if hasattr(one, "arg_name")]


# --- files and overrides --------------------------------------------------------------------------------


@dataclass
class Source:
    """Everything that was read, in order: later bindings replace earlier ones.

    warnings: texts about legal settings that are probably mistakes. files: as shown to the user. own_files:
    all that were read, included ones too, but for the shipped ones. presets: names of the shipped ones.
    imports: import statements of the files.
    problems: texts for an error. num_opened: files, and the overrides.
    """

    bindings: list[Binding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    own_files: list[Path] = field(default_factory=list)
    presets: set[str] = field(default_factory=set)
    imports: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_opened: int = 0

    def read_file(self, path: Path, opened_by: tuple[Path, ...] = ()) -> None:
        """Append the bindings of one gin file and of the files it includes, and their problems."""
        shown = _shown(path)
        if not opened_by:
            self.files.append(shown)
        root, resolved = preset_root(), path.resolve()
        if root in resolved.parents:
            self.presets.add(resolved.relative_to(root).with_suffix("").as_posix())
        else:
            self.own_files.append(path)
            search_in(path.absolute().parent, resolved.parent)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.num_opened += 1
            self.problems.append(f"{shown}: cannot be read ({error}). Fix: give a UTF-8 text file.")
            return
        self.read_text(text, path, shown, opened_by)

    def read_text(self, text: str, path: Path, shown: str, opened_by: tuple[Path, ...] = ()) -> None:
        """Read a text that is, or would be, in the file `path`; shown: the name for errors."""
        self.num_opened += 1
        number = self.num_opened
        try:
            for statement in parse_statements(text):
                origin = Origin(shown, statement.location.line_num, statement.location.line_content.strip())
                try:
                    self._take(statement, origin, number, (*opened_by, path))
                except ConfigError as error:
                    self.problems += error.problems
        except (SyntaxError, tokenize.TokenError) as error:
            self.problems.append(_syntax_problem(error, shown, text))

    def _take(self, statement: Any, origin: Origin, number: int, opened: tuple[Path, ...]) -> None:
        """Act on one statement of the file that was opened last."""
        if isinstance(statement, config_parser.IncludeStatement):
            included = _find_include(statement.filename, opened[-1], origin)
            if included.resolve() in {path.resolve() for path in opened}:
                raise ConfigError(
                    f"{origin}: `{origin.text}` includes a file that includes this one. Fix: remove this "
                    "line."
                )
            self.read_file(included, opened)
        elif isinstance(statement, config_parser.ImportStatement):
            _run_import(statement, origin)
            self.imports.append(statement.format())
        elif isinstance(statement, config_parser.BindingStatement):
            binding = _binding(statement, origin, number)
            if before := [b for b in self.bindings if (b.source, b.key) == (number, binding.key)]:
                self.warnings.append(
                    f"{origin}: {binding.key} is also set in line {before[-1].origin.line}; the later line "
                    "takes effect. Fix: remove one of them."
                )
            self.bindings.append(binding)

    def read_override(self, text: str, typed: str) -> None:
        """Append `Name.param=value`, shown as `typed` in errors; a value gin cannot parse is a string."""
        origin = Origin(COMMAND_LINE, 0, typed)
        key, _, value = (part.strip() for part in text.partition("="))
        if problem := override_problem(text):
            self.problems.append(f"{origin}: {problem}")
            return
        try:
            (statement,) = parse_statements(f"{key} = {value}")
        except (SyntaxError, tokenize.TokenError, ValueError):
            if value[0] in "@%":
                self.problems.append(
                    f"{origin}: `{value}` is not a reference. Fix: write @Name, @Name() or %NAME; for a "
                    f"string, put quotes inside the argument: \"'{value}'\"."
                )
                return
            (statement,) = parse_statements(f"{key} = {value!r}")
        self.bindings.append(_binding(statement, origin, self.num_opened))


def read_source(configs: Sequence[str | GinText], overrides: Iterable[tuple[str, str]] = ()) -> Source:
    """Read config files (paths, preset names, texts), then overrides, in order, each with the typed argument.

    Raises: ConfigError listing what cannot be found, read or imported in all of them.
    """
    source = Source()
    for name in configs:
        try:
            if isinstance(name, GinText):
                source.files.append(name.name)
                source.read_text(name.text, Path("start.gin"), name.name)
            else:
                source.read_file(find_config(name))
        except ConfigError as error:
            source.problems += error.problems
    source.num_opened += 1
    for text, typed in overrides:
        source.read_override(text, typed)
    raise_if_any(source.problems)
    return source


def _binding(statement: Any, origin: Origin, number: int) -> Binding:
    scope, selector, param = statement.scope, statement.selector, statement.arg_name
    if not param:
        scope, selector, param = f"{scope}/{selector}" if scope else selector, MACRO, "value"
    return Binding(scope, selector, param, statement.value, origin, number)


def _shown(path: Path) -> str:
    """The path as the user would write it: relative inside the working folder, else absolute."""
    relative = os.path.relpath(path)
    return str(path.resolve()) if relative.startswith("..") else relative


def search_in(*folders: str | Path) -> None:
    """Let modules be imported from these folders, in this process and in its child processes.

    They come last: a file next to a config never hides a module of Python or an installed one.
    """
    sys.path += [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]


def import_path() -> list[str]:
    """The folders from which this process imports modules that are not installed."""
    found = [Path(entry).absolute() for entry in sys.path if not entry.startswith(_INSTALLED)]
    return [str(one) for one in found if one.is_dir() and one.name not in ("site-packages", "dist-packages")]


def _run_import(statement: Any, origin: Origin) -> None:
    """Import a module that a config names, so that its classes are known; the working folder is searched too.

    Raises: ConfigError if it cannot be imported, beginning with the faulty place in the module.
    """
    search_in(Path.cwd())
    try:
        importlib.import_module(statement.module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{statement.module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{origin}: importing '{statement.module}' failed: {error}. Fix: install it, or put it "
                "into the folder of this file, or start from the folder that holds it."
            ) from None
        file, line = _place_of(error)
        raise ConfigError(
            f"{_shown(Path(file))}:{line}: {type(error).__name__}: {getattr(error, 'msg', error)}, while "
            f"importing {statement.module} for {origin}. Fix: correct that line."
        ) from None
    gin.parse_config(statement.format())  # recorded, so that a saved config repeats the import


def _place_of(error: BaseException) -> tuple[str, int]:
    """File and line of the user's code that raised `error`; installed code is not at fault."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the import in this file
    own = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<"))]
    return (own or frames)[-1].filename, (own or frames)[-1].lineno or 1


# --- presets and paths ----------------------------------------------------------------------------------


def find_config(name: str) -> Path:
    """The file that `--config name` refers to: an existing path first, then a preset.

    Raises: ConfigError naming near matches and all presets.
    """
    if (path := find_preset(name)) is None:
        raise ConfigError(
            f"command line, `--config {name}`: {no_such_config(name)} "
            "Fix: give the path of a .gin file, or the name of a preset."
        )
    return path


def _find_include(name: str, included_from: Path, origin: Origin) -> Path:
    """The file of an `include`: relative to the including file, the presets, or the working folder."""
    searched = [included_from.parent, preset_root(), Path.cwd()]
    for folder in searched:
        if (folder / name).is_file():
            return folder / name
    meant = did_you_mean(name.removesuffix(".gin"), preset_names())
    raise ConfigError(
        f"{origin}: include '{name}' names no file.{meant} Searched in: "
        f"{', '.join(dict.fromkeys(str(folder) for folder in searched))}. Fix: correct the path."
    )


# --- explanations of syntax errors ------------------------------------------------------------------------


def _syntax_problem(error: SyntaxError | tokenize.TokenError, file: str, text: str) -> str:
    """Description of a syntax error in `text`, the content of `file`: line, found text, expected form."""
    if isinstance(error, SyntaxError):
        number, reason = error.lineno or 1, str(error.msg)
    else:
        reason, (number, _) = str(error.args[0]), error.args[1]
    lines = text.splitlines()
    number = min(number, len(lines))
    line = lines[number - 1].strip()
    name = line.partition("=")[2].strip().removesuffix("()")
    if line.startswith("include "):
        fix = f"write include '{line.removeprefix('include ')}'"
    elif name in {known.name for known in all_known()}:
        fix = f"write @{name} to refer to the class"
    else:
        fix = (
            "write Name.param = value, with a number, a quoted string, True, False, None, @Name or %NAME as "
            "value; and close each bracket and quote, also in the lines above"
        )
    return f"{file}:{number}: `{line}` cannot be read ({reason.rstrip('.')}). Fix: {fix}."
