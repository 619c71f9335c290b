"""The report: its statistics, and a self-contained page for any runs."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loxodon.experiment.fleet.heartbeat import machine_id
from loxodon.experiment.output import plots
from loxodon.experiment.output.plots import Line, Panel, plot_run, read_curves
from loxodon.tools.report.estimates import improvement, iqm, mean, mean_curve, with_interval
from loxodon.tools.report.main import Report, main
from loxodon.tools.report.page import Gallery
from loxodon.tools.report.runs import grouped, read_runs

from ..experiment.broken_files import BROKEN

VOID = {"img", "meta"}


@pytest.mark.parametrize(
    ("statistic", "samples", "expected"),
    [
        (iqm, [[100.0, 2.0, 1.0, 3.0]], 2.5),
        (iqm, [[1.0, 2.0, 6.0]], 3.0),  # fewer than four values, so the mean
        # 9 // 4 = 2 values are cut at either end
        (iqm, [[-9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 90.0]], 4.0),
        (improvement, [[1.0, 2.0], [0.0, 2.0]], 2.5 / 4),  # greater in two of four pairs, plus a tie
        (improvement, [[3.0, 4.0, 5.0], [1.0]], 1.0),
    ],
)
def test_statistics_by_hand(
    statistic: Callable[..., Any], samples: list[list[float]], expected: float
) -> None:
    assert statistic(*map(np.array, samples)) == pytest.approx(expected)


def test_intervals_are_those_of_the_bootstrap_and_reproducible() -> None:
    scores = np.random.default_rng(1).normal(3.0, 2.0, size=50)
    value, low, high = with_interval(mean, scores)
    assert value == scores.mean()
    assert (high - low) / 2 == pytest.approx(1.96 * scores.std() / np.sqrt(50), rel=0.1)
    assert np.array_equal(with_interval(mean, scores), [value, low, high])
    assert with_interval(iqm, np.full(5, 7.0)).tolist() == [7.0, 7.0, 7.0]
    assert np.isnan(with_interval(mean, np.ones(1))).tolist() == [False, True, True]


def test_a_mean_curve_ends_with_the_shortest_run() -> None:
    points, band = mean_curve([np.array([[0.0, 0.0], [10.0, 10.0]]), np.array([[0.0, 0.0], [20.0, 40.0]])])
    assert points[-1].tolist() == [10.0, 15.0]
    assert band[-1].tolist() == [10.0, 20.0]
    assert mean_curve([np.zeros((1, 2)), np.ones((1, 2))])[0].shape == (0, 2)  # no steps in common


# ---- the page ----


def write_run(folder: Path, returns: list[float], *, rate: float, seed: int, state: str = "finished") -> None:
    """Write the folder of a run with an evaluation of two attempts after each epoch."""
    for name in ("logs", "ckpts", "status", "evaluations"):
        (folder / name).mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for epoch, value in enumerate(returns):
        axes = {"epoch": epoch, "env_steps": 100 * epoch, "gradient_steps": 10 * epoch}
        records.append({**axes, "time/learn_s": 3.0, "train/critic_loss": 1 / value, "odd": None})
        attempts = {f"val/return_attempt_{i}": value + i for i in range(2)}
        records.append({**axes, "time/val_s": 1.0, "val/return": value, "val/return/Walk": value, **attempts})
    lines = [*map(json.dumps, records), '{"epoch": 9, "val/re']  # the last line is still being written
    (folder / "logs" / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "ckpts" / "config.txt").write_text(
        f"Experiment.learning_rate = {rate}\nExperiment.seed = {seed}\n"
    )
    versions = {
        "seed": seed,
        "config_hash": str(rate),
        "packages": {"torch": "9.9"},
        "hardware": {"cores": 77},
    }
    (folder / "ckpts" / "versions.json").write_text(json.dumps(versions))
    beat = {"id": "a", "role": "both", "host": "h", "pid": os.getpid(), "beat": 1, "state": state}
    beat |= {"started": time.time(), "time": time.time(), "machine": machine_id()}
    (folder / "status" / "both_h_1.json").write_text(json.dumps(beat))
    results = [
        {
            "context": context,
            "task": "t",
            "returns": [returns[-1]],
            "lengths": [4],
            "metrics": {},
            "attempts": [],
        }
        for context in (1, None)
    ]
    evaluation = {
        "format": 1,
        "run": folder.name,
        "env": "Walk",
        "policy": "best",
        "epoch": 2,
        "sampled": False,
    }
    (folder / "evaluations" / "a.json").write_text(json.dumps({**evaluation, "seed": 0, "results": results}))


class Page(HTMLParser):
    """A parsed page; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids, self.words = list[str](), list[str](), set[str](), list[str]()
        self.images, self.links = list[str](), list[str]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.ids.add(values.get("id") or "")
        self.images += [values["src"] or ""] if "src" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_about_two_groups_works_offline_and_names_missing_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    runs = tmp_path / "runs"
    for seed in range(3):
        write_run(runs / f"fast-seed{seed}", [1.0, 5.0, 8.0 + seed], rate=0.5, seed=seed)
        write_run(runs / f"slow-seed{seed}", [1.0, 2.0, 3.0 + seed], rate=0.25, seed=seed)
    write_run(runs / "other", [1.0], rate=0.125, seed=0, state="learning")
    (runs / "other" / "evaluations" / "a.json").write_text("[]")
    (runs / "<i>broken" / "logs").mkdir(parents=True)
    (runs / "<i>broken" / "logs" / "metrics.jsonl").write_bytes(b"\xff\n[3]\n")
    assert main([str(runs), str(tmp_path / "gone"), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out' / 'index.html'}\n"
    assert "<i>broken" in printed.err

    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    pictures = [
        base64.b64decode(src.removeprefix("data:image/png;base64,"), validate=True) for src in page.images
    ]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {path.read_bytes() for path in (tmp_path / "out").glob("*.png")} == set(pictures)
    assert {link.removeprefix("#") for link in page.links} <= page.ids  # there are only internal links
    assert not {"script", "link", "iframe", "i"} & set(page.tags)

    text = " ".join(" ".join(page.words).split())
    for part in (
        *("fast 3 9 [8, 10] 9 [8, 10] 8 to 10", "slow 3 4 [3, 5] 4 [3, 5] 3 to 5"),  # mean and IQM of a group
        "fast 1 [1, 1]",  # the probability of improvement over slow
        "group Experiment.learning_rate fast 0.5 slow 0.25 other 0.125",
        *("return of each attempt", "memory limited to", "fast Walk t best full 3 3 9 [8, 10]"),
        *("cores 77", "torch 9.9", "val/return over wall time [s]", "fast 12 0 % 75 % 25 %"),
        *("other: still running, at epoch 0", "other: evaluations/a.json is unreadable"),
        *("<i>broken: state unknown; no figures", "gone: does not exist"),
    ):
        assert part in text


def test_groups_by_name_with_a_chosen_metric_that_is_minimised(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    write_run(tmp_path / "a1", [4.0], rate=0.5, seed=0)
    write_run(tmp_path / "a2", [5.0], rate=0.25, seed=0)
    write_run(tmp_path / "b-seed0", [2.0], rate=0.5, seed=0)
    write_run(tmp_path / "b-seed1", [3.0], rate=0.5, seed=1)
    words = ["--group", "a", "--metric", "train/critic_loss", "--minimize", "-o", str(tmp_path / "out")]
    assert main([str(tmp_path), *words]) == 0
    text = " ".join(Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8")).words)
    assert "group Experiment.learning_rate" in " ".join(text.split())
    assert "0.25 | 0.5" in text  # the values within the group
    assert "a 1 [1, 1] b 0 [0, 0]" in " ".join(text.split())  # 1/4 and 1/5 are below 1/2 and 1/3


def test_a_report_without_anything_to_show_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "gone"), "-o", str(tmp_path / "out")]) == 2
    assert "gone: does not exist. Fix: name folders of runs" in capsys.readouterr().err
    write_run(tmp_path / "run", [4.0], rate=0.5, seed=0)
    assert main([str(tmp_path), "--metric", "val/retrun", "-o", str(tmp_path / "out")]) == 2
    assert "'val/retrun'. Did you mean 'val/return'" in capsys.readouterr().err
    assert main([str(tmp_path), "--group", "ru", "--group", "x", "-o", str(tmp_path / "out")]) == 2
    assert (
        "--group 'x' is not the beginning of the name of any run. Fix: write the beginning of one of run"
        in (capsys.readouterr().err)
    )


def test_the_curves_of_one_run_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    write_run(tmp_path, [4.0, 5.0], rate=0.5, seed=0)
    points = read_curves(tmp_path / "logs" / "metrics.jsonl")["val/return"]
    assert points[1] == {
        "value": 5.0,
        "epoch": 1.0,
        "env_steps": 100.0,
        "gradient_steps": 10.0,
        "wall_s": 8.0,
    }
    plot_run(tmp_path)
    assert (tmp_path / "logs" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_run_without_env_steps_are_drawn_over_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [4.0, 5.0], rate=0.5, seed=0)
    file = tmp_path / "logs" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"env_steps": 100', '"env_steps": 0'))
    drawn: list[Panel] = []
    monkeypatch.setattr(plots, "draw", lambda panels, *_, **__: drawn.extend(panels))
    plot_run(tmp_path)
    assert {panel.x_label for panel in drawn} == {"updates"}
    (returns,) = (panel.lines["val/return"] for panel in drawn if "val/return" in panel.lines)
    assert returns.points.tolist() == [[0.0, 4.0], [10.0, 5.0]]
    assert main([str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    (page,) = (tmp_path / "out").rglob("*.html")
    assert "val/return over updates" in page.read_text()
    assert "val/return over env steps" not in page.read_text()


def test_the_newest_ablation_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [4.0], rate=0.5, seed=0)
    folder = tmp_path / "run" / "evaluations"
    older = json.loads((folder / "a.json").read_text())
    older["results"][0]["returns"] = [-5.0]
    (folder / "z.json").write_text(json.dumps(older))
    os.utime(folder / "z.json", (1.0, 1.0))
    ((run,), _) = read_runs([tmp_path])
    assert run.ablation("Walk") == {1: 4.0, None: 4.0}
    os.utime(folder / "a.json", (0.5, 0.5))
    ((run,), _) = read_runs([tmp_path])
    assert run.ablation("Walk") == {1: -5.0, None: 4.0}


# ---- unexpected files ----


def test_broken_files_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path / "run", [4.0], rate=0.5, seed=0)
    folder = tmp_path / "run" / "evaluations"
    for name, content in BROKEN.items():
        (folder / f"{name}.json").write_bytes(content)
    (folder / "folder.json").mkdir()
    (folder / "nowhere.json").symlink_to("nothing")
    (folder / "loop.json").symlink_to("loop.json")
    os.mkfifo(folder / "pipe.json")
    ((run,), _) = read_runs([tmp_path])
    assert [one.env for found in run.evaluations for one in found] == ["Walk", "Walk"]
    for name in (*BROKEN, "folder", "loop", "pipe"):
        assert f"{name}.json is unreadable" in caplog.text
        assert any(name in note for note in run.notes)


ODD_TEXTS = [
    *BROKEN.values(),
    *(b"A.b = " + b"[" * n for n in (90, 150, 5000)),
    b"A.b = " + b"[" * 150 + b"]" * 150,
    *(b"A.b = " + b"9" * n for n in (400, 5000)),
    b'{"packages": 1}',
    b'{"packages": {"torch": [[]]}, "hardware": null, "seed": {"a": NaN}}',
]


@pytest.mark.parametrize("name", ["ckpts/config.txt", "ckpts/versions.json", "status/both.json"])
def test_broken_settings_versions_and_heartbeats_do_not_break_the_page(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run", [4.0], rate=0.5, seed=0)
    for content in ODD_TEXTS:
        (tmp_path / "run" / name).write_bytes(content)
        ((run,), without) = read_runs([tmp_path])
        assert without == {}
        report = Report(grouped([run], []), Gallery(tmp_path), "val/return")
        assert all([report._versions(), report._runs(), report._scores(report.groups)])


def test_odd_records_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, [4.0, 5.0], rate=0.5, seed=0)
    path = tmp_path / "logs" / "metrics.jsonl"
    expected = read_curves(path)
    assert caplog.text == ""  # the last line is still being written
    odd = [
        *("[" * 100_000, '{"a": ' * 2000 + "1" + "}" * 2000, "null", "[]", '"text"', "\0"),
        *('{"val/return": 1' + "0" * 400 + "}", '{"val/return": [1]}', '{"val/return": 1' + "0" * 5000 + "}"),
        *('{"val/return": NaN}', '{"val/return": 1e300}', '{"val/return": "' + "x" * 3_000_000 + '"}'),
    ]
    good = path.read_text().splitlines()
    path.write_text("\n".join([*odd, *good[:3], *odd, *good[3:]]))
    assert read_curves(path) == expected
    assert f"{2 * len(odd)} lines of {path} are skipped" in caplog.text


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "unreadable"])
def test_only_the_run_whose_metrics_cannot_be_read_is_skipped(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "bad", [4.0], rate=0.5, seed=0)
    write_run(tmp_path / "good", [5.0], rate=0.5, seed=0)
    path = tmp_path / "bad" / "logs" / "metrics.jsonl"
    if what == "unreadable":  # the tests may run as root, who can read everything
        is_bad = path.__eq__
        opened = Path.open

        def refused(self: Path, *args: Any, **kwargs: Any) -> Any:
            if is_bad(self):
                raise PermissionError(13, "Permission denied", str(self))
            return opened(self, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refused)
    else:
        path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(tmp_path / "good" / "logs" / "metrics.jsonl")
    runs, without = read_runs([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert str(path) in without[str(tmp_path / "bad")]


@pytest.mark.parametrize("name", ["ckpts/config.txt", "ckpts/versions.json", "evaluations/a.json"])
def test_links_that_leave_a_run_folder_are_not_read(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run", [4.0], rate=0.5, seed=0)
    path = (tmp_path / "run" / name).rename(tmp_path / "secret")
    (tmp_path / "run" / name).symlink_to(path)
    ((run,), _) = read_runs([tmp_path / "run"])
    assert any(f"{name} is unreadable" in note and "is a link out of" in note for note in run.notes)


def test_odd_names_are_shown_verbatim(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    name = r"_$\frac$ _" + "x" * 300 + "\x1b\ud800"
    lines = {name: Line(np.array([[0.0, 1.0], [1.0, 2.0]]), 0)}
    html = Gallery(tmp_path).figure(Panel(name, name, lines, name), f"{name} val/return", "caption")
    assert r"\x1b\ud800" in html
    assert len([*tmp_path.iterdir()]) == 1


def test_a_file_is_not_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_runs([tmp_path / "file"])[1] == {str(tmp_path / "file"): "is a file, not the folder of a run"}
