"""The command `loxodon`, also without installation: python -m loxodon.tools run --config tmaze."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
