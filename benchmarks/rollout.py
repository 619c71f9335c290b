"""Speed of rollouts, by part of a step. Prints one JSON document.

    python benchmarks/rollout.py --env cartpole --encoder transformer --mode sync
    python benchmarks/rollout.py --env null --context 2048 --prefill     # attention over a full context
    python benchmarks/rollout.py --all                                   # the whole table, in new processes
    python benchmarks/rollout.py --env null --num-envs 512 --device cuda
    python benchmarks/rollout.py --encoder gru --compile                 # Experiment.compile_acting

A vector step is one step of all environments. Its time is split into `policy` (the agent), `env` (waiting for
the environments; with overlap this is less than their own time), `saving` (waiting for the trajectory writer)
and `bookkeeping` (the rest). The floor is the policy alone plus the environments alone, measured in the same
process afterwards. Memory is the proportional set size (PSS) of all processes. --all writes
benchmarks/results/rollout.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from provenance import provenance
from recommended import TRANSFORMER, parts

from loxodon.agents import Agent
from loxodon.data import TrajectoryWriter
from loxodon.envs import EnvSpec, EpsilonGreedy, gym_env, make_vector_env, num_usable_cores
from loxodon.envs.builtin import TMazePassive
from loxodon.experiment import Collector
from loxodon.experiment.collect import RolloutGroup
from loxodon.nets import (
    Actor,
    FFTrajEncoder,
    FFTstepEncoder,
    GRUTrajEncoder,
    MinGRUTrajEncoder,
    TransformerTrajEncoder,
)

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS, SAVE_LEN = 50, 1024
ENCODERS: dict[str, Callable[..., Any]] = {
    "transformer": functools.partial(
        TransformerTrajEncoder, d_model=128, n_layers=3, d_ff=512, **TRANSFORMER
    ),
    "gru": functools.partial(GRUTrajEncoder, d_hidden=128, n_layers=2, d_output=128),
    "mingru": functools.partial(MinGRUTrajEncoder, d_model=128, n_layers=2),
    "ff": functools.partial(FFTrajEncoder, d_model=128, n_layers=2),
}
# Command lines, and the env steps per second that they have to reach.
TABLE: list[tuple[str, float | None]] = [
    ("--env cartpole --encoder transformer --mode sync", 6_000),
    ("--env cartpole --encoder transformer --mode async", None),
    ("--env cartpole --encoder gru --mode sync", 15_000),
    ("--env cartpole --encoder gru --mode async", None),
    ("--env cartpole --encoder ff --mode sync", None),
    ("--env null --encoder transformer --mode sync --prefill --context 128", 5_000),
    ("--env null --encoder transformer --mode sync --prefill --context 512", 3_000),
    ("--env null --encoder transformer --mode sync --prefill --context 1024", 2_000),
    ("--env null --encoder transformer --mode sync --prefill --context 2048", 1_200),
    ("--env null --encoder gru --mode sync --prefill --context 128", 15_000),
    ("--env null --encoder gru --mode sync --prefill --context 2048", 15_000),
    ("--env tmaze --encoder transformer --mode sync", 6_000),
    ("--env popgym_repeat --encoder gru --mode sync --num-envs 16", None),
    ("--env popgym_repeat --encoder gru --mode async --num-envs 16", None),
    ("--env slow --encoder transformer --mode sync", None),
    ("--env slow --encoder transformer --mode async --workers 2 --no-overlap", None),
    ("--env slow --encoder transformer --mode async --workers 2", None),
    ("--env slow --encoder transformer --mode async --workers 12", None),
    ("--env cartpole --encoder gru --mode async --workers 12 --start-method forkserver", None),
]


class NullEnv(gym.Env[np.ndarray, int]):
    """An environment with 16 numbers that never ends; a step may sleep."""

    observation_space = spaces.Box(-1.0, 1.0, (16,), np.float32)
    action_space = spaces.Discrete(4)  # type: ignore[assignment]  # gymnasium's own envs do the same

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s, self.obs = sleep_s, np.linspace(-1.0, 1.0, 16, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return self.obs, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.obs, 0.0, False, False, {}


def env_spec(name: str) -> EnvSpec:
    """The recipe of a benchmark environment."""
    specs: dict[str, Callable[[], EnvSpec]] = {
        "cartpole": lambda: gym_env("CartPole-v1"),
        "tmaze": lambda: EnvSpec(TMazePassive, {"horizon": 100}),
        "popgym_repeat": lambda: gym_env("popgym-RepeatPreviousEasy-v0"),
        "slow": lambda: EnvSpec(NullEnv, {"sleep_s": 0.005}),
        "null": lambda: EnvSpec(NullEnv, {}),
    }
    return specs[name]()


class Stopwatch:
    """Sums the seconds of wrapped methods, by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, kind: str, *names: str) -> None:
        """Time those methods of `owner` in `names` that exist, as `kind`."""
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name), kind))

    def _timed(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start_s

        return timed


def make_envs(args: argparse.Namespace) -> list[Any]:
    """Make one vector env, or two of half the size if the rollout overlaps."""
    specs, middle = [env_spec(args.env)] * args.num_envs, (args.num_envs + 1) // 2
    parts = [specs[:middle], specs[middle:]] if args.overlap else [specs]
    workers = None if args.workers is None else -(-args.workers // len(parts))
    if workers is None and args.overlap:
        workers = -(-num_usable_cores() // 2)
    return [
        make_vector_env(part, args.mode, context=args.start_method, num_workers=workers) for part in parts
    ]


def make_agent(args: argparse.Namespace, envs: Any) -> Agent:
    """The agent of the reference workloads, ready to act."""
    torch.manual_seed(0)
    agent = Agent(
        envs.single_observation_space,
        envs.single_action_space,
        functools.partial(FFTstepEncoder, n_layers=2, d_hidden=128, d_output=128),
        ENCODERS[args.encoder],
        args.context,
        actor_type=functools.partial(Actor, n_layers=2, d_hidden=256),
        **parts(Agent),
    )
    return agent.eval().to(args.device)


def make_collector(halves: list[Any], agent: Agent, folder: Path, device: torch.device) -> Collector:
    """The rollout over one or two vector envs."""
    groups = []
    for i, envs in enumerate(halves):
        writer = TrajectoryWriter(folder, envs.num_envs, save_every=(SAVE_LEN, SAVE_LEN), seed=i)
        noise = EpsilonGreedy(envs.single_action_space, envs.num_envs, i, mean_repeat=8.0)
        groups.append(RolloutGroup(envs, noise, [writer]))
    return Collector(groups, agent, device, sample=True)


def remembering(agent: Agent, hidden_state: Any, context: int) -> Any:
    """The state of an agent with a Transformer that remembers `context` timesteps; others do not change."""
    rows = agent.export_hidden_state(hidden_state)
    for name, part in rows.items():
        if name.endswith(("keys", "values")):
            part.normal_()
        elif name.endswith("age"):
            part.fill_(context)
    return agent.import_hidden_state(rows)


def proportional_memory_mb() -> tuple[float, list[float]]:
    """PSS of this process and of each of its descendants, in MB."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    pids, queue = [], [os.getpid()]
    while queue:
        pids.append(queue.pop())
        queue += children.get(pids[-1], [])
    sizes = []
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024)
    return sizes[0], sizes[1:]


def floor_ms(agent: Agent, groups: list[Any], episode_rate: float, seconds: float) -> dict[str, float]:
    """Milliseconds per vector step of the policy alone and of the environments alone."""
    rng, policy_s, env_s, steps = np.random.default_rng(0), 0.0, 0.0, 0
    device = next(agent.parameters()).device
    deadline = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < deadline:
            for group in groups:
                state = group.state
                obs = {key: torch.from_numpy(value).to(device) for key, value in state.obs.items()}
                rl2s, times = (torch.from_numpy(x).to(device) for x in (state.rl2s, state.time_idxs))
                start_s = time.perf_counter()
                chosen, state.hidden_state = agent.get_actions(obs, rl2s, times, state.hidden_state, True)
                chosen.cpu()
                policy_s += time.perf_counter() - start_s
                ended = rng.random(group.num_envs) < episode_rate
                if ended.any():
                    is_new = torch.from_numpy(ended).to(device)
                    state.hidden_state = agent.reset_hidden_state(state.hidden_state, is_new)
            actions = [group.envs.action_space.sample() for group in groups]
            start_s = time.perf_counter()
            if len(groups) == 1:
                groups[0].envs.step(actions[0])
            else:
                for group, chosen in zip(groups, actions, strict=True):
                    group.envs.step_async(chosen)
                for group in groups:
                    group.envs.step_wait()
            env_s += time.perf_counter() - start_s
            steps += 1
    return {"policy": 1e3 * policy_s / steps, "env": 1e3 * env_s / steps}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one workload."""
    torch.set_num_threads(args.threads)
    start_s = time.perf_counter()
    halves = make_envs(args)
    start_up_s = time.perf_counter() - start_s
    agent = make_agent(args, halves[0])
    if args.compile:
        agent.compile_acting()
    with tempfile.TemporaryDirectory() as folder:
        rollout = make_collector(halves, agent, Path(folder), torch.device(args.device))
        groups = rollout.groups
        rollout.restart(0)
        if args.prefill:
            for group in groups:
                assert group.state is not None  # the groups have just begun
                group.state.hidden_state = remembering(agent, group.state.hidden_state, args.context)
        rollout.collect(WARM_UP_STEPS)
        watch = Stopwatch()
        watch.wrap(agent, "policy", "act", "reset_hidden_state")
        for group in groups:
            watch.wrap(
                group.envs, "env", *(("step_async", "step_wait") if args.mode == "async" else ("step",))
            )
            watch.wrap(group.sinks[0], "saving", "add", "begin")
        steps, num_env_steps, start_s = 0, 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < args.seconds:
            num_env_steps += rollout.collect(20)
            steps += 20
        ms = {kind: 1e3 * watch.seconds.get(kind, 0.0) / steps for kind in ("policy", "env", "saving")}
        own_mb, other_mb = proportional_memory_mb()
        episodes = rollout.histories.returns.num_episodes
        floor = floor_ms(agent, groups, episodes / num_env_steps, min(args.seconds, 2.0))
        rollout.close()
        for envs in halves:
            envs.close()
    whole = 1e3 * elapsed_s / steps
    ms["bookkeeping"] = whole - sum(ms.values())
    return {
        "env_steps_per_s": round(num_env_steps / elapsed_s, 1),
        "ms_per_vector_step": {
            "all": round(whole, 4),
            **{kind: round(value, 4) for kind, value in ms.items()},
        },
        "bookkeeping_and_saving_share": round((ms["bookkeeping"] + ms["saving"]) / whole, 4),
        "floor_ms": {kind: round(value, 4) for kind, value in floor.items()},
        "ratio_to_floor": round(whole / sum(floor.values()), 3),
        "start_up_s": round(start_up_s, 3),
        "memory_mb": {"this_process": round(own_mb, 1), "workers": [round(mb, 1) for mb in other_mb]},
    }


def run_table(repeats: int, seconds: float) -> dict[str, Any]:
    """Run every workload of the table `repeats` times, each in a new process, and report medians."""
    rows = []
    for line, target in TABLE:
        command = [sys.executable, __file__, *line.split(), "--seconds", str(seconds)]
        runs = []
        for _ in range(repeats):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"{' '.join(command)} failed:\n{done.stderr[-3000:]}\nFix: run it by hand."
                )
            runs.append(json.loads(done.stdout)["result"])
        runs.sort(key=lambda run: float(run["env_steps_per_s"]))
        median = runs[len(runs) // 2]
        spread = [run["env_steps_per_s"] for run in runs]
        passed = None if target is None else median["env_steps_per_s"] >= target
        rows.append({"workload": line, "target": target, "passed": passed, "all_runs": spread, **median})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"provenance": provenance(), "repeats": repeats, "rows": rows}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--all", action="store_true", help="measure the whole table and write benchmarks/results/rollout.json"
    )
    add("--repeats", type=int, default=3, help="repeats of each workload with --all")
    add("--env", choices=("cartpole", "tmaze", "popgym_repeat", "slow", "null"), default="cartpole")
    add("--encoder", choices=tuple(ENCODERS), default="transformer")
    add("--mode", choices=("sync", "async"), default="sync")
    add("--context", type=int, default=128, help="number of timesteps that attention reaches back")
    add("--num-envs", type=int, default=12)
    add("--prefill", action="store_true", help="begin with a full context")
    add("--threads", type=int, default=1, help="number of torch threads")
    add("--seconds", type=float, default=5.0)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of the agent")
    add("--compile", action="store_true", help="compile acting with torch.compile, during the warm-up")
    add("--workers", type=int, help="total number of worker processes (default: one per core)")
    add("--start-method", choices=("fork", "forkserver", "spawn"))
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="let half of the environments step while the policy acts in the others (default: with async)",
    )
    args = parser.parse_args()
    args.overlap = args.mode == "async" and args.num_envs > 1 and args.overlap in (None, True)
    return args


def main() -> None:
    """Measure and print."""
    args = parse()
    if not args.all:
        settings = {name: value for name, value in vars(args).items() if name not in ("all", "repeats")}
        found = {**provenance(args.device), "settings": settings, "result": measure(args)}
        print(json.dumps(found, indent=1))
        return
    text = json.dumps(run_table(args.repeats, args.seconds), indent=1)
    print(text)
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    (folder / "rollout.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
