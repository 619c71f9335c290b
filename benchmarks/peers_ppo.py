"""Comparison of PPO with skrl and sb3-contrib: env steps per second, and return at equal steps. Prints JSON.

    python benchmarks/peers_ppo.py > benchmarks/results/peers_ppo.json    # all cases, seeds 0 1 2
    python benchmarks/peers_ppo.py cartpole --seeds 0 --systems skrl --steps 20000

The peers are installed into a separate virtual environment (--venv), with constraints.txt. Every run is a
process: examples/run.py for Loxodon, peers/*.py for the others, all with the same `Settings`. Rates cover
collecting and learning, without imports, the creation of environments, and evaluations. Loxodon's rate is
computed from time/collect_s and time/learn_s, which exclude logs and checkpoints, because the peers write
none. Returns are those of greedy policies in separate environments, over at least 20 episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers.common import Settings
from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ("torch==2.13.0", "skrl", "sb3-contrib", "gymnasium", "popgym")
OURS = "loxodon"
NUM_EVALS = 7
Run = Callable[[list[str], Path], str]


@dataclass(frozen=True)
class Peer:
    """A script of peers/ and its own settings."""

    module: str
    lstm_critic: str = "shared"


@dataclass(frozen=True)
class Case:
    """One task for all systems.

    configs, overrides: arguments of examples/run.py, in addition to `gin_settings`. val_timesteps: length of
    Loxodon's evaluations per environment, enough for 20 episodes.
    """

    settings: Settings
    peers: dict[str, Peer]
    configs: tuple[str, ...]
    val_timesteps: int
    overrides: tuple[str, ...] = ()


PLAIN_MLP = (  # two layers of 64 each for policy and values, like the peers, but with leaky ReLUs
    "FFTstepEncoder.activate_output=True",
    "FFTstepEncoder.out_norm=None",
    "FFTstepEncoder.hide_rl2s=True",
    "PolicyHead.n_layers=0",
    "ValueHead.n_layers=0",
)
CASES = {
    "cartpole": Case(
        Settings("CartPole-v1", updates=98, evaluate_every=14, normalize=True),
        {"skrl": Peer("peers.skrl_ppo")},
        ("ppo/cartpole",),
        val_timesteps=1_500,
        overrides=PLAIN_MLP,
    ),
    "pendulum": Case(
        Settings("Pendulum-v1", updates=196, evaluate_every=28, gamma=0.9, normalize=True),
        {"skrl": Peer("peers.skrl_ppo")},
        ("ppo/pendulum",),
        val_timesteps=600,
        overrides=PLAIN_MLP,
    ),
    "cartpole_no_velocity": Case(
        Settings(
            "CartPole-v1",
            updates=98,
            evaluate_every=14,
            obs_indices=(0, 2),
            hidden=(64,),
            lstm=64,
            lam=0.9,
            normalize=True,
        ),
        {
            "sb3_contrib_shared_lstm": Peer("peers.sb3_recurrent_ppo"),
            "sb3_contrib_two_lstms": Peer("peers.sb3_recurrent_ppo", lstm_critic="own"),
        },
        ("ppo/cartpole_no_velocity",),
        val_timesteps=1_500,
    ),
}
SYSTEMS = [OURS, *dict.fromkeys(name for case in CASES.values() for name in case.peers)]


def gin_settings(settings: Settings) -> dict[str, Any]:
    """The settings of a Loxodon run, by gin name."""
    return {
        "Experiment.torch_threads": settings.threads,
        "Experiment.parallel_actors": settings.num_envs,
        "Experiment.train_timesteps_per_epoch": settings.rollout,
        "Experiment.epochs": settings.updates,
        "Experiment.val_interval": settings.evaluate_every,
        "Experiment.sample_actions_val": False,
        "Experiment.stop_at_val_return": None,
        "Experiment.learning_rate": settings.learning_rate,  # falls to 0, by ppo/ppo.gin
        "Experiment.lr_warmup_steps": 0,
        "Experiment.l2_coeff": 0.0,
        "Experiment.grad_clip": settings.grad_clip,
        "Experiment.critic_loss_weight": settings.critic_loss_weight,
        "PPOLearner.update_epochs": settings.epochs,
        "PPOLearner.minibatches": settings.minibatches,
        "GAE.gamma": settings.gamma,
        "GAE.lam": settings.lam,
        "PPOLoss.clip_eps": settings.clip_eps,
        "PPOLoss.value_clip": None,
        "PPOLoss.entropy_coef": settings.entropy_coef,
        "AdvantageNorm.mode": "batch",
        "PPOAgent.share_encoder": settings.lstm > 0,
        "PPOAgent.value_norm": "popart" if settings.normalize else "none",
        "FFTstepEncoder.normalize_inputs": settings.normalize,
    }


def shortened(settings: Settings, steps: int | None) -> Settings:
    """Shorten the run to about `steps` env steps, with the same number of evaluations if possible."""
    if steps is None:
        return settings
    updates = min(settings.updates, max(1, -(-steps // settings.env_steps_per_update)))
    return replace(settings, updates=updates, evaluate_every=-(-updates // NUM_EVALS))


def run_process(command: list[str], cwd: Path) -> str:
    """Run a command and return its output. Raises: RuntimeError with the end of its stderr if it fails."""
    env = {**os.environ, "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed in {cwd}:\n{done.stderr[-3000:]}\nFix: run that command by hand."
        )
    return done.stdout


def run_peer(peer: Peer, settings: Settings, python: Path, run: Run) -> dict[str, Any]:
    """Train with another library."""
    given = json.dumps(asdict(replace(settings, lstm_critic=peer.lstm_critic)))
    text = run([str(python), "-m", peer.module, given], ROOT / "benchmarks")
    about, *curve = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {**about, **with_rate(settings, curve)}


def run_ours(case: Case, settings: Settings, run: Run) -> dict[str, Any]:
    """Train with Loxodon, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "run.py")]
        command += ["--seed", str(settings.seed), "--run-name", "run"]
        for config in case.configs:
            command += ["--config", config]
        command += [f"{name}={value!r}" for name, value in gin_settings(settings).items()]
        command += [f"Experiment.val_timesteps_per_epoch={case.val_timesteps}"]
        command += [f"Experiment.ckpt_base_dir={folder!r}", *case.overrides]
        run(command, ROOT)
        lines = (Path(folder) / "run" / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return with_rate(settings, learning_curve([json.loads(line) for line in lines]))


def learning_curve(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Evaluations of a Loxodon run, with the seconds of collecting and learning until each."""
    seconds, curve = 0.0, {}
    for record in records:
        seconds += (record.get("time/collect_s") or 0.0) + (record.get("time/learn_s") or 0.0)
        if "val/return" in record and record["env_steps"] > 0:
            curve[record["env_steps"]] = {
                "env_steps": record["env_steps"],
                "seconds": round(seconds, 3),
                "return": round(record["val/return"], 2),
            }
    return list(curve.values())


def with_rate(settings: Settings, curve: list[dict[str, float]]) -> dict[str, Any]:
    """Results of a run. Raises: RuntimeError if it was not evaluated at the same env steps as the others."""
    steps = [point["env_steps"] for point in curve]
    ends = [*range(settings.evaluate_every, settings.updates, settings.evaluate_every), settings.updates]
    expected = [end * settings.env_steps_per_update for end in ends]
    if steps != expected:
        raise RuntimeError(
            f"A run was evaluated after {steps} env steps, but must be evaluated after {expected} to be "
            "comparable. Fix: give both sides the same num_envs, rollout and evaluate_every."
        )
    return {
        "seed": settings.seed,
        "env_steps_per_s": round(steps[-1] / curve[-1]["seconds"], 1),
        "curve": curve,
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds."""
    returns = [
        {"env_steps": points[0]["env_steps"], "return": statistics.median(one["return"] for one in points)}
        for points in zip(*(run["curve"] for run in runs), strict=True)
    ]
    rate = statistics.median(run["env_steps_per_s"] for run in runs)
    return {"env_steps_per_s": rate, "returns": returns, "runs": runs}


def measure_case(
    case: Case, settings: Settings, seeds: list[int], names: list[str], python: Path, run: Run
) -> dict[str, Any]:
    """Run the chosen systems of a case over seeds, interleaved, so that noise affects all equally."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:
        now = replace(settings, seed=seed)
        if OURS in names:
            runs.setdefault(OURS, []).append(run_ours(case, now, run))
        for name, peer in case.peers.items():
            if name in names:
                runs.setdefault(name, []).append(run_peer(peer, now, python, run))
        for name, found in runs.items():
            print(f"seed {seed}, {name}: {found[-1]['env_steps_per_s']} env steps/s", file=sys.stderr)
    systems = {name: summarize(found) for name, found in runs.items()}
    return {"settings": asdict(settings), "configs": case.configs, "systems": systems}


def install_peers(
    venv: Path, pip_args: list[str], run: Run, requirements: tuple[str, ...] = REQUIREMENTS
) -> Path:
    """Return the Python of a virtual environment with the peers, which is created if it is missing."""
    python, done = venv / "bin" / "python", venv / "peers-installed"
    if not done.exists() or done.read_text(encoding="utf-8") != " ".join(requirements):
        print(f"installing the peers into {venv}", file=sys.stderr)
        run([sys.executable, "-m", "venv", str(venv)], ROOT)
        install = [str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt", *pip_args]
        run([*install, *requirements], ROOT)
        done.write_text(" ".join(requirements), encoding="utf-8")
    return python


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_venv = Path(tempfile.gettempdir()) / "loxodon-peers"
    add = parser.add_argument
    add(
        "cases", nargs="*", choices=[[], *CASES], help=f"cases to run, from {', '.join(CASES)} (default: all)"
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    add("--steps", type=int, help="env steps of each run, if fewer than those of the case")
    add("--threads", type=int, default=1, help="torch threads of each run")
    add("--venv", type=Path, default=default_venv, help="folder in which the peers are installed")
    add(
        "--pip-args",
        default="",
        help="pip options for that installation, such as an index with a CPU build of torch",
    )
    return parser.parse_args()


def main() -> None:
    """Run the chosen cases and print one JSON document."""
    args = parse()
    names = args.cases or list(CASES)
    peers_wanted = any(system != OURS for system in args.systems)
    python = install_peers(args.venv, args.pip_args.split(), run_process) if peers_wanted else args.venv
    results: dict[str, Any] = {"provenance": provenance(), "cases": {}}
    for name in names:
        settings = replace(shortened(CASES[name].settings, args.steps), threads=args.threads)
        results["cases"][name] = measure_case(
            CASES[name], settings, args.seeds, args.systems, python, run_process
        )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
