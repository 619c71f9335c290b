"""Every shipped gin file: presets pass the static checks and state their launch command; mix-ins are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin
import pytest

from loxodon.envs import EpsilonGreedy
from loxodon.experiment import Experiment
from loxodon.experiment.config import checks, load_config
from loxodon.experiment.config.checks import unknown_names
from loxodon.experiment.config.reading import find_config, read_source
from loxodon.gin_configs.presets import about, preset_names, runnable_names
from loxodon.gin_configs.start import AGENTS, encoder_names, gin_for


def text_of(name: str) -> str:
    return find_config(name).read_text(encoding="utf-8")


def header_of(name: str) -> str:
    """The comment at the top of the file."""
    lines = text_of(name).splitlines()
    num_comments = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[:num_comments])


PRESETS = runnable_names()
MIX_INS = [name for name in preset_names() if name not in PRESETS]


@pytest.fixture(autouse=True)
def _clean_gin() -> Iterator[None]:
    yield
    gin.clear_config()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_begins_with_its_launch_line(name: str) -> None:
    assert load_config([name]).source.warnings == []
    launch_lines = re.findall(r"python examples/run\.py --config (\S+)", header_of(name))
    accepted = {name, f"gin_configs/{name}.gin"}
    assert launch_lines
    assert set(launch_lines) <= accepted
    form = r"# .+\.\n(# Needs .+\n)?(#   .+\n?)+(# Measured: .+(\n# .+)*)?"
    assert re.fullmatch(form, header_of(name))
    assert about(name).encoder


@pytest.mark.parametrize("name", MIX_INS)
def test_a_mix_in_has_a_header_and_known_names(name: str) -> None:
    assert header_of(name)
    below = ["base_offpolicy"] if name.startswith("agents/") else []  # it defines their macros
    assert unknown_names(read_source([*below, name]).bindings) == []


@pytest.mark.parametrize(
    ("task", "agent"), [("tmaze", n) for n in ("multitask", "dqn", "iql", "bc")] + [("pendulum", "sac")]
)
def test_an_agent_can_be_put_on_top_of_a_preset(task: str, agent: str) -> None:
    assert task in PRESETS
    loaded = load_config([task, f"agents/{agent}"])
    assert loaded.source.warnings == []
    assert f"--config {task} --config agents/{agent}" in header_of(f"agents/{agent}")


# --- the published agent on top of a preset ---------------------------------------------------------------

_OF_THE_RUN = {  # settings of a task and the size of its run, not of the algorithm
    "DiskTrajDataset.dset_name",
    "DiskTrajDataset.relabeler",
    "DiskTrajDataset.takes_new_trajs",
    "Experiment.callbacks",
    "Experiment.ckpt_base_dir",
    "Experiment.ckpt_interval",
    "Experiment.dataset",
    "Experiment.dloader_workers",
    "Experiment.env_mode",
    "Experiment.epochs",
    "Experiment.log_interval",
    "Experiment.make_train_env",
    "Experiment.make_val_env",
    "Experiment.max_seq_len",
    "Experiment.packed_batches",
    "Experiment.parallel_actors",
    "Experiment.run_name",
    "Experiment.sample_actions_val",
    "Experiment.stagger_traj_file_lengths",
    "Experiment.stop_at_val_return",
    "Experiment.train_batches_per_epoch",
    "Experiment.train_timesteps_per_epoch",
    "Experiment.tstep_encoder_type",
    "Experiment.val_interval",
    "Experiment.val_timesteps_per_epoch",
}


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("ppo/")])
def test_the_published_agent_replaces_every_choice_of_a_preset(name: str) -> None:
    published = {b.key for b in read_source(["amago"]).bindings}
    assert published.isdisjoint(_OF_THE_RUN)
    of_preset = {b.key for b in read_source([name]).bindings} - _OF_THE_RUN - {"Experiment.traj_encoder_type"}
    owners = ("Experiment.", "Learner.", "AdamW.", "EpsilonGreedy.", "DiskTrajDataset.")
    assert {key for key in of_preset if key.startswith(owners)} <= published


@pytest.mark.parametrize("name", ["tmaze", "pendulum"])
def test_the_published_agent_trains_on_top_of_a_preset(name: str, tmp_path: Path) -> None:
    exp = run_preset(name, tmp_path, "Experiment.test_run=True", on_top=["amago"])
    assert exp.learner.gradient_steps > 0
    assert (exp.learning_rate, exp.lr_warmup_steps, exp.grad_clip) == (1e-4, 500, 1.0)
    assert exp.exploration_wrapper_type is EpsilonGreedy


# --- a start without a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "encoder"),
    [*((None, name) for name in encoder_names()), *((name, None) for name in AGENTS), ("ppo", "gru")],
)
def test_a_start_without_a_file_is_valid(agent: str | None, encoder: str | None) -> None:
    made = gin_for("CartPole-v1", agent, encoder)
    loaded = load_config([made])
    assert loaded.source.warnings == []
    assert made.text.startswith(
        f"# {made.name}\ninclude '{'ppo/ppo' if agent == 'ppo' else 'base_offpolicy'}.gin'"
    )


def test_a_start_without_a_file_names_its_parts() -> None:
    text = gin_for("my_pkg.envs:My Env-v0", "sac", "gru").text
    for line in ("import my_pkg.envs", "include 'agents/sac.gin'", "include 'encoders/gru.gin'"):
        assert f"\n{line}\n" in text
    assert "Experiment.run_name = 'My-Env-v0-sac-gru'" in text
    assert "include 'encoders/gru_small.gin'" in gin_for("CartPole-v1", "ppo", "gru").text
    assert "env_mode = 'already_vectorized'" in gin_for("envpool/Pong-v5").text


def run_preset(name: str, folder: Path, *settings: str, on_top: Sequence[str] = ()) -> Experiment:
    quiet = [f"Experiment.ckpt_base_dir='{folder}'", "Experiment.verbose=False"]
    config = load_config([name, *on_top], [*quiet, *settings])
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    exp.start()
    with pytest.MonkeyPatch.context() as patch:  # settings of presets are checked like those of a user's file
        patch.setattr(checks, "is_in_preset", lambda b: b.selector in ("FFTstepEncoder", "DictTstepEncoder"))
        assert config.check_unused() == ""
    exp.learn()
    exp.close()
    gin.clear_config()
    return exp


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_collects_learns_evaluates_and_saves(name: str, tmp_path: Path) -> None:
    settings = ["Experiment.test_run=True", "Experiment.parallel_actors=2"]
    owners = {b.key.partition(".")[0] for b in read_source([name]).bindings}
    shorter = [f"{owner}.kwargs={{'max_episode_steps': 100}}" for owner in ("partial_env", "gym_env")]
    shorter = [one for one in (*shorter, "KShotWrapper.num_attempts=2") if one.partition(".")[0] in owners]
    if shorter:
        settings += [shorter[0], "Experiment.val_timesteps_per_epoch=100"]
    if name.startswith("ppo/"):
        settings += ["PPOLearner.minibatches=2", "PPOLearner.update_epochs=1"]
    if name == "ppo/pong":
        settings += ["Experiment.parallel_actors=1", "PPOLearner.minibatches=1"]  # each actor loads the game
    if name == "tmaze_long":
        settings += ["HORIZON=50"]  # otherwise no episode of a trial run ends
    if name.startswith("offline/"):
        run_preset("tmaze", tmp_path, "Experiment.epochs=1", "Experiment.val_timesteps_per_epoch=0")
        settings = [
            "Experiment.epochs=1",
            "Experiment.train_batches_per_epoch=2",
            "Experiment.val_timesteps_per_epoch=51",
            "Experiment.val_interval=1",
        ]
    exp = run_preset(name, tmp_path, *settings)
    assert exp.learner.gradient_steps > 0
    assert (exp.env_steps > 0) != name.startswith("offline/")
    assert "return" in " ".join(exp.last_val_metrics)
    assert (exp.run_dir / "ckpts" / "latest" / "policy.safetensors").is_file()
