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

from loxodon.data import Trajectory, cli, load_trajectory, save_trajectory
from loxodon.data.cli import main, numbers_text, plot_trajectory
from loxodon.data.convert import describe_difference
from loxodon.data.find import age_text, find_files, size_text

MakeTraj = Callable[..., Trajectory]
Fill = Callable[[Path, list[int]], list[Path]]
Capture = pytest.CaptureFixture[str]
FORMATS = ("npz", "npz-compressed", "traj")


@pytest.fixture
def buffer(tmp_path: Path, fill: Fill) -> Path:
    """A run folder with three good files, a cut-off one, and things that are no trajectories."""
    run = tmp_path / "run"
    paths = fill(run / "buffer" / "fifo", [2, 4])
    fill(run / "buffer" / "protected", [6])
    cut = paths[0].with_name("env_000000ff_999999999.000000.npz")
    cut.write_bytes(paths[1].read_bytes()[:-40])
    (run / "buffer" / "fifo" / "notes.md").write_text("mine")
    (run / "buffer" / "fifo" / "env_000000aa_1.000000.npz.tmp").touch()
    (run / "buffer" / "superseded").mkdir()
    (run / "buffer" / "superseded" / paths[0].name).write_bytes(paths[0].read_bytes())
    return run


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: Capture, *words: object) -> str:
    """The error of a command, which must be one line and no traceback."""
    try:
        status, _, err = run(capsys, *words)
    except SystemExit as stop:
        status, err = int(str(stop.code)), capsys.readouterr().err
    assert status == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Fix: " in err
    return err


# --- ls ------------------------------------------------------------------------------------------------


def test_ls_counts_what_is_there_and_survives_broken_files(buffer: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "ls", buffer)
    assert status == 1  # one is broken
    rows = [line.split() for line in out.splitlines()]
    assert ["buffer/fifo", "3"] in [row[:2] for row in rows]
    assert ["buffer/protected", "1"] in [row[:2] for row in rows]
    env = next(row for row in rows if row[:1] == ["env"] and row[1:2] == ["3"])
    # Rewards are 0.1, 0.2, ...: returns 0.3, 1 and 2.1 after 2, 4 and 6 transitions.
    assert env == ["env", "3", "12", "2", "/", "4", "/", "6", "0.3", "0.58", "1", "1.66", "2.1"]
    assert "superseded: 1 files set aside" in out
    assert "unfinished: 1 files" in out
    assert "ignored: 1 files that are not named like trajectories: notes.md" in out
    assert "broken: 1 files" in out


@pytest.mark.parametrize("inside", ["", "buffer", "buffer/fifo"])
def test_ls_finds_the_files_from_wherever_it_starts(buffer: Path, inside: str) -> None:
    assert len(find_files(buffer / inside).files) == (3 if inside.endswith("fifo") else 4)


def test_links_are_followed_and_circles_are_not(tmp_path: Path, fill: Fill) -> None:
    fill(tmp_path / "elsewhere", [3])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fifo").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "again").symlink_to(tmp_path / "run")
    assert len(find_files(tmp_path / "run").files) == 1


