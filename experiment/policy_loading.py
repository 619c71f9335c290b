"""Acting with a trained policy, without the experiment, the environment or the gin files it came from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch

from ..agents import BaseAgent
from ..envs import ActionCode, ActionMap, ObsLayout, is_text
from .checkpoints import MARKER, damage
from .env_spaces import EnvSpaces
from .gin_check.registry import preserved_config
from .metadata import TYPE_FIELDS, find_type, version_of
from .policy_files import POLICY_FORMAT, PolicyInfo, fit_weights, read_policy

logger = logging.getLogger("loxodon")
_FILE = "policy.safetensors"


class LoadedPolicy:
    """Acts in the environment's own terms: its observations in, its actions out; remembers each episode.

    One environment:

        policy = load_policy("runs/tmaze")
        policy.reset()
        obs, _ = env.reset()
        action = policy.act(obs)
        while not over:
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            action = policy.act(obs, reward)

    N of them at once, where an ended one is reset within the same step:

        policy.reset(num_envs=8)
        obs, _ = envs.reset()
        actions = policy.act(obs)
        for _ in range(1000):
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            actions = policy.act(obs, rewards, is_first=terminated | truncated)

    Attributes:
        agent: the agent itself, in evaluation mode.
        info: header of the file it was loaded from.
        observation_space, action_space: of the environment.
        sample: draw actions from the policy; otherwise the most likely one is taken.
    """

    def __init__(
        self, agent: BaseAgent, info: PolicyInfo, env_spaces: EnvSpaces, *, device: torch.device, sample: bool
    ) -> None:
        self.agent, self.info, self.device, self.sample = agent, info, device, sample
        self.observation_space, self.action_space = env_spaces.observation, env_spaces.action
        self._layout, self._map = ObsLayout(env_spaces.observation), ActionMap(env_spaces.action)
        self._code = ActionCode(self._map.policy_space)
        self._width = 1 + self._code.width
        self.reset()

    def reset(self, num_envs: int | None = None) -> None:
        """Forget everything: the next observations are the first of new episodes.

        Args:
            num_envs: environments that act at once, N; None for a single one, without that axis.
        """
        self._is_single = num_envs is None
        self._num_envs = 1 if num_envs is None else num_envs
        self._hidden = self.agent.init_hidden_state(self._num_envs, self.device)
        self._rl2s = np.zeros((self._num_envs, self._width), np.float32)
        self._time_idxs = np.zeros((self._num_envs, 1), np.int64)
        self._has_acted = False

    def act(self, obs: Any, rewards: Any = None, is_first: Any = None) -> Any:
        """Actions for the newest observations.

        Args:
            obs: as the environment gives it; with N environments, every array in it is (N, ...).
            rewards: (N,) float, of the step that led to `obs`; one number for a single environment. Needed
                from the second call on; not used where an episode begins.
            is_first: (N,) bool, True where `obs` is the first of a new episode, so that the past does not
                count; a bool for a single environment. None for nowhere.

        Returns: (N, ...) array in the environment's action space; one action for a single environment.

        Raises: ValueError if shapes or keys are not those of the environment the policy was trained in.
        """
        first = np.zeros(self._num_envs, np.bool_) if is_first is None else self._row(is_first, "is_first")
        first = first.astype(np.bool_)
        if self._has_acted:
            self._take_rewards(rewards, first)
        inputs = {key: torch.from_numpy(value).to(self.device) for key, value in self._flatten(obs).items()}
        with torch.inference_mode():
            if first.any():
                self._hidden = self.agent.reset_hidden_state(self._hidden, self._tensor(first))
            chosen, self._hidden = self.agent.get_actions(
                inputs, self._tensor(self._rl2s), self._tensor(self._time_idxs), self._hidden, self.sample
            )
        actions: np.ndarray = (chosen if self._code.has_integers else chosen.float()).cpu().numpy()
        self._remember(actions)
        env_actions = self._map.to_env(actions)
        if self._is_single:
            return env_actions[0]
        return np.asarray(env_actions, self.action_space.dtype)

    def _take_rewards(self, rewards: Any, first: np.ndarray) -> None:
        """Complete what the policy sees beside the observations; new arrays, as memory may hold the old."""
        if rewards is None:
            if not first.all():
                raise ValueError(
                    "act() got no rewards, but needs those of the last step: policies see them. Fix: call "
                    "act(obs, rewards), or reset() before new episodes."
                )
            rewards = np.zeros(self._num_envs)
        self._rl2s[:, 0] = self._row(rewards, "rewards")
        self._time_idxs = self._time_idxs + 1
        self._rl2s[first] = 0.0
        self._time_idxs[first] = 0

    def _remember(self, actions: np.ndarray) -> None:
        self._rl2s = np.zeros((self._num_envs, self._width), np.float32)
        self._code.write(actions, self._rl2s[:, 1:])
        self._has_acted = True

    def _row(self, value: Any, name: str) -> np.ndarray:
        array = np.asarray(value)
        array = array.reshape(1) if self._is_single and array.size == 1 else array
        if array.shape != (self._num_envs,):
            raise ValueError(
                f"{name} has shape {np.shape(value)}, but must have one entry for each of {self._num_envs} "
                "environments. Fix: call reset(num_envs=N) before the first act(), and give (N,) arrays."
            )
        return array

    def _flatten(self, obs: Any) -> dict[str, np.ndarray]:
        """The observations as the agent has them, each (N, ...); texts are left out."""
        flat = {}
        for leaf in self._layout.leaves:
            if is_text(leaf.space):
                continue
            try:
                value = np.asarray(leaf.read(obs), leaf.space.dtype)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(
                    f"The observation has no usable {leaf.key!r} ({error!r}); the policy was trained with "
                    f"{self.observation_space}. Fix: give observations of that space, batched if N > 1."
                ) from error
            value = value[None] if self._is_single else value
            shape = (self._num_envs, *(leaf.space.shape or ()))
            if value.shape != shape:
                raise ValueError(
                    f"Observation {leaf.key!r} has shape {value.shape}, but must have {shape} (environments "
                    "first). Fix: call reset(num_envs=N) with the right number, or reset() for a single "
                    "environment without that axis."
                )
            flat[leaf.key] = np.ascontiguousarray(value).reshape(shape)
        return flat

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def load_policy(
    path: str | Path, *, device: str | torch.device = "cpu", sample: bool = False
) -> LoadedPolicy:
    """Load a trained policy for acting; no Experiment and no environment is built.

    The file says how to build the agent: spaces, types, lengths and gin configuration. gin's configuration in
    this process is the same before and after, but is replaced for a moment, so no other thread should build
    configurable objects meanwhile. Modules that define the agent's classes are imported by their names, so
    open only files whose configuration you would run. Values that gin cannot write as text (objects bound in
    Python) are not in the file; the agent is then built with their defaults.

    Args:
        path: a policy file, a checkpoint folder, or a run folder (the best policy, else the latest one).
        device: where the agent acts.
        sample: draw actions from the policy; otherwise the most likely one is taken.

    Raises:
        FileNotFoundError: If there is no policy.
        ValueError: If the file is damaged, of another format, or says too little to build the agent.
        ImportError: If a class that it needs cannot be imported.
    """
    file = _find_file(Path(path).expanduser())
    info, weights = read_policy(file)
    env_spaces = info.env_spaces()
    if info.format != POLICY_FORMAT or env_spaces is None or info.types is None or info.max_seq_len is None:
        raise ValueError(
            f"{file} has policy format {info.format} (written by Loxodon {info.loxodon}); this Loxodon, "
            f"{version_of('loxodon')}, builds policies of format {POLICY_FORMAT}. Fix: use the version that "
            "wrote it, or build the experiment and call load_checkpoint_from_path."
        )
    agent = _build_agent(info, env_spaces, info.max_seq_len, file)
    fit_weights(agent, weights, file)
    where = torch.device(device)
    return LoadedPolicy(agent.to(where).eval(), info, env_spaces, device=where, sample=sample)


def _build_agent(info: PolicyInfo, env_spaces: EnvSpaces, max_seq_len: int, file: Path) -> BaseAgent:
    """The agent as the header describes it, with new weights."""
    with preserved_config(), torch.random.fork_rng(devices=[]):
        gin.clear_config()
        try:
            gin.parse_config(info.gin or "", skip_unknown=True)  # environments need not be installed here
            types = _find_types(json.loads(info.types or "{}"))
            agent: BaseAgent = types["agent_type"](
                env_spaces.policy_observation,
                env_spaces.policy_action,
                types["tstep_encoder_type"],
                types["traj_encoder_type"],
                max_seq_len,
            )
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).split("\n", maxsplit=1)[0]  # gin's additions name no file of the user's
            raise ValueError(
                f"The agent of {file} cannot be built: {reason} (written by Loxodon {info.loxodon}, this is "
                f"{version_of('loxodon')}). Fix: import the modules that define its classes before "
                "load_policy, or use the version that wrote it."
            ) from error
    return agent


def _find_types(names: Mapping[str, str | None]) -> dict[str, Any]:
    """Agent and encoder types: what gin binds for the Experiment, else what the header names."""
    found = {}
    for field in TYPE_FIELDS:
        bound = gin.get_bindings("Experiment", resolve_references=False).get(field)
        name = names.get(field)
        if hasattr(bound, "scoped_configurable_fn"):
            found[field] = bound.scoped_configurable_fn
        elif name is not None:
            found[field] = find_type(name)
        else:
            raise ValueError(
                f"its {field} has no name to import it by. Fix: define it at the top of a module, not in a "
                "function or in the main script, and train or save again"
            )
    return found


def _find_file(path: Path) -> Path:
    """The policy file that `path` means."""
    if path.is_file():
        return path
    if (path / MARKER).exists():
        if (problem := damage(path)) is not None:
            raise ValueError(f"The checkpoint {path} is damaged: {problem}. Fix: choose another one.")
        return path / "model.safetensors"
    root = path / "ckpts" if (path / "ckpts").is_dir() else path
    places = [root / "best" / _FILE, root / "latest" / _FILE, path / _FILE]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"There is no policy at {path}. Allowed are a .safetensors file, a complete checkpoint folder, and a "
        f"run folder with ckpts/best/{_FILE} or ckpts/latest/{_FILE}. Fix: check the path; runs lie in "
        "<ckpt_base_dir>/<run_name>."
    )
