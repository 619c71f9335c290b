"""Tasks of `learning.py` by suite: presets, overrides and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A preset and its target.

    metric: metric of the greedy evaluation. target: its last value must reach this (or stay below, for a
    control). max_env_steps, max_seconds: budget until then; None for no limit.
    """

    configs: tuple[str, ...]
    metric: str
    target: float
    max_env_steps: int | None = None
    max_seconds: float | None = None
    is_control: bool = False
    overrides: tuple[str, ...] = ()


PRESETS = {
    "tmaze": Task(("tmaze",), "val/success", 1.0, max_seconds=180.0),
    "tmaze_without_memory": Task(("tmaze", "encoders/ff_small"), "val/success", 0.65, is_control=True),
    "cartpole": Task(("cartpole",), "val/return", 475.0, 150_000, 300.0),
    "popgym_repeat_gru": Task(("popgym_repeat",), "val/return", 0.95, 25_000, 90.0),
    "popgym_repeat_transformer": Task(
        ("popgym_repeat", "encoders/transformer_small"), "val/return", 0.95, max_seconds=150.0
    ),
    "pendulum": Task(("pendulum",), "val/return", -250.0, 100_000),
    "ppo_cartpole": Task(("ppo/cartpole",), "val/return", 475.0, 100_000),
    "ppo_pendulum": Task(("ppo/pendulum",), "val/return", -250.0, 200_000),
    "ppo_acrobot": Task(("ppo/acrobot",), "val/return", -100.0, 500_000),
    "ppo_cartpole_no_velocity": Task(("ppo/cartpole_no_velocity",), "val/return", 450.0, 200_000),
    "ppo_cartpole_no_velocity_without_memory": Task(
        ("ppo/cartpole_no_velocity", "encoders/identity"), "val/return", 200.0, is_control=True
    ),
    "ppo_repeat_gru": Task(("ppo/repeat_previous",), "val/return", 0.9, 2_000_000),
    "ppo_repeat_transformer": Task(
        ("ppo/repeat_previous", "encoders/transformer_small"), "val/return", 0.9, 2_000_000
    ),
    "ppo_repeat_without_memory": Task(
        ("ppo/repeat_previous", "encoders/identity"),
        "val/return",
        -0.4,
        is_control=True,
        # The previous action would act as a memory: with it the return is about -0.3.
        overrides=("Experiment.epochs=300", "FFTstepEncoder.hide_rl2s=True"),
    ),
}

_TRUNK: dict[str, Any] = {"d_model": 64, "n_layers": 2}
_RNN: dict[str, Any] = {"d_hidden": 64, "d_output": 64, "n_layers": 2}
_TRANSFORMER: dict[str, Any] = {
    **_TRUNK,
    "d_ff": 256,
    "n_heads": 4,
    "dropout_ff": 0.0,
    "dropout_emb": 0.0,
    "heads": ("fixed", "rotary", "rotary", "content"),
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "FF": _TRUNK,
    "Transformer": _TRANSFORMER,
    "GRU": _RNN,
    "LSTM": _RNN,
    **{
        name: _TRUNK
        for name in (
            "MinGRU",
            "MinLSTM",
            "LRU",
            "S5",
            "FFM",
            "Mamba",
            "Mamba2",
            "GLA",
            "MLSTM",
            "GatedDeltaNet",
        )
    },
    "Hybrid": {"d_model": 64, "mixers": ("gated_delta", "attention")},
}


def _encoders() -> dict[str, Task]:
    """Tasks for every trajectory encoder, with width 64, two layers and the same limit of updates."""
    repeat = ("popgym_repeat",)
    far = (
        "HORIZON=100",
        "Experiment.max_seq_len=101",
        "Experiment.epochs=42",
        "Agent.returns=@LambdaReturns()",
        "LambdaReturns.trace_decay=0.5",
    )
    tasks = {}
    for name, settings in _ENCODERS.items():
        kind, is_control = f"{name.split(',')[0]}TrajEncoder", name == "FF"
        chosen = (
            f"Experiment.traj_encoder_type=@{kind}",
            *(f"{kind}.{setting}={value!r}" for setting, value in settings.items()),
        )
        low = 0.65 if is_control else 1.0
        tasks[f"tmaze_100/{name}"] = Task(
            ("tmaze",), "val/success", low, is_control=is_control, overrides=(*far, *chosen)
        )
        tasks[f"tmaze_1000/{name}"] = Task(
            ("tmaze_long",), "val/success", low, None, 240.0, is_control, (*chosen, "Experiment.epochs=60")
        )
        low = 0.5 if is_control else 0.95
        tasks[f"repeat_previous/{name}"] = Task(
            repeat, "val/return", low, is_control=is_control, overrides=chosen
        )
    return tasks


SUITES = {"presets": PRESETS, "encoders": _encoders()}