def test_ls_quick_opens_nothing(buffer: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_trajectory", None)
    status, out, _ = run(capsys, "ls", buffer, "--quick")
    assert status == 0
    assert "formats: npz 4" in out
    assert "timesteps" not in out


def test_ls_samples_where_there_are_many(
    tmp_path: Path, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [5] * 8)
    monkeypatch.setattr(cli, "MAX_OPENED", 4)
    _, out, _ = run(capsys, "ls", tmp_path)
    assert "from a random sample of 4 of 8 files" in out
    assert ["env", "~8", "~40"] in [line.split()[:3] for line in out.splitlines()]
    _, out, _ = run(capsys, "ls", tmp_path, "--all")
    assert ["env", "8", "40"] in [line.split()[:3] for line in out.splitlines()]


def test_ls_names_formats_and_policy_versions(tmp_path: Path, make_traj: MakeTraj, capsys: Capture) -> None:
    for number, save_as in enumerate(FORMATS):
        traj = dataclasses.replace(make_traj(3), policy_version=None if number == 0 else number + 6)
        save_trajectory(tmp_path, traj, save_as=save_as, traj_id=f"{number:08x}", unix_time=1e9)
    _, out, _ = run(capsys, "ls", tmp_path)
    assert "formats: npz 1, npz-compressed 1, traj 1" in out
    assert "policy versions: 7 to 8 (2 different), unknown in 1 files" in out


def test_ls_of_an_empty_folder_is_no_error(tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "ls", tmp_path) == (0, f"{tmp_path} holds no trajectory files.\n\n", "")


def test_sizes_and_ages_have_one_unit() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 2.5e9)] == ["0 B", "999 B", "1.0 kB", "2.5 GB"]
    assert age_text(0).endswith(" d")


# --- show ----------------------------------------------------------------------------------------------


def test_show_aligns_actions_and_rewards_with_what_was_observed(
    tmp_path: Path, fill: Fill, capsys: Capture
) -> None:
    (path,) = fill(tmp_path, [3])
    status, out, _ = run(capsys, "show", path)
    rows = [line.split() for line in out.splitlines()]
    assert status == 0
    image = ["7"] * 4
    assert ["0", *image, "0", "0", "0.1"] in rows  # time, image, position, action, reward
    assert ["2", *image, "2", "2", "0.3", "yes"] in rows
    assert ["3", *image, "3"] in rows  # the last observation has no action
    assert "return 0.6" in out
    assert "ends with termination" in out


def test_show_shortens_long_trajectories(tmp_path: Path, fill: Fill, capsys: Capture) -> None:
    (path,) = fill(tmp_path, [50])
    _, out, _ = run(capsys, "show", path, "--rows", 4)
    times = [line.split()[0] for line in out.splitlines() if line.split() and line.split()[0].isdigit()]
    assert times == ["0", "1", "49", "50"]
    assert numbers_text(np.arange(9)) == "0 1 2 .. 8"
    assert "--rows is -1" in refused(capsys, "show", path, "--rows", -1)


