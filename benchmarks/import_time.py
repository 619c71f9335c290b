"""Time of `import loxodon.experiment` beyond `import torch`: medians over fresh interpreters, as JSON.

Times are CPU seconds, which depend less on other processes than wall time.

Run: python benchmarks/import_time.py > benchmarks/results/import_time.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from provenance import provenance

NUM_RUNS = 5
TIMED_IMPORTS = """
import json, time
start = time.process_time()
import torch
middle = time.process_time()
import loxodon.experiment
end = time.process_time()
print(json.dumps([middle - start, end - middle]))
"""


def time_imports() -> tuple[float, float]:
    """CPU seconds to import torch, and then loxodon.experiment, in a fresh interpreter."""
    output = subprocess.run(
        [sys.executable, "-c", TIMED_IMPORTS], capture_output=True, text=True, check=True
    ).stdout
    torch_s, ours_s = json.loads(output.splitlines()[-1])
    return float(torch_s), float(ours_s)


def main() -> None:
    """Measure and print; the first run only warms the disk cache."""
    time_imports()
    runs = [time_imports() for _ in range(NUM_RUNS)]
    result = {
        "import_torch_cpu_s": round(statistics.median(torch_s for torch_s, _ in runs), 3),
        "import_loxodon_experiment_cpu_s": round(statistics.median(ours_s for _, ours_s in runs), 3),
        "num_runs": NUM_RUNS,
        **provenance(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
