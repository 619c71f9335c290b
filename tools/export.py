"""`loxodon export RUN -o DIR`: a folder to share, with the policy, its configuration and a model card."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..data.errors import visible
from ..experiment.checkpoint.policy_file import PolicyInfo, read_info, read_json
from ..experiment.checkpoint.recipes import called_name
from ..experiment.checkpoint.record import bindings_of
from ..experiment.checkpoint.store import EVALUATIONS, VIDEOS, CheckpointManager
from ..experiment.config import explained
from ..experiment.output.plots import Curves, curves_if_readable, metrics_of
from ..experiment.process.files import atomic_write, check_inside, check_tree, write_text
from ..experiment.process.versions import import_extra
from .arguments import parse_export
from .evaluate import Policy, find_policy
from .report.estimates import mean, with_interval
from .report.runs import Result, read_evaluations, read_versions
from .run import exit_status, say

_FILE, _CONFIG, _FILM = "policy.safetensors", "config.gin", "replay.mp4"  # the Hub shows the video


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and upload it if requested; returns the exit status."""
    args = parse_export(argv)
    return exit_status(lambda: _export(args))


def _export(args: argparse.Namespace) -> int:
    # Its client has the login of `hf auth login`.
    hub = None if args.push is None else import_extra("huggingface_hub", "huggingface_hub").HfApi()
    with explained():
        found = find_policy(args.run, args.policy)
    run_dir = found.run_dir
    if run_dir is None:
        raise ValueError(
            f"{args.run} is not in the folder of a run. Fix: give the folder of the run that wrote it."
        )
    record = CheckpointManager(run_dir, "")
    films, played = ((run_dir / name) for name in (VIDEOS, EVALUATIONS))
    for path in (found.file, record.config_path, record.versions_path, metrics_of(run_dir), films, played):
        check_inside(path, run_dir)
    for path in (*films.glob("*"), *played.glob("*")):
        check_inside(path, run_dir)
    sources = {_FILE: found.file, _CONFIG: record.config_path}
    if shown := [path for path in films.glob("*.mp4") if path.is_file()]:
        sources[_FILM] = max(shown, key=lambda path: path.stat().st_mtime)
    if missing := [path for path in sources.values() if not path.is_file()]:
        raise FileNotFoundError(f"There is no file {missing[0]}. Fix: export a run whose folder is complete.")
    card = _card(run_dir, found, args, _FILM in sources)
    for name, source in sources.items():
        with atomic_write(args.output / name) as temp:  # replaces an existing link
            shutil.copyfile(source, temp)
    write_text(args.output / "README.md", card)
    say(f"exported  {args.output}")
    if hub is not None:
        check_tree(args.output)  # everything in the folder is uploaded, including earlier files of the user
        try:
            hub.create_repo(args.push, exist_ok=True)
            say(f"uploaded  {hub.upload_folder(repo_id=args.push, folder_path=args.output)}")
        except Exception as error:  # any error of its client: no login, no network, no such user
            raise RuntimeError(
                f"{args.output} is complete, but could not be uploaded to {args.push}: {error}. Fix: log in "
                "with `hf auth login`, check the name, and run the command again."
            ) from error
    return 0


# ---- the model card ----


