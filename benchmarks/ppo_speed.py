"""Speed of PPO on the CPU, by stage. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/ppo_speed.py                  # all cases
    OMP_NUM_THREADS=1 python benchmarks/ppo_speed.py gru --rollouts 40

CartPole-v1, 8 environments of 128 steps, 4 epochs of 4 minibatches, networks of two hidden layers of 64, one
torch thread. Each stage is reported in CPU microseconds per env step, without nested stages; CPU time depends
less on other processes than wall time, which is reported for the total.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from provenance import provenance

from loxodon.experiment import Experiment
from loxodon.experiment.config import load_config
from loxodon.experiment.ppo import sequences
from loxodon.experiment.ppo import trainer as ppo_learner

WARM_UP = 3
COMMON = [
    "Experiment.torch_threads=1",
    "Experiment.val_timesteps_per_epoch=0",
    "Experiment.val_interval=None",
    "Experiment.verbose=False",
    "MetricLogger.tensorboard=False",
    "Experiment.train_timesteps_per_epoch=128",
    "Experiment.max_seq_len=128",
    "PPOLearner.update_epochs=4",
    "PPOLearner.minibatches=4",
    "PPOAgent.value_norm='none'",
    "FFTstepEncoder.normalize_inputs=False",
    "FFTstepEncoder.activation='tanh'",
    "FFTstepEncoder.out_norm=None",
    "FFTstepEncoder.d_hidden=64",
    "FFTstepEncoder.d_output=64",
    "PolicyHead.d_hidden=64",
    "ValueHead.d_hidden=64",
]
SHARED = [
    "PPOAgent.share_encoder=True",
    "FFTstepEncoder.n_layers=1",
    "PolicyHead.n_layers=1",
    "ValueHead.n_layers=1",
]
FF = [
    "PPOAgent.share_encoder=False",
    "FFTstepEncoder.n_layers=1",
    "PolicyHead.n_layers=0",
    "ValueHead.n_layers=0",
]
NORMALIZED = ["PPOAgent.value_norm='running'", "FFTstepEncoder.normalize_inputs=True"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "ff": ([], FF),
    "ff_normalized": ([], [*FF, *NORMALIZED]),
    "gru": (["encoders/gru_small"], SHARED),
    "lstm": (["encoders/lstm_small"], SHARED),
    "transformer": (["encoders/transformer_small"], SHARED),
}
COLLECT = ("collect", "act", "env", "store")


class Stopwatch:
    """Sums the CPU seconds of wrapped functions by stage, without nested stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Count calls of `owner.name` as `stage`."""
        setattr(owner, name, self.timed(getattr(owner, name), stage))

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Wrap a function to measure its time."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.process_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken_s = time.process_time() - start_s
                self.seconds[stage] = self.seconds.get(stage, 0.0) + taken_s - self._inside.pop()
                self._inside[-1] += taken_s

        return timed


def watch(exp: Any) -> Stopwatch:
    """A stopwatch around the stages of an experiment."""
    watch = Stopwatch()
    collector, learner, on_policy = exp.collector, exp.learner, exp.trainer
    (group,) = collector.groups
    for owner, name, stage in (
        (collector, "collect", "collect"),
        (collector, "_act", "act"),
        (group.envs, "step", "env"),
        (group.sinks[0], "add", "store"),
        (group.sinks[0], "begin", "store"),
        (on_policy, "learn_from_rollout", "learn"),
        (on_policy, "_prepare", "advantages"),
        (on_policy, "_batches", "gather"),
        (ppo_learner, "old_policy_outputs", "evaluate"),
        (sequences.RolloutTensors, "gather", "gather"),
        (learner, "update", "update"),
        (learner, "compute_loss", "forward"),
        (learner.accelerator, "backward", "backward"),
        (learner, "_step", "optimizer"),
    ):
        watch.wrap(owner, name, stage)
    return watch


def measure(name: str, rollouts: int) -> dict[str, Any]:
    """Train for `rollouts` rollouts; return rates and CPU time per stage."""
    configs, overrides = CASES[name]
    make: Any = Experiment
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = [*COMMON, *overrides, f"Experiment.ckpt_base_dir={folder!r}", "Experiment.seed=0"]
        load_config(["ppo/cartpole", *configs], settings)
        exp = make()
        exp.start()
        watch_, on_policy = watch(exp), exp.trainer
        wall_s = cpu_s = 0.0
        for epoch in range(WARM_UP + rollouts):
            if epoch == WARM_UP:
                watch_.seconds.clear()
                wall_s, cpu_s = time.perf_counter(), time.process_time()
            exp.collector.collect(128)
            on_policy.learn_from_rollout(epoch)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        exp.close()
    count = rollouts * 128 * 8
    spent = watch_.seconds
    collect_s = sum(spent[stage] for stage in COLLECT)
    return {
        "env_steps": count,
        "env_steps_per_wall_s": round(count / wall_s),
        "env_steps_per_cpu_s": round(count / cpu_s),
        "collect_env_steps_per_cpu_s": round(count / collect_s),
        "learn_env_steps_per_cpu_s": round(count / (sum(spent.values()) - collect_s)),
        "cpu_us_per_env_step": {stage: round(1e6 * s / count, 2) for stage, s in spent.items()},
    }


def main() -> None:
    """Measure the chosen cases and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="all when left out")
    parser.add_argument("--rollouts", type=int, default=30)
    args = parser.parse_args()
    found = {name: measure(name, args.rollouts) for name in args.cases or CASES}
    print(json.dumps({"provenance": provenance(), "cases": found}, indent=1))


if __name__ == "__main__":
    main()
