import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gin
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # worker processes import scripted_envs by this name


@pytest.fixture(autouse=True)
def _empty_gin_config() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Builds vector environments and closes them after the test."""
    from vector_builders import build

    envs: list[Any] = []

    def open_env(*args: Any, **kwargs: Any) -> Any:
        envs.append(build(*args, **kwargs))
        return envs[-1]

    yield open_env
    for env in envs:
        env.close()
