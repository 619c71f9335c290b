"""`loxodon run --device`: the requested device, or an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from loxodon.experiment.config import ConfigError
from loxodon.tools.device import check_device, choose_device
from loxodon.tools.run import main

from ..experiment.fakes import TINY


def test_a_missing_device_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--config", "tmaze", "--device", "cuda"]) == 2
    assert "--device is cuda, but PyTorch" in (error := capsys.readouterr().err)
    assert "Fix: use --device cpu" in error


def test_the_device_applies_to_accelerate_and_to_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, flag in {"cpu": "true", "cuda": "false"}.items():
        choose_device(name)
        assert os.environ["ACCELERATE_USE_CPU"] == flag
    choose_device(None)
    assert os.environ["ACCELERATE_USE_CPU"] == "false"


def test_choosing_a_device_too_late_is_an_error() -> None:
    check_device(torch.device("cuda:1"), "cuda")
    check_device(torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=r"--device is cpu, but this process .* cuda:0.*Fix"):
        check_device(torch.device("cuda:0"), "cpu")


def test_the_header_of_a_run_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.chdir(tmp_path)
    Path("tiny.gin").write_text(TINY)
    assert main(["--config", "tiny.gin", "--device", "cpu", "Experiment.epochs=0"]) == 0
    assert "device  cpu" in capsys.readouterr().out
