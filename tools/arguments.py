"""Arguments of the commands that need torch; mistakes are reported before torch is imported."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
from .benchmark.suites import SUITES

USAGE_ERROR = 2
DEVICES = ("cpu", "cuda", "mps")
_OF_POLICY = "best|latest|epoch:N"
PARALLEL_WITH_ENV = 8  # environments of `loxodon evaluate --env` without --parallel


class Parser(argparse.ArgumentParser):
    """An argument parser with errors that begin with `config error: command line:` and end with a fix."""

    takes_settings = False  # True if Name.param=value is accepted

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print an error with its fix, and end the process."""
        hint = f"Fix: see {self.prog} --help for the options."
        if message.startswith("unrecognized arguments: "):
            options = [option for action in self._actions for option in action.option_strings]
            if self.takes_settings:
                settings = "write settings as Experiment.epochs=5 (Name.param=value)"
                hint = f"Fix: {settings}, or see --help for the options."
            hint = f"{did_you_mean(message.split()[2].partition('=')[0], options)} {hint}".lstrip()
        self.stop(f"command line: {message}" if "Fix:" in message else f"command line: {message}. {hint}")

    def stop(self, message: str) -> NoReturn:
        """Print an error and end the process; the text says where the mistake is."""
        sys.stderr.write(f"config error: {message}\n")
        raise SystemExit(USAGE_ERROR)


def writing_problem(folder: Path) -> str | None:
    """Why no file can be written into a folder, which may not exist yet; None if one can."""
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return f"the output folder {folder} cannot be written to ({error.strerror})"
    return None


def _check_output(parser: Parser, folder: Path, option: str) -> None:
    """End the process if no file can be written into a folder."""
    if problem := writing_problem(folder):
        parser.error(f"{problem}. Fix: choose another place with {option}.")


def at_least_1(text: str) -> int:
    """Parse a whole number of at least 1. Raises: ArgumentTypeError for anything else."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1. Fix: write 2, for example."
        )
    return int(text)


# ---- run ----


def program_name() -> str:
    """The beginning of commands in messages to the user: the program that this process was started with."""
    script = Path(sys.argv[0])
    if script.suffix != ".py":  # `loxodon` itself, or a run of --seeds that it started
        return "loxodon run"
    if script.resolve().parent == Path(__file__).resolve().parent:
        return "python -m loxodon.tools run"
    return f"python {shlex.quote(sys.argv[0])}"


def parse_run(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `loxodon run`; ends the process if they are wrong.

    Returns: a namespace; `configs` holds names and paths in order, or the GinText of --env; `overrides` holds
        `Name.param=value` words.
    """
    parser = _run_parser(program_name())
    args = parser.parse_intermixed_args(words)
    names = [*args.config, *(word for word in args.words if _names_config(word))]
    args.overrides = [word for word in args.words if not _names_config(word)]
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


def _names_config(word: str) -> bool:
    """True for a preset or gin file, False for a setting; a path may contain an equals sign."""
    return "=" not in word or (word.endswith(".gin") and Path(word).is_file())


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
    return f"the seed is set by both {found[0]} and {found[1]}. Fix: remove one of the two."


def _not_a_config(name: str) -> str:
    if re.fullmatch(r"(\w+/)*[A-Z]\w*\.[a-z_]\w*", name) and not name.endswith(".gin"):
        return f"a setting needs a value. Fix: write {name}=value, without spaces."
    advice = "give the path of a .gin file, the name of a preset, or a setting Name.param=value"
    return f"{no_such_config(name)} Fix: {advice}."


def parse_seeds(text: str) -> list[int]:
    """Parse seeds: `0:5` is 0, 1, 2, 3, 4; `1,4` is 1 and 4. Raises: ArgumentTypeError for anything else."""
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        seeds = list(range(int(found[1]), int(found[2])))
    else:
        seeds = [int(one) for one in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not seeds:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of seeds. Fix: write --seeds 0:5 or --seeds 1,4,7, for example."
        )
    return list(dict.fromkeys(seeds))


