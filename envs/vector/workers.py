"""Environments in worker processes: several per worker, shared memory, one wake-up per step and worker."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import secrets
import select
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gin
import numpy as np

from ...data.errors import check_choice, check_count
from ..errors import EnvError, close_all
from ..gin_values import ship
from ..returned import Metrics
from ..spec import EnvSpec, build_all, registered
from .base import EnvQueries, SequenceVectorEnv, StepResult
from .group import StepBuffers
from .worker_main import CLOSE, STEP, Recipes, WorkerFailure, WorkerJob, run_worker

CONTEXTS = ("fork", "forkserver", "spawn")
ALIVE_CHECK_MS = 1000
SLOW_S = 60.0  # time without an answer after which a warning is logged, once
CLOSE_TIMEOUT_S = 5.0
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's quota: microseconds in each period, and the period
logger = logging.getLogger("loxodon")
_open_envs: weakref.WeakSet[AsyncVectorEnv] = weakref.WeakSet()


@gin.configurable(allowlist=["num_workers"])
class AsyncVectorEnv(SequenceVectorEnv):
    """Environments in worker processes. See `SequenceVectorEnv` for the interface.

    `step` is `step_async` followed by `step_wait`; between the two, the caller can do other work. After any
    failure the workers are stopped, and every further call raises an error that says so.

    Args:
        specs: one recipe per environment.
        context: start method, "fork", "forkserver", "spawn", or None for the platform's default.
        num_workers: None means one per CPU core this process may use, at most one per environment.
        share: number of vector envs, including this one, that the workers are divided among.
        seed: seed of the global random generators in the workers, until `reset` receives a seed; None draws
            one.

    Raises: EnvError when a worker dies or an environment raises, with the environment's own traceback.
    """

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        *,
        context: str | None = None,
        num_workers: int | None = None,
        share: int = 1,
        seed: int | None = None,
    ) -> None:
        self.closed = True  # nothing needs closing yet
        self._has_warned = False  # that a worker does not answer
        if context is not None:
            check_choice("Experiment.async_env_mp_context", context, CONTEXTS)
        num_workers = _count_workers(num_workers, len(specs), share)
        (probe,) = build_all(specs[:1])
        obs_space, action_space = probe.obs_layout.space, probe.action_map.policy_space
        raw_spaces = probe.raw_spaces
        close_all([probe])
        mp: Any = multiprocessing.get_context(context)
        memory = mp.RawArray("b", StepBuffers.num_bytes(obs_space, action_space, len(specs)))
        super().__init__(obs_space, action_space, len(specs), memory)
        self.env_observation_space, self.env_action_space = raw_spaces
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._pollers: list[Any] = []
        self._is_waiting = False
        self._owner_pid = os.getpid()
        self.closed = False
        _open_envs.add(self)
        bounds = np.linspace(0, len(specs), num_workers + 1).astype(int).tolist()
        self._bounds = list(pairwise(bounds))
        try:
            self._start(mp, specs, memory, secrets.randbits(31) if seed is None else seed)
            self.env_names = [name for worker in range(num_workers) for name in self._receive(worker)]
        except BaseException:
            self.close()
            raise

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin new episodes in all environments; seed + i seeds env i, and its worker's generators."""
        if self._is_waiting:
            self.step_wait()
        seeds = self.seeds_of(seed)
        for worker, (start, stop) in enumerate(self._bounds):
            self._send(worker, pickle.dumps(("reset", (seeds[start:stop], options))))
        _, metrics = self._gather()
        return self.buffers.obs, self.infos(False, metrics)

    def step(self, actions: Any) -> StepResult:
        """Take one env step in all environments."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a step in every worker and return at once."""
        if self._is_waiting:
            raise RuntimeError(
                "step_async was called twice without step_wait. Fix: call step_wait in between."
            )
        self.buffers.actions[:] = actions
        for worker in range(len(self._bounds)):
            self._send(worker, STEP)
        self._is_waiting = True

    def step_wait(self) -> StepResult:
        """Wait for the step that `step_async` started."""
        if not self._is_waiting:
            raise RuntimeError("step_wait was called without step_async. Fix: call step_async first.")
        self._is_waiting = False
        return self.step_result(*self._gather())

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        if self._is_waiting:
            raise RuntimeError(
                "Attributes of environments cannot be read while the environments step. Fix: call "
                "step_wait first."
            )
        messages = [pickle.dumps((what, arguments[start:stop])) for start, stop in self._bounds]
        for worker, message in enumerate(messages):
            self._send(worker, message)
        return tuple(answer for worker in range(len(self._bounds)) for answer in self._receive(worker))

    def close_extras(self, **_: Any) -> None:
        """Stop every worker: by a request first, then by force."""
        for connection in self._connections:
            with suppress(OSError):  # the worker has ended already
                connection.send_bytes(CLOSE)
            connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def _start(self, mp: Any, specs: Sequence[EnvSpec], memory: Any, seed: int) -> None:
        is_fork = mp.get_start_method() == "fork"
        for start, stop in self._bounds:
            mine, theirs = mp.Pipe()
            self._connections.append(mine)
            recipes = Recipes(
                list(specs[start:stop]),
                self.single_observation_space,  # type: ignore[arg-type]
                self.single_action_space,
                registered(specs[start:stop]),
            )
            shipped = recipes if is_fork else _shipped(recipes)
            job = WorkerJob(shipped, start, stop - start, self.num_envs, memory, seed)
            inherited = tuple(self._connections) if is_fork else ()
            process = mp.Process(
                target=run_worker,
                args=(theirs, inherited, job),
                name=f"loxodon-envs-{start}-{stop - 1}",
                daemon=True,
            )
            with _hidden_main():
                process.start()
            theirs.close()
            self._processes.append(process)
            poller = select.poll()
            poller.register(mine.fileno(), select.POLLIN)
            self._pollers.append(poller)

    def _send(self, worker: int, message: bytes) -> None:
        if self.closed:
            raise EnvError(
                "The vector environment is closed (after an earlier failure, or by close()). Fix: build a "
                "new one."
            )
        try:
            self._connections[worker].send_bytes(message)
        except OSError:
            self._receive(worker)  # reports the worker's failure, or its death
            raise

    def _gather(self) -> tuple[bool, Metrics]:
        has_ended, metrics, names = False, [], self.env_names
        for worker, (start, stop) in enumerate(self._bounds):
            answer = self._receive(worker)
            if answer is None:
                continue
            worker_ended, worker_metrics, worker_names = answer
            has_ended = has_ended or worker_ended
            metrics += [(start + row, name, value) for row, name, value in worker_metrics]
            if worker_names is not None:
                names = [*names[:start], *worker_names, *names[stop:]]
        self.env_names = names
        return has_ended, metrics

    def _receive(self, worker: int) -> Any:
        """The worker's answer, unpickled; None if it is empty. Our own workers are trusted."""
        asked_s = time.monotonic()
        try:
            while not self._pollers[worker].poll(ALIVE_CHECK_MS):
                if not self._processes[worker].is_alive() and not self._pollers[worker].poll(0):
                    raise EOFError
                if not self._has_warned and time.monotonic() - asked_s > SLOW_S:
                    self._has_warned = True
                    first, stop = self._bounds[worker]
                    logger.warning(
                        "The worker process of environments %d to %d has not answered for %d s; the run "
                        "waits for it. Fix: if it hangs, interrupt the run twice (nothing more is saved) and "
                        "look at the environment with env_mode='sync' under your debugger.",
                        first,
                        stop - 1,
                        SLOW_S,
                    )
            message = self._connections[worker].recv_bytes()
        except (EOFError, ConnectionResetError):
            raise EnvError(self._death_text(worker)) from None
        answer = pickle.loads(message) if message else None
        if isinstance(answer, WorkerFailure):
            self.close()
            raise EnvError(
                f"Environment {answer.row} failed in {answer.doing}: {answer.summary}\n"
                f"--- the environment's own traceback, from its worker process ---\n{answer.traceback}"
                "--- Fix: correct the environment; env_mode='sync' runs it in this process, under your "
                "debugger."
            )
        return answer

    def _death_text(self, worker: int) -> str:
        process = self._processes[worker]
        process.join(CLOSE_TIMEOUT_S)
        code, (start, stop) = process.exitcode, self._bounds[worker]
        self.close()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return (
            f"The worker process of environments {start} to {stop - 1} {how} without a Python error. "
            "Expected: it runs until the vector environment is closed. Fix: look for a crash in the "
            "environment's native code or for the system's out-of-memory killer (dmesg); fewer workers or "
            "environments need less memory."
        )


