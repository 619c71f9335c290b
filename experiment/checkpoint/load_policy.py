"""Acting with a trained policy, without the experiment, environment or gin files it came from."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import gin
import numpy as np
import torch
from gin.config_parser import ImportStatement
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ...agents import BaseAgent, RolloutHooks
from ...data.errors import WrongValueError, check_count
from ...envs import ActionCode, ActionMap, ObsLayout
from ...nets import TrajEncoder, TstepEncoder
from ..config import registry
from ..config.reading import Binding, Reference, bindings_in, parse_statements, references_in, without_macros
from ..config.registry import cleared_config
from ..process.transfer import to_device, to_host
from ..process.versions import version_of
from .policy_file import PolicyInfo, check_fit, fit_weights, read_json, read_policy
from .recipes import from_json, name_of
from .spaces import EnvSpaces
from .store import damage, find_files

logger = logging.getLogger("loxodon")
# Limits on modules and numbers that an agent may build and discard, beyond twice the tensors of its file, as
# it is built twice.
_SPARE_MODULES, _SPARE_NUMBERS = 500, 1 << 28
_MOST_STATE_BYTES = 1 << 32  # memory size of one environment
_MOST_TIMESTEPS = 1 << 31  # length of a training sequence
_BASES: dict[str, type] = {
    "agent_type": BaseAgent,
    "tstep_encoder_type": TstepEncoder,
    "traj_encoder_type": TrajEncoder,
}


class LoadedPolicy:
    """Acts in terms of the environment: takes its observations, returns its actions, remembers episodes.

    One environment:

        policy = load_policy("runs/tmaze")
        policy.reset()
        obs, _ = env.reset()
        action = policy.act(obs)
        while not over:
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            action = policy.act(obs, reward)

    N environments at once, each reset within the step in which it ends:

        policy.reset(num_envs=8)
        obs, _ = envs.reset()
        actions = policy.act(obs)
        for _ in range(1000):
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            actions = policy.act(obs, rewards, is_first=terminated | truncated)

    Attributes:
        agent: the agent itself, in evaluation mode.
        info: header of the file it was loaded from.
        observation_space, action_space: spaces of the environment.
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
        self._hooks = RolloutHooks(agent, [leaf.key for leaf in self._layout.leaves])
        self.reset()

    def reset(self, num_envs: int | None = None) -> None:
        """Forget everything: the next observations are the first of new episodes.

        Args:
            num_envs: environments that act at once, N; None for a single one, without that axis.

        Raises: ValueError for anything but None or a whole number of at least 1.
        """
        num_envs = int(num_envs) if isinstance(num_envs, np.integer) else num_envs
        check_count("num_envs", num_envs, optional=True)
        self._is_single = num_envs is None
        self._num_envs = 1 if num_envs is None else num_envs
        self._hidden = self.agent.init_hidden_state(self._num_envs, self.device)
        self._rl2s = np.zeros((self._num_envs, self._width), np.float32)
        self._time_idxs = np.zeros((self._num_envs, 1), np.int64)
        self._has_acted = False
        self._seen: dict[str, np.ndarray] | None = None

    def act(self, obs: Any, rewards: Any = None, is_first: Any = None) -> Any:
        """Actions for the newest observations.

        Args:
            obs: observation of the environment; with N environments, every array in it is (N, ...).
            rewards: (N,) float, rewards of the step that led to `obs`; one number for a single environment.
                Needed from the second call on; not used at the start of an episode.
            is_first: (N,) bool, True where `obs` is the first of a new episode, so that the past does not
                count; a bool for a single environment. None means False everywhere.

        Returns: (N, ...) array in the environment's action space; one action for a single environment.

        Raises: ValueError if shapes or keys differ from those of the environment the policy was trained in,
            or a number is NaN or infinite; TypeError for rewards or is_first that are not numbers.
        """
        first = np.zeros(self._num_envs, np.bool_) if is_first is None else self._row(is_first, "is_first")
        first = first.astype(np.bool_)
        seen = self._flatten(obs)
        if self._hooks.adds_to_obs:
            begins = first if self._has_acted else np.ones_like(first)
            seen |= self._hooks.info(self.agent, seen, self._seen, begins)
            self._seen = seen
        if self._has_acted:
            self._take_rewards(rewards, first)
        obs = to_device(seen, self.device)
        inputs = to_device({"rl2s": self._rl2s, "times": self._time_idxs, "first": first}, self.device)
        with torch.inference_mode():
            if first.any():
                self._hidden = self.agent.reset_hidden_state(self._hidden, inputs["first"])
            chosen, self._hidden = self.agent.get_actions(
                obs, inputs["rl2s"], inputs["times"], self._hidden, self.sample
            )
        actions: np.ndarray = (chosen if self._code.has_integers else chosen.float()).cpu().numpy()
        # A new array, because the memory may refer to the old one.
        self._rl2s = np.zeros((self._num_envs, self._width), np.float32)
        self._code.write(actions, self._rl2s[:, 1:])
        self._has_acted = True
        env_actions = self._map.to_env(actions)
        if self._is_single:
            return env_actions[0]
        return np.asarray(env_actions, self.action_space.dtype)

    @property
    def memory(self) -> dict[str, np.ndarray]:
        """Copies of what the policy remembers, (N, ...) by name: states of a GRU, keys of a Transformer.

        Raises: NotImplementedError for an encoder without `export_hidden_state`.
        """
        return to_host(self.agent.export_hidden_state(self._hidden))

    def _take_rewards(self, rewards: Any, first: np.ndarray) -> None:
        """Add rewards and time indices to the inputs of the policy, which are 0 where an episode begins."""
        if rewards is None:
            if not first.all():
                raise ValueError(
                    "act() got no rewards, but policies observe the rewards of the last step. Fix: call "
                    "act(obs, rewards), or reset() before new episodes."
                )
            rewards = np.zeros(self._num_envs)
        self._rl2s[:, 0] = np.where(first, 0.0, self._row(rewards, "rewards"))
        if not (is_finite := np.isfinite(self._rl2s[:, 0])).all():  # networks would silently act on it
            raise ValueError(
                f"The reward of environment {is_finite.argmin()} is NaN or infinite. Fix: correct the "
                "environment, or reset it."
            )
        self._time_idxs = self._time_idxs + 1  # also a new array
        self._rl2s[first] = 0.0
        self._time_idxs[first] = 0

    def _row(self, value: Any, name: str) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"{name} of act() is {value!r}, but must hold numbers or bools. Fix: give what the "
                "environment returned, as an array of floats or bools."
            )
        array = array.reshape(1) if self._is_single and array.size == 1 else array
        if array.shape != (self._num_envs,):
            raise ValueError(
                f"{name} has shape {np.shape(value)}, but must have one entry for each of {self._num_envs} "
                "environments. Fix: call reset(num_envs=N) before the first act(), and give (N,) arrays."
            )
        return array

    def _flatten(self, obs: Any) -> dict[str, np.ndarray]:
        """The observations in the form the agent uses, each (N, ...)."""
        flat = {}
        num_rows = None if self._is_single else self._num_envs
        try:
            for leaf, raw in zip(self._layout.leaves, self._layout.values(obs), strict=True):
                value = np.array(leaf.convert(raw, num_rows), leaf.dtype, order="C", ndmin=1)
                flat[leaf.key] = value.reshape(self._num_envs, *leaf.shape)
                if leaf.has_checks:
                    leaf.check(flat[leaf.key])
        except WrongValueError as error:
            place = "" if error.row is None else f"environment {error.row}"
            more = "With N environments at once call reset(num_envs=N) first, and give arrays of N rows."
            raise error.completed("act() got", place, more) from None
        return flat


