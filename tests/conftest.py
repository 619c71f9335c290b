"""What holds for every test: the same random numbers each time, in any order, on any number of workers."""

from __future__ import annotations

import random

import hypothesis
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding

# The same examples each time, and no complaint that a busy machine makes few of them per second.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and of tests in each")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file share a worker, so that its fixtures are made once; so do all that start processes."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    if (seed := config.getoption("--shuffle")) is not None:
        rng = random.Random(seed)
        rng.shuffle(items)
        places = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules, too
def pytest_runtest_setup() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for what uses the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded_spaces_and_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments and spaces that nobody seeds draw their seed from `random`, not from the system."""
    make = seeding.np_random
    monkeypatch.setattr(
        seeding, "np_random", lambda seed=None: make(random.getrandbits(32) if seed is None else seed)
    )
