"""The documentation is correct: configs and commands work, samples run, and tables match the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium
import numpy as np
import pytest
import torch

from loxodon import agents, data, envs, nets
from loxodon import experiment as package
from loxodon.agents import GAE, AdvantageNorm, PPOAgent, PPOLoss, RewardNormalizer
from loxodon.agents.parts import Steps
from loxodon.data import load_trajectory, save_trajectory, split_episodes
from loxodon.experiment import CheckpointManager, Collector, Experiment, Learner, ppo
from loxodon.experiment.artifacts import UrlStore
from loxodon.experiment.artifacts.stores import find_artifact
from loxodon.experiment.callbacks import HOOKS
from loxodon.experiment.checkpoint.start_from import is_path
from loxodon.experiment.config import checks, load_config, registry
from loxodon.experiment.config.reading import Reference, bindings_in, read_source, without_macros
from loxodon.experiment.config.registry import MACRO
from loxodon.experiment.output.plots import PANELS
from loxodon.experiment.ppo import KLAdaptiveLR, PPOLearner
from loxodon.nets import RunningNorm
from loxodon.tools import launch
from loxodon.tools.arguments import parse_run
from loxodon.tools.benchmark.page import Row
from loxodon.tools.benchmark.results import read_runs
from loxodon.tools.benchmark.suites import SUITES
from loxodon.tools.run import main, overrides

from .fakes import make_experiment, metrics, run
from .test_experiment import DEFAULTS, REQUIRED

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
}
BASES = {
    "multi_task": "ppo/pendulum",
    "on_policy": "ppo/cartpole",
    "pretraining": "ppo/cartpole",
}  # for samples of these pages; all others extend tmaze
TINY = (
    "Experiment.epochs = 1\nExperiment.train_timesteps_per_epoch = 16\n"
    "Experiment.val_timesteps_per_epoch = 0\nExperiment.val_interval = None\n"
    "Experiment.parallel_actors = 4\nExperiment.max_seq_len = 8\nMetricLogger.tensorboard = False\n"
    "Experiment.verbose = False\nExperiment.torch_threads = 1\nExperiment.evaluate_at_end = False\n"
)


def samples(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def commands() -> list[tuple[str, str]]:
    pattern = r"^ *(?:[A-Z_]+=\S+ )*python (?:examples/run\.py|-m loxodon\.tools\.launch) .*"
    found = [
        (page, line) for page, text in PAGES.items() for line in re.findall(pattern, text, flags=re.MULTILINE)
    ]
    return [(page, line.split("#")[0].split("`")[0]) for page, line in found if "..." not in line]


@pytest.fixture(scope="module")
def defined() -> dict[str, Any]:
    """The names that the Python samples define; gin registers a name only once."""
    names: dict[str, Any] = {"__name__": "docs_sample"}
    with gin.unlock_config():
        for page in ("algorithm", "artifacts", "callbacks", "on_policy"):
            exec(samples(page, "python")[0], names)
    return names


def figures_of(run_dir: Path, *texts: str) -> dict[str, Any]:
    """Run a tiny PPO with some gin text on top; returns its metrics."""
    extra = run_dir / "extra.gin"
    extra.write_text("\n".join([*texts, TINY, f"Experiment.ckpt_base_dir = '{run_dir}'"]), encoding="utf-8")
    load_config(["ppo/cartpole", str(extra)])
    exp = run(Experiment())  # type: ignore[call-arg]  # gin supplies the arguments
    return {key: value for one in metrics(exp.run_dir, with_time=True) for key, value in one.items()}


# ---- all pages ----

GIN = [(page, i) for page in sorted(PAGES) for i in range(len(samples(page, "gin")))]


@pytest.mark.usefixtures("defined")
@pytest.mark.parametrize(("page", "number"), GIN)
def test_a_gin_sample_is_valid(page: str, number: int, tmp_path: Path) -> None:
    text = samples(page, "gin")[number]
    if page == "artifacts" and "Artifacts.store" not in text:
        text += samples(page, "gin")[0]
    path = tmp_path / "sample.gin"
    path.write_text(f"include '{BASES.get(page, 'tmaze')}.gin'\n{text}")
    load_config([str(path)])  # refuses unknown names, wrong types and missing files


def test_the_samples_of_the_readme_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = TINY.replace("val_interval = None", "val_interval = 1").replace("epoch = 0", "epoch = 8")
    Path("mine.gin").write_text(samples("README", "gin")[0] + tiny)
    code = samples("README", "python")[0].replace("epochs=40", "epochs=1")
    with gin.unlock_config():
        exec(code, {"__name__": "readme"})
    *during, at_end = capsys.readouterr().out.splitlines()[-2:]
    env_steps, val_return = during[0].split()
    assert int(env_steps) == 0
    assert float(val_return) > 0.0
    assert float(at_end.removeprefix("at the end ")) > 0.0


MEASURED = {  # suite and task of each row of results in the README
    "T-maze, corridor of 50": ("presets", "tmaze"),
    "T-maze, corridor of 10,000": ("long", "tmaze_10000"),
    "100 symbols recalled by key": ("memory", "recall_by_key"),
    "POPGym AutoencodeEasy": ("popgym", "AutoencodeEasy"),
    "Meta-FrozenLake, 15 attempts": ("meta", "frozen_lake"),
    "Pendulum-v1": ("classic", "Pendulum-v1"),
    "CartPole-v1 without velocities": ("ppo", "ppo_cartpole_no_velocity"),
    "POPGym RepeatPreviousEasy": ("ppo", "ppo_repeat_gru"),
}


def test_the_figures_of_the_readme_are_those_of_stored_runs() -> None:
    page = PAGES["README"]
    rows = re.findall(r"^\| (.*?) \| `.*?` \| \w+ \| (.*?) \| (.*) \|$", page, flags=re.MULTILINE)
    assert [task for task, *_ in rows] == list(MEASURED)
    for task, target, figures in rows:
        aim, expected = measured(*MEASURED[task])
        assert (float(target.split()[0 if "right" in target else -1]), figures) == (aim, expected)
    figures_of_task = {task: figures for task, _, figures in rows}
    assert "in 24,000 env steps with every seed" in page
    assert "24,000" in figures_of_task["100 symbols recalled by key"]
    assert "velocities in 30,720 env steps" in page
    assert "30,720" in figures_of_task["CartPole-v1 without velocities"]
    assert f"{stored('chaos')['rounds']} kills in one run" in page


def measured(suite: str, name: str) -> tuple[float | None, str]:
    """Target of a task, and the cells of a row: seeds, median env steps and seconds until it was reached."""
    if suite in SUITES:
        task = SUITES[suite].tasks[name]
        runs = read_runs(ROOT / "benchmarks" / "results" / suite)["loxodon"][name]
        reached, *costs, _ = Row(name, task, runs).learned()
        assert reached.endswith(f": {len(runs)} of {len(runs)}")
        return task.target, " | ".join([f"all {len(runs)}", *costs])
    entry = stored(f"learning_{suite}")["tasks"][name]
    medians = entry["median_to_target"]  # None unless every seed reached the target
    cells = f"all {len(entry['runs'])} | {medians['env_steps']:,} | {medians['seconds']:,.0f}"
    return entry["task"]["target"], cells


def stored(name: str) -> Any:
    """A file of benchmark results."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def test_the_pages_have_samples_and_commands() -> None:
    assert len(GIN) > 20
    assert len(commands()) > 15


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_is_understood(page: str, command: str) -> None:
    words = shlex.split(command[command.index("python ") :])[2:]
    if "launch" in command:
        args, words = launch.parser().parse_known_args(words[1:])
        words += ["--actors", str(args.actors)]
    parsed = parse_run(words)
    assert load_config(parsed.configs, overrides(parsed)).source.warnings == []


