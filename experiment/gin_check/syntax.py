"""What gin's parser could not read, in words: the line, the offending text, and how it should look."""

from __future__ import annotations

import re
import tokenize

from .errors import ConfigError
from .registry import names_known

_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_BINDING = re.compile(r"\s*[A-Za-z_][\w./]*\s*=[^=]")
_BARE = re.compile(r"[^\s\[\](){},#'\"@%]+")


def syntax_error(error: SyntaxError | tokenize.TokenError, file: str, text: str) -> ConfigError:
    """What to raise for an error of gin's parser in `text`, the content of `file`."""
    return ConfigError(_explain(error, file, text))


def override_value_error(where: str, value: str) -> ConfigError:
    """What to raise for a command-line value that starts like a reference and is none."""
    return ConfigError(
        f"{where}: `{value}` is no reference. Fix: write @Name, @Name() or %NAME; for a string put quotes "
        f"inside the argument: \"'{value}'\"."
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
    at_end = "multi-line statement" in reason or "never closed" in reason
    if start := _unclosed_bracket(lines, len(lines) + 1 if at_end else line_number):
        return (
            f"{file}:{start}: `{lines[start - 1].strip()}` has a bracket that is never closed. Fix: close it."
        )
    if ("string literal" in reason and "unterminated" in reason) or _ends_in_string(line):
        return f"{where}: `{line.strip()}` has a quote that is never closed. Fix: close it."
    if isinstance(error, IndentationError):
        return f"{where}: `{line.strip()}` is indented like no other line. Fix: align it with its neighbours."
    if include := re.match(r"\s*include\s+([^'\"\s#]+)", line):
        return f"{where}: `{line.strip()}` names its file without quotes. Fix: write include '{include[1]}'."
    left, equals, value = (part.strip() for part in line.partition("="))
    if not equals:
        left, value = "", line.strip()
    if "Couldn't parse statement" in reason or (not equals and "token" not in reason):
        return (
            f"{where}: `{line.strip()}` is no binding. Fix: write Name.param = value, a block `Name:` with "
            "indented lines, include 'file.gin' or import module."
        )
    return f"{where}: {_value_problem(left, value, reason)}"


def _unclosed_bracket(lines: list[str], line_number: int) -> int:
    """Line of the last binding before this line if it leaves a bracket open, else 0.

    This line must be a binding too, or the end of the file.
    """
    if line_number <= len(lines) and not _BINDING.match(lines[line_number - 1]):
        return 0
    for start in range(line_number - 1, 0, -1):
        if _BINDING.match(lines[start - 1]):
            text = "\n".join(re.sub(r"#.*", "", line) for line in lines[start - 1 : line_number - 1])
            return start if sum(map(text.count, "([{")) > sum(map(text.count, ")]}")) else 0
    return 0


def _ends_in_string(line: str) -> bool:
    """Whether the line's value begins with a quote that no other one closes."""
    value = line.partition("=")[2].strip()
    return value[:1] in {"'", '"'} and value.count(value[0]) == 1


def _value_problem(left: str, value: str, reason: str) -> str:
    """Text for a value (what follows `=`) that is no gin literal."""
    value = re.sub(r"\s+#.*$", "", value)
    shown = f"{left} = {value}" if left else value
    failed = re.search(r"Failed to parse token '(.*)'", reason, re.DOTALL)
    token = failed.group(1) if failed else _first_odd_word(value)
    target = value if _is_plain(value) else token
    if not target:
        return f"`{shown}` is not gin. Fix: write Name.param = value with a number, a quoted string or @Name."
    found = f"`{shown}`: {target} is no number, quoted string, True, False, None, @Name or %NAME."
    if target.lower() in _WORDS:
        return f"{found} Fix: write {_WORDS[target.lower()]}."
    if value.startswith("="):
        return f"{found} Fix: write a single `=`."
    if re.match(r"[A-Za-z]+['\"]", value):
        return f"{found} Fix: begin with the quote, without letters before it."
    name = target.removesuffix("()")
    if name in names_known():
        return f"{found} Fix: write @{target} to refer to the class."
    return f"{found} Fix: put quotes around it: {target.strip(chr(34) + chr(39))!r}."


def _is_plain(value: str) -> bool:
    """Whether the text is one unquoted thing (words, a path, a date), no container and not partly quoted."""
    return bool(value) and not re.search(r"[\[\](){},'\"@%]", value.removesuffix("()"))


def _first_odd_word(value: str) -> str:
    """The first word in `value` that begins like a name or a path and is no keyword."""
    for word in _BARE.findall(value):
        if word not in {"True", "False", "None"} and not re.fullmatch(r"[-+]?[\d._eE+-]+", word):
            return str(word)
    return ""