# Registered after the import of multiprocessing.util, so it runs before that waits for all processes.
@atexit.register
def _close_all() -> None:
    """End the workers of a program that ends without close(); a signal alone does not end them at once."""
    for envs in list(_open_envs):
        if envs._owner_pid == os.getpid():
            envs.close()


class EnvHalves(EnvQueries):
    """All environments of several vector environments, which are stepped in turns, not through this class.

    It answers for all of them (`call`, `get_attr`, `set_attr`, `call_if_defined` ...) and closes them.
    """

    def __init__(self, halves: Sequence[AsyncVectorEnv]) -> None:
        self.halves, first = list(halves), halves[0]
        self.num_envs = sum(envs.num_envs for envs in halves)
        self.single_observation_space = first.single_observation_space
        self.single_action_space = first.single_action_space
        self.env_observation_space = first.env_observation_space
        self.env_action_space = first.env_action_space

    def _query(self, what: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        answers: tuple[Any, ...] = ()
        for envs in self.halves:
            start = len(answers)
            answers += envs._query(what, arguments[start : start + envs.num_envs])
        return answers

    def close(self) -> None:
        """End all workers."""
        for envs in reversed(self.halves):  # newer workers hold ends of the older workers' pipes
            envs.close()


def num_usable_cores() -> int:
    """Number of CPU cores this process may use, limited by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # the file does not exist, or has "max" for no quota
        quota_us, period_us = CPU_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota_us) // int(period_us)))
    return cores


def _count_workers(num_workers: int | None, num_envs: int, share: int) -> int:
    check_count("AsyncVectorEnv.num_workers", num_workers, optional=True)
    if num_workers is None:
        num_workers = num_usable_cores()
    return min(-(-num_workers // share), num_envs)


def _shipped(recipes: Recipes) -> bytes:
    try:
        return ship(recipes)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        raise EnvError(
            f"An environment recipe cannot be sent to a worker process: {error}. The recipes are "
            f"{list(dict.fromkeys(map(str, recipes.specs)))}. It must be picklable. Fix: define the "
            "environment in an importable module, pass plain arguments, or set "
            "Experiment.async_env_mp_context = 'fork'."
        ) from error


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a new process from importing the main script, and torch with it; recipes do not need it."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)
    }
    vars(main).update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        vars(main).update(hidden)
