"""Copies between the host and the device of an agent: any number of tensors in one transfer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, after a copy that does not block; on the CPU, they share memory."""
    on_host = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return on_host
    block = joined(on_host)
    block = block.pin_memory() if device.type == "cuda" else block
    return parts(block.to(device, non_blocking=True), on_host)


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tensors, which are all on one device, as arrays; waits for the device once."""
    if any(x.device.type != "cpu" for x in tensors.values()):
        tensors = parts(joined(tensors).cpu(), tensors)
    return {name: x.numpy() for name, x in tensors.items()}


def joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of all tensors, (n,) uint8. The widest numbers come first, so that all are aligned."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for _, x in _by_width(tensors)])


def parts(block: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the result of `joined`, as views; `like` has their names, types, shapes and order."""
    blocks = block.split([x.nbytes for _, x in _by_width(like)])  # type: ignore[no-untyped-call]
    found = {
        name: part.view(x.dtype).view(x.shape)
        for (name, x), part in zip(_by_width(like), blocks, strict=True)
    }
    return {name: found[name] for name in like}


def _by_width(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: -item[1].itemsize)