def _found_device(device: str | torch.device) -> torch.device:
    """The device. Raises: ValueError if PyTorch does not find it on this machine."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # builds without CUDA assert
        raise ValueError(
            f"The device is {str(device)!r}, but PyTorch {torch.__version__} finds no such device on this "
            f"machine ({str(error).splitlines()[0]}). Fix: use 'cpu', or install a build of PyTorch for it."
        ) from error
    return found


def load_policy(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    sample: bool = False,
    trust: str | Sequence[str] = (),
    types: Mapping[str, Callable[..., Any]] | None = None,
) -> LoadedPolicy:
    """Load a trained policy for acting; no Experiment and no environment is built.

    The file describes how to build the agent: spaces, types, lengths and gin configuration. It can name only
    classes of agents and encoders that this process has imported already, and set only parameters of networks
    and other parts of an agent. Nothing is imported or called because a file says so. gin's configuration in
    this process is the same before and after, but it is replaced during the call, so no other thread should
    build configurable objects meanwhile. Values that gin cannot write as text (objects bound in Python) are
    not in the file; the agent is then built with their defaults.

    Args:
        path: a policy file, a checkpoint folder, or a run folder (the best policy, else the latest one).
        device: device on which the agent acts.
        sample: draw actions from the policy; otherwise the most likely one is taken.
        trust: modules or packages, such as "my_pkg", which are imported if the file names them. The file
            may use their configurable functions and classes with its own arguments.
        types: agent_type, tstep_encoder_type or traj_encoder_type of the run, instead of those in the file.
            A run writes down classes that can be imported, also in a functools.partial.

    Raises:
        FileNotFoundError: If there is no policy.
        TypeError: If `path` is not a path.
        ValueError: If the file is damaged, has another format, asks for something that is not allowed, or
            lacks something that the agent needs; or if the device does not exist.
        ImportError: If a class that it needs is not imported and not in `trust`, or cannot be imported.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load_policy got the path {path!r}, but needs a str or Path: a policy file, or the folder of a "
            "checkpoint or run. Fix: load_policy('runs/tmaze'), for example."
        )
    file = find_files(Path(path).expanduser(), "load_policy")
    if file.is_dir():  # file is a training state
        if (problem := damage(file)) is not None:
            raise ValueError(f"The checkpoint {file} is damaged: {problem}. Fix: choose another checkpoint.")
        file /= "model.safetensors"
    info, weights = read_policy(file)
    env_spaces = info.env_spaces()
    if info.format is None or env_spaces is None or info.types is None or info.max_seq_len is None:
        raise ValueError(
            f"{file} does not describe the agent that its weights are for. Fix: use a file that Loxodon "
            "wrote, or build the experiment and call load_checkpoint_from_path."
        )
    if not 0 < info.max_seq_len <= _MOST_TIMESTEPS:
        raise ValueError(
            f"The header of {file} says max_seq_len = {info.max_seq_len}, but it must be from "
            f"1 to {_MOST_TIMESTEPS:,}. Fix: use a file that Loxodon wrote."
        )
    trust = (trust,) if isinstance(trust, str) else trust
    agent = _build_agent(info, env_spaces, info.max_seq_len, file, weights, trust, types or {})
    fit_weights(agent, weights, file)
    where = _found_device(device)
    agent.to(where).eval().on_checkpoint_loaded(is_resume=False)
    return LoadedPolicy(agent, info, env_spaces, device=where, sample=sample)


