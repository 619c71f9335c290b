"""Environments as sequences of timesteps: wrapping, vectorisation, exploration, statistics, built-in tasks.

Importing this package only imports numpy, gymnasium and gin, because worker processes import it too.
"""

if __name__ == "envs":
    raise ImportError(
        "Import this as 'loxodon.envs', not 'envs': a second copy would break isinstance and gin. "
        "Fix: run pip install -e . and import loxodon.envs."
    )

from ..data.spaces import MINIGRID_WORDS, ActionCode, ActionMap, ObsLayout, Tokens
from .attributes import MaxEpisodeLength
from .builtin import (
    Bandit,
    Counting,
    DarkKeyToDoor,
    DarkRoom,
    FrozenLake,
    HalfCheetahVelocity,
    MazeRunner,
    MetaWorld,
    Recall,
    TMazeActive,
    TMazePassive,
    TMazePixels,
    atari_env,
)
from .env_state import ClassicControlState, generator_state, set_generator_state
from .errors import EnvError
from .exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper
from .joint_actions import JointActions
from .kshot import KShotWrapper
from .partial import PartialObs, partial_env
from .returned import METRIC_PREFIX
from .sequence_env import SequenceEnv
from .spec import EnvSpec, gym_env, resolve_env
from .statistics import Histories, ReturnHistory, SpecialMetricHistory
from .vector.adapter import AlreadyVectorizedEnv
from .vector.make import make_vector_env
from .vector.sync import SyncVectorEnv
from .vector.workers import AsyncVectorEnv, EnvHalves, num_usable_cores

__all__ = [
    "METRIC_PREFIX",
    "MINIGRID_WORDS",
    "ActionCode",
    "ActionMap",
    "AlreadyVectorizedEnv",
    "AsyncVectorEnv",
    "Bandit",
    "BilevelEpsilonGreedy",
    "ClassicControlState",
    "Counting",
    "DarkKeyToDoor",
    "DarkRoom",
    "EnvError",
    "EnvHalves",
    "EnvSpec",
    "EpsilonGreedy",
    "ExplorationWrapper",
    "FrozenLake",
    "HalfCheetahVelocity",
    "Histories",
    "JointActions",
    "KShotWrapper",
    "MaxEpisodeLength",
    "MazeRunner",
    "MetaWorld",
    "ObsLayout",
    "PartialObs",
    "Recall",
    "ReturnHistory",
    "SequenceEnv",
    "SpecialMetricHistory",
    "SyncVectorEnv",
    "TMazeActive",
    "TMazePassive",
    "TMazePixels",
    "Tokens",
    "atari_env",
    "generator_state",
    "gym_env",
    "make_vector_env",
    "num_usable_cores",
    "partial_env",
    "resolve_env",
    "set_generator_state",
]
