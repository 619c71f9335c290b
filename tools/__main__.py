"""The command `loxodon` where it is not on the path: python -m loxodon.tools run --config tmaze."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
