"""AdamW with linear warm-up, and separate learning rates for modules of the agent."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import gin
import torch
from torch import nn

from ...data.errors import check_number


def is_under(name: str, prefix: str) -> bool:
    """True when the parameter `name` is `prefix` itself or lies in the module `prefix`."""
    return name == prefix or name.startswith(f"{prefix}.")


def named_among(agent: nn.Module, params: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of `params` by their names in the agent, in the agent's order."""
    wanted = {id(p) for p in params}
    return {name: p for name, p in agent.named_parameters() if id(p) in wanted}


def check_prefixes(prefixes: Collection[str], names: Collection[str], setting: str) -> None:
    """Refuse a prefix that no trainable parameter has.

    Args:
        prefixes: names of modules or parameters.
        names: names of all trainable parameters.
        setting: gin name of the setting with the prefixes.

    Raises: ValueError that says which names are nearest.
    """
    parts = [name.split(".") for name in names]
    known = sorted({".".join(words[:depth]) for words in parts for depth in range(1, len(words) + 1)})
    for prefix in prefixes:
        if prefix not in known:
            near = difflib.get_close_matches(str(prefix), known, n=3, cutoff=0.5)
            top = [name for name in known if "." not in name]
            raise ValueError(
                f"{setting} names {prefix!r}, but no trainable parameter of the agent has a name that "
                f"begins like this. Allowed are names of its modules, such as {', '.join(near or top)}. "
                f"Fix: correct the name in {setting}."
            )


def param_groups(
    agent: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    learning_rate: float,
    lr_multipliers: Mapping[str, float] | None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: first the plain learning rate, then one group per prefix, sorted.

    A parameter belongs to the longest prefix of its name. Each group has its `prefix` ("" for the first),
    so that a resumed run can check that its groups are still the same.

    Raises: ValueError for a prefix that no parameter has.
    """
    if not lr_multipliers:
        return [{"params": list(params), "lr": learning_rate, "prefix": ""}]
    named = named_among(agent, params)
    check_prefixes(lr_multipliers, named, "AdamW.lr_multipliers")
    rates = {"": 1.0, **{prefix: lr_multipliers[prefix] for prefix in sorted(lr_multipliers)}}
    members: dict[str, list[nn.Parameter]] = {prefix: [] for prefix in rates}
    for name, param in named.items():
        matching = [prefix for prefix in lr_multipliers if is_under(name, prefix)]
        members[max(matching, key=len, default="")].append(param)
    return [
        {"params": members[prefix], "lr": learning_rate * rate, "prefix": prefix}
        for prefix, rate in rates.items()
        if members[prefix] or not prefix
    ]


def check_same_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the optimizer state of other parameter groups: its moments would go to the wrong parameters.

    Args:
        saved: `param_groups` of the saved state, with numbers as `params`.
        own: groups of this run.

    Raises: ValueError that shows both.
    """
    before, after = ([(g.get("prefix", ""), len(g["params"])) for g in groups] for groups in (saved, own))
    if before != after:
        raise ValueError(
            f"The checkpoint's optimizer has the parameter groups {_shown(before)}, but this run has "
            f"{_shown(after)}. Fix: resume with the agent and the prefixes in AdamW.lr_multipliers of the "
            "earlier run (the multipliers themselves may change), or load the weights only "
            "(resume_training_state=False)."
        )


def _shown(groups: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{prefix or '(all others)'}: {count}" for prefix, count in groups)


@gin.configurable("AdamW", allowlist=["beta2", "eps", "lr_multipliers"])
def make_optimizer(
    agent: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    learning_rate: float,
    l2_coeff: float,
    fused: bool,
    beta2: float = 0.999,
    eps: float = 1e-8,
    lr_multipliers: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Args:
        agent: the agent whose modules are named.
        params: its trained parameters.
        learning_rate: learning rate before factors.
        l2_coeff: weight decay.
        fused: one kernel for all parameters; hides whether a loss scaler skipped the step.
        beta2: decay of the second moment per update. Once a task is solved, gradients are small for a long
            time. The next large one then changes all parameters at once, by up to 3 times the learning rate
            with 0.999 and by 0.7 times with 0.98.
        eps: added to the root of the second moment.
        lr_multipliers: factor of the learning rate by name of a module of the agent, such as "actor" or
            "traj_encoder"; the longest name that fits a parameter wins.
    Raises: ValueError or TypeError for invalid numbers, or a name that no parameter has.
    """
    check_number("AdamW.beta2", beta2, lowest=0, highest=0.999_999)
    for name, value in {"eps": eps, **(lr_multipliers or {})}.items():
        setting = "AdamW.eps" if name == "eps" else f"AdamW.lr_multipliers[{name!r}]"
        check_number(setting, value, above=0)
    groups = param_groups(agent, params, learning_rate=learning_rate, lr_multipliers=lr_multipliers)
    return torch.optim.AdamW(
        groups, lr=learning_rate, weight_decay=l2_coeff, fused=fused, eps=eps, betas=(0.9, beta2)
    )


def warmup_factor(gradient_steps: int, lr_warmup_steps: int) -> float:
    """Share of the learning rate after `gradient_steps` updates: 1/warmup, 2/warmup, ..., 1."""
    return min(1.0, (gradient_steps + 1) / max(lr_warmup_steps, 1))
