"""Cost of an update, compared to its matrix products alone. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/learner.py                    # all workloads, about 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete multi_task --seconds 5
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete --precision bf16 --profile
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete --compile      # Experiment.compile_learning
    python benchmarks/learner.py base large --device cuda --precision bf16

Batches of 24 windows of 128 (or 512) transitions, or of 8 and 24 windows of 64; 16 observations, 4 actions;
encoders of width 128 (a Transformer of 3 layers, a GRU of 2), 4 critics, 5 discounts, heads of 2 x 256; one
torch thread, float32 or autocast to bfloat16. Times are medians over updates: CPU time, or with --device cuda
the time until the GPU has finished.

gflop: counted operations of matrix products and attention. floor_s: their time at the speed of one large
product, the fastest of all that fit into 3 s. share_of_floor: floor_s as a share of the median update;
at_best: as a share of the fastest one. phase_ms: losses (forward pass), backward, clipping, adamw, targets
(work after the update), and total.
host_ms, waits, peak_gb (with --device cuda): time until an update has launched all of its work, places at
which it waits for the GPU, and the largest amount of allocated memory.
operation_ms (with --profile): the slowest operations of one update, without the operations that they call.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from clock import now_s, seconds_of, waits_of
from encoders import CPU, count_flop, flops_per_s
from gymnasium import spaces
from provenance import provenance
from recommended import TRANSFORMER, parts

from loxodon.agents import Agent, DQNAgent, IQLAgent, MultiTaskAgent, SACAgent
from loxodon.data import Batch
from loxodon.experiment import Learner
from loxodon.experiment.learn.learner import masked_losses
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.experiment.process.malloc import keep_freed_memory
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, TransformerTrajEncoder

BATCH, LENGTH, OBS_DIM, NUM_ACTIONS = 24, 128, 16, 4
DISCRETE, BOX = spaces.Discrete(NUM_ACTIONS), spaces.Box(-1, 1, (NUM_ACTIONS,), np.float32)


@dataclass(frozen=True)
class Workload:
    """An agent with an encoder of some size, and batches.

    Attributes:
        kind, action_space: the agent.
        encoder: `transformer` or `gru`.
        width, layers: size of the encoder.
        batch, length: number of windows, and transitions in each.
        window: max_seq_len of the agent; None for `length`. A Transformer needs no attention mask if a window
            is longer than a batch, which has one timestep more than transitions.
    """

    kind: type = Agent
    action_space: spaces.Space[Any] = field(default_factory=lambda: DISCRETE)
    encoder: str = "transformer"
    width: int = 128
    layers: int = 3
    batch: int = BATCH
    length: int = LENGTH
    window: int | None = None

    def make_agent(self) -> Any:
        """Build the agent, with the same weights in each call."""
        torch.manual_seed(0)
        obs_space = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (OBS_DIM,), np.float32)})
        tstep = partial(FFTstepEncoder, n_layers=2, d_hidden=self.width, d_output=self.width)
        encoders: dict[str, Any] = {
            "transformer": partial(
                TransformerTrajEncoder,
                d_model=self.width,
                d_ff=4 * self.width,
                n_layers=self.layers,
                **TRANSFORMER,
            ),
            "gru": partial(GRUTrajEncoder, d_hidden=self.width, d_output=self.width, n_layers=self.layers),
        }
        encoder, window = encoders[self.encoder], self.window or self.length
        return self.kind(obs_space, self.action_space, tstep, encoder, window, **parts(self.kind))


WORKLOADS = {
    "discrete": Workload(),
    "discrete_512": Workload(length=4 * LENGTH),
    "windows_8": Workload(batch=8, length=64),  # the batch of batch_size = 'auto'
    "windows_24": Workload(batch=24, length=64),
    "discrete_gru": Workload(encoder="gru", layers=2),
    "box": Workload(action_space=BOX),
    "multi_task": Workload(MultiTaskAgent),
    "multi_task_box": Workload(MultiTaskAgent, BOX),
    "dqn": Workload(DQNAgent),
    "sac": Workload(SACAgent, BOX),
    "iql": Workload(IQLAgent),
}
# Sizes for a GPU, with --device cuda.
GPU_WORKLOADS = {
    "base": Workload(width=256, batch=64, length=511, window=512),
    "base_masked": Workload(width=256, batch=64, length=512, window=512),
    "base_box": Workload(action_space=BOX, width=256, batch=64, length=511, window=512),
    "base_gru": Workload(encoder="gru", width=256, batch=64, length=511),
    "base_multi_task": Workload(MultiTaskAgent, width=256, batch=64, length=511, window=512),
    "base_2048": Workload(width=256, batch=64, length=2047, window=2048),
    "mid": Workload(width=512, layers=6, batch=64, length=511, window=512),
    "large": Workload(width=1024, layers=12, batch=64, length=511, window=512),
    "large_masked": Workload(width=1024, layers=12, batch=64, length=512, window=512),
    "large_2048": Workload(width=1024, layers=12, batch=16, length=2047, window=2048),
}
MIN_UPDATES, NUM_PROFILED = 5, 20


class Phases:
    """Seconds of the phases of updates."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call`, so that its time is added to a phase."""
        taken = self.seconds.setdefault(name, [])

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin_s = now_s(self.device)
            try:
                return call(*args, **kwargs)
            finally:
                taken.append(now_s(self.device) - begin_s)

        return measured

    def medians_ms(self) -> dict[str, float]:
        """Median milliseconds of each phase."""
        return {name: round(1e3 * statistics.median(taken), 2) for name, taken in self.seconds.items()}


