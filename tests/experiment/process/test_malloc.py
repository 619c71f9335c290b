"""Memory that updates free stays available for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from loxodon.experiment.process.malloc import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(9_000_000)  # 36 MB, more than glibc would ever keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [faults() for _ in range(25)]  # the first ones may find no place that is large enough
print(sorted(found[-5:])[2])
"""


def faults(*args: str, **env: str) -> int:
    command = [sys.executable, "-c", FAULTS, *args]
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))
    }
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**inherited, **env})
    return int(told.stdout)


@pytest.mark.forked
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_a_tensor_frees_is_kept_for_the_next_one_unless_the_user_configures_malloc() -> None:
    # Memory that is asked for each time takes 18 faults with large pages and thousands with small ones, and
    # each process may get the other kind.
    assert faults() > 10
    assert faults("kept") < 5
    assert faults("kept", MALLOC_ARENA_MAX="2") > 10
