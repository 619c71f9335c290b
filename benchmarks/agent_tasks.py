"""Tasks of `agents.py` by study, and the runs that record data for the offline study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from learning_tasks import Task
from peers.common import Settings


@dataclass(frozen=True)
class OfflineTask(Task):
    """A task that learns from the data of the run `DATA[data]`, found by {folder}, {run} and {dataset}."""

    data: str = field(kw_only=True)
    share: float = field(default=1.0, kw_only=True)  # share of its episodes, best returns first


@dataclass(frozen=True)
class PeerTask(Task):
    """A task for RecurrentPPO of sb3-contrib, with separate LSTMs for policy and values."""

    settings: Settings = field(kw_only=True)


RECURRENT: dict[str, Task] = {
    "dqn_cartpole_no_velocity": Task(
        ("cartpole_no_velocity", "agents/dqn"), "val/return", 475.0, 100_000, overrides=("NStep.n=5",)
    ),
    "dqn_repeat": Task(("popgym_repeat", "agents/dqn"), "val/return", 0.95, 50_000),
    "sac_pendulum_no_velocity": Task(
        ("pendulum_no_velocity", "agents/sac"),
        "val/return",
        -250.0,
        100_000,
        overrides=("SACAgent.alpha=0.2",),
    ),
}


def _peer(target: float, env: str, **own: Any) -> PeerTask:
    """A peer task with the network sizes of the small presets."""
    settings = Settings(env, evaluate_every=4, threads=1, hidden=(64,), lstm=64, **own)
    return PeerTask((), "return", target, settings=settings)


PEERS: dict[str, PeerTask] = {
    "ppo_repeat": _peer(
        0.95,
        "popgym:popgym-RepeatPreviousEasy-v0",
        updates=60,
        num_envs=16,
        rollout=102,
        minibatches=8,
        gamma=0.8,
        entropy_coef=0.01,
    ),
    "ppo_pendulum_no_velocity": _peer(
        -250.0,
        "Pendulum-v1",
        updates=36,
        obs_indices=(0, 1),
        rollout=200,
        epochs=10,
        minibatches=10,
        gamma=0.9,
        normalize=True,
    ),
}

DATA = {
    "tmaze": Task(
        ("tmaze",),
        "val/return",
        1.0,
        overrides=("Experiment.epochs=12", "Experiment.stop_at_val_return=None"),
    ),
    "pendulum": Task(
        ("pendulum_no_velocity", "agents/sac"),
        "val/return",
        -250.0,
        overrides=("SACAgent.alpha=0.2", "Experiment.epochs=40"),
    ),
}
_FROM_FOLDER = ("DiskTrajDataset.dset_root='{folder}'", "DiskTrajDataset.dset_name='{run}'")
_FROM_MINARI = (
    "Experiment.dataset=@MinariDataset()",
    "MinariDataset.dataset_id='{dataset}'",
    "Sampler.sample_by='timestep'",
)
_OFFLINE = (
    "Experiment.train_timesteps_per_epoch=0",
    "Experiment.start_learning_at_epoch=0",
    "Experiment.epochs=30",
    "Experiment.train_batches_per_epoch=100",
)
_WITH_PENDULUM: dict[str, tuple[str, ...]] = {
    "bc": (),
    # Advantages are small compared to the spread of values, so beta is large. Single weights of the actor are
    # then large too, and policies vary in quality from update to update.
    "iql": (
        "IQLAgent.beta=50.0",
        "IQLAgent.expectile=0.9",
        "Experiment.batch_size=48",
        "Experiment.epochs=60",
    ),
    "agent": (),
}
OFFLINE: dict[str, OfflineTask] = {
    f"{data}_{name}": OfflineTask((f"offline/{name}",), "val/return", 0.9, overrides=overrides, data="tmaze")
    for data, overrides in (("tmaze", _FROM_FOLDER), ("tmaze_minari", _FROM_MINARI))
    for name in ("bc", "iql", "agent")
} | {
    f"pendulum_{name}": OfflineTask(
        ("pendulum_no_velocity", *([] if name == "agent" else [f"agents/{name}"])),
        "val/return",
        -400.0,
        overrides=(*_FROM_MINARI, *_OFFLINE, *own),
        data="pendulum",
        share=0.1 if name == "bc" else 1.0,  # excludes the random actions at the start
    )
    for name, own in _WITH_PENDULUM.items()
}

_TARGETS = {
    "n_step_1": ("Agent.returns=@NStep()", "NStep.n=1"),
    "n_step_3": ("Agent.returns=@NStep()", "NStep.n=3"),
    "n_step_10": ("Agent.returns=@NStep()", "NStep.n=10"),
    "lambda": ("Agent.returns=@LambdaReturns()",),
    "retrace": ("Agent.returns=@Retrace()",),
}
CREDIT: dict[str, Task] = {
    name: Task(("tmaze_active",), "val/success", 1.0, overrides=own) for name, own in _TARGETS.items()
}

STUDIES: dict[str, Mapping[str, Task]] = {
    "recurrent": RECURRENT,
    "peers": PEERS,
    "offline": OFFLINE,
    "credit": CREDIT,
}
