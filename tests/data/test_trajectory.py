from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loxodon.data import Batch, Layout, Trajectory, pack_batch, pad_batch
from loxodon.data.trajectory import action_indices

MakeTraj = Callable[..., Trajectory]


# --- trajectories --------------------------------------------------------------------------------------


def test_the_worked_example_of_alignment(make_traj: MakeTraj) -> None:
    """o0 -a0-> r1,o1 -a1-> r2,o2 -a2-> r3,o3(terminal)."""
    batch = pad_batch([make_traj(3)])
    assert batch.obs["position"][0, :, 0].tolist() == [0, 1, 2, 3]
    assert batch.time_idxs[0, :, 0].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(batch.rl2s[0, :, 0], torch.tensor([0, 0.1, 0.2, 0.3]))
    assert batch.rl2s[0, 0].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(batch.rl2s[0, 1:, 1:], torch.eye(3))  # a0, a1, a2
    torch.testing.assert_close(batch.actions[0], torch.eye(3))
    torch.testing.assert_close(batch.rews[0, :, 0], torch.tensor([0.1, 0.2, 0.3]))
    assert batch.dones[0, :, 0].tolist() == [False, False, True]
    assert batch.mask[0, :, 0].tolist() == [True, True, True]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 6)])
def test_slices_out_of_range_are_refused(make_traj: MakeTraj, start: int, stop: int) -> None:
    with pytest.raises(
        ValueError, match=rf"from {start} to {stop} of a trajectory of 5 .*at least one transition.*Fix:"
    ):
        make_traj(5).slice(start, stop)


def test_layouts_of_trajectories(make_traj: MakeTraj) -> None:
    obs = {"position": ((1,), np.dtype(np.float32)), "image": ((2, 2), np.dtype(np.uint8))}
    expected = Layout(obs, 3)
    assert make_traj(4).layout == make_traj(9).slice(2, 4).layout == expected
    assert str(expected) == "position float32[1], image uint8[2, 2]; 3 action columns"
    assert str(Layout({}, 5, (2, 3))).endswith("5 action columns (factors of 2, 3)")


