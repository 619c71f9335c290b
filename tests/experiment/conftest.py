"""What holds for every test of a run."""

from __future__ import annotations

from collections.abc import Iterator

import gin
import pytest


@pytest.fixture(autouse=True)
def no_bindings_left() -> Iterator[None]:
    """Bindings of one test are no business of the next."""
    gin.clear_config()
    yield
    gin.clear_config()
