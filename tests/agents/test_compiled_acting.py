"""Compiled acting: the same actions, the same parameter names, and no compilation per timestep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.agents import Agent
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, LSTMTrajEncoder, TrajEncoder, TransformerTrajEncoder

OBS = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
NUM_ENVS, WINDOW, CPU = 3, 4, torch.device("cpu")
FIVE = spaces.Discrete(5)
ENCODERS: dict[str, Callable[[int, int], TrajEncoder]] = {
    "gru": lambda dim, length: GRUTrajEncoder(dim, length, n_layers=1, d_hidden=16, d_output=16),
    "lstm": lambda dim, length: LSTMTrajEncoder(dim, length, n_layers=1, d_hidden=16, d_output=16),
    "transformer": lambda dim, length: TransformerTrajEncoder(
        dim, length, d_model=16, n_heads=2, d_ff=16, n_layers=2
    ),
}


def make_agent(encoder: str, space: spaces.Discrete | spaces.MultiDiscrete = FIVE) -> Agent:
    torch.manual_seed(0)
    agent = Agent(
        OBS,
        space,
        lambda obs_space, rl2_dim: FFTstepEncoder(obs_space, rl2_dim, n_layers=1, d_hidden=8, d_output=8),
        ENCODERS[encoder],
        WINDOW,
    )
    return agent.eval()


def act(agent: Agent, num_timesteps: int) -> list[torch.Tensor]:
    """Greedy actions of some timesteps, with a reset of one env now and then."""
    generator, state, actions = torch.Generator().manual_seed(1), agent.init_hidden_state(NUM_ENVS, CPU), []
    for t in range(num_timesteps):
        obs = {"observation": torch.randn(NUM_ENVS, 3, generator=generator)}
        rl2s, times = torch.randn(NUM_ENVS, 6, generator=generator), torch.full((NUM_ENVS, 1), t)
        action, state = agent.get_actions(obs, rl2s, times, state, sample=False)
        actions.append(action)
        if t % 7 == 3:
            state = agent.reset_hidden_state(state, torch.arange(NUM_ENVS) == t % NUM_ENVS)
    return actions


@pytest.mark.slow  # tracing takes seconds
@pytest.mark.parametrize(
    ("encoder", "space"),
    [*((encoder, FIVE) for encoder in sorted(ENCODERS)), ("gru", spaces.MultiDiscrete([2, 3]))],
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
        actions = act(compiled, 10 * WINDOW)
        expected = act(plain, 10 * WINDOW)
    assert num_graphs > 0
    assert len(graphs) == num_graphs  # a full window, resets and a new rollout compile nothing more
    torch.testing.assert_close(torch.stack(actions), torch.stack(expected))
