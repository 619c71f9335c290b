"""What gin's parser could not read, in words: the line, the offending text, and how it should look."""

from __future__ import annotations

import re
import tokenize

from .errors import ConfigError
from .registry import names_known

_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_BARE = re.compile(r"[^\s\[\](){},#'\"@%]+")


def syntax_error(error: SyntaxError | tokenize.TokenError, file: str, text: str) -> ConfigError:
    """What to raise for an error of gin's parser in `text`, the content of `file`."""
    return ConfigError(_explain(error, file, text))


def override_value_error(where: str, value: str) -> ConfigError:
    """What to raise for a command-line value that starts like a reference and is none."""
    return ConfigError(
        f"{where}: `{value}` is no reference. Fix: write @Name, @Name() or %NAME; for a string put quotes inside the "
        f"argument: \"'{value}'\"."
    )


def _explain(error: SyntaxError | tokenize.TokenError, file: str, text: str) -> str:
    if isinstance(error, SyntaxError):
        line_number, reason = error.lineno or 1, str(error.msg)
    else:
        reason, (line_number, _) = str(error.args[0]), error.args[1]
    lines = text.splitlines() or [""]
    line_number = min(max(line_number, 1), len(lines))
    line = lines[line_number - 1]
    where = f"{file}:{line_number}"
    if "multi-line statement" in reason or "never closed" in reason:
        return f"{where}: a bracket is opened and never closed. Fix: close it before the next binding."
    if "string literal" in reason and "unterminated" in reason:
        return f"{where}: `{line.strip()}` has a quote that is never closed. Fix: close it."
    if isinstance(error, IndentationError):
        return f"{where}: `{line.strip()}` is indented in a way that fits no block. Fix: align it with its neighbours."
    left, equals, value = (part.strip() for part in line.partition("="))
    if not equals:
        left, value = "", line.strip()
    if "Couldn't parse statement" in reason or (not equals and "token" not in reason):
        return (
            f"{where}: `{line.strip()}` is no binding. Fix: write Name.param = value, a block `Name:` with indented "
            "lines, include 'file.gin' or import module."
        )
    return f"{where}: {_value_problem(left, value, reason)}"


def _value_problem(left: str, value: str, reason: str) -> str:
    """Text for a value (what follows `=`) that is no gin literal."""
    value = re.sub(r"\s+#.*$", "", value)
    shown = f"{left} = {value}" if left else value
    failed = re.search(r"Failed to parse token '(.*)'", reason, re.DOTALL)
    token = failed.group(1) if failed else _first_odd_word(value)
    target = value if _is_plain(value) else token
    if not target:
        return f"`{shown}` is not gin syntax. Fix: write Name.param = value with a number, a quoted string or @Name."
    found = f"`{shown}`: {target} is no number, quoted string, True, False, None, @Name or %NAME."
    if target.lower() in _WORDS:
        return f"{found} Fix: write {_WORDS[target.lower()]}."
    name = target.removesuffix("()")
    if name in names_known():
        return f"{found} Fix: write @{target} to refer to the class."
    return f"{found} Fix: put quotes around it: {target.strip(chr(34) + chr(39))!r}."


def _is_plain(value: str) -> bool:
    """Whether the text is one unquoted thing (words, a path, a date), not a container or a partly quoted text."""
    return bool(value) and not re.search(r"[\[\](){},'\"@%]", value.removesuffix("()"))


def _first_odd_word(value: str) -> str:
    """The first word in `value` that begins like a name or a path and is no keyword."""
    for word in _BARE.findall(value):
        if word not in {"True", "False", "None"} and not re.fullmatch(r"[-+]?[\d._eE+-]+", word):
            return str(word)
    return ""

