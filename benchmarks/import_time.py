"""How long `import loxodon.experiment` takes beyond `import torch`: medians over fresh interpreters, as JSON.

Run: python benchmarks/import_time.py > benchmarks/results/import_time.json
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

NUM_RUNS = 5
PACKAGES = ("torch", "accelerate", "gin-config", "gymnasium", "numpy", "rich")
TIMED_IMPORTS = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import loxodon.experiment
end = time.perf_counter()
print(json.dumps([middle - start, end - middle]))
"""


def time_imports() -> tuple[float, float]:
    """Seconds to import torch, then seconds to import loxodon.experiment, in one fresh interpreter."""
    output = subprocess.run(
        [sys.executable, "-c", TIMED_IMPORTS], capture_output=True, text=True, check=True
    ).stdout
    torch_s, ours_s = json.loads(output.splitlines()[-1])
    return float(torch_s), float(ours_s)


def git_commit() -> str:
    """Commit of the code that was measured, marked when the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure and print; the first run only warms the disk cache."""
    time_imports()
    runs = [time_imports() for _ in range(NUM_RUNS)]
    result = {
        "import_torch_s": round(statistics.median(torch_s for torch_s, _ in runs), 3),
        "import_loxodon_experiment_s": round(statistics.median(ours_s for _, ours_s in runs), 3),
        "num_runs": NUM_RUNS,
        "device": f"cpu, {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "commit": git_commit(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