# ---- the algorithm, resuming ----


def test_the_part_of_the_page_makes_targets(defined: dict[str, Any]) -> None:
    load_config(["tmaze"], ["Agent.returns=@HalfNStep()"])
    ends = torch.tensor([False, True]).view(1, 2, 1, 1)
    steps = Steps(torch.ones(1, 2, 1, 1), ends, torch.ones(1, 2, 1, 1) > 0, torch.tensor([[0.5]]))
    targets = defined["HalfNStep"]().from_values(steps, torch.full((1, 2, 1, 1), 8.0))
    assert targets.flatten().tolist() == [3.0, 1.0]


def test_the_environment_of_the_page_offers_its_state() -> None:
    names: dict[str, Any] = {"gym": gymnasium}
    exec(samples("resume", "python")[0], names)
    one, other = (names["MyEnv"]() for _ in range(2))
    for env, position in ((one, 1), (other, 2)):
        env.position, env.map = position, np.full(3, position)
        env.np_random.random(position)
    other.set_state(one.get_state())
    assert (other.position, other.map.tolist()) == (1, [1, 1, 1])
    assert one.np_random.random() == other.np_random.random()


# ---- artifacts ----


def test_the_layout_of_artifacts_is_that_of_a_run(tmp_path: Path) -> None:
    store = {"Artifacts.store": lambda: UrlStore(str(tmp_path / "artifacts"))}
    run(make_experiment(tmp_path, run_name="my-run", **store))
    (layout,) = re.findall(r"```\n(artifacts/.*?)```", PAGES["artifacts"], flags=re.DOTALL)
    for what in ("state", "policy"):
        home = tmp_path / "artifacts" / "my-run" / what
        for path in (*(home / "v0").iterdir(), *home.glob("[!.]*")):
            assert path.name in layout, path


