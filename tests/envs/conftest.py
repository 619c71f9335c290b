import sys
from collections.abc import Iterator
from pathlib import Path

import gin
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # worker processes import scripted_envs by this name


@pytest.fixture(autouse=True)
def _empty_gin_config() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()
