"""The front door: python examples/run.py tmaze [Name.param=value ...]; --help lists the options."""

import sys

try:
    from loxodon.tools.main import run
except ModuleNotFoundError as error:
    if (error.name or "").startswith("loxodon."):
        raise
    sys.exit(
        f"Loxodon is not installed for {sys.executable}: {error}.\nFix: run source .venv/bin/activate "
        "(`make install` creates it), or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(run())
