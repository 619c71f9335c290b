"""Base class of all agents: the sequence model, acting, and the work after each update."""

from __future__ import annotations

import contextlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, get_type_hints

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ..data import Batch
from ..nets import (
    DistributionType,
    PolicyDistribution,
    RunningStatistics,
    TrajEncoder,
    TstepEncoder,
    sum_over_processes,
)
from ..nets.log_once import log_once
from ..nets.mlp import RMSNorm
from .policies import ActionMask, distribution_for
from .sequence_model import SequenceModel, build_encoders

_FORBIDDEN = -1e8  # log-probabilities of actions that a mask forbids are lower


@dataclass(frozen=True)
class LossTerms:
    """Losses before any mean, so that masks can be edited and micro-batches weighted.

    Attributes:
        actor: (B, L, G, 1) float.
        critic: (B, L, C, G, 1) float.
        metrics: scalar tensors by name. With several processes, the logs contain their mean, weighted by real
            timesteps, or the extreme if the name ends in `_min` or `_max`.
        extra: auxiliary losses by name, each (B, L, ...) float. They are masked and averaged like the others,
            multiplied by `Experiment.extra_loss_weights`, and logged as `<name>_loss`.
        mask: (B, L, 1) bool, True on the transitions whose losses count; None for the mask of the batch.
    """

    actor: Tensor
    critic: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None


@dataclass(frozen=True)
class ActOutput:
    """The result of acting for one timestep of N envs.

    Attributes:
        actions: input of the envs: (N,) int64 if discrete, (N, K) int64 for K discrete choices at once,
            (N, A) float32 in [-1, 1] otherwise.
        hidden_state: input of the next call.
        extras: arrays (N, ...) that trajectory files and the rollout buffer store for every step, with the
            same names at every timestep. On-policy agents always have "log_probs" (N, 1) float32; "values"
            (N, 1) float32 unless nobody reads them; and "samples" (N, A) float32 if the policy's samples
            differ from the actions of the envs. "action_probs" (N, A) float32, or (N, K, M) for factors of
            at most M actions, are the probabilities that the actions were drawn with; combined with
            exploration noise they become the "log_probs" that are stored.
    """

    actions: Tensor
    hidden_state: Any
    extras: dict[str, Tensor] = field(default_factory=dict)


MAX_COMPILED = 8  # torch's own limit on versions of a compiled function
CODE_SUPPLIED = ["obs_space", "action_space", "tstep_encoder_type", "traj_encoder_type", "max_seq_len"]
"""Arguments of every agent that code supplies; gin may not bind them."""


