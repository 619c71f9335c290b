"""The command `loxodon run`: a config with overrides, and the actions that options select."""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.errors import visible
from ..experiment.checkpoint.store import CheckpointManager
from ..experiment.config import ConfigError, LoadedConfig, explained, load_config
from ..experiment.config.reading import COMMAND_LINE, find_config
from ..experiment.experiment import Experiment
from ..experiment.fleet.actors import ActorSpec, MakePool, library_program, local_pool, this_program, without
from ..experiment.fleet.shared_folder import check_folder, expected_token
from ..experiment.fleet.supervisor import exit_with_parent
from ..experiment.output.plots import curves_of
from ..experiment.process.exits import CONFIG_ERROR, FAILED, INTERRUPTED, Stopped, without_foreign_exits
from ..gin_configs.presets import preset_root
from ..gin_configs.start import GinText
from .arguments import parse_run, program_name
from .device import check_device, choose_device
from .dry_run import dry_run, lack_of_data, work_of
from .seeds import run_seeds

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def main(
    argv: Sequence[str] | None = None, *, pool: MakePool | None = None, program: str | None = None
) -> int:
    """Run the command line; returns the exit status, 2 for a wrong config.

    Args:
        argv: words of the command line; None for those that this program was started with.
        pool: makes the processes for the actors of `--actors`; None for processes on this machine.
        program: beginning of commands in messages to the user; None for the program that was started.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_run(words)
    exit_with_parent()
    own_program = this_program() if argv is None else library_program()
    pool = pool or functools.partial(local_pool, program=own_program)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("loxodon").setLevel(logging.INFO)

    def work() -> int:
        nonlocal words
        choose_device(args.device if args.seeds is None else None)  # runs of --seeds may be on other machines
        config = load_config(args.configs, overrides(args), is_complete=True)
        if args.save_config is not None:
            _save_config(args, config)
            words = without(words, "--save-config")
        if args.env is not None and not args.print_config:
            say(args.configs[0].text)
        for warning in config.source.warnings:
            say(f"warning: {warning}", error=True)
        if args.print_config or args.check:
            say(config.text())
        if args.check:
            with explained():
                say(dry_run(config))
        if args.check or args.print_config:
            return 0
        if args.through and args.seeds is None:
            raise ConfigError("--through needs --seeds. Fix: write its words before this command instead.")
        if args.seeds is not None:
            with explained():
                exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments; nothing is built
            names = ("epochs", "stop_at_val_return", "max_env_steps")
            ends = {f"Experiment.{name}": getattr(exp, name) for name in names}
            return run_seeds(exp.run_dir, ends, args.seeds, words, own_program, args.jobs, args.through)
        return _run(config, args, words, pool, program)

    return exit_status(work)


def exit_status(work: Callable[[], int]) -> int:
    """Call `work` and return its exit status; errors that explain themselves print no traceback."""
    try:
        with without_foreign_exits():
            return work()
    except ConfigError as error:
        say(f"config error: {error}", error=True)
        return CONFIG_ERROR
    except KeyboardInterrupt:
        say("interrupted", error=True)
        return INTERRUPTED
    except Exception as error:
        text = str(error)
        if isinstance(error, OSError) and error.errno in _FULL_DISK and "Fix:" not in text:
            text += ". Fix: free space there, then run the same command again."
        if "Fix:" not in text:
            raise
        say(f"error: {text}", error=True)  # the traceback would add nothing
        return FAILED


def overrides(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the overrides, followed by the options, which take precedence; each with its text for errors."""
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


def _save_config(args: argparse.Namespace, config: LoadedConfig) -> None:
    """Write a gin file with the configs of the command line and the settings that override them.

    Raises: ConfigError if a different file of this name exists, or the file cannot be written.
    """
    options = ("--mode", "--actors", "--test-run")
    shown = {text for _, text in overrides(args)}
    typed = [b for b in config.bindings if b.origin.file == COMMAND_LINE and b.origin.text in shown]
    on_top = {b.key: repr(b.value) for b in typed if b.origin.text.split()[0] not in options}
    lines = []
    for one in args.configs:
        if isinstance(one, GinText):
            lines += [line for line in one.text.splitlines() if line.partition(" = ")[0] not in on_top]
        else:
            is_preset = preset_root() in (found := find_config(one).resolve()).parents
            lines.append(f"include {str(found.relative_to(preset_root()) if is_preset else found)!r}")
    text = "\n".join([*lines, *(f"{key} = {value}" for key, value in on_top.items())]) + "\n"
    path: Path = args.save_config
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--save-config {path}: a different file of this name exists. Fix: choose another name."
            )
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--save-config {path} cannot be written ({error}). Fix: choose another path."
        ) from error
    say(f"saved {path}; {program_name()} {shlex.quote(str(path))} starts the same run")


