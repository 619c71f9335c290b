"""`loxodon evaluate RUN`: evaluates a trained policy in any environment, with full or limited memory."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gin
import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..agents import BaseAgent, OffPolicyAgent
from ..data import DoNothingDataset
from ..envs import EnvSpec, Histories, resolve_env
from ..experiment.checkpoint.load_policy import LoadedPolicy, is_gone, load_policy
from ..experiment.checkpoint.recipes import from_json
from ..experiment.checkpoint.spaces import EnvSpaces, check_spaces
from ..experiment.checkpoint.store import EVALUATIONS, VIDEOS, CheckpointManager
from ..experiment.collect.build import make_envs
from ..experiment.config import ConfigError, explained, load_config
from ..experiment.config.reading import search_in
from ..experiment.evaluation import Evaluator
from ..experiment.experiment import Experiment
from ..experiment.process.files import json_object, short_name, write_text
from ..experiment.process.rng import isolated_rng
from ..experiment.process.versions import import_extra
from ..nets import TrajEncoder
from .arguments import PARALLEL_WITH_ENV, parse_evaluate, writing_problem
from .report.estimates import mean, with_interval
from .report.runs import EVALUATION_FORMAT
from .run import exit_status, say

_MOST_STEPS = 1_000_000  # limit per environment, since its episodes may never end
_VIDEO_EPISODES = 3
_PLAIN_WIDTH = 300  # width of the table if the output is not a terminal
_WEIGHTS = re.compile(r"policy_epoch_(\d+)\.safetensors")
_ATTEMPT = re.compile(r"(.+)_attempt_(\d+)")  # metrics of single attempts, see KShotWrapper


class Policy(NamedTuple):
    """The policy to evaluate. run_dir: folder of its run; None for a file outside of runs."""

    run_dir: Path | None
    name: str
    file: Path


class Recipe(NamedTuple):
    """Environments to be made; the fields are the arguments of `make_envs`."""

    make_env: Any
    num_envs: int
    mode: str
    context: str | None = None

    def make(self, seed: int) -> Any:
        """Make the environments. seed: seeds the global generators, from which constructors may draw."""
        with isolated_rng(seed):
            return make_envs(*self[:3], context=self.context, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Play episodes, print a table, write the results; returns the exit status."""
    args = parse_evaluate(argv)
    return exit_status(lambda: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> int:
    if args.video is not None:
        import_extra("moviepy", "loxodon[video]")
    with explained():
        found = find_policy(args.run, args.policy)
        recipe = _recipe(args, found.run_dir)
    env = args.env or ", ".join(["val", *args.set])  # a modified environment counts as another one
    place = args.output
    if place is None and found.run_dir is not None and args.discount is None:
        name = f"{found.name}-{env}-{'sampled' if args.sampled else 'greedy'}"
        plain = re.sub(r"[^-.a-zA-Z0-9]+", "_", name)
        place = found.run_dir / EVALUATIONS / f"{short_name(plain, name)}.json"
        if problem := writing_problem(place.parent):
            raise ConfigError(f"{problem}. Fix: choose another place with --json.")
    results: list[dict[str, Any]] = []
    with explained():
        made = recipe.make(args.seed)
    loaded = _loaded(found.file, args)  # once, as a running learner replaces the file
    with contextlib.closing(made) as envs:
        for size in args.context:
            policy = copy.deepcopy(loaded)
            with explained():
                check_spaces(
                    policy.info.env_spaces(),
                    EnvSpaces(envs.env_observation_space, envs.env_action_space),
                    what=f"The policy in {found.file}",
                    fix="choose an environment with the observations and actions it was trained with.",
                )
            if size is not None:
                cut_memory(policy.agent, size)
            with Console(stderr=True).status(f"{args.episodes} episodes, memory: {size or 'full'}"):
                results += results_of(play(policy, envs, args.episodes, args.seed), size)
    report = {
        "format": EVALUATION_FORMAT,
        "run": (found.run_dir or found.file).resolve().name,
        "env": env,
        "policy": found.name,
        "epoch": loaded.info.epoch,
        "sampled": args.sampled,
        "discount": args.discount,
        "seed": args.seed,
        "episodes": args.episodes,
        "results": results,
    }
    print_table(results)
    if place is not None:
        write_text(place, json.dumps(report) + "\n")
        say(f"results  {place}")
    if args.video is not None:
        folder = (found.run_dir or Path()) / VIDEOS if args.video is True else args.video
        _record(loaded, recipe, folder, found.name, args.seed)
        say(f"videos   {folder}")
    return 0


# ---- policy and environments ----


def _loaded(file: Path, args: argparse.Namespace) -> LoadedPolicy:
    """Load the policy that acts as the command line says."""
    policy = load_policy(file, device=args.device, sample=args.sampled, trust=args.trust)
    if args.discount is not None:
        with explained():
            if not isinstance(policy.agent, OffPolicyAgent):
                raise ValueError(
                    f"--discount is for agents with several discounts, unlike {type(policy.agent).__name__}. "
                    "Fix: remove --discount."
                )
            policy.agent.act_for(args.discount)
    return policy


def find_policy(place: Path, which: str | None = None) -> Policy:
    """Find the policy `best`, `latest` or `epoch:N` of a run; None takes the first of these that exists.

    place: the folder of a run or of an exported policy, or a policy file.

    Raises: FileNotFoundError if it does not exist; ValueError for another word, or any for a single policy.
    """
    place = place.expanduser()
    if (exported := place / "policy.safetensors").is_file():
        place = exported
    if place.is_file():
        if which is not None:
            raise ValueError(
                f"--policy chooses a policy of a run, but {place} is a single one. Fix: leave out --policy."
            )
        whole = place.absolute()  # a relative path may lack the folders above
        is_in_run = whole.parent.parent.name == "ckpts"
        name = whole.parent.name if place.stem == "policy" else place.stem
        if epoch := _WEIGHTS.fullmatch(place.name):
            name = f"epoch:{epoch[1]}"
        return Policy(whole.parents[2] if is_in_run else None, name, place)
    store = CheckpointManager(place, place.name)
    files = {"best": store.best_path, "latest": store.latest_path}
    which = which or next((name for name, file in files.items() if file.is_file()), "latest")
    if epoch := re.fullmatch(r"epoch:(\d+)", which):
        files[which] = store.weights_dir / f"policy_epoch_{epoch[1]}.safetensors"
    if which not in files:
        raise ValueError(
            f"--policy is {which!r}, but must be best, latest or epoch:N. Fix: write --policy best, for "
            "example."
        )
    if not files[which].is_file():
        names = [name for name, file in files.items() if file.is_file()]
        saved = (_WEIGHTS.fullmatch(path.name) for path in store.weights_dir.glob("*"))
        names += [f"epoch:{n}" for n in sorted(int(one[1]) for one in saved if one)]
        there = f"{place} has {', '.join(names)}" if names else f"{place} has saved no policy"
        if not place.is_dir():
            there = f"{place} {'is not a folder' if place.exists() else 'does not exist'}"
        fix = "choose one of these with --policy" if names else "give the folder of a run that has saved one"
        raise FileNotFoundError(f"There is no policy {files[which]}: {there}. Fix: {fix}.")
    return Policy(place, which, files[which])


def _recipe(args: argparse.Namespace, run_dir: Path | None) -> Recipe:
    """The environments to play in; without --env those of the run, whose configuration gin then holds."""
    if args.env is not None:
        search_in(Path.cwd())
        with explained():
            is_vector = resolve_env(args.env).makes_vector_env
        mode = "already_vectorized" if is_vector else "sync"
        return Recipe(args.env, args.parallel or PARALLEL_WITH_ENV, mode)
    store = CheckpointManager(run_dir or Path(), "")
    # Only the first file has the settings that environments in other processes read. Only the second lacks
    # the environment of a preset that Python code has replaced.
    texts = [path for path in (store.requested_path, store.config_path) if run_dir and path.is_file()]
    versions = {} if run_dir is None else json_object(store.versions_path)
    search_in(*(folder for folder in versions.get("import_path", ()) if Path(folder).is_dir()), Path.cwd())
    if not texts or "Experiment.make_val_env" not in texts[-1].read_text(encoding="utf-8"):
        if versions.get("environments") is not None and not args.set:
            return _recipe_of(versions["environments"], args.parallel, texts)
        raise ValueError(
            f"{args.run} does not record how to create its environment. A run records it in "
            "ckpts/config.txt if gin configured it, and in ckpts/versions.json if the environment can be "
            "imported by its name; --set needs the former. Fix: give the folder of such a run, or name an "
            "environment, e.g. --env CartPole-v1."
        )
    changes = [(text, f"--set {text}") for text in args.set]
    if args.parallel is not None:
        changes.append((f"Experiment.parallel_actors={args.parallel}", f"--parallel {args.parallel}"))
    # Another version may have recorded settings that agents no longer have. Environments do not read them.
    load_config([str(path) for path in texts], changes, is_ignored=is_gone)
    # Replace parts that may be large, or missing on this machine.
    for name, value in {
        "dataset": DoNothingDataset(sampler=None),
        "callbacks": (),
        "mixed_precision": "no",
    }.items():
        gin.bind_parameter(f"Experiment.{name}", value)
    with explained():
        exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments; nothing is started
    return Recipe(exp.make_val_env, exp.parallel_actors, exp.env_mode, exp.async_env_mp_context)


def _recipe_of(written: Any, num_envs: int | None, texts: Sequence[Path]) -> Recipe:
    """The environments of a run that Python configured, from its `versions.json`; texts: gin's bindings."""

    def find(name: str) -> Any:
        module, _, path = name.partition(":")
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))

    found = from_json(written, find, calls=True)
    gin.parse_config("\n".join(path.read_text(encoding="utf-8") for path in texts), skip_unknown=True)
    names = ("make_val_env", "parallel_actors", "env_mode", "async_env_mp_context")
    make_env, parallel, mode, context = (found[name] for name in names)
    return Recipe(make_env, num_envs or parallel, mode, context)


