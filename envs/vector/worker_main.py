"""The main loop of an `AsyncVectorEnv` worker, which runs several environments. No heavy imports here."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gymnasium import spaces

from ..errors import close_all
from ..generators import generators_state, seed_generators, set_generators_state
from ..gin_values import bind_known, unship
from ..sequence_env import SequenceEnv
from ..spec import EnvSpec, build_all, register_as
from .group import EnvGroup, StepBuffers, check_same_spaces

STEP = b"s"
"""The message that requests a step; actions and results are in shared memory."""
CLOSE = b"c"
"""The message that ends a worker. End-of-file is not enough: later forked workers hold copies of the pipe."""
GRACE_S = 30
"""Seconds for which a worker continues after SIGTERM, unless its parent ends it earlier."""
_GENERATORS = "generators"
NOTHING_NEW = b""
"""The answer to a step without ended episodes and metrics."""


class Recipes(NamedTuple):
    """A worker's environments before they are made, and the spaces that they must have.

    registered: see `spec.registered`.
    """

    specs: Sequence[EnvSpec]
    obs_space: spaces.Dict
    action_space: spaces.Space[Any]
    registered: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerJob:
    """The environments, memory and seed of a worker.

    recipes: the recipes and the spaces they must have; packed by `ship` for a worker that is not a fork;
    memory: shared, laid out by StepBuffers for all num_envs environments; seed: seed of the vector
    environment, for random numbers in the constructors of environments.
    """

    recipes: Recipes | bytes
    first_row: int
    num_rows: int
    num_envs: int
    memory: Any
    seed: int


@dataclass(frozen=True)
class WorkerFailure:
    """An exception of an environment, as text."""

    row: int
    doing: str
    summary: str
    traceback: str


def run_worker(connection: Connection, inherited: Sequence[Connection], job: WorkerJob) -> None:
    """Serve step and reset until the parent requests the end, closes the connection or dies.

    Args:
        connection: this worker's end.
        inherited: the parent's ends that forking copied into this process. They are closed, so that every
            worker sees end-of-file when the parent ends.
        job: the environments and the shared memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_after_grace)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers with models share the cores
    for other in inherited:
        other.close()
    group: EnvGroup | None = None
    try:
        group = _build(connection, job)
        if group is not None:
            _serve(connection, group)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has ended
    finally:
        if group is not None:
            group.close()


def _exit_after_grace(*_: object) -> None:
    """End some seconds after SIGTERM: on a preempted machine, the parent needs its workers while it saves."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE_S)


def _build(connection: Connection, job: WorkerJob) -> EnvGroup | None:
    envs: list[SequenceEnv] = []
    try:
        recipes = _make(job, envs)
        check_same_spaces(envs, recipes.obs_space, recipes.action_space, job.first_row)
        buffers = StepBuffers.carve(job.memory, recipes.obs_space, recipes.action_space, job.num_envs)
        group = EnvGroup(envs, buffers.rows(job.first_row, job.first_row + job.num_rows), job.first_row)
    except BaseException as error:  # any exception of a user's constructor must reach the parent
        row = job.first_row + min(len(envs), job.num_rows - 1)
        connection.send(_failure(row, "its construction", error))
        return None
    connection.send(group.env_names)
    return group


def _make(job: WorkerJob, made: list[SequenceEnv]) -> Recipes:
    """Make the environments with gin's bindings, and add them to `made`; returns the recipes."""
    seed_generators(job.seed, job.first_row)
    if not isinstance(job.recipes, bytes):
        build_all(job.recipes.specs, made)
        return job.recipes
    recipes: Recipes
    recipes, text = unship(job.recipes)
    register_as(recipes.specs, recipes.registered)
    num_bound = bind_known(text)
    build_all(recipes.specs, made)
    # Building the environments imported more configurables, whose bindings can be set only now.
    if bind_known(text) > num_bound:
        close_all(made, job.first_row)
        made.clear()
        seed_generators(job.seed, job.first_row)
        build_all(recipes.specs, made)
    return recipes


def _serve(connection: Connection, group: EnvGroup) -> None:
    while (message := connection.recv_bytes()) != CLOSE:
        doing = "step"
        try:
            if message == STEP:
                answer = _step(group)
            else:
                doing, argument = pickle.loads(message)
                answer = _handle(group, doing, argument)
        except BaseException as error:  # any exception of a user's environment must reach the parent
            connection.send(_failure(group.first_row + group.failed_row, doing, error))
            return
        connection.send_bytes(answer)


def _step(group: EnvGroup) -> bytes:
    names = group.env_names
    has_ended, metrics = group.step()
    if not has_ended and not metrics:
        return NOTHING_NEW
    return pickle.dumps((has_ended, metrics, None if group.env_names is names else group.env_names))


def _handle(group: EnvGroup, command: str, argument: Any) -> bytes:
    if command == "reset":
        seeds, options = argument
        if seeds[0] is not None:
            seed_generators(seeds[0])
        metrics = group.reset(seeds, options)
        return pickle.dumps((False, metrics, group.env_names))
    answers = group.query(command, argument)
    if command == "get_state":  # the first environment of a process also stores the generators that all share
        answers[0] = {**answers[0], _GENERATORS: generators_state()}
    elif command == "set_state":
        for state in (state for (state,) in argument if _GENERATORS in state):
            set_generators_state(state[_GENERATORS])
    return pickle.dumps(answers)


def _failure(row: int, doing: str, error: BaseException) -> WorkerFailure:
    return WorkerFailure(row, doing, f"{type(error).__name__}: {error}", traceback.format_exc())
