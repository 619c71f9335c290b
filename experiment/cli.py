"""The command line: a config, overrides on top, and what to do with them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..data.errors import visible
from ..gin_configs.presets import did_you_mean, preset_names, runnable_names
from .checkpoint.store import CheckpointManager, about
from .config import ConfigError, LoadedConfig, explained, load_config
from .device import DEVICES, check_device, choose_device
from .dry_run import dry_run
from .exits import CONFIG_ERROR, FAILED, INTERRUPTED
from .experiment import Experiment
from .fleet.actors import Crew, MakePool, library_program, local_pool, this_program, without
from .fleet.folder import check_folder, expected_here
from .fleet.supervisor import end_with_parent
from .plots import curves_of
from .several import parse_seeds, run_seeds


class _Parser(argparse.ArgumentParser):
    """An argument parser whose error says how to mend it."""

    def error(self, message: str) -> NoReturn:
        hint = "Fix: settings look like Experiment.epochs=5 (Name.param=value); --help lists the options."
        if message.startswith("unrecognized arguments: "):
            options = [option for action in self._actions for option in action.option_strings]
            hint = f"{did_you_mean(message.split()[2], options)} {hint}".lstrip()
        text = message if "Fix:" in message else f"{message}. {hint}"
        say(f"config error: command line: {text}", error=True)
        raise SystemExit(CONFIG_ERROR)


def main(
    argv: Sequence[str] | None = None, *, pool: MakePool | None = None, program: str | None = None
) -> int:
    """Run what the command line asks for; returns the exit status, 2 for a wrong config.

    Args:
        argv: its words; None for those that this program was started with.
        pool: makes what runs the actors of `--actors`; None for processes on this machine.
        program: what to write before the words in a command for the user; None for what was started.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    end_with_parent()
    own_program = this_program() if argv is None else library_program()
    pool = pool or functools.partial(local_pool, program=own_program)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("loxodon").setLevel(logging.INFO)

    def work() -> int:
        choose_device(args.device if args.seeds is None else None)  # others may have another machine
        config = load_config(args.config, overrides(args))
        for warning in config.source.warnings:
            say(f"warning: {warning}", error=True)
        if args.print_config or args.check:
            say(config.text())
        if args.check:
            with explained(config):
                say(dry_run(config))
        if args.check or args.print_config:
            return 0
        if args.through and args.seeds is None:
            raise ConfigError("--through is for runs of --seeds. Fix: write it before this command instead.")
        if args.seeds is not None:
            with explained(config):
                exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments; nothing is built
            ends = {f"Experiment.{name}": getattr(exp, name) for name in ("epochs", "stop_at_val_return")}
            return run_seeds(exp.run_dir, ends, args.seeds, words, own_program, args.jobs, args.through)
        return _run(config, args, words, pool, program)

    return exit_status(work)


