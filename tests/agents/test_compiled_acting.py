"""Compiled acting: the same actions, the same parameter names, and no compilation per timestep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

from loxodon.agents import Agent

from .rollouts import ENCODERS, OBS, tstep

NUM_ENVS, WINDOW, CPU = 3, 16, torch.device("cpu")
FIVE = spaces.Discrete(5)


def make_agent(encoder: str, space: spaces.Discrete | spaces.MultiDiscrete = FIVE) -> Agent:
    torch.manual_seed(0)
    return Agent(OBS, space, tstep, ENCODERS[encoder], WINDOW).eval()


def act(agent: Agent, num_timesteps: int) -> list[torch.Tensor]:
    """Greedy actions of some timesteps; one env is reset now and then."""
    generator, state, actions = torch.Generator().manual_seed(1), agent.init_hidden_state(NUM_ENVS, CPU), []
    for t in range(num_timesteps):
        obs = {key: torch.randn(NUM_ENVS, *OBS[key].shape, generator=generator) for key in OBS}
        rl2s, times = torch.randn(NUM_ENVS, 6, generator=generator), torch.full((NUM_ENVS, 1), t)
        action, state = agent.get_actions(obs, rl2s, times, state, sample=False)
        actions.append(action)
        if t % 7 == 3:
            state = agent.reset_hidden_state(state, torch.arange(NUM_ENVS) == t % NUM_ENVS)
    return actions


@pytest.mark.slow  # tracing takes seconds
@pytest.mark.parametrize(
    ("encoder", "space"),
    [("lstm", FIVE), ("transformer", FIVE), ("gru", spaces.MultiDiscrete([2, 3]))],
)
def test_compiled_acting_takes_the_same_actions_with_a_fixed_number_of_graphs(
    encoder: str, space: spaces.Discrete | spaces.MultiDiscrete
) -> None:
    graphs: list[Any] = []

    def count_graphs(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, compiled = make_agent(encoder, space), make_agent(encoder, space)
    compiled.compile_acting(backend=count_graphs)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    with torch.inference_mode():
        act(compiled, 3)
        num_graphs = len(graphs)
        actions = act(compiled, 3 * WINDOW)
        expected = act(plain, 3 * WINDOW)
    assert num_graphs > 0
    assert len(graphs) == num_graphs  # a full window, resets and a new rollout compile nothing more
    torch.testing.assert_close(torch.stack(actions), torch.stack(expected))
