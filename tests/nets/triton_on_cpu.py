"""Triton's interpreter, so that a machine without a GPU can check what kernels compute."""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

MODULES = ("hgrn", "gla", "simple_gla", "gated_delta_rule")


def interpret() -> None:
    """Import the kernels of flash-linear-attention so that they run on the CPU.

    The interpreter cannot time tilings, so the first of several is used. It also passes plain integers to
    loops, where kernels expect tensors.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    autotuner = import_module("triton.runtime.autotuner").Autotuner
    interpreter = import_module("triton.runtime.interpreter")
    begin = autotuner.__init__

    def take_first(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.configs = self.configs[:1]

    def tensor_range(*args: Any) -> Iterator[Any]:
        bounds = (int(x.handle.data.item()) if hasattr(x, "handle") else x for x in args)
        return map(interpreter._implicit_cvt, builtins.range(*bounds))

    autotuner.__init__ = take_first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the imported packages warn about one another
        for name in MODULES:
            import_module(f"fla.ops.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            vars(module)["range"] = tensor_range