def exit_status(work: Callable[[], int]) -> int:
    """Do it; returns its exit status, or that of an error which says all there is to know: it is printed."""
    try:
        return work()
    except ConfigError as error:
        say(f"config error: {error}", error=True)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        say("interrupted", error=True)
        return INTERRUPTED
    except Exception as error:
        if "Fix:" not in str(error):
            raise
        say(f"error: {error}", error=True)  # where it was raised is no news
        return FAILED


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of these words; ends the process if they are wrong."""
    runnable = runnable_names()
    parser = _Parser(
        prog=_program(),
        description="Run a gin-configured experiment.",
        epilog=f"Presets: {', '.join(runnable)}. Parts to put on top of one: "
        f"{', '.join(name for name in preset_names() if name not in runnable)}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help="a .gin file or preset; repeatable")
    add("overrides", nargs="*", metavar="Name.param=value", help="gin bindings on top of the files")
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
    add("--resume", action="store_true", help="go on from the newest complete checkpoint of this run name")
    add("--test-run", action="store_true", help="collect, train, evaluate and save once, in seconds")
    add("--check", action="store_true", help="validate, build, try one batch of everything, train nothing")
    add("--print-config", action="store_true", help="print the resolved config with the origin of each value")
    args = parser.parse_intermixed_args(words)
    if not args.config:
        parser.error(f"no --config is given. Fix: e.g. --config tmaze. Presets: {', '.join(runnable)}")
    if args.seeds is not None and (args.test_run or args.seed is not None):
        parser.error("--seeds goes with neither --seed nor --test-run. Fix: leave one of the two out.")
    if problem := _seed_problem(words):
        parser.error(problem)
    if args.jobs > 1 and args.seeds is None:
        parser.error("--jobs is for runs of --seeds. Fix: add e.g. --seeds 0:5, or leave it out.")
    if args.through and shutil.which(args.through[0]) is None:
        parser.error(f"--through begins with {args.through[0]}, which is no program here. Fix: e.g. srun.")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but must be at least 1. Fix: e.g. --jobs 2.")
    if args.actors is not None and args.test_run:
        parser.error("--test-run is one process, without --actors. Fix: leave one of the two out.")
    if args.actors is not None and args.actors < 1:
        parser.error(f"--actors is {args.actors}, but must be at least 1. Fix: e.g. --actors 2.")
    if args.actors is not None and args.mode in ("both", "collect"):
        parser.error(
            f"--actors makes this process the learner, so it does not go with --mode {args.mode}. "
            "Fix: leave one of the two out."
        )
    return args


def _seed_problem(words: Sequence[str]) -> str | None:
    """What is wrong if the command line says twice which seed to use; one of the two would be ignored."""
    names = {"--seed": 2, "--seeds": 2, "Experiment.seed": 1}  # how many words it takes, if `=` joins none
    found = [
        " ".join(words[i : i + names[name]]) if name == word else word
        for i, word in enumerate(words)
        if (name := word.partition("=")[0].strip()) in names
    ]
    if len(found) < 2:  # noqa: PLR2004 - the second one
        return None
    return f"the seed is set by both {found[0]} and {found[1]}. Fix: leave one of the two out."


def overrides(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Overrides, then options, which win; each with the text to show in errors."""
    found = [(text, text) for text in args.overrides]
    if args.mode is not None:
        found.append((f"Experiment.mode='{args.mode}'", f"--mode {args.mode}"))
    elif args.actors is not None:
        found.append(("Experiment.mode='learn'", f"--actors {args.actors}"))
    if args.run_name is not None:
        found.append((f"Experiment.run_name={args.run_name!r}", f"--run-name {args.run_name}"))
    if args.seed is not None:
        found.append((f"Experiment.seed={args.seed}", f"--seed {args.seed}"))
    if args.test_run:
        found.append(("Experiment.test_run=True", "--test-run"))
    return found


def _start(config: LoadedConfig, resumes: bool, has_actors: bool, device: str | None) -> Experiment:
    """Build the experiment, after a look at its run folder: what to resume must be there."""
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    check_device(exp.DEVICE, device)
    check_folder(exp.run_dir, expected_here())
    if has_actors:
        exp.keep_pace_of_preset()
    earlier = CheckpointManager(exp.run_dir, exp.run_name)
    if exp.ctx.role.is_actor:
        if resumes:
            say("warning: --resume changes nothing: --mode collect follows the newest policy.", error=True)
    elif resumes:
        newest = earlier.state_dir(earlier.newest_epoch())
        earlier_seed = about(newest).get("seed", exp.run_seed)
        exp.ctx.progress.seed = earlier_seed if exp.seed is None else exp.run_seed
        exp.begins_anew = False  # its own checkpoint goes further than what it began from
    elif epochs := earlier.complete_epochs():
        say(
            f"warning: {exp.run_dir} holds checkpoints up to epoch {epochs[-1]}; this run starts anew and "
            "moves them to ckpts_old<n>/. Fix: --resume goes on with it, --run-name begins another.",
            error=True,
        )
    exp.start()
    try:
        if (unused := config.check_unused()) and exp.accelerator.is_main_process:
            say(f"note: {unused}", error=True)
    except ConfigError as error:
        if exp.ctx.role.learns:
            raise
        # An actor has the learner's config and builds less of it: no environments to evaluate in, for one.
        say(f"warning: {error}", error=True)
    if resumes and exp.ctx.role.learns:
        exp.ctx.console.say(f"Resuming at epoch {exp.load_checkpoint()}.")
    return exp


