"""Old log-probabilities and values: a pass over a rollout before the updates, with the weights that acted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...agents import OnPolicyAgent
from ...nets import DistributionType, summed_over_processes
from ..process.transfer import to_device
from .sequences import STEP, TAIL, GatherIndices, Results, RolloutTensors

_NUM_ULPS = 32  # six times the largest difference seen (widths 16 to 256); a wrong hidden state gave 4,000


@torch.no_grad()
def old_policy_outputs(
    agent: OnPolicyAgent,
    tensors: RolloutTensors,
    groups: Iterable[GatherIndices],
    cast: Callable[[], AbstractContextManager[Any]],
) -> tuple[Results, Tensor]:
    """Log-probabilities and values of every step of a rollout; also updates the agent's input statistics.

    groups: contain every step once, and the timestep that followed it as the next step or as a tail.
    Returns: "log_probs", "values" (T * N, 1) and "params" (T * N, P) float32 of the steps, and the values
        (T, N) of the timesteps that followed.
    """
    agent.eval()
    num_steps = tensors.num_steps * tensors.num_envs
    # Entries without a step are written to an additional row: choosing the others would wait for the device.
    values = torch.zeros(len(tensors.rl2s) + 1, 1, device=tensors.device)
    results: Results = {}
    for indices in groups:
        batch = tensors.gather(indices, {})
        with cast():
            found = agent.evaluate(batch)
        agent.gather_statistics(batch)
        is_step, is_tail = indices.kinds == STEP, indices.kinds == TAIL
        steps = torch.where(is_step, indices.steps, num_steps)
        for name, value in (("log_probs", found.log_probs), ("params", found.params)):
            if name not in results:
                results[name] = torch.zeros(num_steps + 1, value.shape[-1], device=tensors.device)
            results[name][steps] = value.float()
        for chosen in (is_tail, is_step):  # in this order: a step's own value replaces that of a tail
            values[torch.where(chosen, indices.timesteps, len(tensors.rl2s))] = found.values.float()
    results = {name: value[:num_steps] for name, value in results.items()}
    first = tensors.rollout.history * tensors.num_envs
    results["values"] = values[first : first + num_steps]
    successors = to_device({"successors": tensors.successors}, tensors.device)["successors"]
    return results, values[:, 0][successors]


@torch.no_grad()
def refreshed_states(agent: OnPolicyAgent, tensors: RolloutTensors, num_envs: Sequence[int]) -> list[Any]:
    """Hidden states from which to continue after a rollout, recomputed with the present weights.

    num_envs: number of envs of each buffer that the rollout was read from.
    Returns: a state for each, from which acting continues.
    """
    agent.eval()
    indices, resets, is_fresh = tensors.running_episodes(agent.context_len or 0)
    batch = dataclasses.replace(tensors.gather(indices, {}), resets=resets)
    rows = agent.remember(batch)
    states = []
    for part in torch.split(torch.arange(tensors.num_envs, device=tensors.device), list(num_envs)):
        state = agent.import_hidden_state({key: value[part] for key, value in rows.items()})
        states.append(agent.reset_hidden_state(state, is_fresh[part]))
    return states


def disagreement(results: Results, steps: Results) -> dict[str, float]:
    """Difference between acting and the same weights on whole sequences; only rounding errors, normally."""
    metrics, valid = {}, steps["valid"].reshape(-1)
    names = {"log_probs": "initial_logratio_abs_max", "values": "initial_value_diff_abs_max"}
    for name, metric in names.items():
        if name in steps:
            difference = (results[name].reshape(-1) - steps[name].reshape(-1)).abs()
            metrics[metric] = float(difference.masked_fill(~valid, 0.0).max())
    return metrics


def rounding(
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


def spread(values: Tensor, returns: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
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
