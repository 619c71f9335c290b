"""Start learner and actors: python -m loxodon.tools.launch --backend slurm --actors 8 --config x.gin.

  local  processes on this machine; the same as examples/run.py --actors N
  slurm  one job for the learner and an array of jobs for the actors, through submitit
  ray    the learner here, the actors on a Ray cluster
All machines must see the run folder (Experiment.ckpt_base_dir) and the working directory at the same paths.
"""

from __future__ import annotations

import argparse
import ast
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gin

from ..experiment.config import ConfigError, explained, load_config
from ..experiment.experiment import Experiment
from ..experiment.fleet.actors import ActorSpec
from ..experiment.fleet.heartbeat import read_heartbeats
from ..experiment.fleet.launchers import ray_pool, submit
from ..experiment.process.exits import CONFIG_ERROR
from ..experiment.process.versions import import_extra
from . import run
from .arguments import Parser, at_least_1, parse_run


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the processes; returns the exit status."""
    options = parser()
    args, words = options.parse_known_args(argv)
    words = [*words, "--actors", str(args.actors)]
    if args.backend == "slurm":
        parsed = parse_run(words)
        if parsed.seeds is not None:
            options.error("--seeds cannot be combined with --backend slurm. Fix: start one command per seed.")
        if parsed.check or parsed.print_config:
            return run.main(words)  # it starts nothing
        return run.exit_status(lambda: _submit(args, parsed, words))
    if args.backend == "local":
        return run.main(words, program="python -m loxodon.tools.launch")
    try:
        import_extra("ray", "loxodon[ray]")
    except ImportError as error:
        run.say(f"error: {error}", error=True)
        return CONFIG_ERROR
    resources = {"num_cpus": args.ray_cpus, "num_gpus": args.ray_gpus}
    pool = functools.partial(ray_pool, address=args.ray_address, **resources)
    program = f"python -m loxodon.tools.launch --backend ray --ray-address {shlex.quote(args.ray_address)}"
    for name in ("ray_cpus", "ray_gpus"):
        if (number := getattr(args, name)) != options.get_default(name):
            program += f" --{name.replace('_', '-')} {number:g}"
    return run.main(words, pool=pool, program=program)


def parser() -> Parser:
    """Make the parser of this command's own options; others are passed to the run."""
    made = Parser(
        prog="python -m loxodon.tools.launch",
        description="Start a learner and its actors. All other arguments are those of `loxodon run`.",
    )
    add = made.add_argument
    add("--backend", choices=("local", "slurm", "ray"), default="local", help="where the processes run")
    add("--actors", type=at_least_1, required=True, metavar="N", help="number of actor processes")
    add("--slurm-partition", metavar="NAME", help="partition (default: the cluster's)")
    limit = "time limit per job, after which it is queued again"
    add("--slurm-minutes", type=at_least_1, default=24 * 60, metavar="N", help=limit)
    add("--slurm-learner-gpus", type=int, default=1, metavar="N", help="GPUs of the learner's job")
    add("--slurm-actor-gpus", type=int, default=0, metavar="N", help="GPUs of each actor's job")
    add("--slurm-learner-cpus", type=at_least_1, default=8, metavar="N", help="CPUs of the learner's job")
    add("--slurm-actor-cpus", type=at_least_1, default=1, metavar="N", help="CPUs of each actor's job")
    repeatable = "option for Slurm, e.g. slurm_account=lab or mem_gb=16; repeatable"
    add("--slurm-set", action="append", default=[], type=_pair, metavar="NAME=VALUE", help=repeatable)
    add(
        "--slurm-cluster",
        choices=("slurm", "local"),
        default="slurm",
        help="slurm submits jobs; local tries the same on this machine",
    )
    cluster = "auto: the running cluster; local: a new one on this machine"
    add("--ray-address", default="auto", metavar="HOST:PORT", help=cluster)
    add("--ray-cpus", type=float, default=1.0, metavar="N", help="CPUs per actor")
    add("--ray-gpus", type=float, default=0.0, metavar="N", help="GPUs per actor")
    return made


def _pair(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no value. Fix: write --slurm-set slurm_account=lab, for example."
        )
    try:
        return name, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (SyntaxError, ValueError):
        return name, value


def _set_aside_earlier_data(exp: Experiment) -> None:
    """Set aside what an earlier run of the name collected; its actors may begin before their learner.

    Raises: ConfigError if that run still learns.
    """
    for beat in read_heartbeats(exp.run_dir):
        if beat.is_alive and beat.role != "actor":
            raise ConfigError(
                f"{exp.run_dir} is in use by a learner on {beat.host} (process {beat.pid}). Fix: end it, or "
                "choose another --run-name."
            )
    dataset = exp.init_dsets()
    exp.set_aside_earlier_data()
    dataset.close()


@explained()
def _submit(args: argparse.Namespace, parsed: argparse.Namespace, words: list[str]) -> int:
    """Submit the jobs, and print how to watch and end them; `parsed` are the options of a run in `words`."""
    config = load_config(parsed.configs, run.overrides(parsed), is_complete=True)
    gin.bind_parameter("Experiment.mixed_precision", "no")  # this machine may lack a GPU; the job decides
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments; nothing is built yet
    exp.keep_pace_of_preset(config.is_set_by_user)
    common = {"timeout_min": args.slurm_minutes, **dict(args.slurm_set)}
    if args.slurm_partition is not None:
        common["slurm_partition"] = args.slurm_partition
    jobs = submit(
        run.main,
        ActorSpec(
            words,
            args.actors,
            exp.replay_ratio,
            exp.start_collecting_at_epoch,
            "cuda" if args.slurm_actor_gpus else parsed.actor_device,
        ),
        exp.run_dir,
        prepare=lambda: None if parsed.resume else _set_aside_earlier_data(exp),
        cluster=args.slurm_cluster,
        common=common,
        learner={"gpus_per_node": args.slurm_learner_gpus, "cpus_per_task": args.slurm_learner_cpus},
        actor={"gpus_per_node": args.slurm_actor_gpus, "cpus_per_task": args.slurm_actor_cpus},
    )
    ids = [str(job.job_id) for job in jobs]
    stop = "scancel" if args.slurm_cluster == "slurm" else "kill"
    run_dir = shlex.quote(str(exp.run_dir))
    sys.stdout.write(
        f"learner  job {ids[0]}\nactors   jobs {' '.join(ids[1:])}\n"
        f"logs     {Path(run_dir, 'logs', 'slurm')}/<job>/\n"
        f"watch    loxodon status {run_dir}\n"
        f"stop     {stop} {' '.join(ids)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