def test_show_draws_a_picture(
    tmp_path: Path, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = fill(tmp_path, [3])
    monkeypatch.chdir(tmp_path)
    _, out, _ = run(capsys, "show", path, "--plot")
    assert f"plot written to {path.stem}.png" in out
    assert (tmp_path / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"
    assert "end the name with .png" in refused(capsys, "show", path, "--plot", tmp_path / "a.nothing")


@pytest.mark.parametrize("width", [1, 20])
def test_continuous_actions_and_wide_observations_can_be_drawn(
    tmp_path: Path, make_traj: MakeTraj, width: int
) -> None:
    traj = make_traj(700)
    traj = dataclasses.replace(
        traj,
        actions=np.zeros((700, 3), np.float32),
        obs={"many": np.zeros((701, width)), "image": np.zeros((701, 9, 9), np.uint8)},
    )
    assert plot_trajectory(traj, tmp_path / "a.png", title="a").stat().st_size > 1000


def test_a_missing_matplotlib_is_named(
    tmp_path: Path, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = fill(tmp_path, [3])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install matplotlib" in refused(capsys, "show", path, "--plot", tmp_path / "a.png")


def test_extras_and_factors_are_shown_and_kept(tmp_path: Path, make_traj: MakeTraj, capsys: Capture) -> None:
    traj = make_traj(6, num_actions=5)
    indices = np.array([[i % 2, i % 3] for i in range(6)])
    extras = {"values": np.ones((6, 1), np.float32), "option": np.arange(6, dtype=np.int16)}
    traj = dataclasses.replace(traj, actions=indices, nvec=(2, 3), extras=extras)
    (tmp_path / "a").mkdir()
    path = save_trajectory(tmp_path / "a", traj, save_as="npz", traj_id="00000001", unix_time=1e9)
    status, out, _ = run(capsys, "show", path, "--plot", tmp_path / "a.png")
    assert status == 0
    assert "factors of 2, 3" in out
    assert "extras values float32[1], option int16[]" in out
    assert ["5", "7", "7", "7", "7", "5", "1", "2", "0.6", "yes"] in [
        line.split() for line in out.splitlines()
    ]
    assert "extras: values 1, option 1" in run(capsys, "ls", path.parent)[1]
    for save_as in FORMATS:
        assert run(capsys, "convert", path.parent, tmp_path / save_as, "--to", save_as)[0] == 0
        (copy,) = (tmp_path / save_as).iterdir()
        assert describe_difference(traj, load_trajectory(copy)) is None


# --- check ---------------------------------------------------------------------------------------------


def test_check_lists_broken_files_and_says_so_in_its_status(buffer: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "check", buffer)
    assert status == 1
    assert "3 good, 1 broken, 0 of another layout" in out
    assert [line for line in out.splitlines() if line.startswith("broken ") and "_000000ff_" in line]
    assert run(capsys, "check", buffer / "buffer" / "protected")[0] == 0


@pytest.mark.parametrize("save_as", FORMATS)
def test_check_sees_one_changed_byte(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture, save_as: str
) -> None:
    path = save_trajectory(tmp_path, make_traj(400), save_as=save_as, traj_id="00000001", unix_time=1e9)
    assert run(capsys, "check", path)[0] == 0
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run(capsys, "check", path)[0] == 1


def test_check_moves_broken_and_odd_files_with_their_reasons(
    buffer: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    odd = make_traj(3, num_actions=7)
    path = save_trajectory(buffer / "buffer" / "fifo", odd, save_as="npz", traj_id="0000abcd", unix_time=1e9)
    status, out, _ = run(capsys, "check", buffer, "--quarantine")
    assert status == 1
    assert "actions have 7 columns, expected 3" in out
    moved = buffer / "buffer" / "quarantine"
    assert "2 files moved to " + str(moved) in out
    assert "7 columns" in (moved / f"{path.name}.txt").read_text()
    assert not path.exists()
    assert run(capsys, "check", buffer)[0] == 0
    assert "quarantine: 2 files set aside" in run(capsys, "ls", buffer)[1]


def test_check_leaves_a_mixture_alone(
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


@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_convert_keeps_everything(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture, before: str, after: str
) -> None:
    traj = dataclasses.replace(make_traj(30, env_name="deep_sea"), policy_version=5)
    named: dict[str, Any] = {"traj_id": "0123abcd", "unix_time": 1e9 + 0.25}
    (tmp_path / "a" / "fifo").mkdir(parents=True)
    save_trajectory(tmp_path / "a" / "fifo", traj, save_as=before, **named)
    status, _, _ = run(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", after)
    assert status == 0
    (path,) = (tmp_path / "b" / "fifo").iterdir()
    assert path.stem == next((tmp_path / "a" / "fifo").iterdir()).stem
    assert cli.format_of(path) == after
    loaded = load_trajectory(path)
    assert describe_difference(traj, loaded) is None
    assert (loaded.env_name, loaded.policy_version) == ("deep_sea", 5)


def test_what_convert_compares(make_traj: MakeTraj) -> None:
    traj = make_traj(4)
    floats = dataclasses.replace(traj, actions=traj.actions.astype(np.float32))
    assert describe_difference(traj, floats) is None
    other = dataclasses.replace(traj, actions=(traj.actions.argmax(1) + 1) % 3)
    assert describe_difference(traj, other) == "actions"
    assert describe_difference(traj, dataclasses.replace(traj, rews=traj.rews + 1)) == "rews"
    assert "_OBS_KEY_image, _OBS_KEY_position" in str(
        describe_difference(traj, dataclasses.replace(traj, obs={}))
    )
    assert describe_difference(traj, dataclasses.replace(traj, policy_version=3)) is not None


def test_convert_overwrites_only_when_told_and_leaves_no_twin(
    tmp_path: Path, fill: Fill, capsys: Capture
) -> None:
    fill(tmp_path / "a", [3, 4])
    target = tmp_path / "b"
    assert run(capsys, "convert", tmp_path / "a", target, "--to", "traj")[0] == 0
    assert "overwrite with --force" in refused(capsys, "convert", tmp_path / "a", target, "--to", "npz")
    status, out, _ = run(capsys, "convert", tmp_path / "a", target, "--to", "npz", "--force")
    assert status == 0
    assert "AMAGO 3.x" in out
    assert [path.suffix for path in target.iterdir()] == [".npz", ".npz"]


def test_convert_leaves_out_what_is_broken(buffer: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "convert", buffer, tmp_path / "b", "--to", "traj")
    assert status == 1
    assert "broken, left out" in out
    assert len(find_files(tmp_path / "b").files) == 3


# --- mistakes ------------------------------------------------------------------------------------------


ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e"


def test_names_in_and_of_files_cannot_steer_the_terminal(
    tmp_path: Path, make_traj: MakeTraj, capsys: Capture
) -> None:
    traj = make_traj(3)
    traj = dataclasses.replace(traj, env_name=f"mine{ESCAPES}", obs={f"key{ESCAPES}": traj.obs["position"]})
    path = save_trajectory(tmp_path, traj, save_as="traj", traj_id="00000001", unix_time=1e9)
    named = path.rename(tmp_path / f"e{ESCAPES}_00000001_1000000000.0.traj")
    (tmp_path / f"e{ESCAPES}_00000002_1000000000.0.npz").write_bytes(b"nothing")
    (tmp_path / f"notes{ESCAPES}\nall is well").touch()
    os.mkfifo(tmp_path / "e_00000003_1000000000.0.npz")
    for words in (("ls", tmp_path), ("ls", "--quick", tmp_path), ("check", tmp_path), ("show", named)):
        out = run(capsys, *words)[1]
        assert r"\x1b]0;owned\x07\x1b[31m\u202e" in out
        assert all(line.isprintable() for line in out.splitlines())
        assert "all is well" not in out.splitlines()
    assert "2 broken" in run(capsys, "check", tmp_path)[1]
    error = refused(capsys, "show", tmp_path / f"e{ESCAPES}_00000002_1000000000.0.npz")
    assert error.rstrip("\n").isprintable()


def test_mistakes_get_one_line(tmp_path: Path, fill: Fill, capsys: Capture) -> None:
    (path,) = fill(tmp_path / "a", [3])
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    assert "does not exist" in refused(capsys, "ls", nowhere)
    assert "does not exist" in refused(capsys, "check", nowhere)
    assert "holds no trajectory files" in refused(capsys, "check", empty)
    assert "show takes one file" in refused(capsys, "show", path.parent)
    assert "Did you mean show?" in refused(capsys, "shw")
    assert "Did you mean npz?" in refused(capsys, "convert", path, empty, "--to", "npy")
    assert "looks like a file" in refused(capsys, "convert", path, empty / "b.npz", "--to", "npz")
    assert "would hold every trajectory twice" in refused(
        capsys, "convert", path.parent, path.parent, "--to", "traj"
    )
    foreign = path.rename(path.with_name("foreign.npz"))
    assert "no id and time to keep" in refused(capsys, "convert", foreign, empty, "--to", "npz")
    foreign.write_bytes(b"")
    assert "it is empty" in refused(capsys, "show", foreign)


@pytest.mark.slow
def test_the_module_runs_and_ends_quietly_when_nobody_reads_on(tmp_path: Path, fill: Fill) -> None:
    fill(tmp_path, [3])
    command = [sys.executable, "-m", "loxodon.data", "ls", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "timesteps" in done.stdout
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        broken = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (broken.returncode, broken.stderr) == (0, "")
