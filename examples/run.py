"""The front door: python examples/run.py --config tmaze [Name.param=value ...]; --help lists the options."""

import sys

from loxodon.experiment.cli import main

if __name__ == "__main__":
    sys.exit(main())