def _build_agent(
    info: PolicyInfo,
    env_spaces: EnvSpaces,
    max_seq_len: int,
    file: Path,
    weights: dict[str, torch.Tensor],
    trust: Sequence[str],
    given: Mapping[str, Callable[..., Any]],
) -> BaseAgent:
    """The agent that the header describes, with new weights."""
    with cleared_config(), torch.random.fork_rng(devices=[]):
        try:
            types = _bind(info, trust, given)
            build = functools.partial(
                types["agent_type"],
                env_spaces.policy_observation,
                env_spaces.policy_action,
                types["tstep_encoder_type"],
                types["traj_encoder_type"],
                max_seq_len,
            )
            with _no_larger_than(weights):  # sizes that differ from those of the weights never get memory
                if (sketch := _without_memory(build)) is not None:
                    check_fit(sketch, weights, file)
                    _check_state(sketch, max_seq_len)
                agent: BaseAgent = build()
        except ImportError:
            raise
        except Exception as error:  # constructors may raise anything for settings from a file
            # The following lines are from gin and do not refer to files of the user.
            reason = str(error).split("\n", maxsplit=1)[0]
            if "Fix:" not in reason:
                reason += (
                    f" (the file was written by Loxodon {info.loxodon}; this is {version_of('loxodon')}). "
                    "Fix: import the modules that define its classes before load_policy, or use the "
                    "version that wrote it."
                )
            raise ValueError(f"The agent of {file} cannot be built: {reason}") from error
    return agent


