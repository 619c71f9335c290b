"""The record of a run (versions, configuration, spaces), and differences to it when something is loaded."""

from __future__ import annotations

import difflib
import json
import logging
import platform
import re
import time
import tokenize
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import gin

from ...data.errors import visible
from ...envs.gin_values import inside_gin
from ..config import registry
from ..config.reading import bindings_in, import_path
from ..process.versions import PACKAGES, git_commit, hardware, version_of
from .recipes import to_json
from .spaces import EnvSpaces, check_spaces

logger = logging.getLogger("loxodon")
_COMPARED = ("loxodon", "python", "torch")
_SHOWN_LINES = 16


@dataclass(frozen=True)
class RunRecord:
    """Record of how a run is made.

    config, config_requested: gin's texts, as operative and as requested. spaces: spaces of the environment.
    types: types of the agent's parts by field of Experiment: `module:name`, a partial as written by
    recipes.py, or None for a type that cannot be written.
    max_seq_len: in transitions. packages: versions by name. hardware: see versions.py.
    """

    config: str
    config_requested: str
    config_hash: str
    spaces: EnvSpaces
    types: Mapping[str, Any]
    max_seq_len: int
    packages: Mapping[str, str | None] = field(default_factory=lambda: {n: version_of(n) for n in PACKAGES})
    python: str = field(default_factory=platform.python_version)
    git_commit: str | None = field(default_factory=git_commit)
    hardware: Mapping[str, Any] = field(default_factory=hardware)

    def header(self) -> dict[str, str]:
        """The part of a policy file's header that is the same for all files of this process."""
        return {
            "loxodon": str(self.packages["loxodon"]),
            "spaces": json.dumps(self.spaces.to_json()),
            "gin": self.config,
            "types": json.dumps(dict(self.types)),
            "max_seq_len": str(self.max_seq_len),
        }

    def metadata(self, **facts: Any) -> dict[str, Any]:
        """JSON values for a checkpoint: the data to rebuild the agent and to compare with another run."""
        return {**vars(self), "spaces": self.spaces.to_json(), "time": time.time(), **facts}

    def versions(self, **facts: Any) -> dict[str, Any]:
        """JSON values for `versions.json`."""
        names = ("config_hash", "python", "packages", "hardware")
        return {**facts, **{name: getattr(self, name) for name in names}, "import_path": import_path()}


def record_run(
    *,
    spaces: EnvSpaces,
    types: Mapping[str, Any],
    max_seq_len: int,
    config_hash: str,
    passed: Mapping[str, Any] | None = None,
) -> RunRecord:
    """The record of a run in this process, with the current gin configuration.

    types: classes or functions by field of Experiment. passed: see `settings_from_python`.
    """
    names: dict[str, Any] = dict.fromkeys(types)
    config, requested = (
        _with_settings(text, passed or {}) for text in (gin.operative_config_str(), gin.config_str())
    )
    for name, thing in types.items():
        try:
            names[name] = type_to_json(thing)
        except TypeError as error:
            if f"Experiment.{name} =" not in config:  # those in gin have a name
                logger.warning(
                    "The policy files of this run do not record how to create %s = %r: %s Otherwise call "
                    "load_policy(..., types={%r: ...}).",
                    name,
                    thing,
                    error,
                    name,
                )
    return RunRecord(config, requested, config_hash, spaces, names, int(max_seq_len))


def settings_from_python(exp: Any) -> dict[str, Any]:
    """Settings that a script passed to Experiment, by `Experiment.name`, as far as gin can write them.

    exp: a dataclass instance, made in this process. Environments are recorded in versions.json instead.
    """
    others = {"make_train_env", "make_val_env"}
    others |= {name.partition(".")[2] for name in bindings_of(gin.operative_config_str())}
    values = {one.name: getattr(exp, one.name) for one in fields(exp) if one.name not in others}
    for one in fields(exp):  # gin does not know these defaults
        if one.default_factory is not MISSING and values.get(one.name) == one.default_factory():
            values.pop(one.name, None)
    return {f"Experiment.{name}": one for name, one in values.items() if registry.can_be_written(one)}


def _with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """A gin text in which these settings replace those of the same names."""
    for name in settings:
        lines = rf"^{re.escape(name)} =.*\n(?:    .*\n)*"  # gin continues long values with four spaces
        text = re.sub(lines, "", text, flags=re.MULTILINE)
    added = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    return f"{text}\n# Passed from Python:\n{added}" if added else text


def environments_to_json(**fields: Any) -> Any:
    """Fields of Experiment that describe its environments, for `versions.json`; None if unwritable."""
    try:
        return to_json(fields)
    except TypeError:
        return None


def known_bindings() -> dict[str, str]:
    """Bindings in gin, and the defaults that were read so far; see `bindings_of`."""
    return {**bindings_of(gin.operative_config_str()), **bindings_of(gin.config_str())}


def type_to_json(thing: Any) -> Any:
    """A type for a policy file: `module:name`, or a partial and its arguments. Raises: TypeError."""
    value = to_json(inside_gin(thing))  # bindings include the scope
    return value["name"] if value.keys() == {"name"} else value


# --- differences ----------------------------------------------------------------------------------------


def check_checkpoint(saved: Mapping[str, Any], own: RunRecord, where: str) -> None:
    """Compare a checkpoint's metadata with this run, before anything is loaded.

    Logs a warning with the versions and settings that differ. A checkpoint without metadata passes.

    Args:
        saved: the metadata.
        own: record of this run.
        where: name for errors, such as "the checkpoint runs/x/...".

    Raises: ValueError if observations or actions differ, naming each difference.
    """
    if "packages" not in saved:
        return
    check_spaces(
        EnvSpaces.from_json(saved["spaces"]),
        own.spaces,
        what=where[0].upper() + where[1:],
        fix="resume with the environment it was trained in, or choose another run_name for a new run.",
    )
    if lines := differences(saved, vars(own)):
        more = [f"and {len(lines) - _SHOWN_LINES} more"] if len(lines) > _SHOWN_LINES else []
        shown = "\n  ".join([*lines[:_SHOWN_LINES], *more])
        logger.warning(
            "Versions or settings differ from those of %s (- checkpoint, + this run):\n  %s", where, shown
        )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Versions and lines of the requested gin text that only one of two records has, as `-old` and `+new`."""

    def compared(record: Mapping[str, Any]) -> list[str]:
        packages = {**record["packages"], "python": record.get("python")}
        # A resumed run keeps its own seed, and its folder may have moved.
        ignored = ("#", "Experiment.seed = ", "Experiment.ckpt_base_dir = ")
        settings = [line for line in record["config_requested"].splitlines() if line]
        versions = [f"{name} {packages.get(name)}" for name in _COMPARED]
        return [*versions, *(line for line in settings if not line.startswith(ignored))]

    lines = list(difflib.unified_diff(compared(old), compared(new), n=0, lineterm=""))
    # The first two lines name the texts.
    return [visible(line) for line in lines[2:] if not line.startswith("@@")]


def bindings_of(text: str) -> dict[str, str]:
    """Values of a gin text as they would be written, by `scope/Name.param`; empty if it is not a gin text."""
    try:
        bindings = bindings_in(text)
    except (SyntaxError, tokenize.TokenError, RecursionError):
        return {}
    found = {}
    for one in bindings:
        # The shortest name this process has for a configurable, so that two texts have the same spelling.
        matches = registry.find(one.selector) if one.selector != registry.MACRO else []
        named = replace(one, selector=matches[0].name) if len(matches) == 1 else one
        found[named.key] = repr(named.value)
    return found
