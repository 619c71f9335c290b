from __future__ import annotations

import os
import signal

import pytest

from loxodon.experiment.signals import StopRequest


def test_a_second_sigint_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_that_passes_ctrl_c_on_does_not_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with StopRequest() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_name == "SIGINT"
        stop._first_s -= 2.0  # the user insists, two seconds later
        with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
