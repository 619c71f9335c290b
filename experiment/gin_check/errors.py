"""The one error of configurations, and near matches for its texts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_LISTED = 8


class ConfigError(ValueError):
    """A configuration that cannot be used. Each problem says where it is, what was found, and `Fix:`."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(_joined(self.problems))


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise one error that lists `problems`, if there are any.

    Raises: ConfigError with the text of each problem.
    """
    if problems:
        error = ConfigError(problems)
        raise error


def _joined(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = [f"{len(problems)} problems in the configuration. Fix: mend each place below."]
    lines += [f"  {text}" for text in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"  ... and {len(problems) - MAX_LISTED} more.")
    return "\n".join(lines)


def near_matches(name: str, candidates: Iterable[str]) -> list[str]:
    """Up to three of `candidates` that look like `name`, best first, whatever their upper or lower case."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    return [by_lower[m] for m in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """A sentence ` Did you mean 'a' or 'b'?` with a leading space, or nothing when no name is near."""
    near = [f"'{prefix}{match}'" for match in near_matches(name, candidates)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
