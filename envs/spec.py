"""Recipes for environments: plain data that can be sent to a worker process and built there."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gin
import gymnasium as gym

from ..data.errors import check_count
from ..data.spaces import MINIGRID_WORDS, Tokens, with_tokens
from .errors import close_all
from .gin_values import in_current_scope
from .joint_actions import JointActions, num_combinations
from .returned import check_env
from .sequence_env import SequenceEnv

_PACKAGES: dict[str, tuple[str, ...]] = {
    "popgym": ("popgym", "envs"),
    "MiniGrid-": ("minigrid", "envs"),
    "BabyAI-": ("minigrid", "envs"),
    "ALE/": ("ale_py", "atari"),
    "dm_control/": ("shimmy", "dm_control", "dm_control"),
    "Meta-World/": ("metaworld", "metaworld"),
    "envpool/": ("envpool", "envpool"),
    "gymnax/": ("gymnax", "jax"),
    "xminigrid/": ("xminigrid", "jax"),
}
"""Packages, then their extra, by prefix of environment ids. The packages are imported when an id is used."""
_REGISTERING = {"envpool": ".envpool_suite", "gymnax": ".jax_suites", "xminigrid": ".jax_suites"}
"""Our modules that register ids for packages that do not; all of these environments are batches."""


@dataclass(frozen=True)
class EnvSpec:
    """Recipe for one environment; `build()` is called in the process that uses the environment.

    Attributes:
        target: a gymnasium id, `module:id`, `module:Class`, or a callable that returns an environment.
        kwargs: plain keyword arguments for it.
        env_name: fixed name for metrics and files; None takes the environment's own.
        vocabulary: the words by which text observations become numbers, equal in every process and in policy
            files. None allows no texts except the missions of MiniGrid and BabyAI, whose words are known.
        joint_actions: MultiDiscrete and MultiBinary actions with at most this many combinations become one
            Discrete choice among them, see JointActions; 0 leaves them unchanged, as do vector environments.
    """

    target: Callable[..., Any] | str
    kwargs: dict[str, Any] = field(default_factory=dict)
    env_name: str | None = None
    vocabulary: Tokens | None = None
    joint_actions: int = 0

    def __str__(self) -> str:
        """A name for errors: the one for metrics, the id, or the name of the class or function."""
        return self.env_name or str(getattr(self.target, "__qualname__", self.target))

    def build(self) -> SequenceEnv:
        """Build a new environment in the library's form.

        Errors of its constructor pass through, except those of missing packages and of missing or unknown
        arguments, which are explained.
        """
        made = self._make()
        name = self.env_name or (made.env_name if isinstance(made, EnvSpec) else None)
        made = self._completed(made)
        if not isinstance(made, gym.Env):
            raise TypeError(_no_env_text(str(self), made))
        return made if type(made) is SequenceEnv else SequenceEnv(made, name)

    @property
    def makes_vector_env(self) -> bool:
        """True if the target is known to be a vector environment, without building it."""
        target = _resolved(self.target)
        if isinstance(target, str):
            return gym.spec(_registered_name(target)).entry_point is None
        return isinstance(target, type) and issubclass(target, gym.vector.VectorEnv)

    def build_raw(self) -> Any:
        """Build the target itself, not yet in the library's form, with the vocabulary for its texts."""
        return self._completed(self._make())

    def _make(self) -> Any:
        kwargs = copy.deepcopy(self.kwargs)
        target = _resolved(self.target)
        with _explained(target, kwargs):
            return _make_registered(target, kwargs) if isinstance(target, str) else target(**kwargs)

    def _completed(self, made: Any) -> Any:
        """Complete the target's result: build it if it is a recipe, and convert texts and actions."""
        if isinstance(made, EnvSpec):
            made = made.build_raw()
        if not isinstance(made, gym.Env):
            return made
        check_env(made)
        if self.joint_actions and 0 < num_combinations(made.action_space) <= self.joint_actions:
            made = JointActions(made)
        space = self.numbered(made.observation_space)
        if space is made.observation_space:
            return made
        return gym.wrappers.TransformObservation(made, _unchanged, space)

    def numbered(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """An observation space with `Tokens` for its texts; see `with_tokens`."""
        return with_tokens(space, self.vocabulary)

    def build_vector(self, num_envs: int) -> Any:
        """Build a vector environment: `gymnasium.make_vec` for an id, otherwise the target's result.

        Args:
            num_envs: number of rows for `make_vec`, unless the recipe's arguments name one.
        """
        kwargs = copy.deepcopy(self.kwargs)
        target = _resolved(self.target)
        if isinstance(target, str):
            name = _registered_name(target)
            with _explained(name, kwargs, is_batch=True):
                return gym.make_vec(name, **{"num_envs": num_envs, **kwargs})
        with _explained(target, kwargs):
            made = target(**kwargs)
        return made.build_vector(num_envs) if isinstance(made, EnvSpec) else made


def build_all(specs: Iterable[EnvSpec], made: list[SequenceEnv] | None = None) -> list[SequenceEnv]:
    """Build the environments of these recipes; if one fails, those already built are closed.

    made: receives the environments as they are built.
    """
    made = [] if made is None else made
    try:
        for spec in specs:
            made.append(spec.build())
    except BaseException:
        close_all(made)
        raise
    return made


@contextlib.contextmanager
def _explained(
    target: Callable[..., Any] | str, kwargs: Mapping[str, Any], *, is_batch: bool = False
) -> Iterator[None]:
    """Explain a missing package, and arguments that the constructor does not take."""
    try:
        yield
    except gym.error.DependencyNotInstalled as error:
        extra = re.search(r"gymnasium\[(box2d|mujoco)\]", str(error))
        fix = f"pip install 'loxodon[{extra[1]}]'" if extra else "install it"
        raise ModuleNotFoundError(
            f"The environment {getattr(target, '__qualname__', target)} needs a package that is not "
            f"installed ({error}). Fix: {fix}."
        ) from error
    except TypeError as error:
        reason = str(error).partition("\n")[0].partition(" was raised from")[0]  # gymnasium's addition
        if not re.search(r"missing \d+ required|got an unexpected keyword", reason):
            raise
        maker: Any = target
        if isinstance(target, str):  # gym.make has arguments of its own, such as max_episode_steps
            spec = gym.spec(target)
            of_gym = {*inspect.signature(gym.make).parameters, *inspect.signature(gym.make_vec).parameters}
            kwargs = {**spec.kwargs, **{name: kwargs[name] for name in kwargs if name not in of_gym}}
            maker = (spec.vector_entry_point if is_batch else None) or spec.entry_point
            maker = gym.envs.registration.load_env_creator(maker) if isinstance(maker, str) else maker
        try:
            signature = inspect.signature(maker)
            signature.bind(**kwargs)
        except ValueError:  # a constructor in C has no signature
            raise error from None
        except TypeError:
            name = getattr(maker, "__qualname__", target)
            raise TypeError(
                f"The environment {name} cannot be created with the arguments {dict(kwargs)}: {reason}. It "
                f"takes {signature.replace(return_annotation=inspect.Signature.empty)}. Fix: correct "
                "gym_env.kwargs (in Python EnvSpec.kwargs)."
            ) from error
        raise


def _no_env_text(target: str, made: Any) -> str:
    fix = (
        "derive the environment from gymnasium.Env, and return one (for old gym environments, install shimmy)"
    )
    if isinstance(made, gym.vector.VectorEnv):
        fix = "set Experiment.env_mode = 'already_vectorized'"
    found = made if made is None or isinstance(made, type) else f"a {type(made).__name__}"
    return f"{target} created {found}, but must create one gymnasium.Env. Fix: {fix}."


def _unchanged(obs: Any) -> Any:
    """Return strings unchanged; `ObsLayout` converts them with their space."""
    return obs


@gin.configurable
def gym_env(
    env_id: str = gin.REQUIRED,
    kwargs: dict[str, Any] | None = None,
    env_name: str | None = None,
    vocabulary: Sequence[str] | str | None = None,
    max_tokens: int = 16,
    joint_actions: int = 64,
) -> EnvSpec:
    """Recipe for a registered environment, by its id.

    Args:
        env_id: e.g. "CartPole-v1" or "popgym-RepeatPreviousEasy-v0"; "module:id" imports the module first,
            and "module:Class" takes a class or function of the module if no such id is registered.
        kwargs: arguments for `gymnasium.make`.
        env_name: name for metrics and files; None takes the registered name without version.
        vocabulary: words of text observations, or "minigrid" for the words of MiniGrid and BabyAI. Their
            missions have these words with None too.
        max_tokens: longest text, in words, if a vocabulary is given.
        joint_actions: MultiDiscrete and MultiBinary actions with at most this many combinations become one
            Discrete choice among them, see JointActions; 0 leaves them unchanged, as do vector environments.
    """
    if not isinstance(env_id, str):
        raise TypeError(
            f"gym_env.env_id is {env_id!r}, but must be the string of a registered id. Fix: set "
            'gym_env.env_id = "CartPole-v1", for example.'
        )
    if isinstance(vocabulary, str) and vocabulary != "minigrid":
        raise ValueError(
            f"gym_env.vocabulary is {vocabulary!r}, but must be a list of words, 'minigrid' or None. "
            "Fix: set gym_env.vocabulary = ['go', 'to', 'the', 'red', 'ball'], for example."
        )
    check_count("gym_env.joint_actions", joint_actions, 0)
    words = MINIGRID_WORDS if isinstance(vocabulary, str) else vocabulary
    tokens = None if words is None else Tokens(words, max_tokens)
    return EnvSpec(env_id, dict(kwargs or {}), env_name, tokens, joint_actions)


def resolve_env(make_env: EnvSpec | str | Callable[..., Any]) -> EnvSpec:
    """Convert a user's environment to a recipe that can be sent to a worker process.

    gin's bindings are looked up where the environment is built, in the scope of this call.

    Args:
        make_env: a recipe (returned unchanged), a gymnasium id, a gin-configurable class or function, or any
            callable without required arguments that returns an environment.

    Raises: TypeError for anything else, such as an environment instance.
    """
    if isinstance(make_env, EnvSpec):
        return make_env
    if isinstance(make_env, str):
        return EnvSpec(make_env)
    if isinstance(make_env, (gym.Env, gym.vector.VectorEnv)):
        name = type(make_env.unwrapped).__name__
        raise TypeError(
            f"make_train_env or make_val_env is a single environment ({name} instance), but several are "
            "built from it. Allowed "
            f"are an EnvSpec, an id, or a callable that creates one. Fix: in gin write @{name} without "
            "parentheses; in Python pass the class or a function."
        )
    if not callable(make_env):
        raise TypeError(
            f"make_env is {make_env!r} ({type(make_env).__name__}), but must be an EnvSpec, a gymnasium id, "
            "or a callable that returns an environment. Fix: set @TMazePassive or @gym_env() in gin, or "
            '"CartPole-v1" in Python, for example.'
        )
    return EnvSpec(in_current_scope(make_env))


def _resolved(target: Callable[..., Any] | str) -> Callable[..., Any] | str:
    """The class or function of `module:Class` if that is not a registered id, otherwise the target."""
    if not isinstance(target, str) or ":" not in target:
        return target
    module, _, name = target.rpartition(":")
    found = getattr(_imported(module, target), name, None)
    return found if callable(found) and name not in gym.registry else target


def _imported(module: str, env_id: str) -> Any:
    """Import the module of `module:id`. Raises: ModuleNotFoundError with the places that were searched."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ModuleNotFoundError(
                f"The environment {env_id!r} needs the module {module}, which was not found. Fix: correct "
                f"the name, install it, or add `import {module}` to a gin file in its folder.",
                name=error.name,
            ) from error
        raise


def _make_registered(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    name = _registered_name(env_id)
    if gym.spec(name).entry_point is None:
        raise ValueError(
            f"The environment {env_id!r} exists only as a vector environment, so no single environments can "
            "be built from it. Fix: set Experiment.env_mode = 'already_vectorized'."
        )
    return gym.make(name, **{"disable_env_checker": True, **kwargs})


def _registered_name(env_id: str) -> str:
    """Import an id's module and return the id without it; raises ValueError unless it is then registered."""
    module, _, name = env_id.rpartition(":")
    if module:
        _imported(module, env_id)
    elif found := next((_PACKAGES[prefix] for prefix in _PACKAGES if name.startswith(prefix)), None):
        *packages, extra = found
        for package in packages:
            import_package(package, extra, env_id)
            if package in _REGISTERING:
                importlib.import_module(_REGISTERING[package], __package__)
    try:
        gym.spec(name)
    except gym.error.Error as error:  # unknown, outdated or malformed
        raise ValueError(_unknown_id_text(env_id, error)) from error
    return name


def registered(specs: Iterable[EnvSpec]) -> dict[str, Any]:
    """This process's registrations for the ids of these recipes, which may differ in other processes."""
    names = [spec.target.rpartition(":")[2] for spec in specs if isinstance(spec.target, str)]
    return {name: gym.registry[name] for name in names if name in gym.registry}


def register_as(specs: Iterable[EnvSpec], known: Mapping[str, Any]) -> None:
    """Register the results of `registered` in another process under the ids of these recipes."""
    for spec in specs:
        if isinstance(spec.target, str):
            with contextlib.suppress(ValueError):  # ignore ids that only `known` has
                _registered_name(spec.target)  # the id's module registers its own ids first
    gym.registry.update(known)


def import_package(package: str, extra: str, env_id: str) -> Any:
    """Import the package that an environment needs. Raises: ModuleNotFoundError that names its extra."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:  # the package itself, or one that it needs
        missing = error.name or package
        raise ModuleNotFoundError(
            f"The environment {env_id!r} needs the package {missing}, which is not installed. "
            f"Fix: pip install 'loxodon[{extra}]'.",
            name=missing,
        ) from error


def _unknown_id_text(env_id: str, error: Exception) -> str:
    with contextlib.suppress(ValueError):
        gin.get_configurable(env_id)
        return (
            f"No environment is registered under the text {env_id!r}, but gin knows a class or function of "
            f"this name. Fix: write @{env_id} (with @, without quotes)."
        )
    known = {known_id.lower(): known_id for known_id in gym.registry}
    module, _, name = env_id.rpartition(":")
    near = [known[match] for match in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)]
    there = vars(sys.modules.get(module, object))
    own = [other for other, thing in there.items() if callable(thing)]
    meant = [f"{module}:{other}" for other in difflib.get_close_matches(name, own, n=3)]
    is_class = bool(module) and name.isidentifier()
    near = meant if is_class else meant or near
    hint = f"Did you mean {', '.join(map(repr, near))}? " if near else ""
    if is_class:
        classes = [other for other in own if _is_env_class(there[other])]
        return (
            f"The module {module} has no class or function {name}. {hint}Its environments are "
            f"{', '.join(classes) or 'none'}. Fix: correct the name after the colon."
        )
    return (
        f"No environment is registered under {env_id!r} ({error}). {hint}Allowed are ids listed by "
        "gymnasium.pprint_registry(). "
        'Fix: correct the id, or name the module that registers it: "my_module:my_env-v0".'
    )


def _is_env_class(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, gym.Env) and thing is not gym.Env