def cut_memory(agent: BaseAgent, size: int) -> None:
    """Limit an agent's memory to its last `size` timesteps, including the current one.

    At each timestep, its memory is what it would be if the episode had begun `size` - 1 timesteps before.

    Raises: ValueError for an agent with a custom hidden state.
    """
    if type(agent).init_hidden_state is not BaseAgent.init_hidden_state:
        raise ValueError(
            f"{type(agent).__name__} has its own hidden state (init_hidden_state), which --context cannot "
            "limit. Allowed are agents with the memory of BaseAgent. Fix: remove --context."
        )
    _cut_encoder(agent.traj_encoder, size)


def _cut_encoder(encoder: TrajEncoder, size: int) -> None:
    """Encode the last timesteps from scratch at every step, as a sequence without history, as in training."""
    whole = copy.copy(encoder)  # a copy with the same weights and the original methods

    def forward(
        seq: Tensor, time_idxs: Tensor, hidden_state: Any, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        before = hidden_state or (seq[:, :0], time_idxs[:, :0])
        seq, time_idxs = (
            torch.cat(pair, 1)[:, -size:] for pair in zip(before, (seq, time_idxs), strict=True)
        )
        encoded, _ = whole(seq, time_idxs, None, time_idxs[..., 0] == 0)
        return encoded[:, -1:], (seq, time_idxs)

    vars(encoder).update(
        forward=forward,
        init_hidden_state=lambda num_envs, device: None,
        reset_hidden_state=lambda hidden_state, ended: hidden_state,  # timestep 0 marks the reset
    )


def play(policy: LoadedPolicy, envs: Any, episodes: int, seed: int) -> Histories:
    """Play `episodes` new episodes, divided equally among `envs`; the same seed gives the same episodes."""
    evaluator = Evaluator(policy.device, policy.sample)
    with isolated_rng(seed):
        return evaluator.play(policy.agent, envs, _MOST_STEPS, episodes=episodes, limit=_MOST_STEPS)[1]


def _record(policy: LoadedPolicy, recipe: Recipe, folder: Path, name: str, seed: int) -> None:
    make_env = recipe.make_env
    spec = resolve_env(make_env[0] if isinstance(make_env, list | tuple) else make_env)
    recorded = EnvSpec(_recorded, {"spec": spec, "folder": str(folder), "name": name})
    with contextlib.closing(Recipe(recorded, 1, "sync").make(seed)) as envs:
        play(policy, envs, _VIDEO_EPISODES, seed)


def _recorded(spec: EnvSpec, folder: str, name: str) -> Any:
    """The environment, with a video of each episode in `folder`."""
    if isinstance(spec.target, str):
        spec = dataclasses.replace(spec, kwargs={"render_mode": "rgb_array", **spec.kwargs})
    env = spec.build_raw()
    if not isinstance(env, gym.Env) or "rgb_array" not in env.metadata.get("render_modes", ()):
        raise ValueError(
            f"{env} has no 'rgb_array' among its metadata['render_modes'], so there is nothing to record. "
            "Fix: remove --video, or implement render() with 'rgb_array' in the environment."
        )
    if env.render_mode != "rgb_array":  # a user's environment may read it when it renders
        env.unwrapped.render_mode = "rgb_array"
    return gym.wrappers.RecordVideo(
        env,
        folder,
        episode_trigger=lambda number: number < _VIDEO_EPISODES,
        name_prefix=name.replace(":", "_"),
        disable_logger=True,
    )


# ---- results ----


def results_of(histories: Histories, context: int | None) -> list[dict[str, Any]]:
    """JSON values of each task, one number per episode; `attempts` holds those of each attempt of a trial."""
    results = []
    named = histories.specials.named()
    for task, returns in histories.returns.returns.items():
        metrics = {name: values[task] for name, values in named.items() if task in values}
        attempts: list[list[float]] = []
        while (name := f"return_attempt_{len(attempts)}") in metrics:
            attempts.append(metrics.pop(name))
        lengths = histories.returns.lengths[task]
        one = {"context": context, "task": task, "returns": returns, "lengths": lengths}
        results.append({**one, "metrics": metrics, "attempts": attempts})
    return results


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print means and intervals for each context and task; values per attempt share one row."""
    table = Table(
        "memory", "task", "metric", "mean", "95 % interval", "values", box=None, padding=(0, 2, 0, 0)
    )
    for one in results:
        place = ["full" if one["context"] is None else f"last {one['context']}", one["task"]]
        for cells in _rows(one):
            table.add_row(*place, *cells)
            place = ["", ""]
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    Console(width=width, highlight=False, markup=False).print(table)


def _rows(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    by_attempt: dict[str, list[float]] = defaultdict(list)
    if one["attempts"]:
        by_attempt["return"] = [float(np.mean(values)) for values in one["attempts"]]
    own = {"return": one["returns"], "length": one["lengths"]}
    others = {f"metric/{name}" if name in own else name: values for name, values in one["metrics"].items()}
    for name, values in (own | others).items():
        if attempt := _ATTEMPT.fullmatch(name):
            by_attempt[attempt[1]].append(float(np.mean(values)))
        elif values:
            interval = ""
            if 1 < len(values) == len(one["returns"]):  # several values of one trial depend on each other
                _, low, high = with_interval(mean, np.array(values))
                interval = f"{low:.4g} to {high:.4g}"
            yield name, f"{np.mean(values):.4g}", interval, str(len(values))
    for name, means in by_attempt.items():
        yield f"{name} by attempt", " ".join(f"{one_mean:.3g}" for one_mean in means), "", ""
