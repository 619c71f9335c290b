"""Built-in tasks; see docs/tasks.md."""

from .atari import atari_env
from .bandit import Bandit
from .dark_room import DarkKeyToDoor, DarkRoom
from .frozen_lake import FrozenLake
from .half_cheetah import HalfCheetahVelocity
from .mazerunner import MazeRunner
from .meta_world import MetaWorld
from .recall import Counting, Recall
from .tmaze import TMazeActive, TMazePassive, TMazePixels

__all__ = [
    "Bandit",
    "Counting",
    "DarkKeyToDoor",
    "DarkRoom",
    "FrozenLake",
    "HalfCheetahVelocity",
    "MazeRunner",
    "MetaWorld",
    "Recall",
    "TMazeActive",
    "TMazePassive",
    "TMazePixels",
    "atari_env",
]
