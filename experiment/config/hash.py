"""A short name for the settings that decide a run's result; the seed and technical settings do not count."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

TECHNICAL = (
    # folder of the data
    "*.dset_root",
    # output, logs and retention
    "CheckpointManager.*",
    "Artifacts.*",
    "UrlStore.*",
    "WandbStore.*",
    "MetricLogger.*",
    "FinalTest.*",
    "ProfileEpoch.*",
    "WallClockLimit.*",  # a stopped run continues as if it had not been
    # number of processes and threads
    "AsyncVectorEnv.num_workers",
)
"""Bindings that do not affect the result, as patterns; everything else counts as a hyper-parameter.

Fields of Experiment say so themselves, by `in_hash=False`.
"""

_MACRO = re.compile(r"%([\w./]+)")


def is_technical(binding: str) -> bool:
    """True if `scope/Name.param` does not affect the result."""
    name = binding.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TECHNICAL)


def config_hash(exp: Any, bindings: Mapping[str, str]) -> str:
    """16 hexadecimal digits of the hyper-parameters.

    Args:
        exp: a dataclass instance; its fields count as `Experiment.<name>`, also where Python set them.
        bindings: gin's bindings, as written, by `scope/Name.param`, and macros by name.
    """
    bound = {
        name: without_macros(value, bindings)
        for name, value in bindings.items()
        if "." in name and not name.startswith("Experiment.")
    }
    chosen: dict[str, Any] = {name: value for name, value in bound.items() if not is_technical(name)}
    counting = [one.name for one in fields(exp) if one.metadata.get("in_hash", True)]
    chosen |= {f"Experiment.{name}": getattr(exp, name) for name in counting}
    if chosen.get("Experiment.batch_size") == "auto":  # the rule that it stands for may change
        chosen["Experiment.batch_size"] = exp.sequences_per_batch
    if bound.get("CheckpointManager.exact_resume") == "True":  # episodes are cut at checkpoints
        chosen["CheckpointManager.exact_resume"] = True
    else:
        del chosen["Experiment.ckpt_interval"]
    text = json.dumps(chosen, sort_keys=True, default=_in_words)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_macros(value: str, bindings: Mapping[str, str]) -> str:
    """A binding's value with macros, and the macros in their values, replaced by what they stand for."""
    for _ in bindings:  # as deep as macros can be nested
        replaced = _MACRO.sub(lambda found: bindings.get(found[1], found[0]), value)
        if replaced == value:
            break
        value = replaced
    return value


def _in_words(value: Any) -> Any:
    """A form of any object that is the same in every process: a name, or its class and arguments.

    The arguments are the attributes named like the constructor's parameters, with or without a leading `_`.
    If there are none, all plain attributes are used.
    """
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    kind = type(value)
    kept = {name.removeprefix("_"): one for name, one in getattr(value, "__dict__", {}).items()}
    arguments = [name for name in inspect.signature(kind).parameters if name in kept] if kept else []
    plain = [name for name, one in kept.items() if isinstance(one, (int, float, str))]
    chosen = [name for name in arguments or plain if not is_technical(f"{kind.__name__}.{name}")]
    return [kind, {name: kept[name] for name in chosen}]
