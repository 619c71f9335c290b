"""Results of pre-training on disk, named by a digest of all that decides them."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gin
from torch import nn

from ..agents import PPOLoss
from ..data import dataset_fingerprint
from .checkpoint.policy_file import (
    PolicyInfo,
    fit_weights,
    plain_tensors,
    policy_header,
    read_policy,
    write_policy,
)
from .checkpoint.record import version_of

if TYPE_CHECKING:
    from .experiment import Experiment
    from .pretraining import Pretraining

logger = logging.getLogger("loxodon")
_FORMAT = 1
_OF_RUN = (
    "max_seq_len",
    "padded_sampling",
    "batch_size",
    "batches_per_update",
    "dloader_workers",
    "learning_rate",
    "lr_warmup_steps",
    "grad_clip",
    "l2_coeff",
    "adam_eps",
    "mixed_precision",
    "bad_grad",
)


def digest_of(exp: Experiment, stage: Pretraining) -> str | None:
    """Name of this stage's result; None, with a warning, if the dataset does not say what its data are.

    It covers the agent's structure and initial weights, the seed, the data, the settings of the stage and
    those of the run that it uses; not those of PPO's loss, so runs that differ in it share a result.
    """
    data = dataset_fingerprint(stage.dataset)
    if data is None:
        logger.warning(
            "Pre-training is not cached: %s does not say what its data are. Fix: give it a method "
            "fingerprint() -> str.",
            type(stage.dataset).__name__,
        )
        return None
    assert exp.on_policy is not None
    bindings = {name: gin.get_bindings(name) for name in ("BatchLoader",)}
    facts = {
        "format": _FORMAT,
        "versions": [version_of("loxodon"), version_of("torch")],
        "seed": exp.run_seed,
        "processes": exp.accelerator.num_processes,
        "device": exp.DEVICE.type,
        "stage": stage.settings(),
        "run": {name: getattr(exp, name) for name in _OF_RUN},
        "lr_multipliers": dict(exp.lr_multipliers or {}),
        "returns": [
            type(exp.on_policy.advantage_estimator).__name__,
            vars(exp.on_policy.advantage_estimator),
        ],
        "agent": structure(exp.policy),
        "data": data,
        "bindings": bindings,
    }
    if stage.method == "off_policy":
        facts["off_policy"] = _gin_of(stage.agent_type)
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode())
    for name, value in plain_tensors(exp.policy).items():
        found.update(name.encode() + value.view(-1).numpy().tobytes())
    return found.hexdigest()[:24]


def structure(model: nn.Module) -> list[Any]:
    """Class and plain attributes of every module, but for PPO's loss, by name."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, PPOLoss):
            continue
        plain = {
            key: value
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key != "training"
        }
        found.append([name, type(module).__qualname__, plain])
    return found


def _gin_of(agent_type: Any) -> list[Any]:
    """What is bound for the off-policy agent and its heads."""
    names = {getattr(agent_type, "__name__", str(agent_type)), "Actor", "CriticEnsemble"}
    found = []
    for name in sorted(names):
        try:
            found.append([name, sorted((k, repr(v)) for k, v in gin.get_bindings(name).items())])
        except ValueError:  # nothing that gin knows
            found.append([name, repr(agent_type)])
    return found


def load_cached(exp: Experiment, path: Path) -> bool:
    """Put a result into the agent; False if there is none, or none that can be read."""
    if not path.is_file():
        return False
    try:
        fit_weights(exp.policy, read_policy(path)[1], path)
    except (ValueError, FileNotFoundError) as error:
        logger.warning("A result of pre-training cannot be used and is made anew: %s", error)
        return False
    return True


def store_cached(exp: Experiment, path: Path) -> None:
    """Keep the agent's weights as a policy file; a run that cannot write it goes on with a warning."""
    if not exp.accelerator.is_main_process:
        return
    try:
        header = policy_header(PolicyInfo(0, 0, False), exp.record.header())
        write_policy(path, plain_tensors(exp.policy), header)
    except OSError as error:
        logger.warning("The result of pre-training is not kept: %s", error)
    else:
        exp.view.say(f"The result of pre-training is kept in {path}.")
