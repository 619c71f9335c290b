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


CONTROL = "/without_memory"  # end of the names of controls

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


# The previous action would act as a memory: with it alone RepeatFirstMedium reaches 0.99.
_MEMORYLESS = (
    "Experiment.traj_encoder_type=@FFTrajEncoder",
    "FFTstepEncoder.hide_rl2s=True",
)


def _general(make_env: str, max_seq_len: int, *overrides: str) -> tuple[str, ...]:
    """The settings that a user adds to the general preset: an environment, and its length."""
    return (
        f"Experiment.make_train_env={make_env}",
        f"Experiment.make_val_env={make_env}",
        f"Experiment.max_seq_len={max_seq_len}",
        *overrides,
    )


def _within(
    num_env_steps: int,
    max_seconds: float | None,
    configs: tuple[str, ...],
    metric: str,
    target: float,
    *settings: str,
) -> Task:
    """A task that ends at its target, in epochs of 1,200 env steps."""
    overrides = (
        *settings,
        f"Experiment.stop_at_val_return={target}",
        f"Experiment.epochs={-(-num_env_steps // 1_200)}",
    )
    return Task(configs, metric, target, num_env_steps + 2_000, max_seconds, overrides=overrides)


def _with_controls(tasks: dict[str, tuple[str, float, float, tuple[str, ...]]]) -> dict[str, Task]:
    """The general preset on each task, and once more without memory.

    tasks: metric, target, limit for the control, and settings of each task, by name.
    """
    general = ("base_offpolicy",)
    found = {}
    for name, (metric, target, chance, settings) in tasks.items():
        found[name] = _within(100_000, 600.0, general, metric, target, *settings)
        control = Task(
            general,
            metric,
            chance,
            is_control=True,
            overrides=(*settings, *_MEMORYLESS, "Experiment.epochs=40"),
        )
        found[name + CONTROL] = control
    return found


def _popgym(name: str, max_seq_len: int, *overrides: str) -> tuple[str, ...]:
    return _general("@gym_env()", max_seq_len, f"gym_env.env_id='popgym-{name}-v0'", *overrides)


def _tmaze(horizon: int) -> tuple[str, ...]:
    walk = {"rollout_horizon": horizon, "curve": 1e5, "eps_start_start": 0.002, "eps_start_end": 0.002}
    turn = {"eps_end_start": 1.0, "eps_end_end": 0.05, "steps_anneal": 50 * horizon, "randomize_eps": False}
    return _general(
        "@TMazePassive",
        horizon + 1,
        f"TMazePassive.horizon={horizon}",
        # Noise in the corridor would end most episodes before the fork.
        "Experiment.exploration_wrapper_type=@BilevelEpsilonGreedy",
        *(f"BilevelEpsilonGreedy.{key}={value!r}" for key, value in {**walk, **turn}.items()),
    )


def _recall(order: str) -> tuple[str, ...]:
    return _general("@Recall", 200, "Recall.length=100", "Recall.num_symbols=4", f"Recall.order={order!r}")


_SUCCESS, _RETURN = "val/success", "val/return"
MEMORY = _with_controls(
    {
        "recall": (_RETURN, 0.95, 0.5, _recall("forward")),
        "recall_reverse": (_RETURN, 0.95, 0.5, _recall("reverse")),
        "recall_by_key": (_RETURN, 0.95, 0.5, _recall("by_key")),
        "tmaze_100": (_SUCCESS, 1.0, 0.65, _tmaze(100)),
        "tmaze_250": (_SUCCESS, 1.0, 0.65, _tmaze(250)),
    }
)
POPGYM = _with_controls(
    {
        "RepeatPreviousEasy": (_RETURN, 0.99, 0.0, _popgym("RepeatPreviousEasy", 52)),
        "RepeatPreviousMedium": (_RETURN, 0.99, 0.0, _popgym("RepeatPreviousMedium", 104)),
        "RepeatFirstMedium": (_RETURN, 0.99, 0.0, _popgym("RepeatFirstMedium", 416)),
        "AutoencodeEasy": (_RETURN, 0.9, 0.0, _popgym("AutoencodeEasy", 105)),
        # A player who remembers every card has 0.81, random play -0.19.
        "ConcentrationEasy": (_RETURN, 0.0, -0.1, _popgym("ConcentrationEasy", 105)),
        # The target is the return of a player who never shoots twice at a place, and otherwise at random.
        "BattleshipEasy": (_RETURN, 0.06, -0.2, _popgym("BattleshipEasy", 65)),
        # The target is the return of PPO with a GRU after a million env steps (POPGYM_PPO, seed 0).
        "PositionOnlyPendulumEasy": (_RETURN, 0.891, 0.5, _popgym("PositionOnlyPendulumEasy", 201)),
        # Counting all cards has 0.528, the best rule without memory 0.498.
        "HigherLowerEasy": (_RETURN, 0.52, 0.51, _popgym("HigherLowerEasy", 52)),
        # Targets are published returns of PPO with a GRU: Morad et al. 2023, arXiv:2303.01859, appendix B.
        "MultiarmedBanditEasy": (_RETURN, 0.619, 0.2, _popgym("MultiarmedBanditEasy", 201)),
        "NoisyPositionOnlyCartPoleEasy": (_RETURN, 0.995, 0.5, _popgym("NoisyPositionOnlyCartPoleEasy", 201)),
    }
)

