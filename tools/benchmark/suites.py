"""The suites of `loxodon benchmark`: tasks, their settings, targets and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """A task of a suite.

    settings: gin settings of its environment and of the length of its episodes. configs: presets that hold
    more of these. metric: that of the evaluation. target: value at which the task counts as learned;
    None if there is no reason for one. num_env_steps: budget of a run.
    """

    settings: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    metric: str = "val/return"
    target: float | None = None
    num_env_steps: int = 100_000


@dataclass(frozen=True)
class Suite:
    """Tasks that agents are compared on.

    title: heading of the page. about: one line for it. configs and settings: those of the library's own
    agent, which another agent replaces by its own.
    """

    title: str
    about: str
    tasks: dict[str, Task]
    configs: tuple[str, ...] = ("base_offpolicy",)
    settings: tuple[str, ...] = field(default=())


def _env(make_env: str, max_seq_len: int, *settings: str) -> tuple[str, ...]:
    """Settings that name an environment and the length of its episodes."""
    return (
        f"Experiment.make_train_env={make_env}",
        f"Experiment.make_val_env={make_env}",
        f"Experiment.max_seq_len={max_seq_len}",
        *settings,
    )


def _gym(env_id: str, max_seq_len: int) -> tuple[str, ...]:
    return _env("@gym_env()", max_seq_len, f"gym_env.env_id={env_id!r}")


# ---- POPGym ----

# Timesteps of the longest episode, by difficulty. Mazes are not here, as they need a further package.
_POPGYM_LENGTHS = {
    "RepeatFirst": (51, 415, 831),
    "RepeatPrevious": (51, 103, 155),
    "Autoencode": (103, 207, 311),
    "CountRecall": (51, 103, 207),
    "Concentration": (104, 208, 104),
    "Battleship": (64, 100, 144),
    "MineSweeper": (14, 30, 54),
    "HigherLower": (51, 103, 155),
    "MultiarmedBandit": (200, 400, 600),
    "PositionOnlyCartPole": (200, 400, 600),
    "VelocityOnlyCartpole": (200, 400, 600),
    "NoisyPositionOnlyCartPole": (200, 200, 200),
    "PositionOnlyPendulum": (200, 150, 100),
    "NoisyPositionOnlyPendulum": (200, 200, 200),
}
# Published values (references.json) are the targets of all other tasks that have one.
_POPGYM_TARGETS = {
    "ConcentrationEasy": 0.0,  # remembering every card has 0.81, random play -0.19
    "BattleshipEasy": 0.06,  # never shooting twice at a place, and otherwise at random
    "MultiarmedBanditEasy": 0.619,  # published for PPO with a GRU; the best memory has 0.631
    "PositionOnlyPendulumEasy": 0.891,  # our PPO with a GRU after a million env steps
    # The published values of these are above or at the optimum.
    "HigherLowerEasy": 0.52,
    "RepeatFirstEasy": 0.99,
    "RepeatFirstMedium": 0.99,
    "RepeatPreviousEasy": 0.99,
    "PositionOnlyCartPoleEasy": 0.99,
    "PositionOnlyCartPoleMedium": 0.99,
    "PositionOnlyCartPoleHard": 0.99,
    # Published agents reach less than memory makes possible.
    "RepeatPreviousMedium": 0.99,
    "AutoencodeEasy": 0.9,
}
POPGYM = Suite(
    "POPGym",
    "The 42 tasks of POPGym 1.0.7 (Morad et al. 2023) that are not mazes. Published values are "
    "those of the best of 13 memories trained with PPO for 15 million env steps: the largest mean return of "
    "sampled actions during training, which favours them. CountRecall had no action for the largest count "
    "then.",
    {
        f"{name}{level}": Task(
            _gym(f"popgym-{name}{level}-v0", length + 1), target=_POPGYM_TARGETS.get(f"{name}{level}")
        )
        for i, level in enumerate(("Easy", "Medium", "Hard"))
        for name, length in ((name, lengths[i]) for name, lengths in _POPGYM_LENGTHS.items())
    },
)

# ---- recall and T-mazes ----


def _recall(order: str) -> Task:
    settings = ("Recall.length=100", "Recall.num_symbols=4", f"Recall.order={order!r}")
    return Task(_env("@Recall", 200, *settings), target=0.95)


def _tmaze(horizon: int) -> Task:
    walk = {"rollout_horizon": horizon, "curve": 1e5, "eps_start_start": 0.002, "eps_start_end": 0.002}
    turn = {"eps_end_start": 1.0, "eps_end_end": 0.05, "steps_anneal": 50 * horizon, "randomize_eps": False}
    settings = _env(
        "@TMazePassive",
        horizon + 1,
        f"TMazePassive.horizon={horizon}",
        # Noise in the corridor would end most episodes before the fork.
        "Experiment.exploration_wrapper_type=@BilevelEpsilonGreedy",
        *(f"BilevelEpsilonGreedy.{key}={value!r}" for key, value in {**walk, **turn}.items()),
    )
    return Task(settings, metric="val/success", target=1.0)


MEMORY = Suite(
    "Recall and T-mazes",
    "Lists of 100 out of four symbols, recalled in order, in reverse or by key; corridors of 100 and 250 "
    "steps.",
    {
        "recall": _recall("forward"),
        "recall_reverse": _recall("reverse"),
        "recall_by_key": _recall("by_key"),
        "tmaze_100": _tmaze(100),
        "tmaze_250": _tmaze(250),
    },
)

_LONGER = ("HORIZON=10_000", "Experiment.max_seq_len=10_001", "Experiment.val_timesteps_per_epoch=10_001")
LONG = Suite(
    "Long corridors",
    "T-mazes of 1,000 and 10,000 steps with a minGRU (preset `tmaze_long`), in corridors that grow.",
    {
        "tmaze_1000": Task((), ("tmaze_long",), "val/success", 1.0, 360_000),
        "tmaze_10000": Task(_LONGER, ("tmaze_long",), "val/success", 1.0, 360_000),
    },
    configs=(),
)

# ---- other suites ----

_CONTROL = (
    "Experiment.learning_rate=5e-4",  # CartPole-v1 is unstable with 1e-3 (docs/notebook)
    "Experiment.replay_ratio=0.16",  # needs 0.6 times as many env steps as with 0.04 (docs/notebook)
    "Experiment.grad_clip=1",  # with 40, CartPole-v1 and Acrobot-v1 need 1.3 and 1.7 times as many
)
CLASSIC = Suite(
    "Classic control",
    "Control with all velocities observed, so nothing has to be remembered; with a GRU.",
    {
        env_id: Task(_gym(env_id, 64), target=target)
        for env_id, target in (("CartPole-v1", 475.0), ("Pendulum-v1", -200.0), ("Acrobot-v1", -100.0))
    },
    configs=("base_offpolicy", "encoders/gru"),
    settings=_CONTROL,
)


def _walkers() -> dict[str, Task]:
    """MuJoCo tasks whose observations show only positions, or only velocities."""
    tasks = {}
    for name, num_positions, num_velocities in (
        ("Hopper", 5, 6),
        ("Walker2d", 8, 9),
        ("HalfCheetah", 8, 9),
        ("Ant", 13, 14),
    ):
        positions = tuple(range(num_positions))
        velocities = tuple(range(num_positions, num_positions + num_velocities))
        for kind, keep in (("positions", positions), ("velocities", velocities)):
            settings = (f"partial_env.env_id='{name}-v5'", f"partial_env.keep={keep}")
            env = _env("@partial_env()", 64, *settings)
            tasks[f"{name}-{kind}"] = Task(env, num_env_steps=200_000)
    return tasks


CONTROL = Suite(
    "Control with part of the state",
    "MuJoCo walkers that observe only their positions, or only their velocities; with a GRU, and with the "
    "discount that acts chosen by returns.",
    _walkers(),
    configs=("base_offpolicy", "encoders/gru"),
    # HalfCheetah-v5 moves with short horizons only, Hopper-v5 needs long ones (docs/notebook).
    settings=(*_CONTROL, "Agent.acting=@ActByReturn()"),
)
_TEN_ATTEMPTS = ("KShotWrapper.num_attempts=10", "Experiment.max_seq_len=250")
META = Suite(
    "Meta-RL",
    "Several attempts at a task that is new in each trial, by presets: lakes count the success of the last "
    "attempt, rooms the return of all.",
    {
        "frozen_lake": Task((), ("meta_frozen_lake",), "val/success_attempt_14", 0.6, 1_000_000),
        "frozen_lake_10": Task(_TEN_ATTEMPTS, ("meta_frozen_lake",), "val/success_attempt_9", 0.6, 1_000_000),
        "dark_room": Task((), ("dark_room",), target=100.0),
        "dark_key_to_door": Task((), ("dark_key_to_door",), target=10.0, num_env_steps=240_000),
    },
    configs=(),
)

SUITES = {
    "popgym": POPGYM,
    "memory": MEMORY,
    "long": LONG,
    "classic": CLASSIC,
    "control": CONTROL,
    "meta": META,
}
