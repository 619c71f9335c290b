"""Contracts between the parts of a run: read this first.

An `Experiment` makes a `RunContext`, then parts that get it, or only those of its fields that they need; no
part gets the experiment itself. A long-lived part owns its state and is `Stateful`, which is all that a
checkpoint needs to know about it. Optional parts are `Callback`s, which see the run as `Run`.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from gymnasium import spaces

from ..agents import BaseAgent
from ..data import RLDataset, Sink
from .output.console import ConsoleView
from .process.distributed import any_process
from .process.rng import derive_seed
from .process.signals import StopRequest


class Stateful(Protocol):
    """A part with a state for checkpoints: only tensors and plain values, in dicts and lists."""

    def state_dict(self) -> dict[str, Any]:
        """State from which `load_state_dict` continues exactly."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`. Raises: ValueError if it does not fit this run."""
        ...


class Role(NamedTuple):
    """Role of this process in its run, from `Experiment.mode`."""

    collects: bool
    learns: bool

    @classmethod
    def of(cls, mode: str) -> Role:
        """The role for mode "both", "learn" or "collect"."""
        return cls(collects=mode != "learn", learns=mode != "collect")

    @property
    def does_both(self) -> bool:
        """True if this process collects for itself, in a run of one command."""
        return self.collects and self.learns

    @property
    def is_actor(self) -> bool:
        """True if this process collects for a separate learner and follows its policies."""
        return not self.learns

    @property
    def only_learns(self) -> bool:
        """True if this process learns from the data of separate actors and publishes policies for them."""
        return not self.collects

    def __str__(self) -> str:
        """Name of the role in heartbeats."""
        return "both" if self.does_both else "learner" if self.learns else "actor"


@dataclass
class Progress:
    """Progress of the run: the only place for its counters.

    epochs: number of epochs of the run. seed: seed of the run. epoch: the running epoch, or the next one.
    env_steps: env steps of the whole run. gradient_steps: optimizer steps. policy_version: counts
    publications. policy_epoch: epoch of the learner's policy that an actor acts with; None in other
    processes. best_score: score of the best policy so far. val_return: mean return of the newest evaluation.
    is_finished: True if nothing is left to do after the last epoch.
    """

    epochs: int
    seed: int
    epoch: int = 0
    env_steps: int = 0
    gradient_steps: int = 0
    policy_version: int = 0
    policy_epoch: int | None = None
    best_score: float | None = None
    val_return: float | None = None
    is_finished: bool = False

    @property
    def schedule_epoch(self) -> int:
        """The epoch that schedules follow: the running one; in an actor, that of its newest policy."""
        return self.epoch if self.policy_epoch is None else self.policy_epoch

    @property
    def share(self) -> float:
        """Share of the epochs that are done, in [0, 1]."""
        return min(1.0, self.epoch / max(self.epochs, 1))

    def state_dict(self) -> dict[str, Any]:
        """All fields but the length of the run, which may change on resuming."""
        state = dataclasses.asdict(self)
        del state["epochs"], state["policy_epoch"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


class Status(Protocol):
    """Reports the activity of this process to others; see fleet/heartbeat.py."""

    def state(self, state: str, note: str | None = None) -> None:
        """Set the current activity, one of fleet.heartbeat.STATES; note: the reason for waiting."""
        ...

    def put(self, **values: Any) -> None:
        """Report new values, such as epoch and env_steps."""
        ...


@dataclass(frozen=True)
class RunContext:
    """Context that several parts of a run share, made once and never replaced.

    stop and console become active in `learn`. log: writes a record, each metric as `<key>/<name>`.
    """

    run_dir: Path
    run_name: str
    role: Role
    accelerator: Accelerator
    progress: Progress
    log: Callable[[Mapping[str, Any], str], None]
    console: ConsoleView
    status: Status
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def is_main(self) -> bool:
        """True in the process that writes files and represents all that train together."""
        return bool(self.accelerator.is_main_process)

    def any(self, flag: bool) -> bool:
        """True in all processes if `flag` is True in any; all have to call this."""
        return any_process(flag, self.accelerator)

    def stop_agreed(self) -> bool:
        """True in all processes if any was asked to stop; all have to call this."""
        return self.any(self.stop.requested())

    def seed_of(self, *names: str | int) -> int:
        """Seed of a random stream of this process. Actors never repeat each other."""
        own = (os.getpid(), time.time_ns() % 2**31) if self.role.is_actor else ()
        return derive_seed(self.progress.seed, *names, self.accelerator.process_index, *own)


class Trainer(abc.ABC):
    """Training within an epoch; chosen once for the agent: `OffPolicyTrainer` or `PPOLearner`."""

    explores: bool = True
    """Whether exploration noise is put on training actions."""
    idle_epochs: int = 0
    """Number of consecutive epochs without an update for lack of trajectories."""
    timesteps_per_forward: int
    """Largest number of timesteps in a batch, which decides how many threads pay off."""

    def sinks(self, num_envs: int) -> list[Sink]:
        """Receivers of the rollout of `num_envs` envs besides the trajectory files."""
        return []

    def wait_for_data(self) -> bool:
        """Return True once training can begin (a learner waits for this); False skips it in this epoch."""
        return True

    @abc.abstractmethod
    def train(self, epoch: int) -> None:
        """All updates of an epoch; logs their metrics.

        Raises: FloatingPointError for a loss that is not finite, unless such updates are left out.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """A short description of the training data of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict` that does not follow from the epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - nothing to restore
        """Continue from the result of `state_dict`."""


class Run(Protocol):
    """View of the Experiment for callbacks; it is also an instance of `settings.Settings`."""

    mode: str
    make_val_env: Any
    parallel_actors: int
    test_run: bool
    val_interval: int | None
    val_timesteps_per_epoch: int
    restore_from: str | None
    begins_anew: bool
    """False if a checkpoint will be loaded after `start`."""
    ctx: RunContext
    dataset: RLDataset
    learner: Any
    trainer: Trainer
    checkpoints: Any
    train_envs: Any
    val_envs: Any
    epoch: int
    env_steps: int
    last_val_metrics: dict[str, float]
    obs_space: spaces.Dict
    action_space: Any
    env_spaces: Any

    @property
    def policy(self) -> BaseAgent:
        """The agent."""
        ...

    @property
    def DEVICE(self) -> torch.device:  # noqa: N802 - the name is part of the public interface
        """The device of the agent."""
        ...

    def caster(self) -> AbstractContextManager[Any]:
        """Context of forward passes: the precision of the run."""
        ...

    def log(self, metrics_dict: Mapping[str, Any], key: str = "") -> None:
        """Write one record, each name as `<key>/<name>`."""
        ...

    def make_envs(self, make_env: Any) -> Any:
        """A vector env of parallel_actors environments that the agent fits."""
        ...

    def fetched(self, reference: str, name: str) -> AbstractContextManager[tuple[Path, str | None]]:
        """Local path of a file or an artifact, for all processes, and the run it is from.

        name: name of the setting, for errors.
        """
        ...

    def evaluate_val(self) -> dict[str, float]:
        """Evaluate in the validation environments; returns metrics named `val/...`."""
        ...

    def evaluate_test(
        self,
        make_test_env: Any,
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
    ) -> dict[str, float]:
        """Evaluate in new environments; returns metrics named `test/...`."""
        ...

    def request_stop(self, reason: str = "") -> None:
        """End training after the running epoch, with a checkpoint."""
        ...
