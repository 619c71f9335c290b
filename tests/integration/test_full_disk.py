"""A run on a file system that really is full: a tmpfs of two megabytes in its own mount namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loxodon.data import check_file

ROOT = Path(__file__).resolve().parents[2]
# The files are copied out before the namespace ends, and the tmpfs with it.
SCRIPT = """
mount -t tmpfs -o size=2m tmpfs "$1" || exit 99
"$2" "$3" --config tmaze --run-name full "Experiment.ckpt_base_dir='$1'" Experiment.epochs=100 \
    Experiment.train_batches_per_epoch=0 Experiment.val_interval=None Experiment.val_timesteps_per_epoch=0 \
    HORIZON=10 Experiment.max_seq_len=11 Experiment.train_timesteps_per_epoch=500 Experiment.verbose=False
code=$?
cp -r "$1/full/buffer" "$4"
exit $code
"""


def can_mount() -> bool:
    """True if this user may mount a tmpfs in a namespace of its own."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this user may not mount a tmpfs in a namespace")
def test_a_full_disk_ends_the_run_with_one_error_and_loses_no_finished_file(tmp_path: Path) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    run = str(ROOT / "examples" / "run.py")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", str(disk), sys.executable, run, str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode not in (0, 99), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr
    assert "A finished trajectory could not be written" in errors[0]
    assert "No space left on device" in errors[0]
    assert "Fix: free space" in errors[0]
    files = list((copy / "fifo").glob("*.npz"))
    assert len(files) > 100
    for file in files:
        check_file(file)
    assert not list((copy / "fifo").glob("*.tmp"))
