"""`python -m loxodon.data`: look at trajectory files, check, convert and exchange them."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
