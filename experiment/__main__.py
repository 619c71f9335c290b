"""The front door where there is no checkout: python -m loxodon.experiment --config tmaze."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
