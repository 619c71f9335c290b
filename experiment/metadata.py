"""What a run was made with: versions, configuration, spaces; and what differs when something is loaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
import time
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gin

from ..data.errors import visible
from .config import registry
from .config.hash import config_hash
from .config.reading import parse_statements
from .env_spaces import EnvSpaces, space_differences
from .policy_files import POLICY_FORMAT, PolicyInfo

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
PACKAGES = ("loxodon", "torch", "accelerate", "gymnasium", "numpy", "gin-config", "safetensors")
TYPE_FIELDS = ("agent_type", "tstep_encoder_type", "traj_encoder_type")
_COMPARED = ("loxodon", "python", "torch")
_SHOWN_BINDINGS = 8
_GIT_TIMEOUT_S = 2.0
_UNSET = "(default)"


def version_of(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the repository around `folder` (None: the working directory), or None if there is none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def describe_run(exp: Experiment) -> dict[str, Any]:
    """JSON values for a checkpoint: enough to rebuild the agent and to tell what another run has changed."""
    return {
        **_facts(exp),
        "config_hash": exp.config_hash,
        "time": time.time(),
        "world_size": exp.accelerator.num_processes,
        "seed": exp.ctx.progress.seed,
        "mode": exp.mode,
        "run_id": exp.checkpoints.run_id,
    }


def hash_of(exp: Experiment) -> str:
    """See `config_hash`; of what is bound and of the defaults that building this run has read."""
    return config_hash(exp, {**bindings_of(gin.operative_config_str()), **bindings_of(gin.config_str())})


def policy_facts(exp: Experiment) -> dict[str, str]:
    """The part of a policy file's header that is the same for all files of this process."""
    facts = _facts(exp)
    return {
        "loxodon": str(facts["packages"]["loxodon"]),
        "spaces": json.dumps(facts["spaces"]),
        "gin": facts["config"],
        "types": json.dumps(facts["types"]),
        "max_seq_len": str(facts["max_seq_len"]),
    }


def _facts(exp: Experiment) -> dict[str, Any]:
    """What does not change while the process runs; found out once."""
    if exp.run_facts is None:
        exp.run_facts = {
            "packages": {name: version_of(name) for name in PACKAGES},
            "python": platform.python_version(),
            "git_commit": git_commit(),
            "config": gin.operative_config_str(),
            "config_requested": gin.config_str(),
            "spaces": exp.env_spaces.to_json(),
            "types": {name: name_of_type(getattr(exp, name)) for name in TYPE_FIELDS},
            "max_seq_len": int(exp.max_seq_len),
        }
    return exp.run_facts


# --- types by name --------------------------------------------------------------------------------------


def name_of_type(thing: Any) -> str | None:
    """`module:name` under which a class or function can be imported, or None if it cannot."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or module == "__main__":
        return None
    return f"{module}:{name}"


def find_type(name: str, base: type, trust: Sequence[str] = ()) -> type:
    """The class that name_of_type named, which a file says.

    Nothing is imported for it but modules that `trust` names, and nothing is run: it is looked up in what is
    there, without asking a module or class for attributes, which could be computed.

    Raises: ImportError if there is no such class here; TypeError if it is not derived from `base`.
    """
    module, _, path = name.partition(":")
    problem = "which is not imported here, and a file may not ask for that"
    if is_trusted(module, trust):
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            problem = f"which cannot be imported ({error})"
    found: Any = sys.modules.get(module)
    if found is not None:
        problem = "which has no such class"
        for part in path.split("."):
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if not isinstance(found, type):
        raise ImportError(
            f"The policy needs {path!r} of the module {module!r}, {problem}. Fix: import what defines it "
            f"before load_policy, or let load_policy do so if you trust it: trust=({module!r},)."
        )
    check_base(found, base)
    return found


def check_base(found: Any, base: type) -> None:
    """Raise TypeError unless `found`, which a file names, is a class derived from `base`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(
            f"{found!r} is no class derived from {base.__name__}, and nothing else is called because a file "
            "says so. Fix: use a file that Loxodon wrote."
        )


def is_trusted(module: str, trust: Sequence[str]) -> bool:
    """Whether a module is one of those in `trust`, or inside one."""
    return any(module == name or module.startswith(f"{name}.") for name in trust)


# --- differences ----------------------------------------------------------------------------------------


