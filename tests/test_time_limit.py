"""Every test has a time limit, which also ends waiting for other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
import subprocess, sys
def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(50)"])
"""


@pytest.mark.slow
def test_a_test_that_waits_for_a_process_that_hangs_fails(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 120
    (tmp_path / "test_hanging.py").write_text(HANGING)
    words = ["-q", "-c", str(pytestconfig.inipath), "--rootdir", str(tmp_path), "-o", "timeout=1", "-n", "1"]
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *words, "test_hanging.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=40,
    )
    assert "Timeout (>1.0s)" in ran.stdout, ran.stdout + ran.stderr
