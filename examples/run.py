"""The front door: python examples/run.py --config tmaze [Name.param=value ...]; --help lists the options."""

import sys

try:
    from loxodon.experiment.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").startswith("loxodon."):
        raise
    sys.exit(
        f"Loxodon is not installed for {sys.executable}: {error}.\n"
        "Fix: source .venv/bin/activate (`make install` makes it), or pip install -e ."
    )
except KeyboardInterrupt:  # the imports take a second or two
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
