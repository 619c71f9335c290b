"""Built-in tasks."""

from .tmaze import TMazePassive

__all__ = ["TMazePassive"]
