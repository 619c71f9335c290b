"""Metrics of a rollout: how well acting and training agree, and how well values fit returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...nets import DistributionType, summed_over_processes
from .sequences import Results

_NUM_ULPS = 32  # six times the largest difference seen (widths 16 to 256); a wrong hidden state gave 4,000


def disagreement(results: Results, steps: Results) -> dict[str, float]:
    """Difference between acting and the same weights on whole sequences; only rounding errors, normally."""
    metrics, valid = {}, steps["valid"].reshape(-1)
    names = {"log_probs": "initial_logratio_abs_max", "values": "initial_value_diff_abs_max"}
    for name, metric in names.items():
        if name in steps:
            difference = (results[name].reshape(-1) - steps[name].reshape(-1)).abs()
            metrics[metric] = float(difference.masked_fill(~valid, 0.0).max())
    return metrics


def max_rounding_error(
    distribution: DistributionType, results: Results, actions: Tensor, mask: Tensor, dtype: torch.dtype
) -> float:
    """Largest difference of log-probs that the order of computation alone can cause, in nats.

    Sums of a network may differ in the last digits of the largest of its outputs, here the parameters of the
    policy. A log-prob then changes by its derivative times that difference, plus its own rounding error.
    Parameters with the derivative 0, such as the logits of masked actions, do not count.

    actions: (T * N, A). mask: (T, N) bool, steps that count. dtype: precision of the network.
    """
    valid = mask.reshape(-1)
    params = results["params"][valid].detach().requires_grad_()
    with torch.enable_grad():
        log_probs = distribution(params).log_prob(actions[valid])
        (slopes,) = torch.autograd.grad(log_probs.sum(), params)
    if not len(params):
        return 0.0
    largest = params.detach().abs().where(slopes != 0, 0.0).max()
    moved = torch.finfo(dtype).eps * slopes.abs().sum(-1).max() * largest
    own = torch.finfo(log_probs.dtype).eps * log_probs.detach().abs().max()
    return _NUM_ULPS * float(moved + own)


def value_fit_metrics(values: Tensor, returns: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics on the fit of values to returns, and on their size; (T, N) each, of all processes."""
    v, y, a = values.double(), returns.double(), advantages.double()
    moments = means_over_processes([v, y, a, y - v, y * y, a * a, (y - v) * (y - v)], mask)
    value, mean_return, advantage, residual, y_squares, a_squares, residual_squares = moments
    unexplained = max(residual_squares - residual**2, 0.0) / max(y_squares - mean_return**2, 1e-12)
    return {
        "explained_variance": 1.0 - unexplained,
        "value": value,
        "return": mean_return,
        "advantage_std": max(a_squares - advantage**2, 0.0) ** 0.5,
    }


def means_over_processes(columns: Sequence[Tensor], mask: Tensor) -> list[float]:
    """The mean of each (T, N) float column where mask (T, N) bool is True, over the steps of all processes.

    All processes that train together have to call this at the same time.
    """
    sums = [column.double().masked_fill(~mask, 0.0).sum() for column in columns]
    count, *totals = summed_over_processes(torch.stack([mask.sum().double(), *sums])).tolist()
    return [total / max(count, 1.0) for total in totals]
