"""gin configurations: read, checked as a whole, then handed to gin.

`reading` reads files and overrides with gin's own parser and keeps where each binding came from, `registry`
is our view of gin's configurables, `checks` finds problems, `load` runs them in order, `hash` identifies the
settings that decide a result.
"""

from .load import LoadedConfig, explained, load_config
from .reading import ConfigError

__all__ = ["ConfigError", "LoadedConfig", "explained", "load_config"]
