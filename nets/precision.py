"""Computations that stay in float32 under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run without autocast, on arguments of float32 or wider."""

    def widened(x: Any) -> Any:
        is_narrow = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
        return x.float() if is_narrow else x

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # has no "meta"
            wide = {key: widened(x) for key, x in kwargs.items()}
            return cast("R", cast("Any", function)(*map(widened, args), **wide))

    return run