def check_metadata(exp: Experiment, saved: Mapping[str, Any], where: str) -> None:
    """Compare a checkpoint's metadata with this run, before anything is loaded.

    Logs one warning for versions and one for settings that differ. A checkpoint without metadata passes.

    Raises: ValueError if observations or actions differ, naming each difference, or if Loxodon is of another
        major version and CheckpointManager.on_mismatch does not allow that.
    """
    if not saved:
        return
    differences = space_differences(EnvSpaces.from_json(saved["spaces"]), exp.env_spaces, "the checkpoint")
    beginning = where[0].upper() + where[1:]
    if differences:
        raise ValueError(
            f"{beginning} is of another environment: {'; '.join(differences)}. Fix: resume with the "
            "environment it was trained in, or choose another run_name for a new run."
        )
    own = _facts(exp)
    written_by, here = (facts["packages"].get("loxodon") for facts in (saved, own))
    is_other = written_by and here and _major(written_by) != _major(here)
    if is_other and exp.checkpoints.on_mismatch == "error":
        raise ValueError(
            f"{where} was written by Loxodon {written_by}, this process has {here}, which may read it in "
            "another way. Fix: install that version, or set CheckpointManager.on_mismatch = 'warn' to try."
        )
    if versions := _version_differences(saved, own):
        logger.warning("%s was written with other versions: %s.", beginning, ", ".join(versions))
    if bindings := config_differences(saved, own):
        shown = "\n  ".join(bindings[:_SHOWN_BINDINGS])
        more = f"\n  and {len(bindings) - _SHOWN_BINDINGS} more" if len(bindings) > _SHOWN_BINDINGS else ""
        logger.warning("Settings differ from those of %s (old -> new):\n  %s%s", where, shown, more)


def _major(version: str) -> list[str]:
    """What changes with incompatible versions: the first number, before 1.0 the first two."""
    numbers = version.split(".")
    return numbers[:2] if numbers[0] == "0" else numbers[:1]


def _version_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    found = []
    for name in _COMPARED:
        old = saved["packages"].get(name) if name in saved["packages"] else saved.get(name)
        new = own["packages"].get(name) if name in own["packages"] else own.get(name)
        if old != new:
            found.append(visible(f"{name} {old} (here {new})"))
    return found


def config_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Bindings with another value, as `Name.param: old -> new`.

    What one of the two runs sets is compared with what the other sets or has as its default. A default that
    the other run never read counts as "(default)".
    """
    old_set, new_set = bindings_of(saved["config_requested"]), bindings_of(own["config_requested"])
    old = {**bindings_of(saved["config"]), **old_set}
    new = {**bindings_of(own["config"]), **new_set}
    keys = sorted((old_set.keys() | new_set.keys()) - {"Experiment.seed"})  # a resumed run keeps its own
    pairs = [(key, old.get(key, _UNSET), new.get(key, _UNSET)) for key in keys]
    return [f"{key}: {before} -> {after}" for key, before, after in pairs if before != after]


def bindings_of(text: str) -> dict[str, str]:
    """Values of a gin text as they would be written, by `scope/Name.param`; empty if it is no gin text."""
    try:
        statements = parse_statements(text)
    except (SyntaxError, tokenize.TokenError, RecursionError):
        return {}
    found = {}
    for one in statements:
        if hasattr(one, "arg_name"):
            name = _full_name(one.selector) if one.arg_name else one.selector
            scoped = f"{one.scope}/{name}" if one.scope else name
            found[f"{scoped}.{one.arg_name}" if one.arg_name else scoped] = repr(one.value)
    return found


def _full_name(selector: str) -> str:
    """The shortest name this process has for a configurable, so that two texts write it alike."""
    matches = registry.find(selector)
    return matches[0].name if len(matches) == 1 else selector


def check_policy(exp: Experiment, info: PolicyInfo, path: Path) -> None:
    """Refuse to act with a published policy of another format or for another environment.

    Raises: ValueError saying what differs.
    """
    if info.format is not None and info.format != POLICY_FORMAT:
        raise ValueError(
            f"The policy in {path} has format {info.format}, written by Loxodon {info.loxodon}; this process "
            f"has Loxodon {version_of('loxodon')}, which reads format {POLICY_FORMAT}. Fix: install the same "
            "version of Loxodon for learner and actors."
        )
    saved = info.env_spaces()
    differences = [] if saved is None else space_differences(saved, exp.env_spaces, "the policy")
    if differences:
        raise ValueError(
            f"The policy in {path} is of another environment than this process: {'; '.join(differences)}. "
            "Fix: start actors and learner with the same config, or another run_name."
        )
    own = version_of("loxodon")
    if exp.loaded_policy is None and info.loxodon is not None and info.loxodon != own:
        logger.warning("The policy in %s is of Loxodon %s, this process has %s.", path, info.loxodon, own)
