"""Acting by a program that AOTInductor compiled, against eager acting. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/exported_step.py --encoder gru

The program holds the whole step but the random numbers, which it is given. First both act on the same
observations, and `largest_difference` is that of their probabilities of actions. Then each collects
CartPole-v1 with its own environments, in turns, and the medians of their CPU time per vector step are
reported. The program keeps the weights that it was compiled with, so this measures what it could save and
nothing in Loxodon uses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rollout
import torch
from provenance import provenance
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

from loxodon.agents import Agent
from loxodon.nets import Categorical

NUM_ACTIONS = 2  # CartPole-v1 has two
LEAST_NOISE = 1e-30  # keeps divisions finite
NUM_ENVS, CONTEXT, COMPARED_STEPS, WARM_UP_STEPS, TIMED_STEPS = 12, 128, 300, 60, 400


class Step(nn.Module):
    """Actions (N,), their probabilities (N, A), and the memory after a timestep of N environments.

    noise: (N, A) exponential random numbers; see Categorical.act.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, memory: Any, noise: Tensor
    ) -> Any:
        state, memory = self.agent._models[0].encode_timestep(obs, rl2s, time_idxs, memory)
        policy = self.agent.policy(self.agent.actor_input(state, obs))
        assert isinstance(policy, Categorical)
        return (policy.probs / noise).argmax(-1), policy.probs, memory


def inputs(obs_key: str, timestep: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Random observations, and previous rewards and actions, for one timestep of all environments."""
    obs = {obs_key: torch.randn(NUM_ENVS, 4)}
    return obs, torch.randn(NUM_ENVS, 1 + NUM_ACTIONS), torch.full((NUM_ENVS, 1), timestep)


def new_memory(agent: Agent) -> Any:
    """The memory of an agent before the first timestep."""
    return agent.init_hidden_state(NUM_ENVS, torch.device("cpu"))[0]


def exported(agent: Agent, obs_key: str) -> Any:
    """The step of an agent as a compiled program."""
    example = (*inputs(obs_key, 0), new_memory(agent), torch.ones(NUM_ENVS, NUM_ACTIONS))
    with torch.no_grad():
        program = torch.export.export(Step(agent).eval(), example, strict=False)
        return aoti_load_package(aoti_compile_and_package(program))


def largest_difference(agent: Agent, program: Any, obs_key: str) -> float:
    """The largest difference of probabilities over timesteps whose memories each side keeps itself."""
    step, noise, largest = Step(agent).eval(), torch.ones(NUM_ENVS, NUM_ACTIONS), 0.0
    plain_memory, compiled_memory = new_memory(agent), new_memory(agent)
    with torch.no_grad():
        for i in range(COMPARED_STEPS):
            given = inputs(obs_key, i)
            _, plain, plain_memory = step(*given, plain_memory, noise)
            _, compiled, compiled_memory = program(*given, compiled_memory, noise)
            largest = max(largest, float((plain - compiled).abs().max()))
    return largest


def act_by(agent: Agent, program: Any) -> None:
    """Let an agent with Discrete actions act by a program that always samples."""

    def act(obs: Any, rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool) -> Any:
        noise = torch.empty(NUM_ENVS, NUM_ACTIONS).exponential_().clamp_min_(LEAST_NOISE)
        actions, probs, memory = program(obs, rl2s, time_idxs, hidden_state[0], noise)
        return actions, (memory,), {"action_probs": probs} if agent.returns.needs_probabilities else {}

    agent._act = act  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", choices=tuple(rollout.ENCODERS), default="gru")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    args = argparse.Namespace(
        env="cartpole", encoder=given.encoder, mode="sync", context=CONTEXT, num_envs=NUM_ENVS,
        device="cpu", workers=None, start_method=None, overlap=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        collectors, agents = {}, {}
        for name in ("eager", "exported"):
            halves = rollout.make_envs(args)
            agents[name] = agent = rollout.make_agent(args, halves[0])
            collectors[name] = rollout.make_collector(halves, agent, Path(folder) / name, torch.device("cpu"))
            collectors[name].restart(0)
        state = collectors["eager"].groups[0].state
        assert state is not None  # it has just been restarted
        (obs_key,) = state.obs
        start_s = time.perf_counter()
        program = exported(agents["exported"], obs_key)
        compile_s = time.perf_counter() - start_s
        difference = largest_difference(agents["exported"], program, obs_key)
        act_by(agents["exported"], program)
        times: dict[str, list[float]] = {name: [] for name in collectors}
        for collector in collectors.values():
            collector.collect(WARM_UP_STEPS)
        for _ in range(given.repeats):
            for name, collector in collectors.items():
                start_s = time.process_time()
                collector.collect(TIMED_STEPS)
                times[name].append(1e3 * (time.process_time() - start_s) / TIMED_STEPS)
        for collector in collectors.values():
            collector.close()
    medians = {name: statistics.median(runs) for name, runs in times.items()}
    result = {
        "largest_difference": difference,
        "compile_s": round(compile_s, 1),
        "cpu_ms_per_vector_step": {name: round(ms, 3) for name, ms in medians.items()},
        "all_runs": {name: [round(ms, 3) for ms in runs] for name, runs in times.items()},
        "times_as_fast": round(medians["eager"] / medians["exported"], 2),
    }
    print(json.dumps({**provenance(), "settings": vars(given), "result": result}, indent=1))


if __name__ == "__main__":
    main()
