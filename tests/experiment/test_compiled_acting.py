"""The gin switch for compiled acting reaches the agent before its first hidden state is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fakes import TinyAgent, make_experiment


@pytest.mark.parametrize("is_on", [True, False])
def test_the_switch_compiles_the_agent_that_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(TinyAgent, "compile_acting", lambda agent: calls.append("compile"), raising=False)
    init = TinyAgent.init_hidden_state
    monkeypatch.setattr(
        TinyAgent,
        "init_hidden_state",
        lambda agent, *args: calls.append("hidden state") or init(agent, *args),  # type: ignore[func-returns-value]
    )
    experiment = make_experiment(tmp_path, compile_acting=is_on)
    experiment.start()
    experiment.collect_new_training_data()
    experiment.close()
    assert calls[: 1 + is_on] == ["compile", "hidden state"][not is_on :]
