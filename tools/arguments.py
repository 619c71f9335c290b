"""Arguments of the commands that need torch; mistakes are reported before torch is imported."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..gin_configs.presets import (
    did_you_mean,
    find_preset,
    no_such_config,
    override_problem,
    preset_names,
    runnable_names,
)
from ..gin_configs.start import (
    AGENTS,
    DEFAULT_AGENT,
    DEFAULT_ENCODER,
    encoder_names,
    gin_for,
    problem_with_id,
)

USAGE_ERROR = 2
DEVICES = ("cpu", "cuda", "mps")
_OF_POLICY = "best|latest|epoch:N"
PARALLEL_WITH_ENV = 8  # environments of `loxodon evaluate --env` without --parallel


class Parser(argparse.ArgumentParser):
    """An argument parser with errors that begin with `config error: command line:` and end with a fix."""

    takes_settings = False  # True if Name.param=value is accepted

    def error(self, message: str) -> NoReturn:
        """Print an error with its fix, and end the process."""
        hint = f"Fix: {self.prog} --help lists the options."
        if message.startswith("unrecognized arguments: "):
            options = [option for action in self._actions for option in action.option_strings]
            if self.takes_settings:
                settings = "settings look like Experiment.epochs=5 (Name.param=value)"
                hint = f"Fix: {settings}; --help lists the options."
            hint = f"{did_you_mean(message.split()[2].partition('=')[0], options)} {hint}".lstrip()
        self.stop(f"command line: {message}" if "Fix:" in message else f"command line: {message}. {hint}")

    def stop(self, message: str) -> NoReturn:
        """Print an error and end the process; the text says where the mistake is."""
        sys.stderr.write(f"config error: {message}\n")
        raise SystemExit(USAGE_ERROR)


# ---- run ----


def program_name() -> str:
    """The beginning of commands in messages to the user: the program that this process was started with."""
    script = Path(sys.argv[0])
    if script.suffix != ".py":  # `loxodon` itself, or a run of --seeds that it started
        return "loxodon run"
    if script.resolve().parent == Path(__file__).resolve().parent:
        return "python -m loxodon.tools run"
    return f"python {sys.argv[0]}"


def parse_run(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `loxodon run`; ends the process if they are wrong.

    Returns: a namespace; `configs` holds names and paths in order, or the GinText of --env; `overrides` holds
        `Name.param=value` words.
    """
    parser = _run_parser(program_name())
    args = parser.parse_intermixed_args(words)
    names = [*args.config, *(word for word in args.words if "=" not in word)]
    args.overrides = [word for word in args.words if "=" in word]
    # Restore the order in which they were typed, since argparse puts options first.
    order = {
        name: i
        for i, word in reversed([*enumerate(words)])
        for name in (word, word.removeprefix("--config="))
    }
    args.configs = sorted(dict.fromkeys(names), key=lambda name: order.get(name, 0))
    _check_start(parser, args)
    for name in args.configs:
        if isinstance(name, str) and find_preset(name) is None:
            typed = f"--config {name}" if name in args.config else name
            parser.stop(f"command line, `{typed}`: {_not_a_config(name)}")
    for text in args.overrides:
        if problem := override_problem(text):
            parser.stop(f"command line, `{text}`: {problem}")
    _check_combinations(parser, args)
    if problem := _seed_problem(words):
        parser.error(problem)
    return args


def _seed_problem(words: Sequence[str]) -> str | None:
    """Describe a seed that the command line sets twice, since one of the two would be ignored; else None."""
    names = {"--seed": 2, "--seeds": 2, "Experiment.seed": 1}  # number of words, if `=` does not join them
    found = [
        " ".join(words[i : i + names[name]]) if name == word else word
        for i, word in enumerate(words)
        if (name := word.partition("=")[0].strip()) in names
    ]
    if len(found) < 2:  # noqa: PLR2004 - the second one
        return None
    return f"the seed is set by both {found[0]} and {found[1]}. Fix: leave one of the two out."