def make_batch(work: Workload, device: torch.device) -> Batch:
    """Random windows without padding, on the device: a run copies them during the update before."""
    generator, rows, length = torch.Generator().manual_seed(0), work.batch, work.length
    draw = partial(torch.randn, generator=generator)
    if isinstance(work.action_space, spaces.Discrete):
        indices = torch.randint(NUM_ACTIONS, (rows, length), generator=generator)
        actions = torch.nn.functional.one_hot(indices, NUM_ACTIONS).float()
    else:
        actions = draw(rows, length, NUM_ACTIONS).clamp(-0.9, 0.9)
    batch = Batch(
        obs={"observation": draw(rows, length + 1, OBS_DIM)},
        rl2s=draw(rows, length + 1, 1 + NUM_ACTIONS),
        time_idxs=torch.arange(length + 1).repeat(rows, 1)[..., None],
        actions=actions,
        rews=draw(rows, length, 1),
        dones=torch.zeros(rows, length, 1, dtype=torch.bool),
        mask=torch.ones(rows, length, 1, dtype=torch.bool),
    )
    return batch.to(device)


def make_learner(work: Workload, precision: str = "no", device: torch.device = CPU) -> Learner:
    """A learner of a workload's agent."""
    agent = work.make_agent().to(device)
    params = agent.trainable_params()
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)

    def losses(batch: Batch, log_step: bool) -> dict[str, Any]:
        with accelerator.autocast():
            found = agent(batch, log_step)
        return masked_losses(batch, found)

    learner: Learner = Learner(
        agent,
        agent,
        make_optimizer(agent, params, learning_rate=1e-4, l2_coeff=1e-3, fused=True),
        accelerator,
        compute_loss=losses,
        critic_loss_weight=10.0,
        lr_warmup_steps=500,
        grad_clip=1.0,
    )
    return learner


def profile(update: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of the slowest operations of an update."""
    key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    with torch.profiler.profile() as seen:
        update()
        now_s(device)
    taken = sorted(((getattr(x, key) / 1e3, x.key) for x in seen.key_averages()), reverse=True)
    return {name: round(ms, 1) for ms, name in taken[:NUM_PROFILED]}


def count_update_flop(work: Workload) -> float:
    """Operations of an update's matrix products and attention, counted on the CPU for one window."""
    one = replace(work, batch=1)
    learner, batch = make_learner(one), make_batch(one, CPU)
    return count_flop(lambda: learner.update([batch])) * work.batch


def measure(work: Workload, speed: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one workload; speed: operations per second of a large product."""
    device = torch.device(args.device)
    learner: Any = make_learner(work, args.precision, device)  # its methods are replaced
    batch = make_batch(work, device)
    gflop = count_update_flop(work) / 1e9
    agent, optimizer, accelerator = learner.agent, learner.optimizer, learner.accelerator

    def update() -> None:
        learner.update([batch])

    update()
    if args.compile:
        agent.compile_learning()
    first_s = seconds_of(update, device)
    taken: list[float] = []
    while len(taken) < MIN_UPDATES or sum(taken) < args.seconds:
        taken.append(seconds_of(update, device))
    on_gpu = {} if device.type == "cpu" else gpu_figures(update)
    phases = Phases(device)
    learner.compute_loss = phases.timed("losses", learner.compute_loss)
    accelerator.backward = phases.timed("backward", accelerator.backward)
    accelerator.clip_grad_norm_ = phases.timed("clipping", accelerator.clip_grad_norm_)
    optimizer.step = phases.timed("adamw", optimizer.step)
    agent.after_update = phases.timed("targets", agent.after_update)
    for _ in range(MIN_UPDATES):
        update()
    median_s = statistics.median(taken)
    return {
        "updates_per_s": round(1 / median_s, 3),
        "timesteps_per_s": round(work.batch * work.length / median_s),
        "gflop": round(gflop, 2),
        "floor_s": round(1e9 * gflop / speed, 4),
        "share_of_floor": round(1e9 * gflop / speed / median_s, 3),
        "at_best": round(1e9 * gflop / speed / min(taken), 3),
        "update_ms": round(1e3 * median_s, 2),
        "phase_ms": phases.medians_ms(),
        **({"first_s": round(first_s, 1)} if args.compile else {}),
        **on_gpu,
        **({"operation_ms": profile(update, device)} if args.profile else {}),
    }


def gpu_figures(update: Callable[[], object]) -> dict[str, Any]:
    """Time of the host for one update, its waits for the GPU, and the largest amount of memory."""
    host_s = []
    for _ in range(MIN_UPDATES):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        update()
        host_s.append(time.perf_counter() - begin_s)
    return {
        "host_ms": round(1e3 * statistics.median(host_s), 2),
        "waits": waits_of(update),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"workloads to measure, from {list(WORKLOADS)} (default: all of these) or {list(GPU_WORKLOADS)}",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time per workload")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--compile", action="store_true", help="compile the losses with torch.compile")
    parser.add_argument("--profile", action="store_true", help="time the operations of one update")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # a run does this, too
    speed = flops_per_s(3.0, torch.device(args.device), args.precision)
    known, found = WORKLOADS | GPU_WORKLOADS, {}
    for name in args.names or WORKLOADS:
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found[name] = measure(known[name], speed, args)
        gc.collect()
    head = {**provenance(args.device), "gflops_per_s_of_a_large_product": round(speed / 1e9, 1)}
    print(json.dumps({**head, "workloads": found}, indent=2))


if __name__ == "__main__":
    main()
