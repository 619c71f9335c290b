"""Nested values with tensors in one safetensors file: nothing in it is, or can be, a pickled object."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_PLAIN_KINDS = "biufc"  # of NumPy: booleans and numbers
_STRUCTURE = "tree"  # entry of the file's header


def save_tree(tree: Any, path: Path) -> None:
    """Write dicts, lists and tuples of tensors, NumPy arrays, numbers, texts, booleans and None.

    Raises: TypeError for anything else, such as an object of a class.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(tree, tensors))
    save_file(tensors, path, metadata={"format": "pt", _STRUCTURE: structure})


def load_tree(path: Path) -> Any:
    """Read what save_tree wrote; tensors are on the CPU.

    Raises: ValueError if the file is none of save_tree; FileNotFoundError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads((file.metadata() or {})[_STRUCTURE])
            return _unpack(structure, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a readable part of a checkpoint ({error}). Fix: use another checkpoint."
        ) from error


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; tensors go to `tensors`, under names that the JSON mentions."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_key(key), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, tensors) for item in value]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _PLAIN_KINDS:
        name, shape = str(len(tensors)), list(value.shape) if isinstance(value, np.ndarray) else None
        flat = np.array(value, order="C").reshape(-1)  # a copy: no two of the file's tensors may share memory
        tensors[name] = torch.from_numpy(flat.view(np.uint8) if flat.size else np.zeros(1, np.uint8))
        return {"array": [name, value.dtype.str, shape]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"A checkpoint cannot hold {value!r} ({type(value).__name__}); allowed are tensors, arrays of "
        "numbers, numbers, texts, booleans, None, and dicts, lists and tuples of these. "
        "Fix: give the state in such values."
    )


def _key(key: Any) -> Any:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise TypeError(
        f"A checkpoint cannot hold a dict with the key {key!r}; allowed are texts and whole numbers. "
        "Fix: give the state with such keys."
    )


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        name, dtype, shape = content
        count = 1 if shape is None else math.prod(shape)
        flat = np.frombuffer(tensors[name].numpy(), dtype=dtype, count=count)
        return flat[0] if shape is None else flat.reshape(shape).copy()
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