def _start(config: LoadedConfig, resumes: bool, has_actors: bool, device: str | None) -> Experiment:
    """Build the experiment after a check of its run folder; with --resume it must have a checkpoint."""
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    check_device(exp.DEVICE, device)
    check_folder(exp.run_dir, expected_token())
    has_ratio = exp.replay_ratio is not None and exp.train_timesteps_per_epoch > 0
    if has_actors or (exp.ctx.role.only_learns and has_ratio):  # the latter with actors started by hand
        exp.keep_pace_of_preset(config.is_set_by_user)
    earlier = CheckpointManager(exp.run_dir, exp.run_name)
    if exp.ctx.role.is_actor:
        if resumes:
            say(
                "warning: --resume has no effect, because --mode collect follows the newest policy.",
                error=True,
            )
    elif resumes:
        exp.prepare_to_resume()
    elif epochs := earlier.complete_epochs():
        say(
            f"warning: {exp.run_dir} holds checkpoints up to epoch {epochs[-1]}; this run starts anew and "
            "moves them to ckpts_old<n>/. Fix: continue that run with --resume, or choose another name "
            "with --run-name.",
            error=True,
        )
    exp.start()
    try:
        if (unused := config.check_unused(exp.unread_parts)) and exp.accelerator.is_main_process:
            say(f"note: {unused}", error=True)
    except ConfigError as error:
        if exp.ctx.role.learns:
            raise
        # An actor has the learner's config but builds fewer parts, such as no evaluation environments.
        say(f"warning: {error}", error=True)
    if resumes and exp.ctx.role.learns:
        exp.load_newest_checkpoint()
    return exp


def _run(
    config: LoadedConfig, args: argparse.Namespace, words: Sequence[str], pool: MakePool, program: str | None
) -> int:
    """Build, resume if requested, train, and print the results."""
    with explained():
        exp = _start(config, args.resume, args.actors is not None, args.device)
    if args.actors is not None and exp.accelerator.is_main_process:
        first_epoch, device = exp.start_collecting_at_epoch, args.actor_device
        exp.actors = pool(exp.ctx, ActorSpec(words, args.actors, exp.replay_ratio, first_epoch, device))
    try:
        metrics = exp.learn()
    except Stopped:  # a signal came, or no actor is left; everything is stored and closed
        if failure := getattr(exp.actors, "failure", None):
            say(f"error: {failure}", error=True)
            return FAILED
        raise
    except Exception:
        exp.close()  # stores finished trajectories
        raise
    exp.close()
    if problem := lack_of_data(exp):
        say(f"error: {problem}", error=True)
        return FAILED
    if exp.accelerator.is_main_process and exp.test_run:
        say(f"test run passed: {work_of(exp)}, all in {exp.run_dir}")
    elif exp.accelerator.is_main_process:
        say(closing_summary(exp, metrics, words, program or program_name()))
    return 0


def closing_summary(exp: Any, metrics: Mapping[str, float], words: Sequence[str], program: str) -> str:
    """The last text of a run: final metrics, the run folder, and commands to try next."""
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
            ends: dict[str, Any] = {"Experiment.epochs": 2 * max(exp.epochs, exp.epoch, 1)}
            if exp.stop_at_val_return is not None:
                ends["Experiment.stop_at_val_return"] = None
            if exp.max_env_steps is not None:
                ends["Experiment.max_env_steps"] = 2 * max(exp.max_env_steps, exp.env_steps)
            further = [*without(kept, *ends), "--resume", *(f"{name}={end}" for name, end in ends.items())]
        fresh = without(kept, "--seed", "--run-name", "Experiment.seed", "Experiment.run_name")
        # After a drawn seed, which is a large number, the suggestion is 1.
        seed = exp.run_seed + 1 if exp.seed is not None or exp.run_seed == 1 else 1
        name = f"{exp.run_name.rpartition('-seed')[0] or exp.run_name}-seed{seed}"
        again = [*fresh, "--seed", str(seed), "--run-name", name]
        if (count := exp.accelerator.num_processes) > 1:
            program = f"(with the launcher of this run, for {count} processes) {program}"
        lines += [
            "try another seed    " + f"{program} {shlex.join(again)}",
            "train it further    " + f"{program} {shlex.join(further)}",
        ]
    return "\n".join(lines)


def say(text: str, *, error: bool = False) -> None:
    """Print a text with unprintable characters escaped."""
    stream = sys.stderr if error else sys.stdout
    lines = text.rstrip("\n").split("\n")  # the text may contain names and contents of files
    stream.write("\n".join(map(visible, lines)) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
