"""Built-in tasks."""

from .mazerunner import MazeRunner
from .tmaze import TMazePassive, TMazePixels

__all__ = ["MazeRunner", "TMazePassive", "TMazePixels"]
