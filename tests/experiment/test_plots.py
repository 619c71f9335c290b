"""Learning curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loxodon.experiment.plots import main, plot_run, read_curves

PNG_SIGNATURE = b"\x89PNG"


def write_metrics(run_dir: Path, records: list[dict[str, object]]) -> None:
    (run_dir / "logs").mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "logs" / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_curves_pair_values_with_env_steps_and_skip_what_is_no_number(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"env_steps": 5, "val/return": 1.5, "note": "x"}]
    write_metrics(tmp_path, [*records, {"env_steps": 9, "val/return": None}])
    points = read_curves(tmp_path / "logs" / "metrics.jsonl")["val/return"]
    assert points == [{"value": 1.5, "env_steps": 5.0, "gradient_steps": 0.0}]


def test_a_run_becomes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    write_metrics(tmp_path, [{"env_steps": n, "val/return": n, "train/actor_loss": -n} for n in range(3)])
    assert main([str(tmp_path)]) == 0
    picture = Path(capsys.readouterr().out.strip())
    assert picture == tmp_path / "logs" / "curves.png"
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_what_cannot_be_drawn_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"metrics.jsonl does not exist.*Fix: give the folder of a run"):
        plot_run(tmp_path)
    write_metrics(tmp_path, [{"env_steps": 1, "odd": 2}])
    with pytest.raises(ValueError, match=r"no figures to draw yet.*Fix"):
        plot_run(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "no figures" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([])