def _not_a_config(name: str) -> str:
    if re.fullmatch(r"(\w+/)*[A-Z]\w*\.[a-z_]\w*", name) and not name.endswith(".gin"):
        return f"a setting has a value. Fix: write {name}=value, without spaces."
    advice = "give the path of a .gin file, the name of a preset, or a setting Name.param=value"
    return f"{no_such_config(name)} Fix: {advice}."


def parse_seeds(text: str) -> list[int]:
    """Parse seeds: `0:5` is 0, 1, 2, 3, 4; `1,4` is 1 and 4. Raises: ArgumentTypeError for anything else."""
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        seeds = list(range(int(found[1]), int(found[2])))
    else:
        seeds = [int(one) for one in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} names no seeds. Fix: e.g. --seeds 0:5, or --seeds 1,4,7")
    return list(dict.fromkeys(seeds))


def _run_parser(prog: str) -> Parser:
    runnable = runnable_names()
    parser = Parser(
        prog=prog,
        usage=f"{prog} [CONFIG ...] [Name.param=value ...] [options]",
        description="Train: a preset or .gin file and settings on top, or any environment with --env.",
        epilog=f"Presets: {', '.join(runnable)}. Parts to put on top of one: "
        f"{', '.join(name for name in preset_names() if name not in runnable)}.",
        allow_abbrev=False,
    )
    parser.takes_settings = True
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="CONFIG or Name.param=value",
        help="presets, .gin files, and gin bindings on top",
    )
    add("--config", action="append", default=[], metavar="FILE", help="a .gin file or preset; repeatable")
    env = "start without a gin file: a gymnasium id, module:id, or module:Class"
    add("--env", metavar="ID", help=env)
    add("--agent", metavar="NAME", help=f"of --env: {', '.join(AGENTS)}; {DEFAULT_AGENT} by default")
    encoders = f"of --env: {', '.join(encoder_names())}; {DEFAULT_ENCODER} by default"
    add("--encoder", metavar="NAME", help=encoders)
    save = "write a gin file that runs the same, then continue"
    add("--save-config", metavar="FILE", type=Path, help=save)
    add("--mode", choices=("both", "learn", "collect"), help="collect and learn here, or only one of these")
    add("--actors", metavar="N", type=int, help="learn here, and keep N collecting processes running")
    add("--device", choices=DEVICES, help="where the agent is; default: a GPU if there is one")
    add("--actor-device", choices=DEVICES, default="cpu", help="where actors of --actors act (default: cpu)")
    add("--run-name", metavar="NAME", help="sets Experiment.run_name")
    add("--seed", metavar="N", type=int, help="sets Experiment.seed")
    add("--seeds", metavar="0:5", type=parse_seeds, help="a run per seed, called <run_name>-seed<k>")
    add("--jobs", metavar="N", type=int, default=1, help="how many of them run at a time, a thread each")
    through = "words before the command of each of them, e.g. 'srun --cpus-per-task=2'"
    add("--through", metavar="WORDS", type=shlex.split, default=[], help=through)
    add("--resume", action="store_true", help="continue from the newest complete checkpoint of this run")
    add("--test-run", action="store_true", help="collect, train, evaluate and save once, in seconds")
    add("--check", action="store_true", help="validate, build, try one batch of everything, train nothing")
    add(
        "--print-config",
        action="store_true",
        help="print the resolved config with the origin of each value; for a file to run, use --save-config",
    )
    return parser


