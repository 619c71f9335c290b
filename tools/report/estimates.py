"""Statistics over runs with different seeds, after Agarwal et al. 2021 (arXiv:2108.13264).

The definitions are those of their library rliable, for a single task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_NUM_RESAMPLES = 2_000
_NUM_PLACES = 100  # points of a mean curve if the runs were measured at different places


def mean(scores: np.ndarray) -> np.ndarray:
    """Mean over the last axis."""
    result: np.ndarray = np.mean(scores, axis=-1)
    return result


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: without the lowest and the highest n // 4 of n scores."""
    cut = scores.shape[-1] // 4
    return mean(np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut])


def improvement(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Probability that a score of ours (..., n) is above one of theirs (..., m); a tie counts as one half."""
    difference = ours[..., :, None] - theirs[..., None, :]
    result: np.ndarray = ((np.sign(difference) + 1) / 2).mean(axis=(-2, -1))
    return result


def with_interval(statistic: Callable[..., np.ndarray], *samples: np.ndarray) -> np.ndarray:
    """(..., 3): a statistic of samples (..., n), and the ends of its 95 % bootstrap interval.

    It is the percentile bootstrap: scores are redrawn within each sample, with the same random numbers every
    time. For a single score, the ends are NaN.
    """
    value = np.asarray(statistic(*samples))
    if min(sample.shape[-1] for sample in samples) < 2:  # noqa: PLR2004
        return np.stack([value, np.full_like(value, np.nan), np.full_like(value, np.nan)], axis=-1)
    rng = np.random.default_rng(0)
    sizes = [sample.shape[-1] for sample in samples]
    chosen = [rng.integers(size, size=(_NUM_RESAMPLES, size)) for size in sizes]
    drawn = statistic(*(sample[..., index] for sample, index in zip(samples, chosen, strict=True)))
    low, high = np.percentile(drawn, [2.5, 97.5], axis=-1)
    return np.stack([value, low, high], axis=-1)


def mean_curve(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean (n, 2) of curves (n_i, 2) in x and y, and its interval (n, 2).

    The mean ends with the shortest curve. If the curves have different x, they are interpolated.
    """
    first, last = max(one[0, 0] for one in curves), min(one[-1, 0] for one in curves)
    own = [one[(one[:, 0] >= first) & (one[:, 0] <= last), 0] for one in curves]
    is_same = all(np.array_equal(one, own[0]) for one in own)
    x = own[0] if is_same else np.linspace(first, last, _NUM_PLACES if first < last else 0)
    found = with_interval(mean, np.stack([np.interp(x, *one.T) for one in curves], axis=-1))
    return np.stack([x, found[:, 0]], axis=-1), found[:, 1:]
