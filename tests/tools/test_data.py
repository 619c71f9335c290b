from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.data import FILE_FORMATS, Trajectory, load_trajectory, save_trajectory
from loxodon.data.foreign import arrays_of
from loxodon.tools.data import commands
from loxodon.tools.data.commands import main
from loxodon.tools.data.find import find_files

MakeTraj = Callable[..., Trajectory]
Fill = Callable[[Path, list[int]], list[Path]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def buffer(tmp_path: Path, fill: Fill) -> Path:
    """A run folder with three good files, a truncated one, and other things."""
    run = tmp_path / "run"
    paths = fill(run / "buffer" / "fifo", [2, 4])
    fill(run / "buffer" / "protected", [6])
    cut = paths[0].with_name("env_000000ff_999999999.000000.npz")
    cut.write_bytes(paths[1].read_bytes()[:-40])
    (run / "buffer" / "fifo" / "notes.md").write_text("mine")
    (run / "buffer" / "fifo" / "env_000000aa_1.000000.npz.tmp").touch()
    (run / "buffer" / "superseded").mkdir()
    (run / "buffer" / "superseded" / paths[0].name).write_bytes(paths[0].read_bytes())
    (run / "again").symlink_to(run)  # a circular link, which is not followed
    return run


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def refused(capsys: Capture, *words: object) -> str:
    """The error of a command; it must be one line without a traceback."""
    try:
        status, _, err = run(capsys, *words)
    except SystemExit as stop:
        status, err = int(str(stop.code)), capsys.readouterr().err
    assert status == 2
    assert err.count("\n") == 1
    assert err.startswith(("error: ", "config error: "))
    assert "Fix: " in err
    return err


# --- ls ------------------------------------------------------------------------------------------------


def test_ls_counts_files_and_survives_broken_ones(buffer: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "ls", buffer)
    assert status == 1  # one file is broken
    assert ["buffer/fifo", "3"] in [row[:2] for row in rows(out)]
    assert ["buffer/protected", "1"] in [row[:2] for row in rows(out)]
    # Rewards are 0.1, 0.2, ..., so the returns are 0.3, 1 and 2.1 after 2, 4 and 6 transitions.
    assert ["env", "3", "12", "2", "/", "4", "/", "6", "0.3", "0.58", "1", "1.66", "2.1"] in rows(out)
    assert "superseded: 1 files set aside" in out
    assert "unfinished: 1 files" in out
    assert "ignored: 1 files that are not named like trajectories: notes.md" in out
    assert "broken: 1 files" in out
    for inside, count in (("", 4), ("buffer", 4), ("buffer/fifo", 3)):
        assert len(find_files(buffer / inside).files) == count


def test_ls_samples_a_large_folder(
    tmp_path: Path, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a", [5] * 8)
    monkeypatch.setattr(commands, "MAX_OPENED", 4)
    _, out, _ = run(capsys, "ls", tmp_path / "a")
    assert "from a random sample of 4 of 8 files" in out
    assert ["env", "~8", "~40"] in [row[:3] for row in rows(out)]
    _, out, _ = run(capsys, "ls", tmp_path / "a", "--all")
    assert ["env", "8", "40"] in [row[:3] for row in rows(out)]
    (tmp_path / "b").mkdir()
    assert run(capsys, "ls", tmp_path / "b") == (0, f"{tmp_path / 'b'} holds no trajectory files.\n\n", "")


def test_ls_names_formats_policy_versions_and_pieces(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    for number, save_as in enumerate(FILE_FORMATS):
        traj = dataclasses.replace(make_traj(3), policy_version=number + 6 if number else None)
        part = traj.slice(number, 3)
        save_trajectory(tmp_path, part, save_as=save_as, traj_id=f"{number:08x}", unix_time=1e9)
    _, out, _ = run(capsys, "ls", tmp_path)
    assert "formats: npz 1, npz-compressed 1" in out
    assert "policy versions: 7 to 7 (1 different), unknown in 1 files" in out
    assert "pieces: 1 files begin in the middle of an episode" in out


# --- show ----------------------------------------------------------------------------------------------


def test_show_aligns_actions_and_rewards_with_observations(
    tmp_path: Path, fill: Fill, capsys: Capture
) -> None:
    short, long = fill(tmp_path, [3, 50])
    status, out, _ = run(capsys, "show", short)
    assert status == 0
    image = ["7"] * 4
    assert ["0", *image, "0", "0", "0.1"] in rows(out)  # time, image, position, action, reward
    assert ["2", *image, "2", "2", "0.3", "yes"] in rows(out)
    assert ["3", *image, "3"] in rows(out)  # the last observation has no action
    assert "return 0.6" in out
    assert "ends with termination" in out
    _, out, _ = run(capsys, "show", long, "--rows", 4)
    assert [row[0] for row in rows(out) if row and row[0].isdigit()] == ["0", "1", "49", "50"]
    assert "--rows is -1" in refused(capsys, "show", short, "--rows", -1)


def test_show_shortens_wide_values(tmp_path: Path, make_traj: MakeTraj, capsys: Capture) -> None:
    traj = make_traj(70)
    wide = {"many": np.arange(71 * 20.0).reshape(71, 20), "image": np.zeros((71, 9, 9), np.uint8)}
    traj = dataclasses.replace(traj, actions=np.zeros((70, 3), np.float32), obs={**traj.obs, **wide})
    path = save_trajectory(tmp_path, traj, save_as="npz", traj_id="00000001", unix_time=1e9)
    assert ["0", "0", "1", "2", "..", "19", "0", "0", "0", "0", "0.1"] in rows(run(capsys, "show", path)[1])


# --- check ---------------------------------------------------------------------------------------------


def test_check_lists_broken_and_odd_files_and_moves_them_with_their_reasons(
    buffer: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    odd = make_traj(3, num_actions=7)
    path = save_trajectory(buffer / "buffer" / "fifo", odd, save_as="npz", traj_id="0000abcd", unix_time=1e9)
    status, out, _ = run(capsys, "check", buffer)
    assert status == 1
    assert "3 good, 1 broken, 1 of another layout" in out
    assert [line for line in out.splitlines() if line.startswith("broken ") and "_000000ff_" in line]
    assert "actions have 7 columns, expected 3" in out
    moved = buffer / "buffer" / "quarantine"
    assert f"2 files moved to {moved}" in run(capsys, "check", buffer, "--quarantine")[1]
    assert "7 columns" in (moved / f"{path.name}.txt").read_text()
    assert not path.exists()
    assert run(capsys, "check", buffer)[0] == 0
    assert "quarantine: 2 files set aside" in run(capsys, "ls", buffer)[1]


def test_one_unusable_file_does_not_stop_any_command(tmp_path: Path, fill: Fill, capsys: Capture) -> None:
    good = fill(tmp_path / "some", [4] * 3)
    link, pipe = (good[0].with_name(f"env_000000f{i}_2000000000.0.npz") for i in range(2))
    link.symlink_to(link.name)
    os.mkfifo(pipe)
    status, out, _ = run(capsys, "check", tmp_path / "some")
    assert status == 1
    assert "3 good, 2 broken" in out
    assert "a link to itself" in out
    assert run(capsys, "ls", tmp_path / "some")[0] == 1
    assert "3 files written" in run(capsys, "convert", tmp_path / "some", tmp_path / "new", "--to", "npz")[1]


def test_check_names_a_value_that_cannot_be_trained_on(tmp_path: Path, fill: Fill, capsys: Capture) -> None:
    paths = fill(tmp_path / "some", [4, 4])
    arrays = dict(np.load(paths[1]))
    arrays["_OBS_KEY_position"][2] = np.nan
    np.savez(paths[1], **arrays)
    status, out, _ = run(capsys, "check", tmp_path / "some")
    assert status == 1
    reason = "cannot be trained on: observation 'position' (float32) is nan at timestep 2"
    assert f"broken   {paths[1]}: {reason}" in out


def test_check_does_not_move_files_of_a_mixture(
    tmp_path: Path, fill: Fill, make_traj: MakeTraj, capsys: Capture
) -> None:
    fill(tmp_path, [3, 3, 3])
    for number in range(2):
        save_trajectory(
            tmp_path, make_traj(3, num_actions=5), save_as="npz", traj_id=f"a{number}", unix_time=1e9
        )
    status, out, _ = run(capsys, "check", tmp_path, "--quarantine")
    assert status == 1
    assert "2 files of another layout stay" in out
    assert len(find_files(tmp_path).files) == 5


# --- convert -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [FILE_FORMATS, FILE_FORMATS[::-1]])
def test_convert_keeps_everything_including_extras_and_factors(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture, before: str, after: str
) -> None:
    factors = np.array([[i % 2, i % 3] for i in range(30)])
    extras = {"values": np.ones((30, 1), np.float32), "option": np.arange(30, dtype=np.int16)}
    traj = make_traj(30, num_actions=5, env_name="deep_sea")
    traj = dataclasses.replace(traj, policy_version=5, actions=factors, nvec=(2, 3), extras=extras)
    named: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1e9 + 0.25}
    (tmp_path / "a" / "fifo").mkdir(parents=True)
    save_trajectory(tmp_path / "a" / "fifo", traj, save_as=before, **named)
    status, _, _ = run(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", after)
    assert status == 0
    (path,) = (tmp_path / "b" / "fifo").iterdir()
    assert path.stem == next((tmp_path / "a" / "fifo").iterdir()).stem
    assert commands.format_of(path) == after
    loaded = load_trajectory(path)
    for array, original in zip(arrays_of(loaded), arrays_of(traj), strict=True):
        np.testing.assert_array_equal(array, original, strict=True)
    assert (loaded.env_name, loaded.policy_version, loaded.nvec) == ("deep_sea", 5, (2, 3))
    _, out, _ = run(capsys, "show", path)
    assert "factors of 2, 3" in out
    assert "extras values float32[1], option int16[]" in out
    # the last row but one, with both factors
    assert ["5", "7", "7", "7", "7", "5", "1", "2", "0.6"] in rows(out)
    assert "extras: values 1, option 1" in run(capsys, "ls", path.parent)[1]


def test_convert_overwrites_only_if_asked_to_and_skips_broken_files(
    tmp_path: Path, fill: Fill, buffer: Path, capsys: Capture
) -> None:
    fill(tmp_path / "a", [3, 4])
    target = tmp_path / "b"
    assert run(capsys, "convert", tmp_path / "a", target, "--to", "npz-compressed")[0] == 0
    assert "overwrite with --force" in refused(capsys, "convert", tmp_path / "a", target, "--to", "npz")
    status, out, _ = run(capsys, "convert", tmp_path / "a", target, "--to", "npz", "--force")
    assert status == 0
    assert [commands.format_of(path) for path in target.iterdir()] == ["npz", "npz"]
    status, out, _ = run(capsys, "convert", buffer, tmp_path / "c", "--to", "npz")
    assert status == 1
    assert "broken, skipped" in out
    assert len(find_files(tmp_path / "c").files) == 3


def test_convert_takes_the_best_episodes_of_each_environment_with_all_their_pieces(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    def save(traj: Trajectory, number: int, paid: float, **extras: Any) -> None:
        traj = dataclasses.replace(traj, rews=np.full((len(traj), 1), paid, np.float32), extras=extras)
        save_trajectory(
            tmp_path / "a" / "fifo", traj, save_as="npz", traj_id=f"{number:08x}", unix_time=number
        )

    (tmp_path / "a" / "fifo").mkdir(parents=True)
    whole = make_traj(8, first=500, env_name="hard")
    save(whole.slice(0, 5), 1, 0.1)  # 0.5 in this piece
    save(make_traj(3, first=100, env_name="hard"), 2, 0.5)  # 1.5
    save(whole.slice(5, 8), 3, 0.5)  # 1.5 in this one
    save(make_traj(9, first=900, env_name="hard").slice(4, 9), 4, 9.0)  # its beginning is missing
    raw = {"raw_rewards": np.full((4, 1), -7.0, np.float32)}
    save(make_traj(4, first=200, env_name="hard"), 5, 9.0, **raw)  # only the shaped rewards are high
    save(make_traj(2, env_name="easy"), 6, 100.0)
    save(make_traj(2, first=300, env_name="easy"), 7, 200.0)

    def chosen(share: str) -> list[int]:
        status, _, _ = run(
            capsys, "convert", tmp_path / "a", tmp_path / share, "--to", "npz", "--best", share
        )
        assert status == 0
        return [int(file.name.traj_id) for file in find_files(tmp_path / share).files]

    assert chosen("0.1") == [1, 3, 7]
    assert chosen("0.67") == [1, 2, 3, 7]
    assert chosen("1") == [1, 2, 3, 5, 6, 7]
    for share in ("0", "1.5", "nan"):
        assert "at most 1" in refused(
            capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "npz", "--best", share
        )


# --- mistakes ------------------------------------------------------------------------------------------


ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e"


def test_names_of_files_and_in_files_cannot_control_the_terminal(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    traj = make_traj(3)
    traj = dataclasses.replace(traj, env_name=f"mine{ESCAPES}", obs={f"key{ESCAPES}": traj.obs["position"]})
    path = save_trajectory(tmp_path, traj, save_as="npz", traj_id="00000001", unix_time=1e9)
    named = path.rename(tmp_path / f"e{ESCAPES}_00000001_1000000000.0.npz")
    (tmp_path / f"e{ESCAPES}_00000002_1000000000.0.npz").write_bytes(b"nothing")
    (tmp_path / f"notes{ESCAPES}\nall is well").touch()
    os.mkfifo(tmp_path / "e_00000003_1000000000.0.npz")
    for words in (("ls", tmp_path), ("check", tmp_path), ("show", named)):
        out = run(capsys, *words)[1]
        assert r"\x1b]0;owned\x07\x1b[31m\u202e" in out
        assert all(line.isprintable() for line in out.splitlines())
        assert "all is well" not in out.splitlines()
    assert "2 broken" in run(capsys, "check", tmp_path)[1]
    error = refused(capsys, "show", tmp_path / f"e{ESCAPES}_00000002_1000000000.0.npz")
    assert error.rstrip("\n").isprintable()


def test_mistakes_are_one_line(tmp_path: Path, fill: Fill, capsys: Capture) -> None:
    (path,) = fill(tmp_path / "a", [3])
    nowhere, empty, folder = tmp_path / "nowhere", tmp_path / "empty", path.parent
    empty.mkdir()
    for words, problem in (
        (("ls", nowhere), "does not exist"),
        (("check", nowhere), "does not exist"),
        (("check", empty), "holds no trajectory files"),
        (("show", folder), "show takes one file"),
        (("shw",), "invalid choice: 'shw' (choose from "),
        (("convert", path, empty, "--to", "npy"), "invalid choice: 'npy' (choose from "),
        (("convert", path, empty / "b.npz", "--to", "npz"), "looks like a file"),
        (("convert", folder, folder, "--to", "npz"), "would hold every trajectory twice"),
    ):
        assert problem in refused(capsys, *words)
    foreign = path.rename(path.with_name("foreign.npz"))
    assert "id and time cannot be kept" in refused(capsys, "convert", foreign, empty, "--to", "npz")
    foreign.write_bytes(b"")
    assert "it is empty" in (error := refused(capsys, "show", foreign))
    assert "Fix: give a trajectory file, named <env>_<id>_<unix time>.npz" in error
    assert "delete" not in error


@pytest.mark.slow
def test_the_command_ends_quietly_if_its_output_is_closed(tmp_path: Path, fill: Fill) -> None:
    fill(tmp_path, [3])
    command = [sys.executable, "-m", "loxodon.tools", "data", "ls", str(tmp_path)]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
