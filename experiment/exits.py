"""Exit statuses, as argparse and shells use them."""

import signal

FAILED = 1
CONFIG_ERROR = 2  # trying again would not help
INTERRUPTED = 128 + signal.SIGINT  # by which a shell's loop over commands knows to end too