# --- actions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvec", "given", "rows"),
    [
        (None, [[2], [0]], [[0, 0, 1], [1, 0, 0]]),
        (None, [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (None, [[0, 0, 1], [1, 0, 0]], [[0, 0, 1], [1, 0, 0]]),
        ((2, 1), [[1, 0], [0, 0]], [[0, 1, 1], [1, 0, 1]]),
        ((2, 1), [[0, 1, 1], [1, 0, 1]], [[0, 1, 1], [1, 0, 1]]),
        ((1, 1, 1), [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_actions_have_one_form_for_every_input(make_traj: MakeTraj, nvec: Any, given: Any, rows: Any) -> None:
    for dtype in (np.int64, np.int8, np.uint16, *([np.uint8, np.bool_] if np.shape(given) == (2, 3) else [])):
        if nvec == (1, 1, 1) and dtype in (np.uint8, np.bool_):
            continue  # bytes of width A are taken for one-hot rows
        traj = dataclasses.replace(make_traj(2), actions=np.array(given).astype(dtype), nvec=nvec)
        assert traj.actions.dtype == np.uint8
        np.testing.assert_array_equal(traj.actions, rows)
        factors = np.split(np.array(rows), np.cumsum(nvec)[:-1] if nvec else [], axis=1)
        indices = action_indices(traj)
        assert indices is not None
        np.testing.assert_array_equal(indices, np.stack([part.argmax(1) for part in factors], 1))
        np.testing.assert_array_equal(pad_batch([traj]).actions[0], rows)


def test_floats_are_kept_and_count_as_discrete_if_every_row_is_one_hot(make_traj: MakeTraj) -> None:
    rows = np.array([[0.5, -1, 0.25], [1, 0, 0]], np.float32)
    continuous = dataclasses.replace(make_traj(2), actions=rows)
    assert continuous.actions is rows
    assert action_indices(continuous) is None
    one_hot = dataclasses.replace(make_traj(2), actions=np.eye(3)[[2, 1]])
    assert one_hot.actions.dtype == np.float32
    indices = action_indices(one_hot)
    assert indices is not None
    assert indices.tolist() == [[2], [1]]


@pytest.mark.parametrize(
    ("nvec", "actions", "problem"),
    [
        (None, [[3], [0]], "range from 0 to 3"),
        (None, [[-1], [0]], "range from -1 to 0"),
        (None, [[0, 1], [1, 0]], r"int64\[2, 2\]"),
        (None, [[1, 1, 0], [1, 0, 0]], r"has 3 columns for actions"),
        (None, [[0.5, 0.5], [0.5, 0.5]], r"float64\[2, 2\]"),
        ((2, 1), [[1, 1], [0, 0]], r"has 2 \+ 1 columns for actions"),
        ((2, 1), [[1, 1, 1], [0, 1, 1]], r"int64\[2, 3\]"),
        ((2, 2), [[1, 1], [0, 0]], r"width 4"),
    ],
)
def test_actions_out_of_range_are_named(make_traj: MakeTraj, nvec: Any, actions: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"Actions.*{problem}.*Fix: store \(T,"):
        dataclasses.replace(make_traj(2), actions=np.array(actions), nvec=nvec)


# --- batches -------------------------------------------------------------------------------------------


def test_padding_is_zero_and_outside_the_mask(make_traj: MakeTraj) -> None:
    short = make_traj(2)
    floats = dataclasses.replace(short, actions=np.eye(3, dtype=np.float32)[:2])  # floats may mix with bytes
    batch = pad_batch([floats, make_traj(4, first=10)])
    assert torch.equal(batch.actions[0, :2], torch.eye(3)[:2])
    assert batch.mask[..., 0].tolist() == [[True, True, False, False], [True] * 4]
    assert batch.timestep_mask[..., 0].tolist() == [[True, True, True, False, False], [True] * 5]
    assert batch.lengths.tolist() == [2, 4]
    for name in ("actions", "rews", "dones"):
        assert not getattr(batch, name)[0, 2:].any(), name
    for value in (batch.rl2s, batch.time_idxs, *batch.obs.values()):
        assert not value[0, 3:].any()
    assert batch.obs["position"][1, :, 0].tolist() == [10, 11, 12, 13, 14]


def test_a_batch_has_its_own_memory_and_fixed_dtypes(make_traj: MakeTraj) -> None:
    traj = make_traj(3)
    traj = dataclasses.replace(traj, obs={**traj.obs, "none": np.zeros((4, 0), np.float32)})
    batch = pad_batch([traj, traj.slice(0, 1)])
    assert batch.obs["none"].shape == (2, 4, 0)
    assert batch.obs["image"].dtype == torch.uint8
    assert batch.dones.dtype == batch.mask.dtype == batch.timestep_mask.dtype == torch.bool
    assert batch.time_idxs.dtype == torch.int64
    assert batch.actions.dtype == batch.rews.dtype == batch.rl2s.dtype == torch.float32
    batch.rl2s.fill_(1)
    batch.obs["image"].fill_(1)
    assert traj.rl2s[0, 0] == 0
    assert traj.obs["image"].max() == 7


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_actions": 5}, "actions have 5 columns, expected 3"),
        ({"position": None}, "observation 'position' is missing"),
        ({"more": np.zeros((3, 1))}, "observation 'more' is not expected"),
        ({"position": np.zeros((3, 2), np.float32)}, r"'position' is float32\[2\], expected float32\[1\]"),
        ({"position": np.array([["a"]] * 3)}, r"'position' is <U1\[1\], expected float32\[1\]"),
        ({"image": np.zeros((3, 2, 2), np.float32)}, r"'image' is float32\[2, 2\], expected uint8\[2, 2\]"),
        ({"nvec": (2, 1)}, "actions have factors of 2, 1, expected one factor"),
    ],
)
def test_windows_of_different_layouts_do_not_mix(
    make_traj: MakeTraj, changes: dict[str, Any], problem: str
) -> None:
    other = make_traj(2, num_actions=changes.get("num_actions", 3), env_name="other")
    if "nvec" in changes:
        other = dataclasses.replace(other, actions=np.zeros((2, 2), np.int64), nvec=changes["nvec"])
    others = {key: value for key, value in changes.items() if key not in ("num_actions", "nvec")}
    obs = {key: value for key, value in {**other.obs, **others}.items() if value is not None}
    with pytest.raises(ValueError, match=rf"Window 2 .*'other'.*window 0.*{problem}.*Fix:"):
        pad_batch([make_traj(2), make_traj(2), dataclasses.replace(other, obs=obs)])


def test_a_layout_overrides_the_first_window_and_dtypes_convert_within_their_kind(
    make_traj: MakeTraj,
) -> None:
    traj = make_traj(2)
    double = dataclasses.replace(traj, obs={**traj.obs, "position": traj.obs["position"].astype(np.float64)})
    batch = pad_batch([traj, double])
    assert batch.obs["position"].dtype == torch.float32
    assert torch.equal(batch.obs["position"][0], batch.obs["position"][1])
    floats = Layout({**traj.layout.obs, "image": ((2, 2), np.dtype(np.float32))}, 3)
    assert pad_batch([traj], floats).obs["image"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"Window 0 .*the run expects .*3 columns, expected 5"):
        pad_batch([traj], Layout(traj.layout.obs, 5))
    with pytest.raises(ValueError, match=r"no trajectories.*Fix:"):
        pad_batch([])


def test_a_batch_moves_all_its_fields(make_traj: MakeTraj) -> None:
    batch = pad_batch([make_traj(3)])
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert {value.device.type for value in (*moved.obs.values(), *tensors)} == {"meta"}
    assert moved.actions.shape == batch.actions.shape


# --- the package ---------------------------------------------------------------------------------------


def test_importing_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ImportError, match="cannot import name"):
        from loxodon.data import no_such_name  # noqa: F401


def test_a_batch_has_log_probs_if_its_windows_do(make_traj: MakeTraj) -> None:
    known, odd, unknown = (make_traj(length) for length in (4, 3, 5))
    told = np.arange(-4, 0, dtype=np.float32)[:, None]
    known = dataclasses.replace(known, extras={"log_probs": told})
    odd = dataclasses.replace(odd, extras={"log_probs": np.zeros((3, 2))})  # an extra with another meaning
    assert pad_batch([odd, unknown]).log_probs is None
    for batch in (pad_batch([odd, known, unknown]), pack_batch([odd, known, unknown], 9)):
        assert batch.log_probs is not None
        found = batch.log_probs[batch.mask].numpy()
        assert np.isnan(found).sum() == 8
        np.testing.assert_array_equal(found[~np.isnan(found)], told[:, 0])