def test_references_to_artifacts_are_understood(tmp_path: Path) -> None:
    store, file = UrlStore(str(tmp_path / "store")), tmp_path / "file"
    file.write_text("")
    for _ in range(4):
        for name in ("my-run/state", "base/state"):
            store.put(name, file, metadata={}, aliases=["latest"])
        store.put("base/policy", file, metadata={}, aliases=["best"])
    table = PAGES["artifacts"][PAGES["artifacts"].index("| value | meaning |") :]
    references = re.findall(r"^\| `'(.*?)'` \|", table, flags=re.MULTILINE)
    found = [find_artifact(store, one, "my-run").reference for one in references if not is_path(one)]
    states = ["my-run/state:v3", "my-run/state:v3", "base/policy:v3", "base/state:v3", "base/policy:v2"]
    assert found == states
    assert len(references) == 6


def test_the_store_of_the_page_serves_a_run(tmp_path: Path, defined: dict[str, Any]) -> None:
    store = {"Artifacts.store": lambda: defined["NewestOnly"](root=str(tmp_path / "store"))}
    base = run(make_experiment(tmp_path, run_name="base", **store))
    exp = make_experiment(tmp_path, **store, restore_from="base:latest", epochs=3)
    exp.start()
    assert exp.epoch == base.epoch
    exp.close()


# ---- callbacks ----


def test_the_callback_of_the_page_stops_a_run_and_keeps_its_state(
    tmp_path: Path, defined: dict[str, Any]
) -> None:
    made = defined["StopWhenSolved"](target=-1e9, times=2)
    exp = run(make_experiment(tmp_path, epochs=9, callbacks=[made]))
    assert (exp.epoch, exp.is_finished, made.in_a_row) == (2, False, 2)
    other = defined["StopWhenSolved"]()
    again = make_experiment(tmp_path, epochs=9, callbacks=[other])
    again.start()
    again.load_checkpoint()
    assert other.in_a_row == 2
    again.close()


def test_the_page_names_every_hook() -> None:
    assert [hook for hook in HOOKS if f"`{hook}`" not in PAGES["callbacks"]] == []


# ---- on-policy learning, and policies that act ----


def test_the_table_of_settings_matches_the_code() -> None:
    kinds = (PPOLearner, PPOAgent, PPOLoss, GAE, AdvantageNorm, RewardNormalizer, KLAdaptiveLR, RunningNorm)
    expected = {
        f"{kind.__name__}.{p.name}": getattr(p.default, "__name__", repr(p.default))
        for kind in kinds
        for p in inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `([^`]+)` \|", PAGES["ppo_reference"], flags=re.MULTILINE)
    assert dict(rows) == expected


def test_the_table_of_metrics_matches_a_run_and_its_policy_acts(tmp_path: Path) -> None:
    found = figures_of(tmp_path, samples("on_policy", "gin")[0], "PPOAgent.share_encoder = True")
    drawn = {name for _, _, names in PANELS for name in names if name.startswith("ppo/")}
    assert drawn <= found.keys()
    rows = re.findall(r"^\| (`ppo/.*?) \|", PAGES["ppo_reference"], flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(ppo/\w+)`", row)}
    assert {name for name in found if re.fullmatch(r"ppo/\w+", name)} == named  # parts have additional names
    sample = next(text for text in samples("deploy", "python") if "load_policy" in text)
    (folder,) = (path.parent for path in tmp_path.glob("*/ckpts"))
    acted: dict[str, Any] = {}
    exec(sample.replace("runs/my-run", str(folder)), acted)
    assert acted["over"]