def _card(run_dir: Path, policy: Policy, args: argparse.Namespace, has_film: bool) -> str:
    info = read_info(policy.file)
    run = curves_if_readable(run_dir)
    tasks = sorted(name.split("/", 2)[2] for name in run if name.startswith("val/return/"))
    # A checkpoint's policy is evaluated at the start of the next epoch, others in the epoch that saves them.
    curves = _of_epoch(run, info.epoch + policy.name.startswith("epoch:"))
    # Results of other policies of the run do not apply, not even those of earlier ones with the same name.
    played = [
        one
        for results in read_evaluations(run_dir, [])
        for one in results
        if (one.policy, one.epoch) == (policy.name, info.epoch)
    ]
    name = run_dir.resolve().name
    types = read_json(info.types or "")
    kinds = [called_name(kind) or "" for kind in types.values()] if isinstance(types, dict) else []
    modules = sorted({kind.partition(":")[0] for kind in kinds})
    imports = [
        f"import {module}  # defines its classes" for module in modules if module.split(".")[0] != "loxodon"
    ]
    parts = ", ".join(kind.rpartition(":")[2] for kind in kinds)
    file = f'hf_hub_download("{args.push}", "{_FILE}")' if args.push else f'"{_FILE}"'
    return "\n".join(
        [
            "---",
            *_front_matter(name, tasks, args.license, curves, [one for one in played if one.env == "val"]),
            "---",
            f"# {name}",
            "",
            f"A policy for {', '.join(tasks) or 'the environment below'}, trained with Loxodon: {parts}.",
            f"It is the {policy.name} policy of its run, from epoch {info.epoch}.",
            *([f"\n[A recorded episode]({_FILM})"] if has_film else []),
            "\n## Results\n",
            *_results(curves, played),
            "\n## Use\n",
            "```python",
            *(["from huggingface_hub import hf_hub_download"] if args.push else []),
            "from loxodon.experiment import load_policy",
            *imports,
            "",
            f"policy = load_policy({file})",
            "policy.reset()",
            "action = policy.act(obs)  # then policy.act(obs, reward), until the episode ends",
            "```",
            f"\nObservations and actions:\n\n{_spaces(info)}",
            "\n## Training\n",
            *_training(run_dir),
            f"\nLicence of this policy: {args.license}. Loxodon itself has the MIT licence.\n",
        ]
    )


def _training(run_dir: Path) -> Iterator[str]:
    versions = read_versions(run_dir, [])
    seed = f" --seed {versions['seed']}" if "seed" in versions else ""
    config = CheckpointManager(run_dir, "").config_path.read_text(encoding="utf-8", errors="replace")
    if "Experiment.make_train_env" in bindings_of(config):
        yield f"`loxodon run --config {_CONFIG}{seed}`; the file is a program, so read it first."
    else:
        yield f"A Python program passed the environments; {_CONFIG} has the other settings."
    if versions:
        packages = (f"{name} {version}" for name, version in versions["packages"].items())
        yield "\n" + visible(f"Python {versions.get('python')}, {', '.join(packages)}.")


def _of_epoch(curves: Curves, epoch: int) -> Curves:
    """Keep only the points of one epoch, which belong to the policy that was saved in it."""
    kept = {name: [one for one in points if one["epoch"] == epoch] for name, points in curves.items()}
    return {name: points for name, points in kept.items() if points}


def _front_matter(
    name: str, tasks: Sequence[str], licence: str, curves: Curves, played: Sequence[Result]
) -> Iterator[str]:
    """The metadata that the Hub reads; JSON is valid YAML."""
    last = {task: points[-1]["value"] for task in tasks if (points := curves.get(f"val/return/{task}"))}
    rewards = {task: f"{value:.2f}" for task, value in last.items()}
    for one in (one for one in played if one.context is None):
        rewards[one.task] = f"{np.mean(one.returns):.2f} +/- {np.std(one.returns):.2f}"
    results = [
        {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": task, "type": task},
            "metrics": [{"type": "mean_reward", "name": "mean_reward", "value": reward}],
        }
        for task, reward in rewards.items()
    ]
    values = {
        "library_name": "loxodon",
        "license": licence,
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "loxodon", *tasks],
        "model-index": [{"name": name, "results": results}],
    }
    return (f"{key}: {json.dumps(value)}" for key, value in values.items())


def _results(curves: Curves, played: Sequence[Result]) -> Iterator[str]:
    yield "| environment | actions | memory | task | return | 95 % interval | episodes |"
    yield "|---|---|---|---|---|---|---|"
    for one in played:
        actions = "sampled" if one.sampled else "greedy"
        memory = "full" if one.context is None else f"last {one.context}"
        value, low, high = with_interval(mean, one.returns)
        interval = f"{low:.4g} to {high:.4g}" if len(one.returns) > 1 else ""
        cells = [one.env, actions, memory, one.task, f"{value:.4g}", interval, str(len(one.returns))]
        yield f"| {' | '.join(visible(cell).replace('|', '/') for cell in cells)} |"
    yield (
        "\nEvaluation during training, in the epoch of this policy: "
        + (
            ", ".join(
                f"{name.removeprefix('val/')} {points[-1]['value']:.4g}"
                for name, points in curves.items()
                if name.startswith("val/")
            )
            or "none"
        )
        + "."
    )


def _spaces(info: PolicyInfo) -> str:
    found = info.env_spaces()
    return "" if found is None else f"    {found.observation}\n    {found.action}"