def _run_parser(prog: str) -> Parser:
    runnable = runnable_names()
    parser = Parser(
        prog=prog,
        usage=f"{prog} [CONFIG ...] [Name.param=value ...] [options]",
        description="Train an agent from a preset or .gin file with settings on top, or in any "
        "environment with --env.",
        epilog=f"Presets: {', '.join(runnable)}. Partial presets to put on top of one: "
        f"{', '.join(name for name in preset_names() if name not in runnable)}.",
    )
    parser.takes_settings = True
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="CONFIG or Name.param=value",
        help="presets or .gin files, and settings that override them",
    )
    add("--config", action="append", default=[], metavar="FILE", help="a preset or .gin file; repeatable")
    env = "train in this environment, without a gin file: a gymnasium id, module:id, or module:Class"
    add("--env", metavar="ID", help=env)
    add("--agent", metavar="NAME", help=f"agent for --env: {', '.join(AGENTS)} (default: {DEFAULT_AGENT})")
    encoders = f"trajectory encoder for --env: {', '.join(encoder_names())} (default: {DEFAULT_ENCODER})"
    add("--encoder", metavar="NAME", help=encoders)
    save = "write a gin file that starts the same run, then continue"
    add("--save-config", metavar="FILE", type=Path, help=save)
    add(
        "--mode",
        choices=("both", "learn", "collect"),
        help="collect and learn in this process, or do only one of them",
    )
    add(
        "--actors",
        metavar="N",
        type=at_least_1,
        help="learn in this process, and keep N collecting processes running (off-policy agents)",
    )
    add("--device", choices=DEVICES, help="device of the agent (default: a GPU if there is one)")
    add(
        "--actor-device",
        choices=DEVICES,
        default="cpu",
        help="device of the processes of --actors (default: cpu)",
    )
    add("--run-name", metavar="NAME", help="set Experiment.run_name")
    add("--seed", metavar="N", type=int, help="set Experiment.seed")
    add("--seeds", metavar="0:5", type=parse_seeds, help="start one run per seed, named <run_name>-seed<k>")
    add(
        "--jobs",
        metavar="N",
        type=at_least_1,
        default=1,
        help="number of runs of --seeds at a time, with one thread each (default: 1)",
    )
    through = "command that starts each run of --seeds, e.g. 'srun --cpus-per-task=2'"
    add("--through", metavar="WORDS", type=shlex.split, default=[], help=through)
    add("--resume", action="store_true", help="continue from the newest complete checkpoint of this run")
    add("--test-run", action="store_true", help="collect, train, evaluate and save once, in seconds")
    add(
        "--check",
        action="store_true",
        help="print the config, and try it: a --test-run in a temporary folder that is removed",
    )
    add(
        "--print-config",
        action="store_true",
        help="print the resolved config with the origin of each value (--save-config writes a file that can "
        "be run)",
    )
    return parser