def _check_start(parser: Parser, args: argparse.Namespace) -> None:
    """Check --env, --agent and --encoder, and make the config that they imply."""
    if args.env is None:
        for name in ("agent", "encoder"):
            if getattr(args, name) is not None:
                file = f"{name}s/{getattr(args, name)}"
                advice = (
                    f"put {file} on top of a preset" if find_preset(file) else "add e.g. --env CartPole-v1"
                )
                parser.error(f"--{name} needs --env. Fix: {advice}.")
        if not args.configs:
            names = ", ".join(runnable_names())
            parser.error(
                f"no --config is given. Fix: e.g. {parser.prog} tmaze, or --env CartPole-v1. Presets: {names}"
            )
        return
    if args.configs:
        parser.error(
            f"--env begins from general settings, so it does not go with {args.configs[0]!r}. Fix: leave one "
            "of the two out; --save-config FILE writes what --env stands for."
        )
    agent, encoder = args.agent or DEFAULT_AGENT, args.encoder or DEFAULT_ENCODER
    for option, name, known in (("--agent", agent, list(AGENTS)), ("--encoder", encoder, encoder_names())):
        if name not in known:
            meant = did_you_mean(name, known)
            parser.error(f"{option} {name!r} is not known.{meant} Fix: choose one of {', '.join(known)}.")
    if problem := problem_with_id(args.env):
        parser.error(problem)
    args.configs = [gin_for(args.env, args.agent, args.encoder)]


def _check_combinations(parser: Parser, args: argparse.Namespace) -> None:
    if args.seeds is not None and args.test_run:
        parser.error("--seeds does not go with --test-run. Fix: leave one of the two out.")
    if args.through and shutil.which(args.through[0]) is None:
        parser.error(f"--through begins with {args.through[0]}, which is not a program here. Fix: e.g. srun.")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but must be at least 1. Fix: e.g. --jobs 2.")
    if args.seeds is None and args.jobs > 1:
        parser.error("--jobs is for runs of --seeds. Fix: add e.g. --seeds 0:5, or leave out --jobs.")
    if args.actors is not None and args.test_run:
        parser.error("--test-run is one process, without --actors. Fix: leave one of the two out.")
    if args.actors is not None and args.actors < 1:
        parser.error(f"--actors is {args.actors}, but must be at least 1. Fix: e.g. --actors 2.")
    if args.actors is not None and args.mode in ("both", "collect"):
        parser.error(
            f"--actors makes this process the learner, so it does not go with --mode {args.mode}. "
            "Fix: leave one of the two out."
        )


# ---- status ----


