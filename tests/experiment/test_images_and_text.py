"""Images stay uint8 and texts stay token ids all the way from the environment to the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from loxodon.data import load_trajectory
from loxodon.envs import EnvSpec, Tokens
from loxodon.experiment import Experiment, load_policy
from loxodon.experiment.config import ConfigError, load_config
from loxodon.nets import DictTstepEncoder

GIN = """
Experiment.run_name = 'seen'
Experiment.ckpt_base_dir = 'runs'
Experiment.max_seq_len = 6
Experiment.dataset = @DiskTrajDataset()
Experiment.traj_encoder_type = @GRUTrajEncoder
Experiment.agent_type = @{agent}
Experiment.val_timesteps_per_epoch = 0
Experiment.make_train_env = 'CartPole-v1'
Experiment.make_val_env = 'CartPole-v1'
Experiment.parallel_actors = 2
TrainingEnvs.overlap = False
Experiment.async_env_mp_context = 'fork'
Experiment.dloader_workers = 0
Experiment.verbose = False
Experiment.epochs = 1
Experiment.train_timesteps_per_epoch = 12
Experiment.train_batches_per_epoch = 2
Experiment.batch_size = 2
Experiment.seed = 3
MetricLogger.tensorboard = False
DictTstepEncoder.d_hidden = 8
DictTstepEncoder.d_output = 8
DictTstepEncoder.img_features = 8
GRUTrajEncoder.d_hidden = 8
"""
DTYPES = {"camera": "uint8", "mission": "int16", "speed": "float32"}


class SeenEnv(gym.Env[Any, Any]):
    """An image, a mission in words and a number; episodes have 5 steps."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (40, 40, 3), np.uint8),
            "mission": spaces.Text(20),
            "speed": spaces.Box(-1, 1, (1,), np.float32),
        }
    )
    action_space = spaces.Discrete(3)

    def _obs(self) -> Any:
        camera = self.np_random.integers(256, size=(40, 40, 3), dtype=np.uint8)
        return {"camera": camera, "mission": "go left", "speed": np.zeros(1, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), 1.0, self.t == 5, False, {}


@pytest.fixture(autouse=True)
def _no_configuration() -> Iterator[None]:
    gin.clear_config()
    yield
    gin.clear_config()


def dtypes(arrays: Any) -> dict[str, str]:
    return {key: str(value.dtype).removeprefix("torch.") for key, value in arrays.items()}


@pytest.mark.parametrize(("agent", "env_mode"), [("Agent", "async"), ("PPOAgent", "sync")])
def test_every_interface_keeps_the_dtypes(tmp_path: Path, agent: str, env_mode: str) -> None:
    path = tmp_path / "seen.gin"
    path.write_text(GIN.format(agent=agent))
    load_config([str(path)])
    spec = EnvSpec(SeenEnv, vocabulary=Tokens(["go", "right"], 3))
    exp = Experiment(  # type: ignore[call-arg]  # gin supplies the rest
        ckpt_base_dir=str(tmp_path), make_train_env=spec, make_val_env=spec, env_mode=env_mode
    )
    exp.start()
    encoder = exp.policy.tstep_encoder
    assert isinstance(encoder, DictTstepEncoder)  # the default encoder
    weights = [weight.clone() for weight in encoder.parameters()]
    seen: list[Any] = []
    encoder.register_forward_pre_hook(lambda _, args: seen.append((args[0], encoder.training)))
    assert dtypes(exp.train_envs.buffers.obs) == DTYPES
    exp.learn()
    assert exp.ctx.progress.gradient_steps >= 2
    assert all(dtypes(obs) == DTYPES for obs, _ in seen)
    assert {obs["camera"].dim() for obs, _ in seen} == {5}
    assert not all(map(torch.equal, weights, encoder.parameters()))
    assert all(weight.isfinite().all() for weight in encoder.parameters())
    policy = load_policy(exp.run_dir)
    exp.close()
    policy.reset()
    assert policy.act(SeenEnv().reset(seed=0)[0]) in range(3)
    if agent == "Agent":
        stored = load_trajectory(next((exp.run_dir / "buffer" / "fifo").iterdir()))
        assert dtypes(stored.obs) == DTYPES
        assert stored.obs["mission"].tolist() == [[2, 1, 0]] * len(stored.obs["speed"])
        assert {training for _, training in seen} == {True, False}


def test_settings_of_an_encoder_that_is_not_used_are_refused(seen_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FFTstepEncoder.specify_obs_keys = .* is set, but nothing"):
        header("base_offpolicy", tmp_path, seen_id, "FFTstepEncoder.specify_obs_keys=['speed']")


@pytest.mark.parametrize("preset", ["base_offpolicy", "ppo/ppo"])
def test_presets_for_any_task_embed_images_by_convolutions_and_report_it(
    preset: str, seen_id: str, tmp_path: Path
) -> None:
    said = header(preset, tmp_path, seen_id)
    assert "DictTstepEncoder (camera: image, mission: tokens, speed: flat) -> 128 (" in said
    assert "then GRUTrajEncoder -> 64 (" in said


@pytest.fixture
def seen_id(monkeypatch: pytest.MonkeyPatch) -> str:
    """The id under which SeenEnv is registered."""
    monkeypatch.setitem(gym.registry, "Seen-v0", gym.envs.registration.EnvSpec("Seen-v0", SeenEnv))
    return "Seen-v0"


def header(preset: str, folder: Path, env_id: str, *overrides: str) -> str:
    """The description of a run of a preset with another environment; all settings must be in use."""
    settings = {"epochs": 1, "parallel_actors": 1, "max_seq_len": 6, "val_timesteps_per_epoch": 0}
    names = {"run_name": "seen", "ckpt_base_dir": str(folder), "verbose": False}
    envs = {"make_train_env": "@gym_env()", "make_val_env": "@gym_env()", "evaluate_at_end": False}
    lines = [f"Experiment.{name}={value}" for name, value in {**settings, **names, **envs}.items()]
    lines += [f"gym_env.env_id={env_id}", "gym_env.vocabulary=['go', 'right']", *overrides]
    config = load_config([preset, "encoders/gru_small"], lines)
    exp = Experiment()  # type: ignore[call-arg]  # gin supplies the arguments
    exp.start()
    try:
        config.check_unused()
        return exp.describe("")
    finally:
        exp.close()
