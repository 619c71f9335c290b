"""A reward for observations that are new, for tasks that random actions do not solve."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import gin
import numpy as np
import torch

from ...data.errors import check_number

_MEAN_OVER = 10_000  # observations


@gin.configurable
class NoveltyBonus:
    """A bonus of scale (1 / sqrt(n) - m) for an observation that is the n-th of its kind in training.

    m is the mean of 1 / sqrt(n) over about the last 10,000 observations. Without it every timestep would pay,
    and an agent would rather go on than end the episode at its goal.

    Observations of one kind have the same integers, and numbers on the same side of `bits` random planes,
    after standardisation by the mean and deviation of all observations so far. Kinds share 2^bits counters.
    Every collecting process counts for itself.

    Reason: where random actions hardly ever find a reward, or every action costs the same, nothing says in
    which direction to search. The bonus vanishes as observations repeat, so it hardly changes what is best in
    the end. It cannot tell apart what looks alike, and everything is new if observations contain noise.
    Source: counts of hashed observations: Tang et al. 2017, arXiv:1611.04717; a bonus of 1 / sqrt(n): Strehl
    & Littman 2008; less its mean: ours.
    Off: `RewardShaping.bonus = None` (published).
    Effect: MiniGrid-DoorKey-5x5-v0 is learned after 36,000 and 48,000 env steps (two seeds, together with
    `ActByReturn`), and not within 97,000 without both (one seed).

    Args:
        scale: about the size of a typical reward.
        bits: number of planes, and size of the table.

    Raises: ValueError or TypeError for an impossible number.
    """

    def __init__(self, scale: float = 0.1, bits: int = 16) -> None:
        check_number("NoveltyBonus.scale", scale, above=0)
        check_number("NoveltyBonus.bits", bits, lowest=1, highest=24, whole=True)
        self.scale, self.bits = scale, int(bits)
        self._counts = np.zeros(1 << self.bits, np.int32)
        self._num_seen, self._mean_novelty = 0, 0.0
        self._mean: np.ndarray
        self._variance: np.ndarray
        self._set_width(0)
        self._novelty_sum, self._novelty_count = 0.0, 0  # since the last call of `metrics`

    def __call__(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Count observations (N, ...) and return their bonus, (N,) float32."""
        kinds = self._kinds(obs)
        np.add.at(self._counts, kinds, 1)
        novelty = 1 / np.sqrt(self._counts[kinds])
        self._num_seen += len(kinds)
        share = min(1.0, len(kinds) / min(self._num_seen, _MEAN_OVER))
        self._mean_novelty += share * (float(novelty.mean()) - self._mean_novelty)
        self._novelty_sum += float(novelty.sum())
        self._novelty_count += len(kinds)
        bonus: np.ndarray = (self.scale * (novelty - self._mean_novelty)).astype(np.float32)
        return bonus

    def metrics(self) -> dict[str, float]:
        """The mean of 1 / sqrt(n) since the last call."""
        if not self._novelty_count:
            return {}
        mean = self._novelty_sum / self._novelty_count
        self._novelty_sum, self._novelty_count = 0.0, 0
        return {"collect/novelty": mean}

    def _kinds(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The kind of each observation, a number below 2^bits."""
        num_envs = len(next(iter(obs.values())))
        rows = {key: value.reshape(num_envs, -1) for key, value in obs.items()}
        floats = [value for value in rows.values() if value.dtype.kind == "f"]
        exact = [value for value in rows.values() if value.dtype.kind != "f"]
        kinds: np.ndarray = np.zeros(num_envs, np.int64)
        if floats:
            numbers = self._standardised(np.concatenate(floats, axis=1, dtype=np.float64))
            kinds += (numbers @ self._planes > self._offsets) @ (1 << np.arange(self.bits))
        for value in exact:
            kinds = 31 * kinds + [zlib.crc32(row.tobytes()) for row in value]
        return kinds % len(self._counts)

    def _standardised(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers (N, D) with the mean and deviation of all so far, which these rows join."""
        num_rows, width = numbers.shape
        if not self._num_seen:
            self._set_width(width)
        before, share = self._mean, num_rows / (self._num_seen + num_rows)
        self._mean = before + share * (numbers.mean(axis=0) - before)
        spread = ((numbers - before) * (numbers - self._mean)).mean(axis=0)
        self._variance += share * (spread - self._variance)
        standardised: np.ndarray = (numbers - self._mean) / np.sqrt(self._variance + 1e-8)
        return standardised

    def _set_width(self, width: int) -> None:
        """Begin with observations of that many numbers; the planes are the same in every process and run."""
        self._mean, self._variance = np.zeros(width), np.zeros(width)
        rng = np.random.default_rng(0)
        self._planes = rng.standard_normal((width, self.bits))
        self._offsets = rng.standard_normal(self.bits) * np.sqrt(width)

    # ---- in checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """State from which `load_state_dict` continues exactly."""
        return {
            "counts": torch.from_numpy(self._counts.copy()),
            "num_seen": self._num_seen,
            "mean_novelty": self._mean_novelty,
            "mean": torch.from_numpy(self._mean.copy()),
            "variance": torch.from_numpy(self._variance.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`. Raises: ValueError if it has another number of bits."""
        if len(state["counts"]) != len(self._counts):
            raise ValueError(
                f"The checkpoint counts {len(state['counts'])} kinds of observations, but NoveltyBonus.bits "
                f"= {self.bits} has {len(self._counts)}. Fix: resume with NoveltyBonus.bits = "
                f"{len(state['counts']).bit_length() - 1}."
            )
        self._counts[:] = state["counts"].numpy()
        self._num_seen, self._mean_novelty = int(state["num_seen"]), float(state["mean_novelty"])
        self._set_width(len(state["mean"]))
        self._mean, self._variance = state["mean"].numpy().copy(), state["variance"].numpy().copy()
