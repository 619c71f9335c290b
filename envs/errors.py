"""The one public error class of this folder."""

from __future__ import annotations


class EnvError(RuntimeError):
    """An environment, or the worker process it lived in, failed while running."""
