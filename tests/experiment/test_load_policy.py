"""Policies loaded from a file alone act as in the experiment that trained them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors import safe_open
from safetensors.torch import save_file

from loxodon.agents import Agent, BaseAgent, NStep
from loxodon.envs import EnvSpec, TMazePassive, Tokens, make_vector_env, resolve_env
from loxodon.experiment import Experiment, load_policy
from loxodon.experiment.checkpoint.store import MARKER, contents
from loxodon.experiment.config import load_config
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder

from ..rounding import assert_equal_but_for_rounding
from .fakes import TINY, make_experiment, run

CONFIG = """
Experiment.max_seq_len = 12
Experiment.traj_encoder_type = @small/%s
Experiment.sample_actions_val = False
Experiment.parallel_actors = 3
Experiment.verbose = False
Experiment.train_timesteps_per_epoch = 15
Experiment.seed = 3
TMazePassive.horizon = 5
small/GRUTrajEncoder.d_hidden = 9
small/GRUTrajEncoder.d_output = 7
small/TransformerTrajEncoder.d_model = 8
TransformerTrajEncoder.d_ff = 16
TransformerTrajEncoder.n_heads = 2
TransformerTrajEncoder.heads = ('fixed', 'rotary')
TransformerTrajEncoder.pos_emb = None
TransformerTrajEncoder.qk_norm = True
TransformerTrajEncoder.sigma_reparam = False
TransformerTrajEncoder.normformer_norms = False
TransformerTrajEncoder.head_scaling = False
TransformerTrajEncoder.n_layers = 2
WIDTH = 8
FFTstepEncoder.d_hidden = %%WIDTH
"""


class TiltedEnv(gym.Env[Any, Any]):
    """Nested observations with spaces that do not start at zero, and actions with bounds of their own."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Tuple([spaces.Discrete(4, start=2), spaces.Box(-1, 1, (2,), np.float64)]),
            "words": Tokens(["hello"], 2),
        }
    )
    action_space = spaces.Box(np.array([[0.0, -4.0]]), np.array([[1.0, 8.0]]), dtype=np.float64)

    def _obs(self) -> Any:
        return {"where": (2 + self.t % 4, self.np_random.uniform(-1, 1, 2)), "words": "hello"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self._obs(), float(action.sum()), self.t == 5, False, {}


def configure(folder: Path, encoder: str = "GRUTrajEncoder") -> None:
    """Bind the configuration of the runs of this file."""
    (folder / "tiny.gin").write_text(TINY + CONFIG % encoder)
    load_config([str(folder / "tiny.gin")], [f"Experiment.ckpt_base_dir='{folder}'"])


def trained(folder: Path, env: Any, encoder: str = "GRUTrajEncoder", **changes: Any) -> Experiment:
    """A finished run that was configured by gin."""
    configure(folder, encoder)
    if isinstance(env, EnvSpec) and env.target is TiltedEnv:
        gin.bind_parameter("FFTstepEncoder.specify_obs_keys", ["where/0", "where/1"])
    return run(Experiment(make_train_env=env, make_val_env=env, **changes))


def with_opinions(exp: Experiment, spec: EnvSpec, timesteps: int) -> list[np.ndarray]:
    """Publish large random weights, because barely trained ones act the same everywhere.

    Returns their actions in the experiment.
    """
    for seed in range(200):
        torch.manual_seed(seed)
        with torch.no_grad():
            for param in exp.policy.parameters():
                param.normal_()
        actions = recorded(exp, spec, timesteps)
        if len(np.unique(actions)) > 1:
            break
    exp.write_latest_policy()
    return actions


def recorded(exp: Experiment, spec: EnvSpec, timesteps: int) -> list[np.ndarray]:
    """The actions (N, ...) that the envs received at each step of greedy interaction."""
    envs = make_vector_env([spec] * 3, "sync")
    torch.manual_seed(5)
    steps: list[np.ndarray] = []
    step = envs.step

    def noting(actions: Any) -> Any:
        steps.append(np.array(actions))
        return step(actions)

    envs.step = noting  # type: ignore[method-assign]
    exp.interact(envs, timesteps)
    envs.close()
    return steps


def acted(policy: Any, spec: EnvSpec, timesteps: int) -> list[list[Any]]:
    """The policy's actions in raw environments that are reset as soon as they end."""
    torch.manual_seed(5)
    seed = int(torch.randint(2**31 - 1, ()))
    envs = [spec.build_raw() for _ in range(3)]
    obs = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    policy.reset(num_envs=3)
    space = envs[0].observation_space
    actions = policy.act(stacked(space, obs))
    history = []
    for _ in range(timesteps):
        history.append(list(actions))
        results = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        ended = np.array([r[2] or r[3] for r in results])
        obs = [env.reset()[0] if e else r[0] for env, r, e in zip(envs, results, ended, strict=True)]
        rewards = np.array([r[1] for r in results])
        actions = policy.act(stacked(space, obs), rewards, is_first=ended)
    return history


def stacked(space: Any, obs: list[Any]) -> Any:
    """Observations of N envs in the form of vector environments."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(child, [o[key] for o in obs]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stacked(child, [o[i] for o in obs]) for i, child in enumerate(space.spaces))
    return np.stack([np.asarray(o) for o in obs])


@pytest.mark.parametrize(
    ("env", "encoder"), [("CartPole-v1", "TransformerTrajEncoder"), (TMazePassive, "GRUTrajEncoder")]
)
def test_a_loaded_policy_acts_as_the_experiment_does(tmp_path: Path, env: Any, encoder: str) -> None:
    exp = trained(tmp_path, env, encoder)
    spec = resolve_env(exp.make_val_env)  # type: ignore[arg-type]
    expected = with_opinions(exp, spec, 40)
    gin.clear_config()
    policy = load_policy(exp.run_dir / "ckpts" / "latest" / "policy.safetensors")
    # a setting of the environment, which the policy does not need
    gin.parse_config("TMazePassive.horizon = 5")
    assert np.array_equal(np.array(acted(policy, spec, 40)), np.array(expected))
    assert len(np.unique(expected)) > 1


def test_a_policy_handles_nested_observations_and_scaled_actions(tmp_path: Path) -> None:
    spec = EnvSpec(TiltedEnv)
    exp = trained(tmp_path, spec)
    expected = with_opinions(exp, spec, 12)
    policy = load_policy(exp.run_dir / "ckpts" / "latest" / "policy.safetensors")
    actions = np.array(acted(policy, spec, 12))  # the env itself checks the bounds
    assert actions.shape == (12, 3, 1, 2)
    assert actions.dtype == np.float64
    scaled = (actions.reshape(12, 3, 2) - [0.5, 2.0]) / [0.5, 6.0]
    # actions are rounded when they are sent
    assert_equal_but_for_rounding(scaled, np.array(expected, float), 3)


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The latest policy of a run that also has a best one."""
    exp = trained(tmp_path_factory.mktemp("sound"), "CartPole-v1", val_timesteps_per_epoch=60)
    return exp.run_dir / "ckpts" / "latest" / "policy.safetensors"


@pytest.fixture
def own_run(policy_file: Path, tmp_path: Path) -> Path:
    """A copy of that run for tests that change it."""
    return shutil.copytree(policy_file.parents[2], tmp_path / "tiny")


def test_a_device_that_does_not_exist_is_an_error(policy_file: Path) -> None:
    for device in ("cuda:77", "no-device"):
        with pytest.raises(ValueError, match=rf"The device is '{device}'.* Fix: use 'cpu'"):
            load_policy(policy_file, device=device)


def test_an_agent_is_notified_that_its_weights_were_loaded(
    policy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        BaseAgent, "on_checkpoint_loaded", lambda agent, is_resume: told.append((agent, is_resume))
    )
    policy = load_policy(policy_file)
    assert told == [(policy.agent, False)]


def test_a_single_environment_needs_no_axis(policy_file: Path) -> None:
    policy, many = load_policy(policy_file), load_policy(policy_file)
    env = gym.make("CartPole-v1")
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        policy.reset()
        many.reset(num_envs=2)
        action, over = policy.act(obs), False
        actions = many.act(np.stack([obs, obs]))
        while not over:
            assert env.action_space.contains(action)
            assert actions.tolist() == [action, action]
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            action = policy.act(obs, reward)
            actions = many.act(np.stack([obs, obs]), [reward, reward])


def test_a_new_episode_forgets_the_previous_one(policy_file: Path) -> None:
    policy = load_policy(policy_file)
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((4, 1, 4)).astype(np.float32)

    def probs(start: int, is_first: Any) -> Any:
        policy.reset(num_envs=1)
        for i in range(start, 3):
            policy.act(obs[i], [9.0] if i > start else None)
        policy.act(obs[3], [9.0] if start < 3 else None, is_first)
        return policy._hidden[0]

    assert torch.equal(probs(0, [True]), probs(3, None))
    assert not torch.equal(probs(0, [False]), probs(3, None))


def test_loading_leaves_gin_and_random_numbers_unchanged(policy_file: Path) -> None:
    gin.bind_parameter("FFTstepEncoder.d_hidden", 77)
    thing = object()
    gin.bind_parameter("Actor.d_hidden", thing)  # it has no text, but is kept
    texts, state = (gin.config_str(), gin.operative_config_str()), torch.get_rng_state()
    gin.finalize()
    load_policy(policy_file)  # its actor has a width of 8
    assert (gin.config_str(), gin.operative_config_str()) == texts
    assert gin.query_parameter("Actor.d_hidden") is thing
    assert gin.config_is_locked()
    assert torch.equal(torch.get_rng_state(), state)


def test_best_takes_precedence_over_latest_and_every_kind_of_path_works(own_run: Path) -> None:
    ckpts = own_run / "ckpts"
    assert load_policy(own_run).info == load_policy(ckpts / "best" / "policy.safetensors").info
    assert load_policy(ckpts / "training_states" / "tiny_epoch_0").info.epoch == 0
    assert load_policy(ckpts / "policy_weights" / "policy_epoch_0.safetensors").info.epoch == 0
    (ckpts / "best" / "policy.safetensors").unlink()
    assert load_policy(own_run).info.is_final
    assert load_policy(ckpts).info.is_final
    with pytest.raises(TypeError, match=r"load_policy got the path None, but needs a str or Path.*Fix:"):
        load_policy(None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"load_policy: .*does not exist.*Fix:"):
        load_policy(own_run / "nothing")


def test_sampling_draws_from_the_policy(policy_file: Path) -> None:
    policy = load_policy(policy_file, sample=True)
    policy.reset(num_envs=64)
    assert len(set(policy.act(np.zeros((64, 4), np.float32)).tolist())) > 1


GOOD = np.zeros((2, 4), np.float32)
MISTAKES: dict[str, tuple[tuple[Any, ...], str]] = {
    "shape": ((np.zeros((3, 4)), [0, 0]), r"shape \(3, 4\).* the shape \(2, 4\).*Fix:.*reset\(num_envs=N\)"),
    "key": (({"wrong": 1}, [0, 0]), r"got \{'wrong': 1\}.* requires real numbers.*Fix:"),
    "text": ((np.full((2, 4), "1.0"), [0, 0]), r"got array\(\[\['1.0'.*real numbers.*Fix:"),
    "too large": ((np.full((2, 4), 1e39), [0, 0]), r"got inf as .*\(environment 0\).*Fix:"),
    "no rewards": ((GOOD,), r"got no rewards.*Fix:"),
    "text as rewards": (
        (GOOD, ["1", "1"]),
        r"rewards of act\(\) is \['1', '1'\], but must hold numbers.*Fix:",
    ),
    "rewards": ((GOOD, np.zeros(3)), r"rewards has shape \(3,\).*Fix:"),
    "nan": (
        (np.array([[0] * 4, [0, 0, 0, np.nan]]), [0, 0]),
        r"got NaN as observation 'observation' \(environment 1\).*Fix:",
    ),
    "infinite": (
        (np.array([[np.inf, 0, 0, 0], [0] * 4]), [0, 0]),
        r"got inf as observation 'observation' \(environment 0\).*Fix:",
    ),
    "nan reward": ((GOOD, [np.nan, 0.0]), r"The reward of environment 0 is NaN or infinite. Fix:"),
}


@pytest.mark.parametrize("how", list(MISTAKES))
def test_mistakes_are_named_and_leave_the_policy_unchanged(policy_file: Path, how: str) -> None:
    policy, (arguments, message) = load_policy(policy_file), MISTAKES[how]
    policy.reset(num_envs=2)
    expected = policy.act(GOOD)
    with pytest.raises((ValueError, TypeError), match=message):
        policy.act(*arguments)
    for wrong in (-1, 0, "a", True):
        with pytest.raises(
            ValueError, match=r"num_envs is .*, but must be None or an integer of at least 1. Fix"
        ):
            policy.reset(wrong)  # type: ignore[arg-type]
    # rewards of a finished episode are ignored
    again = policy.act(GOOD, [np.nan, np.nan], is_first=[True, True])
    assert again.tolist() == expected.tolist()


def changed_header(path: Path, **changes: str | None) -> Path:
    """A copy of a policy file with other entries in its header; None removes one."""
    with safe_open(path, framework="pt") as file:
        header = {**file.metadata(), **changes}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    copy = path.with_name("changed.safetensors")
    save_file(tensors, copy, metadata={k: v for k, v in header.items() if v is not None})
    return copy


def test_environments_of_the_config_need_not_be_installed(policy_file: Path) -> None:
    with safe_open(policy_file, framework="pt") as file:
        text = file.metadata()["gin"]
    text = f"import not_installed_here\n{text}\nnot_installed_here.Env.horizon = 5\n"
    text += "Experiment.make_train_env = @not_installed_here.Env\n"
    load_policy(changed_header(policy_file, gin=text))


def test_settings_that_exist_only_in_another_version_are_skipped(
    policy_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with safe_open(policy_file, framework="pt") as file:
        text = file.metadata()["gin"]
    load_policy(changed_header(policy_file, gin=f"{text}\nAgent.num_actions_for_value = 1\n"))
    assert "saved by another version" in caplog.text
    assert "ignored: Agent.num_actions_for_value = 1." in caplog.text


# --- untrusted files ------------------------------------------------------------------------------------

MARKS: list[str] = []


@gin.configurable
def leave_a_mark() -> float:
    """Represents any configurable of this process that does more than build a network."""
    MARKS.append("called")
    return 0.9


def box(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"type": "Box", "low": 0, "high": 1, "shape": shape, "dtype": dtype}


def crafted_spaces(observation: Any = None, action: Any = None) -> str:
    two = {"type": "Discrete", "n": 2, "start": 0}
    return json.dumps({"observation": observation or box(4), "action": action or two})


def nested(depth: int) -> str:
    return '{"observation": ' + '{"type": "Tuple", "spaces": [' * depth + "]}" * depth + ', "action": 1}'


@pytest.fixture
def unheard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `unheard_of` that could be imported, and the file that its import would create."""
    mark, name = tmp_path / "imported", "unheard_of"
    (tmp_path / f"{name}.py").write_text(
        "import gin, pathlib\n"
        "from loxodon.nets import GRUTrajEncoder\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "@gin.configurable\n"
        "class UnheardOf(GRUTrajEncoder):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    MARKS.clear()
    yield mark
    sys.modules.pop(name, None)
    assert not MARKS, "a file had something called"


POPEN = {
    "gin": "",
    "types": json.dumps(
        {
            "agent_type": "loxodon.agents.agent:Agent",
            "tstep_encoder_type": "subprocess:Popen",
            "traj_encoder_type": "loxodon.nets.recurrent:GRUTrajEncoder",
        }
    ),
    # Popen(<Dict space>, <int>) runs the keys of the space as a command.
    "spaces": crafted_spaces(
        {
            "type": "Dict",
            "spaces": [
                [key, {"type": "Discrete", "n": 2, "start": 0}]
                for key in ("/usr/bin/awk", "BEGIN{system(MARK)}")
            ],
        }
    ),
}
SIZES = {
    "huge": crafted_spaces(box(10**6, 10**6)),
    "sum": crafted_spaces({"type": "Tuple", "spaces": [box(1, 10**12), box(-1, 10**12)]}),
    "actions": crafted_spaces(action={"type": "Discrete", "n": 10**12, "start": 0}),
    "factors": crafted_spaces(action={"type": "MultiBinary", "n": 10**12}),
}
REFUSED: dict[str, tuple[Mapping[str, str | None], str]] = {
    "popen": (POPEN, r"gives 'subprocess:Popen' to an agent, but a policy file may only name networks.*Fix:"),
    "another network": (
        {"types": '{"agent_type": "torch.nn.modules.linear:Linear"}'},
        r"Linear'> is not a class derived from BaseAgent.*Fix:",
    ),
    "function": (
        {"types": '{"agent_type": "os:system"}'},
        "'system' of the module 'os', which has no such class",
    ),
    "module in a module": (
        {"types": '{"agent_type": "loxodon.experiment.checkpoint.load_policy:importlib.import_module"}'},
        "import_module' to an agent, but a policy file may only name networks",
    ),
    "not imported": ({"types": '{"agent_type": "unheard_of:X"}'}, r"is not imported here.*Fix: .*trust="),
    "types": ({"types": "[" * 100_000, "gin": ""}, r"no name by which it can be imported. Fix:"),
    "call": (
        {"gin": "+Agent.gamma = @leave_a_mark()"},
        r"Agent.gamma names @leave_a_mark\(\).*networks.*trust=",
    ),
    "macro": ({"gin": "+Agent.gamma = [%HARM]\nHARM = @leave_a_mark()"}, r"Agent.gamma names @leave_a_mark"),
    "env": (
        {"gin": "+Agent.gamma = @gym_env()\ngym_env.id = 'unheard_of:X-v0'"},
        "Agent.gamma names @gym_env",
    ),
    "type": (
        {"gin": "+Experiment.traj_encoder_type = @leave_a_mark"},
        "not a class derived from TrajEncoder",
    ),
    "macro as type": (
        {"gin": "+Experiment.agent_type = %A\nA = %B\nB = @DiskTrajDataset"},
        "derived from BaseAgent",
    ),
    "nonsense": ({"gin": "= ["}, r"its gin configuration cannot be read.*Fix:"),
    "brackets": ({"gin": "Agent.gamma = " + "[" * 5000}, r"cannot be built: .*(recursion|nested).*Fix:"),
    **{
        name: ({"gin": f"+{name} = 100_000_000"}, r"cannot be built: its header asks for more than .*Fix:")
        for name in ("FFTstepEncoder.n_layers", "Actor.n_layers", "CriticEnsemble.n_layers")
    },
    "layers of another encoder": (
        {
            "gin": "+Experiment.traj_encoder_type = @TransformerTrajEncoder\n"
            "TransformerTrajEncoder.n_layers = 100_000_000"
        },
        r"asks for more than .* but the file has \d+ tensors. Fix:",
    ),
    "layers without weights": (
        {"gin": "+FFTstepEncoder.n_layers = 1" + "0" * 30},
        r"cannot be built: .*Fix:",
    ),
    "an error after large layers": (
        {"gin": "+FFTstepEncoder.d_hidden = 1_000_000\nActor.activation = 'none such'"},
        r"cannot be built: .*none such.*Fix:",
    ),
    "critics": ({"gin": "+Agent.num_critics = 1_000_000_000"}, r"do not fit this agent.*Fix:"),
    "digits": ({"gin": "+FFTstepEncoder.d_hidden = 1" + "0" * 400}, r"cannot be built: .*Fix:"),
    "more digits": ({"gin": "+FFTstepEncoder.d_hidden = 1" + "0" * 5000}, r"Fix:"),
    "nothing": ({"gin": "+FFTstepEncoder.d_hidden = 0"}, r"Fix:"),
    "length": ({"max_seq_len": "999999999999"}, r"max_seq_len = 999999999999, but it must be .*Fix:"),
    "no length": ({"max_seq_len": "-1"}, r"max_seq_len = -1, but it must be .*Fix:"),
    "a long length": ({"max_seq_len": "9" * 5000}, r"not a readable safetensors file .*Fix:"),
    "width": ({"gin": "+FFTstepEncoder.d_hidden = 10_000_000"}, r"weights in .* do not fit this agent.*Fix:"),
    "no spaces": ({"spaces": "{"}, r"describes no spaces.*Fix:"),
    "spaces in spaces": ({"spaces": nested(400)}, r"describes no space.*Fix:"),
    "dtype": (
        {"spaces": crafted_spaces(box(4, dtype="S1000000000"))},
        r"S1000000000 is not a numeric dtype.*Fix:",
    ),
    "format": ({"loxodon_format": "99"}, r"its policy format is 99, .*Fix:"),
    "no format": ({"loxodon_format": None}, r"does not describe the agent .*Fix:"),
    "unknown": (
        {"gin": "Agent.actor_type = @NotThere"},
        r"cannot be built: .*NotThere.*Fix: import the modules",
    ),
    "gone": (
        {"gin": "", "types": '{"agent_type": "no_such_module:Gone"}'},
        r"'Gone' of the module 'no_such_module'.*Fix:",
    ),
    "no types": ({"gin": "", "types": "{}"}, r"agent_type has no name by which it can be imported. Fix:"),
    **{
        name: ({"spaces": text}, r"numbers, but at most 67,108,864 are allowed.*Fix:")
        for name, text in SIZES.items()
    },
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_an_unusable_file_is_refused_and_runs_nothing(policy_file: Path, unheard_of: Path, how: str) -> None:
    changes, message = REFUSED[how]
    with pytest.raises((ValueError, ImportError), match=message):
        load_policy(crafted(policy_file, changes, unheard_of))
    assert not unheard_of.exists()


def crafted(path: Path, changes: Mapping[str, str | None], mark: Path) -> Path:
    """A copy of a policy file with another header; gin text behind a `+` is appended."""
    with safe_open(path, framework="pt") as file:
        old = file.metadata()
    command = json.dumps(json.dumps(f"touch {mark}"))[1:-1]
    new = {key: value and value.replace("MARK", command) for key, value in changes.items()}
    if (text := new.get("gin") or "").startswith("+"):
        new["gin"] = old["gin"] + text.replace("+", "\n", 1)
    return changed_header(path, **new)


def test_the_memory_of_one_environment_is_bounded(tmp_path: Path) -> None:
    exp = trained(tmp_path, "CartPole-v1", "TransformerTrajEncoder")
    file = changed_header(exp.run_dir / "ckpts" / "latest" / "policy.safetensors", max_seq_len=str(2**30))
    with pytest.raises(ValueError, match=r"its hidden state for one environment takes .*Fix:"):
        load_policy(file)


class Computing(GRUTrajEncoder):
    """Computes with values in its constructor, which meta tensors do not have, and has buffers."""

    size = 0

    def __init__(self, tstep_dim: int, max_seq_len: int, **settings: Any) -> None:
        super().__init__(tstep_dim, max_seq_len, **settings)
        self.scale = float(torch.ones(2).sum())
        for i in range(self.size):
            self.register_buffer(f"large_{i}", torch.zeros(1 << 23))


def test_an_encoder_that_computes_in_its_constructor_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path)
    exp = run(
        Experiment(make_train_env="CartPole-v1", make_val_env="CartPole-v1", traj_encoder_type=Computing)
    )
    latest = exp.run_dir / "ckpts" / "latest" / "policy.safetensors"
    with safe_open(latest, framework="pt") as opened:
        lines = opened.metadata()["gin"].splitlines()
    file = changed_header(latest, gin="\n".join(one for one in lines if "traj_encoder_type" not in one))
    load_policy(file)
    monkeypatch.setattr(Computing, "size", 100)  # 3.3 GB
    with pytest.raises(ValueError, match=r"asks for more than [\d,]+ numbers.*Fix:"):
        load_policy(file)


def test_imports_and_unrelated_settings_are_skipped(policy_file: Path, unheard_of: Path) -> None:
    text = "+import unheard_of\nfrom unheard_of import UnheardOf\ninclude 'none.gin'\nleave_a_mark.x = @Env()"
    policy = load_policy(crafted(policy_file, {"gin": text}, unheard_of))
    assert policy.agent.traj_encoder.__class__.__name__ == "GRUTrajEncoder"
    assert not unheard_of.exists()


def test_a_trusted_module_is_imported(policy_file: Path, unheard_of: Path) -> None:
    with safe_open(policy_file, framework="pt") as file:
        header = file.metadata()
    file = changed_header(
        policy_file,
        gin="import unheard_of\n" + header["gin"].replace("GRUTrajEncoder", "UnheardOf"),
        types=header["types"].replace("loxodon.nets.recurrent:GRUTrajEncoder", "unheard_of:UnheardOf"),
    )
    with pytest.raises(
        ImportError, match=r"'UnheardOf' of the module 'unheard_of', which is not imported.*Fix:"
    ):
        load_policy(file)
    with pytest.raises(ImportError):
        load_policy(file, trust=("unheard", "unheard_of.part"))
    assert not unheard_of.exists()
    policy = load_policy(file, trust="unheard_of")
    assert type(policy.agent.traj_encoder).__name__ == "UnheardOf"
    assert unheard_of.exists()
    assert (
        load_policy(file).agent.state_dict().keys() == policy.agent.state_dict().keys()
    )  # the module is imported now


@pytest.mark.parametrize(
    ("way", "how"),
    [("resume", "popen"), ("restore_from", "huge"), ("WarmStart.source", "popen"), ("collect", "huge")],
)
def test_no_other_way_of_loading_a_policy_runs_anything(
    own_run: Path, unheard_of: Path, way: str, how: str
) -> None:
    state, latest = (
        own_run / "ckpts/training_states/tiny_epoch_0",
        own_run / "ckpts/latest/policy.safetensors",
    )
    changes = {**REFUSED[how][0], "gin": "import unheard_of\nAgent.gamma = @leave_a_mark()"}
    for path in (state / "model.safetensors", latest):
        crafted(path, changes, unheard_of).replace(path)
    about = json.loads((state / "metadata.json").read_text())
    about |= {"config": changes["gin"], "config_requested": changes["gin"]}
    about |= {"types": json.loads(POPEN["types"])}
    about |= {"spaces": json.loads(changes["spaces"].replace("MARK", f"touch {unheard_of}"))}
    (state / "metadata.json").write_text(json.dumps(about))
    (state / MARKER).unlink()
    (state / MARKER).write_text(json.dumps({"files": contents(state)}))
    configure(own_run.parent)
    begin: dict[str, Any] = {"make_train_env": "CartPole-v1", "make_val_env": "CartPole-v1"}
    if way == "collect":
        begin["mode"] = "collect"
    elif way != "resume":
        begin["run_name"] = "other"
    if way == "restore_from":
        begin[way] = str(state)
    elif way == "WarmStart.source":
        gin.bind_parameter(way, str(latest))
    again = Experiment(**begin)

    def load() -> None:
        again.start()
        again.load_checkpoint() if way == "resume" else again.read_latest_policy()

    with pytest.raises(ValueError, match=r"another environment|numbers, but at most .* are allowed"):
        load()
    assert not unheard_of.exists()


# ---- types that Python configured ----


def from_python(folder: Path, **types: Any) -> Experiment:
    """A finished run without gin."""
    settings: dict[str, Any] = {
        "agent_type": partial(partial(Agent, num_critics=2), training_discounts=(0.9, np.float32(0.5))),
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=16, d_output=8),
        "traj_encoder_type": partial(GRUTrajEncoder, d_hidden=8, d_output=8),
        "epochs": 1,
    }
    return run(make_experiment(folder, **settings | types))


def test_a_partial_is_stored_with_its_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exp = from_python(tmp_path)
    policy = load_policy(exp.run_dir)
    assert policy.agent.state_dict().keys() == exp.policy.state_dict().keys()
    assert policy.agent.traj_encoder.emb_dim == 8
    assert "do not record how to create" not in caplog.text
    before = policy.memory["h"]
    assert before.shape == (1, 2, 8)
    policy.act(policy.observation_space.sample())
    assert not np.array_equal(policy.memory["h"], before)


def test_an_object_as_an_argument_of_a_type_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from_python(tmp_path, agent_type=partial(Agent, returns=NStep(n=3)))
    assert "NStep(n=3) is an object (NStep). Fix: set it by gin" in caplog.text


def wrapped(make: Any) -> Any:
    """A decorator that changes what it decorates."""
    return functools.wraps(make)(lambda *args, **kwargs: make(*args, num_critics=3, **kwargs))


NAMELESS: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda *args: Agent(*args, num_critics=3),
    "local class": lambda: type("Local", (Agent,), {"__qualname__": "make.<locals>.Local"}),
    "class of another's name": lambda: type("Agent", (Agent,), {"__module__": Agent.__module__}),
    "decorated class": lambda: wrapped(Agent),
    "partial of a lambda": lambda: partial(lambda *args, **kw: Agent(*args, num_critics=3, **kw), tau=0.1),
}


@pytest.mark.parametrize("kind", list(NAMELESS))
def test_a_type_without_a_name_gives_a_warning_and_can_be_passed_to_load_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    nameless = NAMELESS[kind]()
    exp = from_python(tmp_path, agent_type=nameless)
    (warning,) = (r.getMessage() for r in caplog.records if "do not record how to create" in r.getMessage())
    assert re.search(r"agent_type = .*Fix: .*types=\{'agent_type': ...\}", warning)
    with pytest.raises(
        ValueError, match=r"agent_type has no name.*Fix: call load_policy\(..., types=\{'agent_type'"
    ):
        load_policy(exp.run_dir)
    policy = load_policy(exp.run_dir, types={"agent_type": nameless})
    assert policy.agent.state_dict().keys() == exp.policy.state_dict().keys()
    with pytest.raises(ValueError, match=r"types has the key 'agent'.*agent_type.*Fix"):
        load_policy(exp.run_dir, types={"agent": nameless})


def call(name: str, **kwargs: Any) -> str:
    return json.dumps({"agent_type": {"call": {"name": name}, "args": [], "kwargs": kwargs}})


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (call("os:system"), "derived from BaseAgent|no such class"),
        (
            call("loxodon.agents.agent:Agent", gamma={"name": "os:system"}),
            "no such class|may only name networks",
        ),
        (
            call("loxodon.agents.agent:Agent", gamma={"name": "subprocess:Popen"}),
            "may only name networks.*Fix",
        ),
        (
            call(
                "loxodon.agents.agent:Agent",
                gamma={"call": {"name": "subprocess:Popen"}, "args": [], "kwargs": {}},
            ),
            "may only name networks.*Fix",
        ),
        (
            call(
                "loxodon.agents.agent:Agent",
                gamma={
                    "call": {"name": "torch.nn.modules.linear:Identity"},
                    "args": [],
                    "kwargs": {},
                    "now": True,
                },
            ),
            "not a value that Loxodon writes.*Fix",
        ),
        ('{"agent_type": {"call": 3}}', "not a value that Loxodon writes.*Fix"),
        ('{"agent_type": ' + '{"call": ' * 300 + "3" + "}" * 301, "not a value that Loxodon writes.*Fix"),
    ],
)
def test_arguments_in_a_file_may_only_name_networks(policy_file: Path, types: str, words: str) -> None:
    with pytest.raises((ValueError, ImportError), match=words):
        load_policy(changed_header(policy_file, gin="", types=types))
