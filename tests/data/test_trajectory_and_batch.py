from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from loxodon.data import Batch, Layout, Trajectory, pad_batch

MakeTraj = Callable[..., Trajectory]


def test_worked_example_of_alignment(make_traj: MakeTraj) -> None:
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


def test_window_in_mid_episode_keeps_its_previous_pair_and_time(make_traj: MakeTraj) -> None:
    whole = make_traj(6)
    window = whole.slice(2, 4)
    assert len(window) == 2
    assert window.time_idxs[:, 0].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(window.rl2s[0], whole.rl2s[2])
    assert window.rl2s[0, 0] == whole.rews[1, 0]
    np.testing.assert_array_equal(window.actions, whole.actions[2:4])


def test_slicing_copies_nothing_and_changes_nothing(make_traj: MakeTraj) -> None:
    whole = make_traj(6)
    window = whole.slice(1, 3)
    assert np.shares_memory(window.rl2s, whole.rl2s)
    assert np.shares_memory(window.obs["image"], whole.obs["image"])
    assert len(whole) == 6


@pytest.mark.parametrize("field", ["rl2s", "time_idxs", "actions", "dones"])
def test_contradicting_lengths_are_refused(make_traj: MakeTraj, field: str) -> None:
    traj = make_traj(4)
    with pytest.raises(ValueError, match=r"do not form a trajectory: .*rews \(4, 1\).*Fix:"):
        dataclasses.replace(traj, **{field: getattr(traj, field)[:-1]})


def test_trajectory_without_a_transition_is_refused(make_traj: MakeTraj) -> None:
    with pytest.raises(ValueError, match="T >= 1"):
        make_traj(4).slice(2, 2)


def test_padding_is_zero_and_outside_the_mask(make_traj: MakeTraj) -> None:
    batch = pad_batch([make_traj(2), make_traj(4, first=10)])
    assert batch.mask[..., 0].tolist() == [[True, True, False, False], [True] * 4]
    assert batch.timestep_mask[..., 0].tolist() == [[True, True, True, False, False], [True] * 5]
    assert batch.lengths.tolist() == [2, 4]
    for name in ("actions", "rews", "dones"):
        assert not getattr(batch, name)[0, 2:].any(), name
    for value in (batch.rl2s, batch.time_idxs, *batch.obs.values()):
        assert not value[0, 3:].any()
    assert batch.obs["position"][1, :, 0].tolist() == [10, 11, 12, 13, 14]


def test_dtypes_of_a_batch(make_traj: MakeTraj) -> None:
    batch = pad_batch([make_traj(2)])
    assert batch.obs["image"].dtype == torch.uint8
    assert batch.dones.dtype == batch.mask.dtype == batch.timestep_mask.dtype == torch.bool
    assert batch.time_idxs.dtype == torch.int64
    assert batch.actions.dtype == batch.rews.dtype == batch.rl2s.dtype == torch.float32


def test_batch_shares_no_memory_with_its_windows(make_traj: MakeTraj) -> None:
    traj = make_traj(3)
    batch = pad_batch([traj])
    batch.rl2s.fill_(1)
    batch.obs["image"].fill_(1)
    assert traj.rl2s[0, 0] == 0
    assert traj.obs["image"].max() == 7


