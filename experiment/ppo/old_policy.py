"""Old log-probabilities and values: a pass over a rollout before the updates, with the weights that acted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...agents import OnPolicyAgent
from ..process.transfer import to_device
from .sequences import STEP, TAIL, GatherIndices, Results, RolloutTensors


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
    num_timesteps = len(tensors.rl2s)
    of_steps, of_tails = torch.zeros(2, num_timesteps + 1, 1, device=tensors.device)
    has_step = torch.zeros(num_timesteps + 1, 1, dtype=torch.bool, device=tensors.device)
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
        timesteps = torch.where(is_step, indices.timesteps, num_timesteps)
        of_steps[timesteps], has_step[timesteps] = found.values.float(), True
        of_tails[torch.where(is_tail, indices.timesteps, num_timesteps)] = found.values.float()
    # A timestep may be a step and the tail of the sequence before it, whose memory differs after a burn-in.
    values = torch.where(has_step, of_steps, of_tails)
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
