"""Returns and special metrics per environment name."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from loxodon.envs import Histories, ReturnHistory, SpecialMetricHistory
from loxodon.envs.statistics import _warn_not_finite, _warn_of_name


def test_without_finished_episodes_there_are_no_keys() -> None:
    history = ReturnHistory(2)
    history.add_step(np.ones(2), np.zeros(2, bool), ["a", "b"])
    assert history.summary("val") == {}
    assert history.num_episodes == 0
    assert SpecialMetricHistory().summary("val") == {}


def test_returns_lengths_and_means_of_means() -> None:
    history = ReturnHistory(3)
    names = ["a", "a", "b"]
    history.add_step(np.array([1.0, 2.0, 3.0], np.float32), np.array([False, True, False]), names)
    history.add_step(np.array([1.0, 4.0, 3.0], np.float32), np.array([True, True, True]), names)
    # a has returns 2, 2, 4 (lengths 1, 2, 1); b has return 6 (length 2).
    summary = history.summary("val/")
    assert summary["val/return/a"] == pytest.approx(8 / 3)
    assert summary["val/return/b"] == 6.0
    assert summary["val/return"] == pytest.approx((8 / 3 + 6) / 2)
    assert summary["val/return_p20"] == pytest.approx(np.percentile([2, 2, 4, 6], 20))
    assert summary["val/return_p20/a"] == pytest.approx(np.percentile([2, 2, 4], 20))
    assert summary["val/return_p20/b"] == 6.0
    assert [summary[f"val/episodes{of}"] for of in ("", "/a", "/b")] == [4, 3, 1]
    assert [summary[f"val/env_steps{of}"] for of in ("", "/a", "/b")] == [6, 4, 2]
    assert summary["val/episode_length"] == pytest.approx((4 / 3 + 2) / 2)


def test_clear_keeps_running_episodes_and_restart_does_not() -> None:
    for method, expected in (("clear", 3.0), ("restart", 1.0)):
        history = ReturnHistory(1)
        history.add_step(np.array([2.0]), np.array([False]), ["a"])
        getattr(history, method)()
        history.add_step(np.array([1.0]), np.array([True]), ["a"])
        assert history.summary("")["return"] == expected


def test_special_metrics_take_scalars_lists_and_arrays() -> None:
    history = SpecialMetricHistory()
    history.add_step([(0, "success", True), (1, "success", np.array([0.0, 1.0]))], ["a", "b"])
    history.add("b", "success", [0, 0])
    history.add("b", "empty", [])
    assert history.summary("train") == {
        "train/success": pytest.approx((1 + 0.25) / 2),
        "train/success/a": 1.0,
        "train/success/b": 0.25,
    }
    history.clear()
    assert history.summary("train") == {}


def test_metrics_that_are_not_finite_are_dropped_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    history = SpecialMetricHistory()
    _warn_not_finite.cache_clear()
    with caplog.at_level(logging.WARNING, "loxodon"):
        for _ in range(2):
            history.add_step([(0, "rate", float("nan")), (0, "all", [1.0, np.inf])], ["a"])
    assert history.summary("") == {"all": 1.0, "all/a": 1.0}
    assert len(caplog.messages) == 2
    assert "The environment a reports NaN or infinity as info['metric/rate']" in caplog.text


def test_rows_without_a_step_do_not_count() -> None:
    history = ReturnHistory(2)
    neither, both = np.zeros(2, bool), np.ones(2, bool)
    history.add_step(np.array([1.0, 1.0]), neither, ["a", "b"])
    history.add_step(np.array([5.0, 1.0]), neither, ["a", "b"], np.array([True, False]))
    history.add_step(np.array([1.0, 1.0]), both, ["a", "b"], neither)
    assert dict(history.returns) == {"a": [2.0], "b": [3.0]}
    assert dict(history.lengths) == {"a": [2], "b": [3]}


def test_metrics_of_environments_never_replace_other_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    histories = Histories.create(2)
    histories.returns.add_step(np.array([1.0, 3.0]), np.ones(2, bool), ["a", "b/c"])
    own = histories.returns.summary("val")
    metrics = ["return", "return_p20", "episode_length", "level", "metric/return", "goal"]
    _warn_of_name.cache_clear()
    with caplog.at_level(logging.WARNING, "loxodon"):
        for _ in range(2):
            histories.specials.add_step(
                [(row, name, float(i)) for i, name in enumerate(metrics) for row in (0, 1)], ["a", "b/c"]
            )
            found = histories.summary("val", ["level"])
    assert {name: found[name] for name in own} == own
    assert len(found) == len(own) + 3 * len(metrics)  # all are present
    assert found["val/metric/return"] == metrics.index("return")
    assert found["val/metric/level"] == metrics.index("level")
    assert found["val/goal"] == metrics.index("goal")
    assert found["val/goal/a"] == metrics.index("goal")  # the mean over environment `a`
    assert len([text for text in caplog.messages if "info['metric/return']" in text]) == 1
    assert "it is logged as val/metric/return (and collect/, test/). Fix:" in caplog.text
