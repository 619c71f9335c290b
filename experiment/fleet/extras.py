"""Packages that only some launchers need."""

from __future__ import annotations

import importlib
from typing import Any


def require(package: str, extra: str) -> Any:
    """Import an optional package.

    Raises: ImportError with the line that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"This launcher needs {package}, which is not installed. "
            f"Fix: pip install {package}, or in the checkout pip install -e '.[{extra}]'."
        ) from None
