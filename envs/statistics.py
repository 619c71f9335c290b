"""Returns, lengths and special metrics of finished episodes, kept per environment name."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from .returned import METRIC_PREFIX

logger = logging.getLogger("loxodon")
_OWN = ("return", "return_p20", "episode_length", "episodes", "env_steps")  # also logged as <name>/<env>


def _join(prefix: str, name: str) -> str:
    return f"{prefix.rstrip('/')}/{name}" if prefix else name


def _mean_of_means(groups: Mapping[str, Sequence[float]]) -> float:
    return float(np.mean([np.mean(values) for values in groups.values()]))


def _metrics(returns: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """The metrics in `_OWN` over some episodes."""
    values = (np.mean(returns), np.percentile(returns, 20), np.mean(lengths), len(returns), np.sum(lengths))
    return {name: float(value) for name, value in zip(_OWN, values, strict=True)}


class ReturnHistory:
    """Undiscounted returns and lengths of the episodes that ended since the last `clear`.

    It covers all envs. Iterating yields only the object itself, because AMAGO has a list with one history per
    env.

    Args:
        num_envs: number N of parallel environments. Running episodes survive `clear`.
    """

    def __init__(self, num_envs: int) -> None:
        self._running_returns = np.zeros(num_envs, np.float64)
        self._running_lengths = np.zeros(num_envs, np.int64)
        self.returns: dict[str, list[float]] = defaultdict(list)
        self.lengths: dict[str, list[int]] = defaultdict(list)

    def __iter__(self) -> Iterator[ReturnHistory]:
        return iter([self])

    @property
    def data(self) -> dict[str, list[float]]:
        """Returns by environment name, under AMAGO's attribute name."""
        return self.returns

    @property
    def num_episodes(self) -> int:
        """Number of episodes finished since the last `clear`."""
        return sum(map(len, self.returns.values()))

    def add_step(
        self,
        rewards: np.ndarray,
        ended: np.ndarray,
        env_names: Sequence[str],
        ignored: np.ndarray | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        """Add one vector step.

        Args:
            rewards: (N,) float.
            ended: (N,) bool, True where the episode terminated or was truncated with this step.
            env_names: N names from *before* the step (afterwards, an ended row has the next episode's name).
            ignored: (N,) bool, True in rows that took no env step (`infos["_ignore"]`); None for none.
            counted: (N,) bool, True where an episode is kept when it ends; None for all.
        """
        if ignored is None:
            self._running_returns += rewards
            self._running_lengths += 1
        else:
            self._running_returns[~ignored] += rewards[~ignored]
            self._running_lengths[~ignored] += 1
        if not np.count_nonzero(ended):
            return
        for row in np.flatnonzero(ended if counted is None else ended & counted).tolist():
            self.returns[env_names[row]].append(float(self._running_returns[row]))
            self.lengths[env_names[row]].append(int(self._running_lengths[row]))
        self._running_returns[ended] = 0.0
        self._running_lengths[ended] = 0

    def summary(self, prefix: str) -> dict[str, float]:
        """Metrics under `prefix`; empty when no episode ended.

        `return`, `episode_length`: mean over the environment names of their means; `return_p20`: 20th
        percentile over all episodes; `episodes`: their number; `env_steps`: their steps. Each also appears as
        `<name>/<env>`, over the episodes of one environment name.
        """
        if not self.num_episodes:
            return {}
        every_return = [value for values in self.returns.values() for value in values]
        every_length = [value for values in self.lengths.values() for value in values]
        metrics = _metrics(every_return, every_length)
        metrics |= {"return": _mean_of_means(self.returns), "episode_length": _mean_of_means(self.lengths)}
        for env, values in self.returns.items():
            metrics |= {f"{name}/{env}": x for name, x in _metrics(values, self.lengths[env]).items()}
        return {_join(prefix, name): x for name, x in metrics.items()}

    def clear(self) -> None:
        """Forget the finished episodes; running ones continue."""
        self.returns.clear()
        self.lengths.clear()

    def running(self) -> dict[str, np.ndarray]:
        """Copies of returns (N,) float64 and lengths (N,) int64 of the running episodes so far."""
        return {"returns": self._running_returns.copy(), "lengths": self._running_lengths.copy()}

    def set_running(self, running: dict[str, np.ndarray]) -> None:
        """Restore what `running` returned."""
        self._running_returns[:], self._running_lengths[:] = running["returns"], running["lengths"]

    def restart(self) -> None:
        """Forget the running episodes too (after a forced reset of all environments)."""
        self.clear()
        self._running_returns[:] = 0.0
        self._running_lengths[:] = 0


@cache
def _warn_of_name(metric: str) -> None:
    """Warn once that a metric is logged under a changed name."""
    logger.warning(
        "Environments report info['%s%s'], but another metric has this name, so it is logged as "
        "val/metric/%s (and collect/, test/). Fix: give the metric another name.",
        METRIC_PREFIX,
        metric,
        metric,
    )


@cache
def _warn_not_finite(env_name: str, metric: str) -> None:
    """Warn once about values that would make a metric's mean NaN or infinite."""
    logger.warning(
        "The environment %s reports NaN or infinity as info['%s%s'], which is left out of the mean. "
        "Fix: omit the key when there is no value.",
        env_name,
        METRIC_PREFIX,
        metric,
    )


class SpecialMetricHistory:
    """Numbers that environments report through `info["metric/<name>"]`; iterates like ReturnHistory."""

    def __init__(self) -> None:
        # A form that can be pickled.
        self.values: dict[str, dict[str, list[float]]] = defaultdict(partial(defaultdict, list))

    def __iter__(self) -> Iterator[SpecialMetricHistory]:
        return iter([self])

    @property
    def data(self) -> dict[str, dict[str, list[float]]]:
        """Numbers by environment name and metric, as in AMAGO."""
        data: dict[str, dict[str, list[float]]] = {}
        for metric, groups in self.values.items():
            for name, numbers in groups.items():
                data.setdefault(name, {})[metric] = numbers
        return data

    def add(self, env_name: str, metric: str, value: Any) -> None:
        """Store a number, or every element of a list or array; values that are not finite are skipped."""
        numbers = np.asarray(value, np.float64).reshape(-1)
        if not np.isfinite(numbers).all():
            _warn_not_finite(env_name, metric)
        self.values[metric][env_name].extend(numbers[np.isfinite(numbers)].tolist())

    def add_step(self, metrics: Iterable[tuple[int, str, Any]], env_names: Sequence[str]) -> None:
        """Store `infos["metrics"]` of one vector step; `env_names` are those from before the step."""
        for row, metric, value in metrics:
            self.add(env_names[row], metric, value)

    def named(self, taken: Collection[str] = ()) -> dict[str, dict[str, list[float]]]:
        """Numbers by logged name and environment name; empty entries are omitted.

        The name is `<metric>`. If another metric has that name, or begins with its first part, the name is
        `metric/<metric>`, and a warning is logged once.

        taken: names of other metrics, in addition to those of `ReturnHistory.summary`.
        """
        others = {*_OWN, "metric", *(name.partition("/")[0] for name in taken)}
        found: dict[str, dict[str, list[float]]] = {}
        for metric in sorted(self.values):
            if groups := {env: values for env, values in self.values[metric].items() if values}:
                is_taken = metric.partition("/")[0] in others
                if is_taken:
                    _warn_of_name(metric)
                found[f"metric/{metric}" if is_taken else metric] = groups
        return found

    def summary(self, prefix: str, taken: Collection[str] = ()) -> dict[str, float]:
        """`<name>`: mean over environment names of their means; `<name>/<env>`: mean of one. May be empty.

        The names are those of `named`.
        """
        summary = {}
        for name, groups in self.named(taken).items():
            summary[_join(prefix, name)] = _mean_of_means(groups)
            for env, values in groups.items():
                summary[_join(prefix, f"{name}/{env}")] = float(np.mean(values))
        return summary

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()


class Histories(NamedTuple):
    """Episode statistics of one rollout: returns and the environment's own metrics."""

    returns: ReturnHistory
    specials: SpecialMetricHistory

    @classmethod
    def create(cls, num_envs: int) -> Histories:
        """Make empty statistics of `num_envs` envs."""
        return cls(ReturnHistory(num_envs), SpecialMetricHistory())

    def share(self, num_envs: int) -> Histories:
        """Make statistics of `num_envs` other envs, with shared records of finished episodes."""
        part = ReturnHistory(num_envs)
        part.returns, part.lengths = self.returns.returns, self.returns.lengths
        return Histories(part, self.specials)

    def summary(self, prefix: str, taken: Collection[str] = ()) -> dict[str, float]:
        """Metrics of the finished episodes; empty if none has finished.

        taken: other names under `prefix`, which metrics of environments must not use.
        """
        return {**self.returns.summary(prefix), **self.specials.summary(prefix, taken)}

    def clear(self) -> None:
        """Forget the finished episodes; running ones continue."""
        self.returns.clear()
        self.specials.clear()