def test_partial_observations_with_memory_agree_in_acting_and_training(tmp_path: Path) -> None:
    found = figures_of(tmp_path, samples("on_policy", "gin")[1])
    assert found["ppo/initial_logratio_abs_max"] < found["ppo/initial_logratio_rounding_max"]


@pytest.mark.usefixtures("defined")
def test_trajectories_of_an_agent_with_its_own_output_are_kept(tmp_path: Path) -> None:
    figures_of(tmp_path, samples("on_policy", "gin")[3], "Experiment.agent_type = @SurprisedPPOAgent")
    files = [path for path in tmp_path.rglob("*.npz") if "ckpt" not in str(path)]
    assert files
    assert {"log_probs", "values", "surprise"} <= set(load_trajectory(files[0]).extras)


# ---- pre-training, scaling ----


def test_the_samples_of_pretraining_run(tmp_path: Path, monkeypatch: Any, capfd: Any, caplog: Any) -> None:
    monkeypatch.chdir(tmp_path)
    protected = tmp_path / "datasets" / "experts" / "buffer" / "protected"
    protected.mkdir(parents=True)
    rng, ended = np.random.default_rng(0), np.zeros(40, bool)
    ended[9::10] = True
    obs = rng.standard_normal((40, 4)).astype(np.float32)
    episodes = split_episodes(
        obs, rng.integers(2, size=40), np.ones(40), ended, np.zeros(40, bool), num_actions=2
    )
    for number, traj in enumerate(episodes):
        save_trajectory(protected, traj, save_as="npz", traj_id=f"{number:08x}", unix_time=1e9 + number)
    pretraining, warm_start = samples("pretraining", "gin")
    tiny = TINY.replace("Experiment.max_seq_len = 8\n", "") + "Pretraining.num_batches = 4\n"
    Path("tiny.gin").write_text(tiny)
    Path("page.gin").write_text(pretraining)
    assert main(["--config", "page.gin", "--config", "tiny.gin", "Experiment.verbose=True"]) == 0
    assert "Pre-training: loss " in capfd.readouterr().out
    (base,) = Path("runs").iterdir()
    Path("warm.gin").write_text(pretraining + warm_start.replace("runs/tmaze", str(base)))
    gin.clear_config()
    assert main(["--config", "warm.gin", "--config", "tiny.gin", "--run-name", "warm"]) == 0
    assert f"Warm start from ./{base}" in caplog.text


def test_the_pace_of_the_preset_is_as_the_page_says() -> None:
    load_config(["tmaze"])
    names = ("parallel_actors", "train_timesteps_per_epoch", "train_batches_per_epoch")
    actors, timesteps, updates = (gin.query_parameter(f"Experiment.{name}") for name in names)
    text = f"{updates} updates / ({actors} x {timesteps} env steps) = {updates / (actors * timesteps):.4f}"
    assert text in PAGES["replay_ratio"]


# ---- coming from AMAGO and SB3 ----


(DIFFERING,) = re.findall(r"## Differing defaults\n.*?(?=\n## )", PAGES["from_amago"], flags=re.DOTALL)
ROWS = [
    row
    for text in (PAGES["from_amago"].replace(DIFFERING, ""), PAGES["from_sb3"])
    for row in re.findall(r"^\| (.*?) \| (.*?) \| .*\|$", text, flags=re.MULTILINE)
]
PARTS = (agents, data, envs, nets, package, ppo)
OURS = [text for _, cell in ROWS for text in re.findall(r"`([^`]+)`", cell)]
SMALL = (
    "include 'tmaze.gin'\nExperiment.test_run = True\nExperiment.log_interval = 1\nTMazePassive.horizon = 5\n"
)


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The run of the page's sample."""
    folder = tmp_path_factory.mktemp("amago")
    (folder / "my.gin").write_text(f"{SMALL}Experiment.ckpt_base_dir = '{folder}'\n", encoding="utf-8")
    (code,) = samples("from_amago", "python")
    defined: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, defined)
    yield defined["experiment"]
    gin.clear_config()


