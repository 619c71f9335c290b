"""The choice of the discount whose policy acts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import gin
import numpy as np
import torch
from torch import Tensor, nn

from ...data.errors import check_count, check_number


class EpisodeResult(NamedTuple):
    """A training episode that has ended.

    discount: index of the discount whose policy acted. total: sum of the rewards. env_name: the environment.
    """

    discount: int
    total: float
    env_name: str


@gin.configurable
class ActByReturn(nn.Module):
    """Chooses, for each training episode, the discount whose policy acts, by the returns of recent episodes.

        z     = (R - mean) / deviation,  over the last `recent` episodes of the environment of that name
        m_g   = sum of z over the n_g recent episodes of discount g, divided by n_g + 1
        draw  = the discount with the largest sample of N(m_g, 1 / (n_g + 1)); a random one with probability
                `explore`
        best  = the discount with the largest m_g; the last one without episodes

    All discounts are trained all the time, so a choice costs nothing but the episodes of worse policies.
    Evaluations and policy files use `best`. Separate actors report their episodes to the learner, and follow
    the choice that comes with its next policy.

    Reason: a long horizon is right in the end, but its values vary far more than a single action changes
    them, so its policy may learn nothing for long; a short horizon may not see what matters. Which one it is
    depends on the task and on the progress of learning.
    Source: a bandit over discounts: Badia et al. 2020 (Agent57), arXiv:2003.13350. The rule (Thompson
    sampling from a normal distribution with one pseudo-episode) is ours.
    Off: `acting = None`, and the last discount acts (published).
    Effect: without velocities, HalfCheetah-v5 runs instead of standing still; Hopper-v5 and
    PositionOnlyCartPoleMedium, which need a long horizon, are learned later (single runs). On eight other
    tasks, the area under learning curves is 0.04 [-0.00, 0.09] larger (docs/algorithm.md).

    Args:
        recent: number of episodes that count, over all environments and discounts.
        explore: probability of a random discount.
    Raises: ValueError or TypeError for an impossible number.
    """

    best: Tensor
    episodes: Tensor
    """The recent episodes, (recent, 3) float32: discount (-1 before there are any), return, a number for the
    environment. As a buffer, it is part of checkpoints and of the policies that actors load."""

    def __init__(self, *, recent: int = 120, explore: float = 0.2) -> None:
        super().__init__()
        check_count("ActByReturn.recent", recent)
        check_number("ActByReturn.explore", explore, lowest=0, highest=1)
        self.recent, self.explore = recent, explore
        self._discounts: list[float] = []
        self.register_buffer("episodes", torch.full((recent, 3), -1.0))

    def build(self, discounts: Sequence[float]) -> None:
        """Set the discounts of the agent, in the order of its policies."""
        self._discounts = list(discounts)
        self.register_buffer("best", torch.tensor(len(discounts) - 1))

    @property
    def best_discount(self) -> float:
        """The discount whose policy has the best recent returns."""
        return self._discounts[int(self.best)]

    def draw(self, count: int) -> np.ndarray:
        """Indices of discounts for new episodes, (count,) int64; uses torch's global generator."""
        means, deviations = self._estimates()
        noise = torch.randn(count, len(means), dtype=torch.float64).numpy()
        chosen = (means + deviations * noise).argmax(axis=1)
        is_random = torch.rand(count).numpy() < self.explore
        return np.where(is_random, torch.randint(len(means), (count,)).numpy(), chosen)

    def add(self, episodes: Sequence[EpisodeResult]) -> None:
        """Add episodes that have ended."""
        if not episodes:
            return
        rows = [(one.discount, one.total, _number_of(one.env_name)) for one in episodes]
        new = torch.tensor(rows, dtype=torch.float32, device=self.episodes.device)
        self.episodes.copy_(torch.cat([self.episodes, new])[-self.recent :])
        means = self._estimates()[0]
        self.best.fill_(int(len(means) - 1 - means[::-1].argmax()))

    def _estimates(self) -> tuple[np.ndarray, np.ndarray]:
        """The m_g and the deviations of their samples, both (G,)."""
        rows = self.episodes.double().cpu().numpy()
        discounts, returns, numbers = rows[rows[:, 0] >= 0].T
        chosen, envs = discounts.astype(np.int64), np.unique(numbers, return_inverse=True)[1]
        sizes = np.bincount(envs)
        returns = returns - (np.bincount(envs, returns) / sizes)[envs]
        scales = np.sqrt(np.bincount(envs, returns**2) / sizes)
        sums = np.bincount(chosen, returns / np.maximum(scales, 1e-12)[envs], len(self._discounts))
        counts = 1 + np.bincount(chosen, minlength=len(self._discounts))
        return sums / counts, counts**-0.5


def _number_of(env_name: str) -> int:
    """A number for the environment that is the same in all processes, and exact in float32."""
    return zlib.crc32(env_name.encode()) % 2**24