POPGYM_PPO = {
    name: Task(
        ("ppo/repeat_previous",),
        _RETURN,
        POPGYM[name].target,
        overrides=(
            f"gym_env.env_id='popgym-{name}-v0'",
            f"Experiment.max_seq_len={max_seq_len}",
            "Experiment.train_timesteps_per_epoch=208",
            f"Experiment.epochs={1_000_000 // (16 * 208)}",
            f"Experiment.val_timesteps_per_epoch={2 * max_seq_len}",
            "Experiment.stop_at_val_return=None",
            "GAE.gamma=0.99",
        ),
    )
    for name, max_seq_len in {
        "ConcentrationEasy": 104,
        "HigherLowerEasy": 51,
        "MultiarmedBanditEasy": 200,
        "BattleshipEasy": 64,
        "PositionOnlyPendulumEasy": 200,
        "NoisyPositionOnlyCartPoleEasy": 200,
    }.items()
}

_TEN_ATTEMPTS = ("KShotWrapper.num_attempts=10", "Experiment.max_seq_len=250")
META = {
    "frozen_lake": Task(("meta_frozen_lake",), "val/success_attempt_14", 0.6, 1_000_000),
    "frozen_lake/without_memory": Task(
        ("meta_frozen_lake",),
        "val/success_attempt_14",
        0.5,
        is_control=True,
        overrides=(*_MEMORYLESS, "Experiment.epochs=100"),
    ),
    "frozen_lake_10": Task(
        ("meta_frozen_lake",),
        "val/success_attempt_9",
        0.6,
        1_000_000,
        overrides=(*_TEN_ATTEMPTS, "Experiment.epochs=170"),
    ),
    "frozen_lake_10/without_memory": Task(
        ("meta_frozen_lake",),
        "val/success_attempt_9",
        0.5,
        is_control=True,
        overrides=(*_TEN_ATTEMPTS, *_MEMORYLESS, "Experiment.epochs=100"),
    ),
    "dark_room": Task(("dark_room",), _RETURN, 100.0, overrides=("Experiment.epochs=84",)),
    "dark_key_to_door": Task(("dark_key_to_door",), _RETURN, 10.0, overrides=("Experiment.epochs=200",)),
    "dark_key_to_door/without_memory": Task(
        ("dark_key_to_door",),
        _RETURN,
        5.0,
        is_control=True,
        overrides=(*_MEMORYLESS, "Experiment.epochs=60"),
    ),
}
_TEN_THOUSAND = (
    "HORIZON=10_000",
    "Experiment.max_seq_len=10_001",
    "Experiment.val_timesteps_per_epoch=10_001",
)
_LONG_CONTROL = ("Experiment.traj_encoder_type=@FFTrajEncoder", "Experiment.epochs=40")
LONG = {
    "tmaze_1000": Task(("tmaze_long",), _SUCCESS, 1.0, max_seconds=360.0),
    "tmaze_1000/without_memory": Task(
        ("tmaze_long",), _SUCCESS, 0.65, is_control=True, overrides=_LONG_CONTROL
    ),
    "tmaze_10000": Task(("tmaze_long",), _SUCCESS, 1.0, max_seconds=600.0, overrides=_TEN_THOUSAND),
    "tmaze_10000/without_memory": Task(
        ("tmaze_long",), _SUCCESS, 0.75, is_control=True, overrides=(*_TEN_THOUSAND, *_LONG_CONTROL)
    ),
}
CLASSIC = {
    env_id: _within(
        100_000,
        None,
        ("base_offpolicy", "encoders/gru"),
        _RETURN,
        target,
        *_general("@gym_env()", 64, f"gym_env.env_id='{env_id}'"),
        "Experiment.learning_rate=5e-4",  # CartPole-v1 rises and falls with 1e-3 (docs/notebook)
        "Experiment.replay_ratio=0.16",  # 0.6 times the env steps of 0.04 (docs/notebook)
        "Experiment.grad_clip=1",  # with 40, CartPole-v1 and Acrobot-v1 take 1.3 and 1.7 times as many
    )
    for env_id, target in (("CartPole-v1", 475.0), ("Pendulum-v1", -200.0), ("Acrobot-v1", -100.0))
}

SUITES = {
    "presets": PRESETS,
    "encoders": _encoders(),
    "memory": MEMORY,
    "popgym": POPGYM,
    "popgym_ppo": POPGYM_PPO,
    "meta": META,
    "long": LONG,
    "classic": CLASSIC,
}