def parse_status(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon status`; ends the process if they are wrong."""
    parser = Parser(
        prog="loxodon status",
        description="Who works on a run, how fast, and what there is of it.",
        epilog="Exit status: 0 if a process is at work or the run has finished, 3 if it has stopped before "
        "its end and no process is at work, 2 if the folder holds no run.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="<ckpt_base_dir>/<run_name>")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    _check_exists(args.run_dir)
    return args


def _check_exists(run: Path) -> None:
    """End the process unless the file or folder exists."""
    if not run.expanduser().exists():
        broken = f"is a link to {run.readlink()}, which does not exist" if run.is_symlink() else ""
        advice = "Fix: give the folder of a run, <ckpt_base_dir>/<run_name>."
        sys.stderr.write(f"error: {run} {broken or 'does not exist'}. {advice}\n")
        raise SystemExit(USAGE_ERROR)


# ---- evaluate, export, report ----


def parse_evaluate(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon evaluate`; ends the process if they are wrong.

    Returns: a namespace; `context` holds numbers of timesteps, or None for all timesteps.
    """
    parser = Parser(
        prog="loxodon evaluate",
        description="Play with a trained policy, in the environments the run was validated in. The run's "
        "configuration is a program, so do this with runs that you trust; --env reads none of it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or a policy file")
    add("--policy", metavar=_OF_POLICY, help="default: best if there is one, else latest")
    add("--env", metavar="ID", help="play in this environment of gymnasium's instead")
    add("--set", action="append", default=[], metavar="Name.param=value", help="change a setting; repeatable")
    add("--episodes", type=int, default=100, metavar="N", help="in all environments together (100)")
    parallel = f"environments (those of the run, or {PARALLEL_WITH_ENV} with --env)"
    add("--parallel", type=int, metavar="N", help=parallel)
    add("--seed", type=int, default=0, metavar="N", help="of episodes and sampled actions (0)")
    add("--sampled", action="store_true", help="draw actions; otherwise the most likely one is taken")
    context = "act on the last k timesteps alone"
    add("--context", type=_sizes, default=[None], metavar="1,16,full", help=context)
    add("--video", type=Path, nargs="?", const=Path(), metavar="FOLDER", help="record episodes (RUN/videos)")
    add("--json", "--output", dest="output", type=Path, metavar="FILE", help="default: in RUN/evaluations")
    add("--device", default="cpu", help="where the policy acts (cpu)")
    add("--trust", action="append", default=[], metavar="MODULE", help="see load_policy; repeatable")
    args = parser.parse_args(words)
    if args.env is not None and args.set:
        parser.error("--set changes the run's environments, which --env replaces. Fix: leave one out.")
    for name in ("episodes", "parallel"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(
                f"--{name} is {getattr(args, name)}, but must be at least 1. Fix: e.g. --{name} 100."
            )
    _check_exists(args.run)
    return args


def _sizes(text: str) -> list[int | None]:
    """Parse a list of sizes: `1,16,full` is [1, 16, None]."""
    if not re.fullmatch(r"([1-9]\d*|full)(,([1-9]\d*|full))*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list such as 1,16,full. Fix: write whole numbers above 0, or full."
        )
    return [None if part == "full" else int(part) for part in text.split(",")]


def parse_export(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon export`; ends the process if they are wrong."""
    parser = Parser(
        prog="loxodon export",
        description="Write a policy of a run, its configuration and a model card into a folder.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    replaced = "files of the same names are replaced"
    add("-o", "--output", type=Path, required=True, metavar="DIR", help=replaced)
    add("--policy", metavar=_OF_POLICY, help="default: best if there is one, else latest")
    licence = "under which you share it, such as mit or cc-by-4.0"
    add("--license", default="unknown", metavar="ID", help=licence)
    push = "upload the folder to this model repository of the Hugging Face Hub"
    add("--push", metavar="REPO_ID", help=push)
    args = parser.parse_args(words)
    _check_exists(args.run)
    return args


def parse_report(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon report`; ends the process if they are wrong."""
    parser = Parser(
        prog="loxodon report",
        description="Write one HTML page (and its figures as PNG files) about runs; it works offline.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or of folders of runs")
    add("-o", "--output", type=Path, default=Path("report"), metavar="DIR", help="default: report")
    add("--metric", metavar="NAME", help="compare by its last value; default: val/return")
    add("--minimize", action="store_true", help="less of it is better")
    by_name = "runs whose names begin so are a group (repeatable); others are grouped by their settings"
    add("--group", action="append", default=[], metavar="PREFIX", help=by_name)
    return parser.parse_args(words)


# ---- sweep ----


def parse_sweep(
    words: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """Parse the options of `loxodon sweep`; returns them, the options of its runs, and the runs' words.

    Ends the process if any of them is wrong.
    """
    parser = Parser(
        prog="loxodon sweep",
        description="Search for good settings with Optuna. Other arguments are those of loxodon run; what to "
        "search is written Name.param=log(a,b), uniform(a,b), int(a,b) or choice(x,y,...), each in quotes.",
        epilog="The same command continues a sweep that was interrupted, and adds trials if --trials is "
        "larger.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trials", type=int, required=True, metavar="N", help="runs in all")
    add("--jobs", type=int, default=1, metavar="N", help="how many run at a time, a thread each")
    add("--metric", default="val/return", metavar="NAME", help="its last value counts (default: val/return)")
    add("--direction", choices=("maximize", "minimize"), default="maximize")
    by_median = "end a trial that is below the median of others at as many env steps, from so many on"
    add("--prune-after", type=int, default=0, metavar="ENV_STEPS", help=f"{by_median} (default: 0)")
    add("-o", "--output", type=Path, metavar="DIR", help="folder of the sweep; default: sweeps/<run_name>")
    args, others = parser.parse_known_args(words)
    for name in ("trials", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, but must be at least 1. Fix: e.g. --{name} 2.")
    run = parse_run(others)
    if run.seeds is not None or run.run_name is not None:
        parser.error("a sweep names its runs itself. Fix: leave out --seeds and --run-name.")
    return args, run, others