def test_continuous_actions_and_stored_one_hot_rows_stay_as_they_are(make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    rows = np.array([[0.5, -1, 0.25], [1, 0, 0]], np.float32)
    batch = pad_batch([dataclasses.replace(traj, actions=rows)])
    np.testing.assert_array_equal(batch.actions[0].numpy(), rows)


def test_single_discrete_action_is_one_hot_too(make_traj: MakeTraj) -> None:
    assert pad_batch([make_traj(2, num_actions=1)]).actions.tolist() == [[[1.0], [1.0]]]


def test_action_index_out_of_range_is_named(make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    with pytest.raises(ValueError, match=r"range from 3 to 3, but rl2s has room for 3 actions.*Fix:"):
        pad_batch([dataclasses.replace(traj, actions=np.full((2, 1), 3))])


def test_windows_of_different_layout_do_not_mix(make_traj: MakeTraj) -> None:
    with pytest.raises(ValueError, match=r"Window 1 .*'other'.*window 0.*actions have 5 columns.*Fix:"):
        pad_batch([make_traj(2), make_traj(2, num_actions=5, env_name="other")])
    traj = make_traj(2)
    fewer = dataclasses.replace(traj, obs={"position": traj.obs["position"]})
    with pytest.raises(ValueError, match=r"Window 1 .*observation 'image' is missing.*Fix:"):
        pad_batch([traj, fewer])
    with pytest.raises(ValueError, match=r"Window 1 .*observation 'image' is not expected.*Fix:"):
        pad_batch([fewer, traj])
    wide = dataclasses.replace(traj, obs={**traj.obs, "position": np.zeros((3, 2), np.float32)})
    with pytest.raises(ValueError, match=r"Window 2 .*'position' is float32\[2\], expected float32\[1\]"):
        pad_batch([traj, traj, wide])
    rows = dataclasses.replace(traj, actions=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"Window 1 .*actions have the shape \(2, 2\).*\(T, 3\)"):
        pad_batch([traj, rows])


def test_dtypes_convert_only_within_their_kind(make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    double = dataclasses.replace(traj, obs={**traj.obs, "position": traj.obs["position"].astype(np.float64)})
    batch = pad_batch([traj, double])
    assert batch.obs["position"].dtype == torch.float32
    assert torch.equal(batch.obs["position"][0], batch.obs["position"][1])
    floats = dataclasses.replace(traj, obs={**traj.obs, "image": traj.obs["image"].astype(np.float32)})
    with pytest.raises(ValueError, match=r"'image' is float32\[2, 2\], expected uint8\[2, 2\]"):
        pad_batch([traj, floats])


def test_a_layout_decides_over_the_first_window(make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    layout = Layout({**traj.layout.obs, "image": ((2, 2), np.dtype(np.float32))}, 3)
    assert pad_batch([traj], layout).obs["image"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"Window 0 .*the run expects .*3 columns, expected 5"):
        pad_batch([traj], Layout(traj.layout.obs, 5))


def test_three_forms_of_actions_mix_in_one_batch(make_traj: MakeTraj) -> None:
    indices = make_traj(3)
    one_hot = np.eye(3)[indices.actions[:, 0]]
    as_bytes = dataclasses.replace(indices, actions=one_hot.astype(np.uint8))
    as_floats = dataclasses.replace(indices, actions=one_hot.astype(np.float32)).slice(0, 2)
    batch = pad_batch([indices, as_bytes, as_floats])
    assert batch.actions.dtype == torch.float32
    np.testing.assert_array_equal(batch.actions[0].numpy(), one_hot)
    assert torch.equal(batch.actions[0], batch.actions[1])
    assert torch.equal(batch.actions[2, :2], batch.actions[0, :2])
    assert not batch.actions[2, 2].any()
    bad = dataclasses.replace(indices, actions=np.full((3, 1), -1))
    with pytest.raises(ValueError, match="range from -1 to -1"):
        pad_batch([bad, as_bytes])


def test_a_column_of_bytes_is_a_row_only_for_a_single_action(make_traj: MakeTraj) -> None:
    traj = make_traj(2)
    small = dataclasses.replace(traj, actions=traj.actions.astype(np.uint8))
    assert torch.equal(pad_batch([small]).actions, pad_batch([traj]).actions)
    one = make_traj(2, num_actions=1)
    rows = dataclasses.replace(one, actions=np.ones((2, 1), np.uint8))
    assert torch.equal(pad_batch([rows]).actions, pad_batch([one]).actions)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no trajectories.*Fix:"):
        pad_batch([])


def test_batch_checks_its_fields(make_traj: MakeTraj) -> None:
    batch = pad_batch([make_traj(3)])
    with pytest.raises(ValueError, match=r"'rews' begins with \(1, 2\).*\(1, 3\).*pad_batch"):
        dataclasses.replace(batch, rews=batch.rews[:, :2])
    with pytest.raises(ValueError, match=r"'position' begins with \(1, 3\).*\(1, 4\)"):
        dataclasses.replace(batch, obs={"position": batch.obs["position"][:, 1:]})


def test_moving_a_batch_keeps_every_field(make_traj: MakeTraj) -> None:
    batch = pad_batch([make_traj(3)])
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert {moved.obs["image"].device.type, moved.rl2s.device.type, moved.mask.device.type} == {"meta"}
    assert moved.actions.shape == batch.actions.shape


@pytest.mark.slow
def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, loxodon.data, loxodon.data.trajectory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_unknown_name_of_the_package() -> None:
    with pytest.raises(ImportError, match="cannot import name"):
        from loxodon.data import no_such_name  # noqa: F401


def test_observations_without_elements_are_padded_too(make_traj: MakeTraj) -> None:
    traj = make_traj(3)
    traj = dataclasses.replace(traj, obs={**traj.obs, "none": np.zeros((4, 0), np.float32)})
    assert pad_batch([traj, traj.slice(0, 1)]).obs["none"].shape == (2, 4, 0)
