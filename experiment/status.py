"""`loxodon status RUN_DIR`: who works on a run, how fast, and what there is of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from ..gin_configs.words import parse_status
from .fleet.overview import as_text, overview

NO_RUN, NOBODY = 2, 3  # exit statuses; of a run that has finished, or that a process works on, it is 0
_PERIOD_S = 2.0  # of --watch
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status of a run; returns the exit status.

    It is 0 if the run has finished or a process is at work, 3 if it stopped before its end, 2 without a run.
    """
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
    return 0 if view["alive"] or view["is_finished"] else NOBODY


if __name__ == "__main__":
    raise SystemExit(main())
