from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.experiment.tensor_tree import load_tree, save_tree


def test_an_optimizer_state_comes_back_as_it_was(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, betas=(0.8, 0.9))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_tree(optimizer.state_dict(), tmp_path / "tree")
    back = load_tree(tmp_path / "tree")
    assert back["state"].keys() == {0, 1}
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    assert isinstance(back["param_groups"][0]["betas"], tuple)
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(back["state"][index][name], value)


def test_tensors_that_share_memory_and_plain_values_are_kept(tmp_path: Path) -> None:
    base = torch.arange(6)
    tree = {"a": base[::2], "b": [base, None, True], "c": (np.float64(0.1), "text"), 7: {}}
    save_tree(tree, tmp_path / "tree")
    back = load_tree(tmp_path / "tree")
    assert torch.equal(back["a"], base[::2])
    assert torch.equal(back["b"][0], base)
    assert (back["b"][1:], back["c"], back[7]) == ([None, True], (0.1, "text"), {})


@pytest.mark.parametrize(("tree", "what"), [({"x": object()}, "object"), ({(1, 2): 3}, r"the key \(1, 2\)")])
def test_objects_are_refused(tmp_path: Path, tree: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"{what}.*Fix:"):
        save_tree(tree, tmp_path / "tree")


@pytest.mark.parametrize("content", [pickle.dumps({"a": 1}), b"", b"\x08\0\0\0\0\0\0\0{}      "])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tree").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a readable part of a checkpoint.*Fix:"):
        load_tree(tmp_path / "tree")
