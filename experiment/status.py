"""`loxodon status RUN_DIR`: who works on a run, how fast, and what there is of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from ..gin_configs.words import parse_status
from .fleet.overview import as_text, overview

NO_RUN, NOBODY = 2, 3
_PERIOD_S = 2.0  # of --watch
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status of a run; returns the exit status: 2 if it is no run, 3 if nobody is at work."""
    args = parse_status(argv)
    clear = ""
    try:
        while True:
            view = overview(args.run_dir.expanduser())
            sys.stdout.write(f"{json.dumps(view) if args.json else clear + as_text(view)}\n")
            sys.stdout.flush()
            if not args.watch:
                break
            clear = _CLEAR if sys.stdout.isatty() else ""
            time.sleep(_PERIOD_S)
    except FileNotFoundError as error:
        sys.stderr.write(f"error: {error}\n")
        return NO_RUN
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    return 0 if view["alive"] else NOBODY


if __name__ == "__main__":
    raise SystemExit(main())