@contextlib.contextmanager
def _no_larger_than(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Limit what this thread builds to the size of these weights, with a margin for temporary modules.

    A header can ask for a hundred million layers in a few bytes. Building stops at the first parameter or
    module beyond the limit, and at the first parameter in memory that makes the total too large.

    Raises: ValueError.
    """
    own_thread = threading.get_ident()
    allowed = {
        "parameters": _SPARE_MODULES + 4 * len(weights),
        "modules": 10 * (_SPARE_MODULES + 4 * len(weights)),
        "numbers": _SPARE_NUMBERS + 2 * sum(one.numel() for one in weights.values()),
    }
    found = dict.fromkeys(allowed, 0)

    def add(kind: str, number: int) -> None:
        found[kind] += number
        if found[kind] > allowed[kind]:
            raise ValueError(
                f"its header asks for more than {allowed[kind]:,} {kind}, but the file has {len(weights):,} "
                "tensors. Fix: use a file that Loxodon wrote."
            )

    def on_parameter(_: nn.Module, __: str, value: torch.Tensor | None) -> None:
        if threading.get_ident() == own_thread and value is not None:
            add("parameters", 1)
            if not value.is_meta and not is_lazy(value):
                add("numbers", value.numel())

    def on_module(_: nn.Module, __: str, value: nn.Module | None) -> None:
        if threading.get_ident() == own_thread and value is not None:
            add("modules", 1)

    hooks = (
        register_module_parameter_registration_hook(on_parameter),
        register_module_buffer_registration_hook(on_parameter),
        register_module_module_registration_hook(on_module),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_memory(build: Callable[[], BaseAgent]) -> BaseAgent | None:
    """An agent that has only shapes; None if its constructor computes with numbers, which are not there."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, TypeError) as error:
        if "meta" in str(error).lower():
            return None
        raise


def _check_state(sketch: BaseAgent, max_seq_len: int) -> None:
    """Refuse an agent that would remember more of one environment than any policy needs.

    The weights do not limit the context of attention, so the header alone could ask for all memory.

    Raises: ValueError.
    """
    try:
        num_bytes = _num_bytes(sketch.init_hidden_state(1, torch.device("meta")))
    except (RuntimeError, TypeError) as error:
        if "meta" in str(error).lower():  # the agent computes with numbers
            return
        raise
    if num_bytes > _MOST_STATE_BYTES:
        raise ValueError(
            f"its hidden state for one environment takes {num_bytes:,} bytes with max_seq_len = "
            f"{max_seq_len}, but at most {_MOST_STATE_BYTES:,} are allowed. Fix: use a file that Loxodon "
            "wrote."
        )


def _num_bytes(state: Any) -> int:
    """Bytes of all tensors in a hidden state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, list | tuple):
        return sum(map(_num_bytes, state))
    fields = state if isinstance(state, dict) else getattr(state, "__dict__", {})
    return sum(map(_num_bytes, fields.values()))


def _bind(info: PolicyInfo, trust: Sequence[str], given: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Bind the settings of agents in the gin text of a header, and return the agent's types by their field.

    Other settings, such as those of the environment, are left out, and so are imports outside `trust`.

    given: types that replace those of the file.

    Raises: ValueError or TypeError for a setting that a file may not have; ImportError as in find_part.
    """
    if unknown := given.keys() - _BASES.keys():
        raise ValueError(
            f"types has the key {min(unknown)!r}; allowed are {', '.join(_BASES)}. Fix: rename it."
        )
    names = read_json(info.types or "")
    types: dict[str, Any] = {
        field: _read_type(names[field], base, trust)
        for field, base in _BASES.items()
        if field not in given and isinstance(names, dict) and names.get(field) is not None
    }
    bindings = _read_gin(info.gin or "", trust)
    kept = [b for b in bindings if _is_kept(b, trust)]
    if gone := [f"{b.key} = {b.value!r}" for b in kept if is_gone(b)]:
        logger.warning(
            "The policy was saved by another version of Loxodon, and these settings do not exist in this "
            "version, so they are ignored: %s. Fix: if the policy acts differently, use the version that "
            "wrote it.",
            ", ".join(gone),
        )
    gin.parse_config("\n".join(f"{b.key} = {b.value!r}" for b in kept if not is_gone(b)))
    values = {b.key: b.value for b in bindings}
    for field, base in _BASES.items():
        value = values.get(f"Experiment.{field}")
        found = registry.find(value.name) if isinstance(value, Reference) and not value.is_called else []
        if len(found) == 1:
            check_base(found[0].wrapped, base)
            types[field] = gin.config.parse_value(repr(value)).scoped_configurable_fn
    types |= given
    if missing := _BASES.keys() - types.keys():
        raise ValueError(
            f"its {min(missing)} has no name by which it can be imported. Fix: call load_policy(..., "
            f"types={{{min(missing)!r}: ...}}) with the class or function that the run used (a class at the "
            "top of a module is found by its name)."
        )
    return types


def _read_gin(text: str, trust: Sequence[str]) -> list[Binding]:
    """Bindings of a gin text, with macros replaced by their values. Only imports in `trust` are run."""
    try:
        imports = [one for one in parse_statements(text) if isinstance(one, ImportStatement)]
        bindings = bindings_in(text)
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(
            f"its gin configuration cannot be read ({error}). Fix: use a file that Loxodon wrote."
        ) from error
    for one in imports:
        if is_trusted(one.module, trust):
            with contextlib.suppress(ImportError):  # environments, for example, need not be installed here
                importlib.import_module(one.module)
    macros = {b.scope: b.value for b in bindings if b.selector == registry.MACRO}
    return [
        replace(b, value=without_macros(b.value, macros)) for b in bindings if b.selector != registry.MACRO
    ]


def _is_kept(binding: Binding, trust: Sequence[str]) -> bool:
    """True if a binding sets a parameter of an agent or network.

    Raises: ValueError if it does, and refers to something else.
    """
    if not any(_is_part(found, trust) for found in registry.find(binding.selector)):
        return False
    for named in references_in(binding.value):
        for found in registry.find(named.name) if isinstance(named, Reference) else ():
            if not _is_part(found, trust):
                module = found.wrapped.__module__
                raise ValueError(
                    f"{binding.key} names {named!r} of the module {module!r}, but a policy file may only "
                    "name networks and objects defined in loxodon.agents and loxodon.nets. Fix: if you "
                    "trust this module with arguments from the file, call load_policy(..., "
                    f"trust=({module!r},))."
                )
    return True


def is_gone(binding: Binding) -> bool:
    """True if an agent or network gets a parameter that it has only in another version."""
    return any(
        _is_part(found, ()) and binding.param not in found.params and not found.takes_any
        for found in registry.find(binding.selector)
    )


def _is_part(found: registry.Configurable, trust: Sequence[str]) -> bool:
    """True for a part of agents, which files may configure: constructing one has no side effects."""
    if isinstance(found.wrapped, type) and issubclass(found.wrapped, nn.Module):
        return True
    return is_trusted(found.wrapped.__module__ or "", ("loxodon.agents", "loxodon.nets", *trust))


# ---- types by name ----


def _read_type(value: Any, base: type, trust: Sequence[str]) -> Any:
    """A type as written by `type_to_json`: a class derived from `base`, or a partial of one.

    Raises: ImportError and ValueError as in find_part; TypeError for a class that is not derived from `base`.
    """
    try:
        found = from_json({"name": value} if isinstance(value, str) else value, lambda n: find_part(n, trust))
    except RecursionError:
        raise ValueError("its header nests types too deeply. Fix: use a file that Loxodon wrote.") from None
    called = found
    while isinstance(called, functools.partial):
        called = called.func
    if not (isinstance(called, FunctionType) and is_trusted(called.__module__, trust)):
        check_base(called, base)
    return found


def find_part(name: str, trust: Sequence[str]) -> Any:
    """A class or function that a file names, as written by `type_to_json`.

    Only modules that `trust` names are imported, and nothing is run: the class is looked up in loaded
    modules, without asking a module or class for attributes, which could be computed.

    Raises: ImportError if it is not found; ValueError if it is not a network and its module may not be used.
    """
    found = _look_up(name, trust)
    module = name.partition(":")[0]
    is_network = isinstance(found, type) and issubclass(found, nn.Module)
    if name_of(found) == name and (
        is_network or is_trusted(module, ("loxodon.agents", "loxodon.nets", *trust))
    ):
        return found
    raise ValueError(
        f"it gives {name!r} to an agent, but a policy file may only name networks and objects defined in "
        "loxodon.agents and loxodon.nets. Fix: if you trust this module with arguments from the file, call "
        f"load_policy(..., trust=({module!r},))."
    )


def _look_up(name: str, trust: Sequence[str]) -> type | FunctionType:
    module, _, path = name.partition(":")
    problem = "which is not imported here, and a policy file may not import modules"
    if is_trusted(module, trust):
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            problem = f"which cannot be imported ({error})"
    found: Any = sys.modules.get(module)
    if found is not None:
        problem = "which has no such class"
        for part in path.split("."):
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if not isinstance(found, type | FunctionType):
        raise ImportError(
            f"The policy needs {path!r} of the module {module!r}, {problem}. Fix: import the module that "
            f"defines it before load_policy, or, if you trust it, pass trust=({module!r},)."
        )
    return found


def check_base(found: Any, base: type) -> None:
    """Raise TypeError unless `found`, an object that a file names, is a class derived from `base`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(
            f"{found!r} is not a class derived from {base.__name__}, and a policy file may name nothing "
            "else here. Fix: use a file that Loxodon wrote."
        )


def is_trusted(module: str, trust: Sequence[str]) -> bool:
    """True if a module is one of those in `trust`, or inside one."""
    return any(module == name or module.startswith(f"{name}.") for name in trust)
