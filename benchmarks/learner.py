"""Cost of an update, compared to its matrix products alone. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/learner.py                    # all workloads, about 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete multi_task --seconds 5
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete --precision bf16 --profile
    OMP_NUM_THREADS=1 python benchmarks/learner.py discrete --compile      # Experiment.compile_learning

Batches of 24 windows of 128 (or 512) transitions, 16 observations, 4 actions; encoders of width 128 (a
Transformer of 3 layers, a GRU of 2), 4 critics, 5 discounts, heads of 2 x 256; one torch thread, float32 or
autocast to bfloat16. Times are CPU time, medians over updates.

gflop: counted operations of matrix products and attention. floor_s: their time at the speed of one large
product, the fastest of all that fit into 3 s. share_of_floor: floor_s as a share of the median update;
at_best: as a share of the fastest one. phase_ms: losses (forward pass), backward, clipping, adamw, targets
(work after the update), and total.
operation_ms (with --profile): the slowest operations of one update, without the operations that they call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from encoders import count_flop, flops_per_s
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

BATCH, LENGTH, OBS_DIM, NUM_ACTIONS, WIDTH = 24, 128, 16, 4, 128
DISCRETE, BOX = spaces.Discrete(NUM_ACTIONS), spaces.Box(-1, 1, (NUM_ACTIONS,), np.float32)
tstep = partial(FFTstepEncoder, n_layers=2, d_hidden=WIDTH, d_output=WIDTH)
transformer = partial(TransformerTrajEncoder, d_model=WIDTH, d_ff=4 * WIDTH, n_layers=3, **TRANSFORMER)
gru = partial(GRUTrajEncoder, d_hidden=WIDTH, d_output=WIDTH, n_layers=2)
WORKLOADS: dict[str, tuple[type, Any, Any, int]] = {
    "discrete": (Agent, DISCRETE, transformer, LENGTH),
    "discrete_512": (Agent, DISCRETE, transformer, 4 * LENGTH),
    "discrete_gru": (Agent, DISCRETE, gru, LENGTH),
    "box": (Agent, BOX, transformer, LENGTH),
    "multi_task": (MultiTaskAgent, DISCRETE, transformer, LENGTH),
    "multi_task_box": (MultiTaskAgent, BOX, transformer, LENGTH),
    "dqn": (DQNAgent, DISCRETE, transformer, LENGTH),
    "sac": (SACAgent, BOX, transformer, LENGTH),
    "iql": (IQLAgent, DISCRETE, transformer, LENGTH),
}
MIN_UPDATES, NUM_PROFILED = 5, 20


class Phases:
    """CPU seconds of the phases of updates."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call`, so that its time is added to a phase."""
        taken = self.seconds.setdefault(name, [])

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                taken.append(time.process_time() - begin)

        return measured

    def medians_ms(self) -> dict[str, float]:
        """Median milliseconds of each phase."""
        return {name: round(1e3 * statistics.median(taken), 2) for name, taken in self.seconds.items()}


def make_batch(action_space: spaces.Space[Any], length: int) -> Batch:
    """Random windows without padding."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    if isinstance(action_space, spaces.Discrete):
        indices = torch.randint(NUM_ACTIONS, (BATCH, length), generator=generator)
        actions = torch.nn.functional.one_hot(indices, NUM_ACTIONS).float()
    else:
        actions = draw(BATCH, length, NUM_ACTIONS).clamp(-0.9, 0.9)
    return Batch(
        obs={"observation": draw(BATCH, length + 1, OBS_DIM)},
        rl2s=draw(BATCH, length + 1, 1 + NUM_ACTIONS),
        time_idxs=torch.arange(length + 1).expand(BATCH, -1)[..., None],
        actions=actions,
        rews=draw(BATCH, length, 1),
        dones=torch.zeros(BATCH, length, 1, dtype=torch.bool),
        mask=torch.ones(BATCH, length, 1, dtype=torch.bool),
    )


def make_learner(
    kind: type, action_space: spaces.Space[Any], encoder: Any, length: int, precision: str = "no"
) -> Learner:
    """A learner with an agent of the sizes above."""
    torch.manual_seed(0)
    obs_space = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (OBS_DIM,), np.float32)})
    agent = kind(obs_space, action_space, tstep, encoder, length, **parts(kind))
    params = agent.trainable_params()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)

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


def profile(update: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the slowest operations of an update."""
    with torch.profiler.profile() as seen:
        update()
    taken = sorted(((x.self_cpu_time_total / 1e3, x.key) for x in seen.key_averages()), reverse=True)
    return {name: round(ms, 1) for ms, name in taken[:NUM_PROFILED]}


def measure(
    name: str, seconds: float, speed: float, precision: str, compiled: bool, profiled: bool
) -> dict[str, Any]:
    """Measure one workload."""
    kind, action_space, encoder, length = WORKLOADS[name]
    learner: Any = make_learner(kind, action_space, encoder, length, precision)  # its methods are replaced
    batch = make_batch(action_space, length)
    phases = Phases()
    agent, optimizer, accelerator = learner.agent, learner.optimizer, learner.accelerator
    learner.compute_loss = phases.timed("losses", learner.compute_loss)
    learner.update([batch])
    gflop = count_flop(lambda: learner.update([batch])) / 1e9
    if compiled:
        agent.compile_learning()
        learner.update([batch])
    accelerator.backward = phases.timed("backward", accelerator.backward)
    accelerator.clip_grad_norm_ = phases.timed("clipping", accelerator.clip_grad_norm_)
    optimizer.step = phases.timed("adamw", optimizer.step)
    agent.after_update = phases.timed("targets", agent.after_update)
    update, taken = phases.timed("update", learner.update), phases.seconds["update"]
    while len(taken) < MIN_UPDATES or sum(taken) < seconds:
        update([batch])
    median_s = statistics.median(taken)
    return {
        "updates_per_s": round(1 / median_s, 3),
        "gflop": round(gflop, 2),
        "floor_s": round(1e9 * gflop / speed, 4),
        "share_of_floor": round(1e9 * gflop / speed / median_s, 3),
        "at_best": round(1e9 * gflop / speed / min(taken), 3),
        "phase_ms": phases.medians_ms(),
        **({"operation_ms": profile(lambda: learner.update([batch]))} if profiled else {}),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=list(WORKLOADS),
        help=f"workloads to measure, from {list(WORKLOADS)} (default: all)",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU time per workload")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--compile", action="store_true", help="compile the losses with torch.compile")
    parser.add_argument("--profile", action="store_true", help="time the operations of one update")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # a run does this, too
    speed = flops_per_s(3.0)
    settings = args.precision, args.compile, args.profile
    found = {name: measure(name, args.seconds, speed, *settings) for name in args.names}
    head = {**provenance(), "gflops_per_s_of_a_large_product": round(speed / 1e9, 1)}
    print(json.dumps({**head, "workloads": found}, indent=2))


if __name__ == "__main__":
    main()
