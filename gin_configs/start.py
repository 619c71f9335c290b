"""Settings for any environment: the gin file of `loxodon run --env ID --agent NAME --encoder NAME`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from .presets import find_preset, preset_names

DEFAULT_AGENT, DEFAULT_ENCODER = "agent", "transformer"
AGENTS = {
    "agent": (),
    **{name: (f"agents/{name}.gin",) for name in ("multitask", "dqn", "sac", "iql", "bc")},
    "ppo": (),
}
"""Agents by name, with additions to their base preset: ppo/ppo for "ppo", base_offpolicy for the others."""
_CLASSES = {
    "ffm": "FFMTrajEncoder",
    "gated_delta": "GatedDeltaNetTrajEncoder",
    "gla": "GLATrajEncoder",
    "lru": "LRUTrajEncoder",
    "mamba": "MambaTrajEncoder",
    "mamba2": "Mamba2TrajEncoder",
    "min_lstm": "MinLSTMTrajEncoder",
    "mlstm": "MLSTMTrajEncoder",
    "s5": "S5TrajEncoder",
}
"""Encoders without a gin file, which use the defaults of their code."""
_BATCHES = ("envpool/", "gymnax/", "xminigrid/")  # prefixes of ids of vector environments
_NEAR = 0.8  # similarity to a known id from which an unknown id counts as a misspelling
_SMALL = "_small"


@dataclass(frozen=True)
class GinText:
    """A gin file that is not stored anywhere. name: its name in errors."""

    name: str
    text: str


def encoder_names() -> list[str]:
    """Values of --encoder: the files of `encoders/`, also without `_small`, and encoders without a file."""
    files = [name.removeprefix("encoders/") for name in preset_names() if name.startswith("encoders/")]
    return sorted({*files, *(name.removesuffix(_SMALL) for name in files), *_CLASSES})


def gin_for(env: str, agent: str | None = None, encoder: str | None = None) -> GinText:
    """The gin file for an environment.

    Args:
        env: a gymnasium id, or "module:id" or "module:Class" with a module to import.
        agent: one of AGENTS; None for the default.
        encoder: one of encoder_names; None for the default.
    """
    given = {"env": env, "agent": agent, "encoder": encoder}
    typed = " ".join(f"--{option} {value}" for option, value in given.items() if value is not None)
    is_ppo, encoder = agent == "ppo", encoder or DEFAULT_ENCODER
    module, _, env_name = env.rpartition(":")
    name = "-".join(part for part in (env_name, agent, given["encoder"]) if part)
    files = ["ppo/ppo.gin" if is_ppo else "base_offpolicy.gin", *AGENTS[agent or DEFAULT_AGENT]]
    lines = [f"# loxodon run {typed}"]
    lines += [f"import {module}"] * bool(module)
    lines += [f"include '{file}'" for file in [*files, *_file_of(encoder, is_ppo)]]
    lines.append("")
    if encoder in _CLASSES:
        lines.append(f"Experiment.traj_encoder_type = @{_CLASSES[encoder]}")
    lines += [
        f"Experiment.run_name = {re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-.')!r}",
        "Experiment.make_train_env = @gym_env()",
        "Experiment.make_val_env = @gym_env()",
        f"gym_env.env_id = {env!r}",
        *["Experiment.env_mode = 'already_vectorized'"] * env_name.startswith(_BATCHES),
        "Experiment.max_seq_len = 128             # how far memory reaches, in env steps",
        *(_PPO_LINES if is_ppo else ()),
    ]
    return GinText(f"loxodon run {typed}", "\n".join(lines) + "\n")


_PPO_LINES = (
    "Experiment.epochs = 977                  # a million env steps",
    "Experiment.val_interval = 20",
    "Experiment.val_timesteps_per_epoch = 1_000   # per environment, and longer than an episode",
    "PPOLearner.update_epochs = 4",
    "PPOLearner.minibatches = 4",
)


def _file_of(encoder: str, is_ppo: bool) -> list[str]:
    """The file of an encoder, the small one on-policy; empty if the base preset or the code has it."""
    if encoder in _CLASSES or (encoder == DEFAULT_ENCODER and not is_ppo):
        return []
    names = [f"encoders/{encoder}{_SMALL}", f"encoders/{encoder}"]
    found = [name for name in (names if is_ppo else reversed(names)) if name in preset_names()]
    return [f"{found[0]}.gin"]


def problem_with_id(env: str) -> str | None:
    """Describe a definite mistake in the id of an environment, with `Fix:`; None if there is none.

    Ids of other packages are known only after a slow import, so only misspellings of gymnasium's own ids are
    found here.
    """
    module, colon, name = env.rpartition(":")
    if not name or (colon and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module)):
        return (
            f"--env {env!r} is not an id. Fix: write e.g. CartPole-v1, my_module:MyEnv-v0 or my_module:MyEnv."
        )
    if module:
        return None
    if find_preset(env) is not None:
        return f"--env {env!r} is a preset, not an environment. Fix: write loxodon run {env}."
    import gymnasium

    if name in gymnasium.registry:
        return None
    near = difflib.get_close_matches(name, list(gymnasium.registry), cutoff=_NEAR)
    if not near:
        return None
    meant = " or ".join(map(repr, near))
    return (
        f"--env {env!r} is not registered. Did you mean {meant}? Fix: correct it, or write my_module:{env}."
    )
