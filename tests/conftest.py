"""Setup for every test: the same random numbers each time, in any order, on any number of workers."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.metadata
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from gymnasium.utils import seeding

from .interpreters import ForkedPopen

gc.disable()  # until all tests are collected: imported objects stay, and scanning them is slow
os.fsync = lambda _: None  # no test is about a power cut, and fsync takes milliseconds
# every run asks for several versions
importlib.metadata.version = functools.cache(importlib.metadata.version)

# The examples are the same each time, and slow example generation on a busy machine is not an error.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

# These tests start several processes, which would slow each other down, or fork from one shared server.
STARTING_PROCESSES = tuple(
    f"tests/{place}"
    for place in (
        "distributed/",
        "experiment/fleet/",
        "experiment/test_fleet_processes.py",
        "experiment/process/test_malloc.py",
        "experiment/test_resume.py::test_kill_9",
        "integration/",
        "tools/test_seeds.py::test_only_unfinished",
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and of tests in each")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file share a worker, so its fixtures are made once; so do all tests that start processes."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(STARTING_PROCESSES) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # see pytest_collection_modifyitems
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    import gin  # the process that only distributes tests needs neither
    import torch

    if not torch.cuda.is_available():  # without a GPU, torch stores every seed with the stack that set it
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda _: None
    # Every run writes its configuration, and most values are the same.
    write, seen = gin.config._format_value, functools.lru_cache(None, typed=True)(gin.config._format_value)
    plain = (bool, int, float, str, type(None))
    gin.config._format_value = lambda value: (seen if type(value) in plain else write)(value)
    gc.collect()
    gc.freeze()  # collected objects are not scanned again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, so that all workers end at about the same time."""
    slow = {item.path for item in items for mark in item.iter_markers() if mark.name in ("slow", "learning")}
    num_tests = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -num_tests[item.path]))
    if (seed := config.getoption("--shuffle")) is not None:
        rng = random.Random(seed)
        rng.shuffle(items)
        places = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)  # also before module fixtures
def pytest_runtest_setup() -> None:
    import torch  # the process that only distributes tests does not need it

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for what uses the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded_spaces_and_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments and spaces without a seed draw it from `random`, not from the system."""
    make = seeding.np_random
    monkeypatch.setattr(
        seeding, "np_random", lambda seed=None: make(random.getrandbits(32) if seed is None else seed)
    )


@pytest.fixture(autouse=True)
def _no_interpreter_outlives_its_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """End all processes of a test that fails while they run; they would slow down the others."""
    started: list[subprocess.Popen[Any]] = []
    base: Any = ForkedPopen if request.node.get_closest_marker("forked") else subprocess.Popen

    class Popen(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if isinstance(self.args, list) and self.args[0] == sys.executable:
                started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    yield
    for process in started:
        if process.poll() is None:
            leads_group = os.getpgid(process.pid) == process.pid
            os.killpg(process.pid, signal.SIGKILL) if leads_group else process.kill()
            process.wait()