def exists(name: str, exp: Any) -> bool:
    """True if there is an option, file, metric, class, function, setting or attribute of this name."""
    name = name.split(" = ", maxsplit=1)[0]
    if name.startswith("--"):
        return re.search(rf"{name}\b", options()) is not None
    if "/" in name or "*" in name:
        pattern = re.sub(r"<\w+>", "*", name)
        return any(exp.run_dir.glob(pattern)) or pattern in figures(exp)
    owner, _, attribute = name.partition(".")
    found = [getattr(part, owner) for part in PARTS if hasattr(part, owner)]
    if not attribute:
        return bool(found) or name in figures(exp)
    alive = {
        Experiment: exp,
        Learner: exp.learner,
        Collector: exp.collector,
        CheckpointManager: exp.checkpoints,
    }
    return any(
        hasattr(alive.get(kind, kind), attribute)
        or attribute in inspect.signature(kind).parameters
        or attribute in getattr(kind, "__annotations__", {})
        for kind in found
    )


def options() -> str:
    """The help text of examples/run.py."""
    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
        parse_run(["--help"])
    return text.getvalue()


def figures(exp: Any) -> set[str]:
    """Names in the log, with `*` for the name of an environment."""
    names = {name for one in metrics(exp.run_dir, with_time=True) for name in one}
    return names | {name.replace("TMazePassive", "*") for name in names}


def test_the_sample_is_a_run_with_the_settings_of_the_file(exp: Any) -> None:
    assert type(exp).__name__ == "MyExperiment"
    assert exp.learner.edits_masks
    assert exp.learner.gradient_steps > 0


def test_every_name_of_ours_exists(exp: Any) -> None:
    assert len(OURS) > 250
    assert [name for name in OURS if not exists(name, exp)] == []
    assert not exists("Agent.gama", exp)
    assert not exists("val/retrun", exp)


def test_every_row_has_a_name_or_a_reason() -> None:
    for theirs, ours in ROWS:
        assert ours == "here" or set(ours) <= {"-"} or "`" in ours or ours.startswith("not here, because "), (
            theirs
        )


def test_the_differing_defaults_are_those_of_the_code_and_the_preset() -> None:
    bindings = checks.remaining(read_source(["base_offpolicy"]).bindings)
    macros = checks.macros_of(bindings)
    preset = {b.key: without_macros(b.value, macros) for b in bindings if b.selector != MACRO}
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| `(.+?)` \|$", DIFFERING, flags=re.MULTILINE)
    listed = {name: [bindings_in(f"x = {text}")[0].value for text in texts] for name, *texts in rows}
    assert {name: [code_default(name), preset[name]] for name in listed} == listed
    owners = ("Experiment", "Learner", "EpsilonGreedy", "Sampler")
    owners += ("Agent", "RandomSubset", "Actor", "CriticEnsemble", "TransformerTrajEncoder")
    defaults = {key: code_default(key) for key in preset if key.startswith(owners)}
    differing = {key for key, value in defaults.items() if value not in (preset[key], registry.MISSING)}
    assert differing == {name for name in listed if name.startswith(owners)}


def code_default(key: str) -> Any:
    """The default of a setting in the code, as a config value; MISSING if it is required."""
    owner, _, param = key.rpartition(".")
    default = registry.find(owner)[0].params[param].default
    named = None if default is registry.MISSING else registry.find_object(default)
    if type(default).__module__.startswith("loxodon.agents.parts"):
        return Reference(type(default).__name__, is_called=True)
    return default if named is None else Reference(named.name, is_called=False)


def test_every_field_of_amago_is_named() -> None:
    (fields,) = re.findall(
        r"unless a remark says otherwise\):\s(.*?)\.\n\n", PAGES["from_amago"], flags=re.DOTALL
    )
    assert re.findall(r"`(\w+)`", fields) == [*REQUIRED, *DEFAULTS]