def _check_start(parser: Parser, args: argparse.Namespace) -> None:
    """Check --env, --agent and --encoder, and make the config that they imply."""
    if args.env is None:
        for name in ("agent", "encoder"):
            if getattr(args, name) is not None:
                file = f"{name}s/{getattr(args, name)}"
                advice = (
                    f"write {file} after a preset"
                    if find_preset(file)
                    else "add --env CartPole-v1, for example"
                )
                parser.error(f"--{name} needs --env. Fix: {advice}.")
        if not args.configs:
            names = ", ".join(runnable_names())
            parser.error(
                f"no preset, .gin file or --env is given. Fix: write {parser.prog} tmaze or {parser.prog} "
                f"--env CartPole-v1, for example. Presets: {names}"
            )
        return
    if args.configs:
        parser.error(
            f"--env begins from general settings, so it cannot be combined with {args.configs[0]!r}. "
            "Fix: remove one of the two; --save-config FILE writes the settings of --env to a file."
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
        parser.error("--seeds cannot be combined with --test-run. Fix: remove one of the two.")
    if args.through and shutil.which(args.through[0]) is None:
        parser.error(
            f"--through begins with {args.through[0]}, but there is no such program on this machine. "
            "Fix: name one that exists, such as srun."
        )
    if args.seeds is None and args.jobs > 1:
        parser.error("--jobs needs --seeds. Fix: add --seeds 0:5, for example, or remove --jobs.")
    if args.actors is not None and args.test_run:
        parser.error(
            "--test-run uses one process, so it cannot be combined with --actors. Fix: remove one of the two."
        )
    if args.actors is not None and args.mode in ("both", "collect"):
        parser.error(
            f"--actors makes this process the learner, so it cannot be combined with --mode {args.mode}. "
            "Fix: remove one of the two."
        )


# ---- status ----


def parse_status(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon status`; ends the process if they are wrong."""
    parser = Parser(
        prog="loxodon status",
        description="Show the processes of a run, their speed, and what the run has collected and saved.",
        epilog="Exit status: 0 if a process is running or the run has finished, 3 if the run stopped before "
        "its end and no process is running, 2 if the folder holds no run.",
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run, <ckpt_base_dir>/<run_name>")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
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
        description="Evaluate a trained policy in the validation environments of its run. The "
        "configuration of a run is a program, so evaluate only runs that you trust; with --env it is "
        "not read.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or a policy file")
    add(
        "--policy",
        metavar=_OF_POLICY,
        help="which policy of the run (default: best if there is one, else latest)",
    )
    add("--env", metavar="ID", help="evaluate in this gymnasium environment instead")
    add("--set", action="append", default=[], metavar="Name.param=value", help="change a setting; repeatable")
    add(
        "--episodes",
        type=at_least_1,
        default=100,
        metavar="N",
        help="number of episodes, over all environments (default: 100)",
    )
    parallel = (
        f"number of parallel environments (default: that of the run, or {PARALLEL_WITH_ENV} with --env)"
    )
    add("--parallel", type=at_least_1, metavar="N", help=parallel)
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the environments and of sampled actions (default: 0)",
    )
    add("--sampled", action="store_true", help="sample actions instead of taking the most likely one")
    context = "numbers of last timesteps to limit the policy's memory to, one evaluation each (default: full)"
    add("--context", type=_sizes, default=[None], metavar="1,16,full", help=context)
    discount = "let the policy of another trained discount act; its results are only printed"
    add("--discount", type=float, metavar="0.9", help=discount)
    add(
        "--video",
        type=Path,
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="record episodes as videos (default folder: RUN/videos)",
    )
    add(
        "--json",
        "--output",
        dest="output",
        type=Path,
        metavar="FILE",
        help="file for the results (default: a file in RUN/evaluations)",
    )
    add("--device", default="cpu", help="device of the policy (default: cpu)")
    add(
        "--trust",
        action="append",
        default=[],
        metavar="MODULE",
        help="module that the policy file may import (see load_policy); repeatable",
    )
    args = parser.parse_args(words)
    if args.env is not None and args.set:
        parser.error(
            "--set changes the run's environments, which --env replaces. Fix: remove one of the two."
        )
    for text in args.set:
        if problem := override_problem(text):
            parser.stop(f"command line, `--set {text}`: {problem}")
    _check_exists(args.run)
    if args.output is not None:
        if args.output.exists() and not args.output.is_file():
            parser.error(
                f"--json {args.output} is not a plain file. Fix: write --json results.json, for example."
            )
        _check_output(parser, args.output.parent, "--json")
    if isinstance(args.video, Path):
        _check_output(parser, args.video, "--video")
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
        description="Write a policy of a run, its configuration and a model card to a folder.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    replaced = "output folder; files of the same names are replaced"
    add("-o", "--output", type=Path, required=True, metavar="DIR", help=replaced)
    add("--policy", metavar=_OF_POLICY, help="default: best if there is one, else latest")
    licence = "licence of the exported policy, such as mit or cc-by-4.0 (default: unknown)"
    add("--license", default="unknown", metavar="ID", help=licence)
    push = "upload the folder to this model repository on the Hugging Face Hub"
    add("--push", metavar="REPO_ID", help=push)
    args = parser.parse_args(words)
    _check_exists(args.run)
    _check_output(parser, args.output, "-o")
    return args


def parse_report(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon report`; ends the process if they are wrong."""
    parser = Parser(
        prog="loxodon report",
        description="Write an HTML page about runs, with its plots as PNG files. The page works offline.",
    )
    add = parser.add_argument
    add(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or folders that contain such folders",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("report"),
        metavar="DIR",
        help="output folder (default: report)",
    )
    add("--metric", metavar="NAME", help="metric whose last value compares runs (default: val/return)")
    add("--minimize", action="store_true", help="lower values of the metric are better")
    by_name = (
        "put runs whose names begin with PREFIX in one group (repeatable); other runs are grouped by their "
        "settings"
    )
    add("--group", action="append", default=[], metavar="PREFIX", help=by_name)
    args = parser.parse_args(words)
    _check_output(parser, args.output, "-o")
    return args


# ---- benchmark ----


def parse_benchmark(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of `loxodon benchmark`; ends the process if they are wrong.

    Returns: a namespace; `tasks` holds names of the suite (all of them if none was given), `overrides` holds
        `Name.param=value` words.
    """
    parser = Parser(
        prog="loxodon benchmark",
        description="Run every task of a suite with several seeds, and write a page that compares agents. "
        "Without --config, the agent is the recommended one.",
        epilog="The same command continues after an interruption. Several of them, also on several machines, "
        "share the runs of a folder. Suites: "
        + "; ".join(f"{n}: {', '.join(s.tasks)}" for n, s in SUITES.items()),
    )
    parser.takes_settings = True
    add = parser.add_argument
    add("suite", choices=list(SUITES), metavar="SUITE", help=", ".join(SUITES))
    add(
        "words",
        nargs="*",
        default=[],
        metavar="TASK",
        help="tasks of the suite (default: all), and settings of the agent",
    )
    of_agent = "preset or gin file of your own agent, which includes base_offpolicy.gin or is a whole one"
    add("--config", action="append", default=[], metavar="FILE", help=f"{of_agent} (repeatable)")
    add("--name", metavar="NAME", help="name of your agent on the page; needed with --config or settings")
    add("--seeds", type=parse_seeds, default=[0, 1, 2], metavar="0:3", help="seeds (default: 0:3)")
    add(
        "--jobs",
        type=at_least_1,
        default=1,
        metavar="N",
        help="number of runs at a time, with one thread each (default: 1)",
    )
    add(
        "--env-steps",
        type=at_least_1,
        metavar="N",
        help="budget of each run, rounded up to whole epochs (default: that of its task)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("benchmark"),
        metavar="DIR",
        help="folder of the results (default: benchmark)",
    )
    add("--page", type=Path, metavar="FILE", help="the page (default: DIR/SUITE.md)")
    args = parser.parse_intermixed_args(words)
    suite = SUITES[args.suite]
    args.overrides = [word for word in args.words if "=" in word]
    args.tasks = [word for word in args.words if "=" not in word] or list(suite.tasks)
    for name in args.tasks:
        if name not in suite.tasks:
            meant = did_you_mean(name, suite.tasks)
            parser.error(
                f"{name!r} is not a task of {args.suite}.{meant} Fix: choose from {', '.join(suite.tasks)}."
            )
    for text in args.overrides:
        if problem := override_problem(text):
            parser.stop(f"command line, `{text}`: {problem}")
    for name in args.config:
        if find_preset(name) is None:
            parser.stop(f"command line, `--config {name}`: {_not_a_config(name)}")
    if args.name is None and (args.config or args.overrides):
        parser.error("an agent of your own needs a name. Fix: add --name mine.")
    if args.name is not None and not re.fullmatch(r"\w[\w.+-]*", args.name):
        parser.error(
            f"--name {args.name!r} is not a file name. Fix: use letters, digits and . + - _ only, and begin "
            "with a letter or digit."
        )
    _check_output(parser, args.output, "-o")
    if args.page is not None:
        _check_output(parser, args.page.parent, "--page")
    return args


# ---- sweep ----


def parse_sweep(
    words: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """Parse the options of `loxodon sweep`; returns them, the options of its runs, and the runs' words.

    Ends the process if any of them is wrong.
    """
    parser = Parser(
        prog="loxodon sweep",
        description="Search for good settings with Optuna. All other arguments are those of loxodon run. "
        "A setting to search is written Name.param=log(a,b), uniform(a,b), int(a,b) or "
        "choice(x,y,...), in quotes.",
        epilog="The same command continues an interrupted sweep, and adds trials if --trials is larger.",
    )
    add = parser.add_argument
    add("--trials", type=at_least_1, required=True, metavar="N", help="total number of trials")
    add(
        "--jobs",
        type=at_least_1,
        default=1,
        metavar="N",
        help="number of trials at a time, with one thread each (default: 1)",
    )
    add(
        "--metric",
        default="val/return",
        metavar="NAME",
        help="metric whose last value is optimised (default: val/return)",
    )
    add("--direction", choices=("maximize", "minimize"), default="maximize")
    by_median = (
        "end trials that are worse than the median of the others at the same number of env steps, from "
        "ENV_STEPS on"
    )
    add("--prune-after", type=int, default=0, metavar="ENV_STEPS", help=f"{by_median} (default: 0)")
    add("-o", "--output", type=Path, metavar="DIR", help="folder of the sweep (default: sweeps/<run_name>)")
    args, others = parser.parse_known_args(words)
    run = parse_run(others)
    if run.seeds is not None or run.run_name is not None:
        parser.error("a sweep names its runs itself. Fix: remove --seeds and --run-name.")
    if run.check or run.print_config or run.test_run:
        parser.error("trials are whole runs. Fix: remove --check, --print-config and --test-run.")
    _check_output(parser, args.output or Path("sweeps"), "-o")
    return args, run, others
