"""Built-in tasks; see docs/tasks.md."""

from .bandit import Bandit
from .dark_room import DarkKeyToDoor, DarkRoom
from .frozen_lake import FrozenLake
from .mazerunner import MazeRunner
from .recall import Counting, Recall
from .tmaze import TMazeActive, TMazePassive, TMazePixels

__all__ = [
    "Bandit",
    "Counting",
    "DarkKeyToDoor",
    "DarkRoom",
    "FrozenLake",
    "MazeRunner",
    "Recall",
    "TMazeActive",
    "TMazePassive",
    "TMazePixels",
]
