"""`loxodon export RUN -o DIR`: a folder to share: the policy, its configuration and a model card."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.errors import visible
from .checkpoint.policy_file import PolicyInfo, read_info, read_json
from .checkpoint.store import CheckpointManager
from .checkpoint.written import called_name
from .cli import exit_status, say
from .evaluate import EVALUATIONS, FORMAT, VIDEOS, Policy, find_policy
from .files import write_text
from .plots import Curves, read_curves
from .report.estimates import mean, with_interval

_FILE, _CONFIG, _FILM = "policy.safetensors", "config.gin", "replay.mp4"  # the hub shows the last one


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and upload it if that is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="loxodon export",
        description="Write a policy of a run, its configuration and a model card into a folder.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="files of the same names are replaced"
    )
    add("--policy", metavar="best|latest|epoch:N", help="default: best if there is one, else latest")
    add(
        "--license",
        default="unknown",
        metavar="ID",
        help="under which you share it, such as mit or cc-by-4.0",
    )
    add(
        "--push", metavar="REPO_ID", help="upload the folder to this model repository of the Hugging Face Hub"
    )
    args = parser.parse_args(argv)
    return exit_status(lambda: _export(args))


def _export(args: argparse.Namespace) -> int:
    hub = None if args.push is None else _hub()
    found = find_policy(args.run, args.policy)
    if found.run_dir is None:
        raise ValueError(f"{args.run} is in no run folder. Fix: give the folder of the run that it is from.")
    args.output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found.file, args.output / _FILE)
    shutil.copyfile(CheckpointManager(found.run_dir, "").config_path, args.output / _CONFIG)
    films = sorted((found.run_dir / VIDEOS).glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    if films:
        shutil.copyfile(films[-1], args.output / _FILM)
    write_text(args.output / "README.md", _card(found.run_dir, found, args, bool(films)))
    say(f"exported  {args.output}")
    if hub is not None:
        try:
            hub.create_repo(args.push, exist_ok=True)
            say(f"uploaded  {hub.upload_folder(repo_id=args.push, folder_path=args.output)}")
        except Exception as error:  # whatever its client raises: no login, no network, no such user
            raise RuntimeError(
                f"{args.output} is complete, but could not be uploaded to {args.push}: {error}. "
                "Fix: log in with `hf auth login`, check the name, and give the command again."
            ) from error
    return 0


def _hub() -> Any:
    """The client of the Hub, logged in as whatever `hf auth login` says."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError(
            f"--push needs the package huggingface_hub ({error}). Fix: pip install huggingface_hub."
        ) from error
    return HfApi()


# ---- the model card ----


def _card(run_dir: Path, policy: Policy, args: argparse.Namespace, has_film: bool) -> str:
    info = read_info(policy.file)
    versions = json.loads(CheckpointManager(run_dir, "").versions_path.read_text(encoding="utf-8"))
    metrics = run_dir / "logs" / "metrics.jsonl"
    curves = read_curves(metrics) if metrics.is_file() else {}
    tasks = sorted(name.split("/", 2)[2] for name in curves if name.startswith("val/return/"))
    files = sorted((run_dir / EVALUATIONS).glob("*.json"))
    played = [one for file in files if (one := json.loads(file.read_text())).get("format") == FORMAT]
    name, packages = run_dir.resolve().name, versions["packages"]
    types = {key: called_name(kind) or "" for key, kind in (read_json(info.types or "") or {}).items()}
    modules = {kind.partition(":")[0] for kind in types.values()}
    imports = [
        f"import {module}  # defines its classes" for module in modules if module.split(".")[0] != "loxodon"
    ]
    parts = ", ".join(kind.rpartition(":")[2] for kind in types.values())
    file = f'hf_hub_download("{args.push}", "{_FILE}")' if args.push else f'"{_FILE}"'
    return "\n".join(
        [
            "---",
            *_front_matter(name, tasks, args.license, curves, [one for one in played if _is_of(one, policy)]),
            "---",
            f"# {name}",
            "",
            f"A policy for {', '.join(tasks) or 'the environment below'}, trained with Loxodon: {parts}.",
            f"It is the {policy.name} one of its run, of epoch {info.epoch}.",
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
            "action = policy.act(obs)  # then policy.act(obs, reward), until the episode is over",
            "```",
            f"\nObservations and actions:\n\n{_spaces(info)}",
            "\n## Training\n",
            f"`loxodon run --config {_CONFIG} --seed {versions['seed']}`; it is a program: read it first.",
            f"\nPython {versions['python']}, "
            + ", ".join(f"{key} {value}" for key, value in packages.items())
            + ".",
            f"\nLicence of this policy: {args.license}. Loxodon itself has the MIT licence.\n",
        ]
    )


def _is_of(report: dict[str, Any], policy: Policy) -> bool:
    """Whether an evaluation is of this policy as it was trained, where it was trained."""
    return bool(report["policy"] == policy.name and report["env"] == "val")


def _front_matter(
    name: str, tasks: Sequence[str], licence: str, curves: Curves, played: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """What the Hub reads; JSON is YAML, too."""
    rewards = {task: f"{curves[f'val/return/{task}'][-1]['value']:.2f}" for task in tasks}
    for one in (one for report in played for one in report["results"] if one["context"] is None):
        rewards[one["task"]] = f"{np.mean(one['returns']):.2f} +/- {np.std(one['returns']):.2f}"
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


def _results(curves: Curves, played: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| policy | environment | actions | memory | task | return | 95 % interval | episodes |"
    yield "|---|---|---|---|---|---|---|---|"
    for report in played:
        actions = "sampled" if report["sampled"] else "greedy"
        for one in report["results"]:
            memory = "full" if one["context"] is None else f"last {one['context']}"
            _, low, high = with_interval(mean, np.array(one["returns"]))
            cells = [
                report["policy"],
                report["env"],
                actions,
                memory,
                one["task"],
                f"{np.mean(one['returns']):.4g}",
            ]
            interval = f"{low:.4g} to {high:.4g}" if len(one["returns"]) > 1 else ""
            yield visible(f"| {' | '.join(cells)} | {interval} | {len(one['returns'])} |")
    yield (
        "\nThe last evaluation while it was trained: "
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
