"""Lists of symbols, to be repeated in order, in reverse or by key, or to be counted by symbol."""

from __future__ import annotations

from typing import Any, ClassVar

import gin
import gymnasium as gym
import numpy as np

from ...data.errors import check_choice
from ..returned import METRIC_PREFIX
from .task import StepResult, Task, check_counts

ORDERS = ("forward", "reverse", "by_key")


class _Questions(Task):
    """`length` timesteps that show symbols, then one question per timestep; see the classes below.

    A right answer pays 1 divided by the number of questions, a wrong one 0. Actions are ignored while symbols
    are shown. The episode terminates after the last answer.
    """

    settings: ClassVar[tuple[str, ...]] = ("length", "num_symbols")
    variables: ClassVar[tuple[str, ...]] = ("_symbols", "_answers", "_time", "_num_correct")

    def __init__(
        self, length: int, num_symbols: int, num_questions: int, obs_dim: int, num_answers: int
    ) -> None:
        self.length, self.num_symbols, self._num_questions = length, num_symbols, num_questions
        self.observation_space = gym.spaces.Box(0.0, 1.0, (obs_dim,), np.float32)
        self.action_space = gym.spaces.Discrete(num_answers)
        self._symbols: list[int] = []  # symbols in the order of showing
        self._answers: list[int] = []  # right answers in the order of asking
        self._time, self._num_correct = 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw a new list."""
        super().reset(seed=seed)
        self._draw_list()
        self._time, self._num_correct = 0, 0
        return self._obs(), {}

    def step(self, action: Any) -> StepResult:
        """Check the answer to the question of the current observation, if it has one."""
        number, reward = self._time - self.length, 0.0
        if number >= 0 and action == self._answers[number]:
            self._num_correct += 1
            reward = 1.0 / self._num_questions
        self._time += 1
        is_over = number + 1 == self._num_questions
        info = {METRIC_PREFIX + "success": self._num_correct / self._num_questions} if is_over else {}
        return self._obs(), reward, is_over, False, info

    def _draw_list(self) -> None:
        raise NotImplementedError

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self.observation_space.shape or (), np.float32)
        number = self._time - self.length
        if number < 0:
            obs[self._symbols[self._time]] = 1.0
            self._show(obs, self._time)
        elif number < self._num_questions:
            self._ask(obs, number)
        return obs

    def _show(self, obs: np.ndarray, index: int) -> None:
        """Write further observation entries for the symbol at an index of the list."""

    def _ask(self, obs: np.ndarray, number: int) -> None:
        """Write the observation entries of a question."""
        raise NotImplementedError


@gin.configurable
class Recall(_Questions):
    """A list of symbols is shown, one per timestep; then all of them are queried, one per timestep.

    Observation: Box float32 of ones and zeros = [symbol shown (num_symbols), whether a symbol is queried, and
    with order "by_key" the key that is shown or queried (length)]. Action: a symbol, 0 to num_symbols - 1.
    The episode has `length` steps that show symbols and as many that query them, and terminates. Each right
    answer pays 1 / length, a wrong one 0: the best return is 1, without memory it is 1 / num_symbols.
    `info["metric/success"]` is the share of right answers, reported at the end.

    Args:
        length: number of symbols in the list.
        num_symbols: size of the alphabet that the list is drawn from.
        order: order of the answers. "forward": as shown; "reverse": the last one first; "by_key": each symbol
            is shown with its own key, and queried by this key, in random order.
    """

    settings: ClassVar[tuple[str, ...]] = ("length", "num_symbols", "order")
    variables: ClassVar[tuple[str, ...]] = (*_Questions.variables, "_keys", "_asked_keys")

    def __init__(self, length: int = gin.REQUIRED, num_symbols: int = 4, order: str = "forward") -> None:
        check_counts(self, length=length)
        check_counts(self, 2, num_symbols=num_symbols)
        check_choice("Recall.order", order, ORDERS)
        self.order = order
        self._keys: list[int] = []
        self._asked_keys: list[int] = []
        obs_dim = num_symbols + 1 + (length if order == "by_key" else 0)
        super().__init__(length, num_symbols, length, obs_dim, num_symbols)

    def _draw_list(self) -> None:
        self._symbols = self.np_random.integers(self.num_symbols, size=self.length).tolist()
        if self.order == "by_key":
            self._keys = self.np_random.permutation(self.length).tolist()
            asked = self.np_random.permutation(self.length).tolist()
            self._asked_keys = [self._keys[index] for index in asked]
            self._answers = [self._symbols[index] for index in asked]
        else:
            self._answers = self._symbols[:: 1 if self.order == "forward" else -1]

    def _show(self, obs: np.ndarray, index: int) -> None:
        if self.order == "by_key":
            obs[self.num_symbols + 1 + self._keys[index]] = 1.0

    def _ask(self, obs: np.ndarray, number: int) -> None:
        obs[self.num_symbols] = 1.0
        if self.order == "by_key":
            obs[self.num_symbols + 1 + self._asked_keys[number]] = 1.0


@gin.configurable
class Counting(_Questions):
    """A list of symbols is shown, one per timestep; then the count of each symbol is queried.

    Observation: Box (2 * num_symbols,) float32 of ones and zeros = [symbol shown, symbol queried]. Action: a
    number, 0 to `length`. The episode has `length` steps that show symbols and `num_symbols` that query them,
    in random order, and terminates. Each right answer pays 1 / num_symbols, a wrong one 0. All ways to divide
    the list among the symbols are equally likely. `info["metric/success"]` is the share of right answers,
    reported at the end.

    Args:
        length: number of symbols in the list.
        num_symbols: size of the alphabet.
    """

    variables: ClassVar[tuple[str, ...]] = (*_Questions.variables, "_asked")

    def __init__(self, length: int = gin.REQUIRED, num_symbols: int = 4) -> None:
        check_counts(self, length=length)
        check_counts(self, 2, num_symbols=num_symbols)
        self._asked: list[int] = []
        super().__init__(length, num_symbols, num_symbols, 2 * num_symbols, length + 1)

    def _draw_list(self) -> None:
        shares = self.np_random.dirichlet(np.ones(self.num_symbols))
        self._symbols = self.np_random.choice(self.num_symbols, self.length, p=shares).tolist()
        self._asked = self.np_random.permutation(self.num_symbols).tolist()
        self._answers = [self._symbols.count(symbol) for symbol in self._asked]

    def _ask(self, obs: np.ndarray, number: int) -> None:
        obs[self.num_symbols + self._asked[number]] = 1.0