def _run(
    config: LoadedConfig, args: argparse.Namespace, words: Sequence[str], pool: MakePool, program: str | None
) -> int:
    """Build, resume if asked, train, and say what came out."""
    with explained(config):
        exp = _start(config, args.resume, args.actors is not None, args.device)
    if args.actors is not None and exp.accelerator.is_main_process:
        first_epoch = exp.start_collecting_at_epoch
        exp.actors = pool(exp.ctx, Crew(words, args.actors, exp.replay_ratio, first_epoch, args.actor_device))
        exp.pace.expect_actors(args.actors, first_epoch)
    try:
        metrics = exp.learn()
    except SystemExit:  # stopped by a signal, or because no actor is left; everything is stored and closed
        if failure := getattr(exp.actors, "failure", None):
            say(f"error: {failure}", error=True)
            return FAILED
        raise
    except Exception:
        with contextlib.suppress(OSError):  # a full disk is what is being reported already
            exp.close()  # stores finished trajectories
        raise
    exp.close()
    if exp.trainer.idle_epochs and not exp.learner.gradient_steps and not exp.test_run:
        say(f"error: This run made no update. {exp.why_idle()}", error=True)
        return FAILED
    if exp.accelerator.is_main_process and exp.test_run:
        say(words_on_test(exp))
    elif exp.accelerator.is_main_process:
        say(closing_words(exp, metrics, words, program or _program()))
    return 0


def closing_words(exp: Any, metrics: Mapping[str, float], words: Sequence[str], program: str) -> str:
    """Final figures, the run folder and commands to try next."""
    rates = [value for name, value in metrics.items() if re.fullmatch("val/.*success", name)]
    lines = [f"final success rate  {value:.3f}" for value in rates]
    if "val/return" in metrics:
        lines.append(f"final mean return   {metrics['val/return']:.3f}")
    lines.append(f"run folder          {exp.run_dir}")
    if exp.mode != "collect":
        if (curves := curves_of(exp.run_dir)).exists():
            lines.append(f"learning curves     {curves}")
        kept = without(words, "--resume")
        further = [*kept, "--resume"]
        if exp.is_finished:
            further = [*without(kept, "Experiment.epochs", "Experiment.stop_at_val_return"), "--resume"]
            further.append(f"Experiment.epochs={2 * exp.epochs}")
            if exp.stop_at_val_return is not None:
                further.append("Experiment.stop_at_val_return=None")
        fresh = without(kept, "--seed", "--run-name", "Experiment.seed", "Experiment.run_name")
        seed = exp.run_seed + 1 if exp.seed is not None else 1
        name = f"{exp.run_name.rpartition('-seed')[0] or exp.run_name}-seed{seed}"
        again = [*fresh, "--seed", str(seed), "--run-name", name]
        lines += [
            "try another seed    " + f"{program} {shlex.join(again)}",
            "train it further    " + f"{program} {shlex.join(further)}",
        ]
    return "\n".join(lines)


def words_on_test(exp: Any) -> str:
    """What a test run has done, in a line."""
    updates = exp.learner.gradient_steps
    trained = f"{updates} updates" if updates else "no update (the dataset was not ready for training)"
    return f"test run passed: {exp.env_steps} env steps, {trained}, one checkpoint, all in {exp.run_dir}"


def _program() -> str:
    """What starts this command again."""
    script = Path(sys.argv[0])
    if script.name == "loxodon":
        return "loxodon run"
    is_own = script.suffix == ".py" and script.parent.resolve() != Path(__file__).resolve().parent
    return f"python {sys.argv[0] if is_own else '-m loxodon.experiment'}"


def say(text: str, *, error: bool = False) -> None:
    """Print a text, what is no text in it made visible."""
    stream = sys.stderr if error else sys.stdout
    lines = text.rstrip("\n").split("\n")  # names of files and what is in them may be part of it
    stream.write("\n".join(map(visible, lines)) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