class BaseAgent(nn.Module, ABC):
    """A timestep encoder, a trajectory encoder, and the heads that a subclass adds.

    A subclass declares its own settings and passes all others on, by `*given` and `**shared`. The parameters
    that it passes on are part of its signature too, for gin, checks of configs and readers.

    Args:
        obs_space: named observations.
        action_space: Discrete or MultiDiscrete (K,) starting at 0, or Box of shape (A,) within [-1, 1].
        tstep_encoder_type, traj_encoder_type: built here from positional arguments only; gin sets the rest.
        max_seq_len: longest training sequence in transitions.
        distribution_type: distribution of the policy, by name or as a class; None for the default of the
            action space. See `policies.distribution_for`.
        action_mask_key: observation that marks the allowed discrete actions (see `policies.ActionMask`);
            others are never taken, nor bootstrapped from. None: all actions are allowed.
        pass_obs_keys_to_actor: Box observations that the policy's head reads, unchanged, in addition to the
            state.
        pass_timestep_to_heads: append the normalised embedding of the timestep to the trajectory encoder's
            output, which may hardly change between two timesteps late in an episode.
    Raises: ValueError for any other action space, or settings that do not fit it.
    """

    def __init__(
        self,
        obs_space: spaces.Dict,
        action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box,
        tstep_encoder_type: Callable[..., TstepEncoder],
        traj_encoder_type: Callable[..., TrajEncoder],
        max_seq_len: int,
        *,
        distribution_type: DistributionType | str | None = None,
        action_mask_key: str | None = None,
        pass_obs_keys_to_actor: Sequence[str] | None = None,
        pass_timestep_to_heads: bool = False,
    ) -> None:
        super().__init__()
        self.obs_space, self.action_space, self.max_seq_len = obs_space, action_space, max_seq_len
        if isinstance(action_space, spaces.Discrete):
            self.action_dim = int(action_space.n)
        elif isinstance(action_space, spaces.MultiDiscrete) and len(action_space.shape) == 1:
            self.action_dim = int(action_space.nvec.sum())
        elif isinstance(action_space, spaces.Box) and len(action_space.shape) == 1:
            self.action_dim = int(action_space.shape[0])
        else:
            raise ValueError(
                f"The action space is {action_space}, but agents act in Discrete and flat MultiDiscrete or "
                "Box spaces. Fix: wrap the environment in loxodon.envs.SequenceEnv."
            )
        name = type(self).__name__
        self.distribution = distribution_for(action_space, distribution_type, f"{name}.distribution_type")
        self.is_discrete = self.distribution.is_discrete
        self.action_mask: ActionMask | None = None
        if action_mask_key is not None:
            self.action_mask = ActionMask.of(
                action_mask_key, obs_space, action_space, f"{name}.action_mask_key"
            )
        self.actor_obs_keys = tuple(pass_obs_keys_to_actor or ())
        self._actor_obs_dim = _width_of(obs_space, self.actor_obs_keys, f"{name}.pass_obs_keys_to_actor")
        self.tstep_encoder, self.traj_encoder = build_encoders(
            tstep_encoder_type, traj_encoder_type, obs_space, 1 + self.action_dim, max_seq_len
        )
        self.timestep_norm = RMSNorm(self.tstep_encoder.emb_dim) if pass_timestep_to_heads else None
        # The keys are prefixes of exported hidden states. The policy reads the first model. A hidden state of
        # the agent is a tuple with the state of each model.
        self.sequence_models = {"": SequenceModel(self.tstep_encoder, self.traj_encoder, self.timestep_norm)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = vars(cls).get("__init__")
        parent: Any = cls.__mro__[1]
        # gin sets the parameters of a wrapped base class by that class's own name, so the subclass must not
        # declare them again.
        if own is not None and inspect.unwrap(parent.__init__) is parent.__init__:
            _declare_what_is_passed_on(own, parent.__init__)

    @abstractmethod
    def forward(self, batch: Batch, with_metrics: bool = False) -> LossTerms:
        """The losses of a batch; gathers running statistics in training mode."""

    @abstractmethod
    def policy(self, state: Tensor) -> PolicyDistribution:
        """The acting policy: `actor_input` (..., D) -> distribution over (..., A)."""

    @property
    def leaves_out_transitions(self) -> bool:
        """True if `LossTerms.mask` may differ from the mask of the batch."""
        return False

    @property
    def state_dim(self) -> int:
        """Width D of states."""
        return self._models[0].dim

    @property
    def actor_dim(self) -> int:
        """Width of `actor_input`."""
        return self.state_dim + self._actor_obs_dim

    def actor_input(self, state: Tensor, obs: dict[str, Tensor]) -> Tensor:
        """Inputs of policies: states (..., D) of timesteps and the observations passed on to the actor."""
        if not self.actor_obs_keys:
            return state
        raw = [obs[key].reshape(*state.shape[:-1], -1).float() for key in self.actor_obs_keys]
        return torch.cat([state, *raw], dim=-1)

    def restrict(self, policy: PolicyDistribution, obs: dict[str, Tensor]) -> PolicyDistribution:
        """The policy, or policies (..., G, P), without the actions that observations (..., *) forbid."""
        if self.action_mask is None:
            return policy
        return policy.masked(self.allowed_actions(obs, policy.params))

    def imitation_log_prob(self, policy: PolicyDistribution, actions: Tensor) -> Tensor:
        """Log-probabilities (..., 1) of recorded actions to imitate; 0 for those that a mask forbids."""
        log_probs = policy.log_prob(actions)
        return log_probs if self.action_mask is None else log_probs.where(log_probs > _FORBIDDEN, 0.0)

    def allowed_actions(self, obs: dict[str, Tensor], like: Tensor) -> Tensor:
        """(..., A) bool, True for allowed actions, with axes of size 1 to fit `like`, such as (..., G, A)."""
        assert self.action_mask is not None
        space = self.obs_space[self.action_mask.key]
        mask = obs[self.action_mask.key]
        allowed = self.action_mask(obs, mask.shape[: mask.dim() - len(space.shape or ())])
        return allowed.reshape(*allowed.shape[:-1], *[1] * (like.dim() - allowed.dim()), allowed.shape[-1])

    def encode(self, batch: Batch) -> Tensor:
        """States (B, L+1, D) of all timesteps of a batch, padding included."""
        return self._models[0].encode(batch, mask=batch.timestep_mask, resets=batch.resets)

    @property
    def _models(self) -> list[SequenceModel]:
        return list(self.sequence_models.values())

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
        """Memory of `num_envs` envs before their first timestep."""
        return tuple(model.traj_encoder.init_hidden_state(num_envs, device) for model in self._models)

    def reset_hidden_state(self, hidden_state: Any, ended: Tensor) -> Any:
        """Forget the episodes of rows where ended (N,) bool is True."""
        pairs = zip(self._models, hidden_state, strict=True)
        return tuple(model.traj_encoder.reset_hidden_state(memory, ended) for model, memory in pairs)

    def export_hidden_state(self, state: Any) -> dict[str, Tensor]:
        """Copies of a hidden state, one row per env, (N, ...); see TrajEncoder.export_hidden_state."""
        pairs = zip(self._models, state, strict=True)
        return self._joined([model.traj_encoder.export_hidden_state(memory) for model, memory in pairs])

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        """The hidden state that continues from exported rows."""
        pairs = self.sequence_models.items()
        return tuple(model.traj_encoder.import_hidden_state(under(prefix, rows)) for prefix, model in pairs)

    def _joined(self, exports: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Exported hidden states of all sequence models as one."""
        pairs = zip(self.sequence_models, exports, strict=True)
        return {prefix + name: row for prefix, rows in pairs for name, row in rows.items()}

    def act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> ActOutput:
        """Act for one timestep of N envs; a subclass may override this, and add to `extras`.

        Args:
            obs: each (N, ...).
            rl2s: (N, 1+A) float32.
            time_idxs: (N, 1) int64.
            hidden_state: result of the previous call.
            sample: draw from the policy; otherwise take its mode.
        """
        return ActOutput(*self._act(obs, rl2s, time_idxs, hidden_state, sample))

    def get_actions(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any]:
        """Act by `act`, but return only the actions and the new hidden state, as evaluations need them."""
        output = self.act(obs, rl2s, time_idxs, hidden_state, sample)
        return output.actions, output.hidden_state

    def compile_acting(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile acting with torch.compile; the first call is slow."""
        # Compiling a method instead of wrapping the module keeps the names of the parameters.
        self._act = torch.compile(self._act, backend=backend)  # type: ignore[method-assign]

    def compile_learning(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the losses of updates with torch.compile; the first update is slow.

        The losses of off-policy agents and BCAgent are a single graph, except with GRU or LSTM, which break
        it, hybrids and Gaussian mixtures. Updates with metrics are not compiled. Each shape of batches is
        compiled on its own, up to eight; an off-policy run pads its batches to four lengths.
        """
        plain, shapes = self.forward, set[torch.Size]()
        compiled = torch.compile(plain, backend=backend, dynamic=False)

        def forward(batch: Any, with_metrics: bool = False) -> LossTerms:
            if with_metrics:
                return plain(batch, True)
            shapes.add(batch.mask.shape)
            if len(shapes) == MAX_COMPILED:
                log_once(
                    f"The losses are compiled for batches of {MAX_COMPILED} shapes, the last one "
                    f"{tuple(batch.mask.shape[:2])}. torch.compile does not compile further ones, so updates "
                    "on them are slow. Fix: set Experiment.compile_learning = False, or, if it is True, "
                    "Experiment.packed_batches = False.",
                    logging.WARNING,
                )
            return compiled(batch)

        # Replacing a method instead of wrapping the module keeps the names of the parameters.
        self.forward = forward  # type: ignore[method-assign]

    def _act(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: Any, sample: bool
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        memory, *others = hidden_state  # the state of the policy's model, then those of the other models
        state, memory = self._models[0].encode_timestep(obs, rl2s, time_idxs, memory)
        policy = self.restrict(self.policy(self.actor_input(state, obs)), obs)
        action = policy.act(sample)
        extras = self._act_extras(policy, sample)
        action = action if policy.is_bounded else action.clamp(-1.0, 1.0)
        return action, (memory, *others), extras

    def _act_extras(self, policy: PolicyDistribution, sample: bool) -> dict[str, Tensor]:
        """Data about the actions that a step stores; see ActOutput.extras."""
        return {}

    # --- hooks of rollouts, see rollout_hooks.py -------------------------------------------------------

    def post_env_step_modifications(
        self,
        obs: dict[str, np.ndarray],
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hook: end episodes that their environments would continue.

        Called after every step of a training rollout, not in evaluations. If the agent ends an episode, the
        environment is reset within the same step, as if it had ended the episode itself.

        Args:
            obs: each (N, ...), observations after the actions; the final observation if an episode ended.
            rewards: (N,) float32, the environments' own.
            terminated: (N,) bool, the environments' own. Episodes that have ended cannot be continued.
            truncated: (N,) bool, the environments' own.
        Returns: terminated and truncated, (N,) bool.
        """
        return terminated, truncated

    def add_agent_info_to_obs(
        self, obs: dict[str, np.ndarray], info: dict[str, np.ndarray] | None, is_first: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Hook: entries that the agent adds to the environment's observations.

        They are acted on, stored and learned from like all other observations. An agent that adds some passes
        an obs_space that contains them to the constructor of BaseAgent. Called once for every timestep, in
        evaluations too, and once more for final observations. The agent must not keep the entries itself,
        since several groups of environments share one agent.

        Args:
            obs: each (N, ...), the environment's.
            info: each (N, ...), the agent's own entries at the previous timestep; None at the very first one.
            is_first: (N,) bool, True where an episode begins; `info` then belongs to another episode.
        Returns: each (N, ...), as declared in obs_space.
        """
        return {}

    def combine_rewards(self, rewards: np.ndarray, terms: dict[str, np.ndarray]) -> np.ndarray:
        """Hook: the rewards to learn from, computed from the environment's reward and its terms.

        Called after every step of a training rollout, before RewardShaping. The policy's input and the
        metrics keep the environment's own reward.

        Args:
            rewards: (N,) float32, the environments' own.
            terms: (N,) float32 by name, reported by environments as info["metric/reward/<name>"] in this
                step; 0 for environments that do not report it. Names that no environment reports are missing.
        Returns: (N,) float.
        """
        return rewards

    def on_checkpoint_loaded(self, is_resume: bool) -> None:
        """Hook: called after weights and buffers were loaded, from any source.

        An agent may update state that it keeps outside of its parameters and buffers.

        Args:
            is_resume: True if the whole run continues from a training state, including optimizer and
                counters; False if only weights were loaded.
        """

    def trainable_params(self) -> list[nn.Parameter]:
        """The parameters an optimizer should own."""
        return [p for p in self.parameters() if p.requires_grad]

    def after_update(self) -> None:
        """Update running statistics; called after every optimizer step, in all training processes."""
        statistics = [module for module in self.modules() if isinstance(module, RunningStatistics)]
        sum_over_processes(statistics)
        for module in statistics:
            module.commit()


def _declare_what_is_passed_on(own: Any, base: Any) -> None:
    """Add the parameters that the constructor `own` passes on to `base` to the signature of `own`."""
    params = inspect.signature(own).parameters.values()
    passed = {p.kind for p in params} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    found = {p.name: p for p in params if p.kind not in passed}
    for name, p in inspect.signature(base).parameters.items():
        is_keyword = p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
        if (p.VAR_KEYWORD if is_keyword else p.VAR_POSITIONAL) in passed:
            found.setdefault(name, p)
    own.__signature__ = inspect.Signature(sorted(found.values(), key=lambda p: p.kind))
    with contextlib.suppress(NameError):  # an annotation may need an import that only type checkers do
        own.__annotations__ = get_type_hints(base) | own.__annotations__


def under(prefix: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}


def _width_of(obs_space: spaces.Dict, keys: Sequence[str], setting: str) -> int:
    """Total width of the observations under `keys`. Raises: ValueError for keys of other kinds."""
    fitting = {
        key: space for key, space in obs_space.items() if isinstance(space, spaces.Box | spaces.MultiBinary)
    }
    if unknown := [key for key in keys if key not in fitting]:
        raise ValueError(
            f"{setting} names {unknown}, but the Box observations of the environment are {sorted(fitting)}. "
            f"Fix: bind {setting} to some of these."
        )
    return sum(prod(fitting[key].shape) for key in keys)
