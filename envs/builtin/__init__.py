"""Built-in tasks."""

from .mazerunner import MazeRunner
from .tmaze import TMazePassive

__all__ = ["MazeRunner", "TMazePassive"]
