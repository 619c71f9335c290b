"""Conversion between an environment's spaces and the arrays that policies and trajectories hold.

Observations become a flat dict of arrays; actions become integers from zero or numbers in [-1, 1]. This
module needs only numpy and gymnasium's spaces.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from .errors import WrongValueError
from .values import cast

SINGLE_KEY = "observation"
_FLOAT64 = np.dtype(np.float64)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_LONGEST_SHOWN = 100  # characters of a value in an error
_WORD = re.compile(r"\w+|[^\w\s]")
logger = logging.getLogger("loxodon")


class Tokens(spaces.MultiDiscrete):
    """Texts as rows of numbers, with a vocabulary that is part of the space: (max_tokens,) int16.

    PAD = 0 fills up short texts, UNKNOWN = 1 stands for every word that `words` lacks, and 2 + i is words[i].
    Words are compared in lower case, and a punctuation mark is a word. An environment may declare an
    observation of this space and return either Python strings or token numbers.

    Args:
        words: the vocabulary; the order gives the numbers.
        max_tokens: longest text; longer texts are cut off, with one warning.
    Raises: ValueError if the vocabulary is empty or too large, has duplicates, or has an entry that is not a
        single word.
    """

    PAD, UNKNOWN = 0, 1

    def __init__(self, words: Sequence[str], max_tokens: int = 16) -> None:
        self.words, self.max_tokens = tuple(word.lower() for word in words), max_tokens
        wrong = [word for word in self.words if not _WORD.fullmatch(word)]
        wrong += [word for word, count in Counter(self.words).items() if count > 1]
        if wrong or not 0 < len(self.words) < np.iinfo(np.int16).max - 1 or max_tokens < 1:
            raise ValueError(
                f"The vocabulary has {len(self.words)} words (at least 1 and fewer than 32,766 are "
                f"allowed), max_tokens is {max_tokens} (at least 1 is required), and these entries are not "
                f"single words or appear twice: {wrong[:5]}. Fix: list every word once, without spaces."
            )
        self._numbers = {word: 2 + i for i, word in enumerate(self.words)}
        self._has_warned: set[str] = set()
        dtype: Any = np.int16
        super().__init__(np.full(max_tokens, 2 + len(self.words)), dtype=dtype)

    def encode(self, texts: Any) -> np.ndarray:
        """Encode a string as (max_tokens,) int16, N of them as (N, max_tokens); numbers stay unchanged.

        Raises: TypeError for anything else.
        """
        if isinstance(texts, str):
            return self._encode(texts)
        rows = np.asarray(texts)
        if rows.dtype.kind not in "OSTU":
            return rows
        if not all(isinstance(text, str) for text in rows.reshape(-1).tolist()):
            raise TypeError(f"{shown(texts)} is neither text nor numbers. Fix: pass str values.")
        return np.stack([self._encode(str(text)) for text in rows.reshape(-1)]).reshape(*rows.shape, -1)

    def _encode(self, text: str) -> np.ndarray:
        row = np.zeros(self.max_tokens, np.int16)
        words = _WORD.findall(text.lower())
        numbers = [self._numbers.get(word, self.UNKNOWN) for word in words[: self.max_tokens]]
        row[: len(numbers)] = numbers
        if len(words) > self.max_tokens:
            self._warn(
                "length",
                "%r has %d words, but only the first %d are used. Fix: name the vocabulary, such as "
                "gym_env.vocabulary = 'minigrid', and raise gym_env.max_tokens (in Python Tokens.max_tokens)",
                text,
                len(words),
                self.max_tokens,
            )
        if self.UNKNOWN in numbers:
            word = words[numbers.index(self.UNKNOWN)]
            self._warn(
                "word",
                "%r has the word %r, which the vocabulary lacks. Fix: change the vocabulary",
                text,
                word,
            )
        return row

    def _warn(self, kind: str, message: str, *values: Any) -> None:
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            logger.warning(f"The text observation {message}.", *values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and (self.words, self.max_tokens) == (other.words, other.max_tokens)

    __hash__ = None  # type: ignore[assignment]  # as in the base classes

    def __repr__(self) -> str:
        return f"Tokens({len(self.words)} words, max_tokens={self.max_tokens})"


_MISSIONS = (
    "a after agent all an and at avoid ball behind blue box by color door drop end explore fetch find floor "
    "from front get go goal green grey hallway in it key lava left locked matching maze must near next not "
    "object of on one open opening or order pick purple put reach red right room rooms same side square "
    "switch the then through to toggle traverse twice unlock up use using wall with yellow you your , ."
)
MINIGRID_WORDS = tuple(_MISSIONS.split())
"""Vocabulary of the missions of MiniGrid and BabyAI."""


def with_tokens(space: Space[Any], vocabulary: Tokens | None) -> Space[Any]:
    """The same space with `Tokens` instead of texts; the same object if there is nothing to replace.

    Args:
        space: an observation space.
        vocabulary: replaces every text. None replaces only the missions of MiniGrid and BabyAI.

    Raises:
        ValueError: If a vocabulary is given, but the space has no text.
    """
    found: list[Space[Any]] = []

    def replaced(part: Space[Any]) -> Space[Any]:
        if isinstance(part, spaces.Dict):
            return spaces.Dict({name: replaced(child) for name, child in part.spaces.items()})
        if isinstance(part, spaces.Tuple):
            return spaces.Tuple([replaced(child) for child in part.spaces])
        # The space of BabyAI is derived from that of MiniGrid.
        is_mission = any(kind.__name__ == "MissionSpace" for kind in type(part).__mro__)
        if not (is_mission if vocabulary is None else _is_text(part)):
            return part
        found.append(part)
        return Tokens(MINIGRID_WORDS) if vocabulary is None else vocabulary

    numbered = replaced(space)
    if vocabulary is not None and not found:
        raise ValueError(
            f"A vocabulary was given, but the observation space {space} has no text. Fix: remove the "
            "vocabulary (EnvSpec.vocabulary, gym_env.vocabulary)."
        )
    return numbered if found else space


def _is_text(space: Space[Any]) -> bool:
    """Return True if the values of the space are Python strings (Text and spaces like it)."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


@dataclass(frozen=True)
class ObsLeaf:
    """One array inside a (possibly nested) observation.

    key: its name in the flat dict; path: how to reach it in the raw observation; raw_space: its space as the
    environment declares it; offset: number that is subtracted from integer observations that do not start at
    zero, else None.
    """

    key: str
    path: tuple[str | int, ...]
    space: Space[Any]
    raw_space: Space[Any]
    offset: Any

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return tuple(self.space.shape or ())

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the columns that hold the values."""
        dtype: np.dtype[Any] = np.dtype(np.dtype(self.space.dtype).str)  # NumPy's own object, not a copy
        return dtype

    @cached_property
    def direct_dtype(self) -> np.dtype[Any] | None:
        """The dtype in which raw values may be stored without `convert`; None if all need it."""
        return self.dtype if self.offset is None and not isinstance(self.space, Tokens) else None

    @cached_property
    def num_choices(self) -> Any:
        """Number of allowed values, counted from zero; an array for one per element; None for a Box."""
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.n)
        if isinstance(self.space, spaces.MultiDiscrete):
            return self.space.nvec.astype(self._unsigned)
        return 2 if isinstance(self.space, spaces.MultiBinary) else None

    @cached_property
    def _unsigned(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.dtype.itemsize}")

    @cached_property
    def _largest_square(self) -> float | None:
        """Square of the largest number that both the column and float32, used by the networks, can hold.

        None if the column does not hold floats.
        """
        if self.dtype.kind != "f":
            return None
        return min(float(np.finfo(self.dtype).max), _MAX_FLOAT32) ** 2

    @property
    def has_checks(self) -> bool:
        """Return True if `check` can find anything."""
        return self.num_choices is not None or self.dtype.kind == "f"

    def convert(self, value: Any, num_rows: int | None = None) -> Any:
        """Bring a raw value, or those of `num_rows` environments, into a form that a column can store.

        Returns: an array of `shape`, with `num_rows` in front, starting at zero, in the dtype of the column
            or in one whose values fit into it. Discrete may give an int.

        Raises: WrongValueError for a wrong shape, for values that are not numbers, and for whole numbers that
            the dtype of the column cannot hold. Floats that are too large for it become infinite.
        """
        if num_rows is None and (found := self._usual(value)) is not None:
            return found
        lead = () if num_rows is None else (num_rows,)
        if isinstance(self.space, Tokens):
            try:
                value = self.space.encode(value)
            except TypeError:
                raise self._refused(value, "text. Fix: return a str.") from None
        array = self._array(value, (*lead, *self.shape))
        if self.dtype.kind == "f":
            with np.errstate(over="ignore"):  # `check` finds values that became infinite
                return array.astype(self.dtype, copy=False)
        exact = self._exact(array, self.dtype if self.offset is None else np.dtype(np.int64))
        return exact if self.offset is None else exact - self.offset

    def check(self, values: np.ndarray) -> None:
        """Raise WrongValueError if values (N, *shape) of a column are not allowed or not finite."""
        if self.num_choices is None:
            self._check_finite(values)
            return
        # Viewed as unsigned integers, negative numbers exceed all others.
        is_wrong = values.view(self._unsigned) >= self.num_choices
        if np.count_nonzero(is_wrong):
            row, _ = _first(is_wrong)
            value = values[row] if self.offset is None else values[row] + self.offset
            raise WrongValueError(
                f"{_shortened(str(value))} as observation {self.key!r}",
                f"Its space {self.raw_space} does not contain this value. Fix: correct the environment, or "
                "the bounds of its observation_space.",
                row,
            )

    def _usual(self, value: Any) -> Any:
        """Return a single value of a common kind that needs no conversion. This saves most of the time."""
        if type(value) is int and self.num_choices is not None and self.shape == ():
            index = value - (self.offset or 0)
            return index if 0 <= index < self.num_choices else None
        if type(value) is np.ndarray and value.shape == self.shape and value.dtype is _FLOAT64:
            limit = self._largest_square
            return value if limit is not None and np.vdot(value, value) < limit else None
        return None

    def restore(self, values: np.ndarray) -> np.ndarray:
        """Undo `convert` for arrays of several observations, to the environment's own form."""
        whole: np.ndarray = values if self.offset is None else values + self.offset
        return whole.astype(self.space.dtype, copy=False)

    def _array(self, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The value as an array of real numbers with this shape."""
        required = f"real numbers of shape {self.shape}. Fix: return a NumPy array of {self.space.dtype}."
        try:
            array = value if isinstance(value, np.ndarray) else as_numpy(value)
        except ValueError:  # the lists have different lengths
            raise self._refused(value, required) from None
        if array.dtype.kind not in "biuf" and not np.can_cast(array.dtype, np.float64):
            raise self._refused(value, required)
        if array.shape != shape:
            raise WrongValueError(
                f"observation {self.key!r} with shape {array.shape}",
                f"Its space {self.raw_space} requires the shape {shape}. Fix: make the environment's "
                "observation_space and its observations agree.",
            )
        return array

    def _refused(self, value: Any, required: str) -> WrongValueError:
        found = f"{shown(value)} as observation {self.key!r}"
        return WrongValueError(found, f"Its space {self.raw_space} requires {required}")

    def _exact(self, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """The array as integers or booleans of `dtype`; raises if the cast would change a value."""
        if np.can_cast(array.dtype, dtype):
            return array.astype(dtype, copy=False)
        with np.errstate(invalid="ignore"):
            converted: np.ndarray = array.astype(dtype)
        is_wrong = np.asarray(converted != array)
        if is_wrong.any():
            row, place = _first(is_wrong)
            raise WrongValueError(
                f"{array[place]} ({array.dtype}) as observation {self.key!r}",
                f"Its space {self.raw_space} has the dtype {dtype}, which turns the value into "
                f"{converted[place]}. Fix: declare the dtype of the observations in the observation_space (a "
                "float dtype for floats), or convert them in the environment.",
                row,
            )
        return converted

    def _check_finite(self, values: np.ndarray) -> None:
        assert self._largest_square is not None  # these are floats
        # NaN and infinity propagate to the sum, which takes a fraction of the time of all().
        if float(np.vdot(values, values)) < self._largest_square:
            return
        is_wrong = ~(np.abs(values) <= math.sqrt(self._largest_square))
        if is_wrong.any():  # otherwise the values are finite and only their squares are too large
            row, place = _first(is_wrong)
            raise not_finite(f"observation {self.key!r}", float(values[place]), row)


def _first(is_wrong: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """The row of the first True, and its whole index."""
    place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    return (place[0] if place else 0), place


def not_finite(what: str, value: float, row: int | None = None) -> WrongValueError:
    """The error for NaN and for values that float32 turns into infinity; either would ruin the weights."""
    return WrongValueError(
        f"{'NaN' if math.isnan(value) else value} as {what}",
        "Allowed are numbers that are finite in float32. Fix: correct or scale them in the environment, or "
        "in a wrapper (gymnasium.wrappers.TransformObservation, TransformReward).",
        row,
    )


def as_numpy(value: Any) -> np.ndarray:
    """The value as an array; tensors may be on a GPU. Raises: ValueError for lists of different lengths."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def shown(value: Any) -> str:
    """Format a value for an error: shortened, and with its type if the text does not show it."""
    shows_type = value is None or isinstance(value, str | np.ndarray)
    return _shortened(repr(value)) + ("" if shows_type else f" ({type(value).__name__})")


def _shortened(text: str) -> str:
    text = " ".join(text.split())  # the text of an array has several lines
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _array_leaf(space: Space[Any], path: tuple[str | int, ...]) -> ObsLeaf:
    key = "/".join(str(part) for part in path) or SINGLE_KEY
    if isinstance(space, (spaces.Box, spaces.MultiBinary, Tokens)):
        return ObsLeaf(key, path, space, space, None)
    if isinstance(space, spaces.Discrete):
        zero_based = spaces.Discrete(int(space.n))
        return ObsLeaf(key, path, zero_based, space, int(space.start) or None)
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(getattr(space, "start", 0))
        return ObsLeaf(key, path, spaces.MultiDiscrete(space.nvec), space, start if start.any() else None)
    if _is_text(space):
        raise TypeError(
            f"Observation {key!r} is a {type(space).__name__}, which only a vocabulary can turn into "
            "numbers. Fix: list its words in gym_env.vocabulary = ['go', 'left'] (an environment of your own "
            "class declares it as loxodon.envs.Tokens(['go', 'left'])), or leave it out with "
            "gymnasium.wrappers.FilterObservation."
        )
    raise TypeError(
        f"Observation {key!r} has the space {space}, which has no fixed array form. Allowed are Box, "
        "Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these. "
        "Fix: wrap the environment with gymnasium.wrappers.TransformObservation (or FilterObservation to "
        "drop it)."
    )


def _leaves(space: Space[Any], path: tuple[str | int, ...]) -> Iterator[ObsLeaf]:
    if (parts := _parts(space)) is None:
        yield _array_leaf(space, path)
        return
    for name, child in parts.items():
        yield from _leaves(child, (*path, name))


class ObsLayout:
    """The flat form of one observation space, and the conversion of values into it.

    Attributes:
        leaves: one per array, sorted by key; the columns given to `write` have the same order.
        space: Dict of the leaves' spaces. A single Box, Discrete, … is named "observation"; nested names are
            joined with "/"; integers start at zero.

    Text becomes numbers, for which its space must be `Tokens`.

    Raises: TypeError for spaces without a fixed array form (Text, Graph, Sequence, OneOf).
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = tuple(sorted(_leaves(space, ()), key=lambda leaf: leaf.key))  # spaces.Dict sorts too
        self.space = spaces.Dict({leaf.key: leaf.space for leaf in self.leaves})
        if not self.leaves:
            raise ValueError(
                f"The observation space {space} is empty. Fix: give it at least one observation, for example "
                "a constant."
            )
        if len(self.space.spaces) != len(self.leaves):
            keys = [leaf.key for leaf in self.leaves]
            raise ValueError(
                f"Two observations share a key after nested names are joined with '/': {keys}. "
                "Fix: rename one of them in the environment."
            )
        self._space = space
        self._sizes = tuple(_sizes(space, ()))
        self._is_lone = not self.leaves[0].path

    def write(self, raw: Any, columns: Sequence[np.ndarray], row: int) -> None:
        """Copy a raw observation into row `row` of every column ([N, ...] arrays, one per leaf).

        Raises: WrongValueError unless the observation has the structure, shapes and kinds of numbers of the
            space. The caller runs `ObsLeaf.check`, because it can check all rows at once.
        """
        if self._is_lone:
            leaf = self.leaves[0]
            is_direct = getattr(raw, "dtype", False) is leaf.direct_dtype and raw.shape == leaf.shape
            columns[0][row] = raw if is_direct else leaf.convert(raw)
            return
        for leaf, value, column in zip(self.leaves, self.values(raw), columns, strict=True):
            is_direct = getattr(value, "dtype", False) is leaf.direct_dtype and value.shape == leaf.shape
            column[row] = value if is_direct else leaf.convert(value)

    def values(self, raw: Any) -> list[Any]:
        """The raw values of all leaves in one observation, or in arrays of several.

        Raises: WrongValueError if parts are missing or are not in the space.
        """
        values = []
        try:
            for path, size in self._sizes:
                part = raw
                for name in path:
                    part = part[name]
                if len(part) != size:
                    raise LookupError
            for leaf in self.leaves:
                value = raw
                for name in leaf.path:
                    value = value[name]
                values.append(value)
        except (LookupError, TypeError):
            _refuse_structure(self._space, raw, "observation")
            raise
        return values

    def flatten(self, raw: Any) -> dict[str, np.ndarray]:
        """One raw observation as a new flat dict of arrays in the dtypes of their spaces."""
        flat = self.empty(1)
        self.write(raw, list(flat.values()), 0)
        for leaf in self.leaves:
            if leaf.has_checks:
                leaf.check(flat[leaf.key])
        return {key: column.reshape(column.shape[1:]) for key, column in flat.items()}

    def empty(self, num_envs: int) -> dict[str, np.ndarray]:
        """Uninitialised columns: one [num_envs, ...] array per leaf, in leaf order."""
        return {leaf.key: np.empty((num_envs, *leaf.shape), leaf.dtype) for leaf in self.leaves}


def _sizes(space: Space[Any], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield path and number of parts of every Dict and Tuple in a space."""
    parts = _parts(space)
    if parts is not None:
        yield path, len(parts)
        for key, child in parts.items():
            yield from _sizes(child, (*path, key))


def _parts(space: Space[Any]) -> dict[Any, Space[Any]] | None:
    """The spaces in a Dict or Tuple; None for other spaces."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    return dict(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def _refuse_structure(space: Space[Any], raw: Any, name: str) -> None:
    """Raise WrongValueError unless the raw observation has the parts of every Dict and Tuple in the space."""
    parts = _parts(space)
    if parts is None:
        return
    kind = Mapping if isinstance(space, spaces.Dict) else tuple | list | np.ndarray
    keys = None
    if isinstance(raw, kind):
        keys = list(raw) if isinstance(raw, Mapping) else list(range(len(raw)))
    if keys is None or set(keys) != set(parts):
        found = f"{shown(raw)} as {name}" if keys is None else f"{name} with the parts {keys}"
        raise WrongValueError(
            found,
            f"Its space is a {type(space).__name__} with the parts {list(parts)}. Fix: return exactly these "
            "parts from every reset and step, or correct the observation_space.",
        )
    for key, child in parts.items():
        _refuse_structure(child, raw[key], f"{name} {key!r}")


# ---- actions ----

PolicyActionSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


class ActionMap:
    """Maps [N, ...] batches of policy actions to environment actions.

    `policy_space` is one of

    - Discrete(n), starting at zero.
    - MultiDiscrete(nvec) with K factors in one row, each starting at zero; MultiBinary has factors of 2.
    - Box(-1, 1, (A,), float32), where A is the number of elements of the environment's Box. It is rescaled to
      the environment's bounds, shape and dtype. Infinite bounds become finite ones, see `finite_box`.

    Raises: TypeError for other spaces and integer Boxes.
    """

    def __init__(self, space: Space[Any]) -> None:
        self._is_free: np.ndarray | None = None  # (A,) bool, True for elements without two finite bounds
        if isinstance(space, spaces.Box) and not space.is_bounded("both"):
            self._is_free = ~(np.isfinite(space.low) & np.isfinite(space.high)).reshape(-1)
            space = finite_box(space)
        self.policy_space: PolicyActionSpace
        self._space = space
        self._start: Any = getattr(space, "start", 0)
        if isinstance(space, spaces.Discrete):
            self.policy_space = spaces.Discrete(int(space.n))
        elif isinstance(space, spaces.MultiDiscrete):
            self.policy_space = spaces.MultiDiscrete(space.nvec.reshape(-1))
        elif isinstance(space, spaces.MultiBinary):
            self.policy_space = spaces.MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
        elif isinstance(space, spaces.Box):
            if not np.issubdtype(space.dtype, np.floating):
                raise TypeError(
                    f"The action space is {space}, an integer Box, which has no meaningful scaling from "
                    "[-1, 1]. Allowed are Discrete, MultiDiscrete, MultiBinary and Box with a float dtype. "
                    "Fix: wrap the environment to take a Discrete action, or a float Box that it rounds "
                    "itself."
                )
            self.policy_space = spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),), np.float32)
            dtype = np.result_type(space.dtype, np.float32)
            self._low, self._high = (bound.astype(dtype).reshape(-1) for bound in (space.low, space.high))
            self._middle, self._half = self._low / 2 + self._high / 2, self._high / 2 - self._low / 2
        else:
            raise TypeError(
                f"The action space is {space}, but only Discrete, MultiDiscrete, MultiBinary and Box are "
                "supported. Fix: wrap the environment so that it takes one of these "
                "(gymnasium.wrappers.TransformAction)."
            )

    def to_env(self, actions: np.ndarray) -> Any:
        """Convert policy actions of N environments to the numbering, bounds and dtype of the environment.

        (N,) integers become a list of Python integers. (N, K) integers and (N, A) floats, which are clipped
        to [-1, 1], become an array (N, *shape).
        """
        space = self._space
        if isinstance(space, spaces.Discrete):
            return (actions + self._start if self._start else actions).tolist()
        if isinstance(space, spaces.Box):
            actions = np.clip(actions, -1.0, 1.0) * self._half + self._middle
            np.clip(actions, self._low, self._high, out=actions)
            return actions.astype(space.dtype, copy=False).reshape(-1, *space.shape)
        return (actions.reshape(-1, *(space.shape or ())) + self._start).astype(space.dtype)

    def from_env(self, actions: Any) -> np.ndarray:
        """Convert T actions of the environment to the policy's: (T,) or (T, K) int64, or (T, A) float32.

        Raises: ValueError if discrete actions are not in the space. Continuous actions are clipped to it.
        """
        actions, space = np.asarray(actions), self._space
        if isinstance(space, spaces.Box):
            low, high = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))
            # an element with a single allowed value becomes 0
            half = np.where(high > low, high / 2 - low / 2, 1.0)
            flat = actions.reshape(len(actions), len(low)).astype(np.float64)
            flat = (flat - (low / 2 + high / 2)) / half
            if self._is_free is not None and (np.abs(flat[:, self._is_free]) > 1.0 + 1e-6).any():
                raise ValueError(
                    f"Actions range from {actions.min()} to {actions.max()}, beyond the finite bounds that "
                    f"replace infinite ones in the action space {space}. Fix: give the dataset's "
                    "action_space finite bounds that include all its actions."
                )
            scaled: np.ndarray = np.clip(flat, -1.0, 1.0).astype(np.float32)
            return scaled
        nvec = np.asarray(getattr(self.policy_space, "nvec", getattr(self.policy_space, "n", None)))
        indices: np.ndarray = cast("actions", actions, np.int64) - self._start
        indices = indices.reshape(-1, *nvec.shape)
        if (indices < 0).any() or (indices >= nvec).any():
            raise ValueError(
                f"Actions range from {actions.min()} to {actions.max()}, but the action space is {space}. "
                "Fix: make the dataset's action_space and its actions agree."
            )
        return indices


class ActionCode:
    """Policy actions as network inputs: one-hot, the one-hots of all factors side by side, or unchanged.

    Attributes:
        width: A, the number of columns.
        nvec: number of actions of each of the K factors of a MultiDiscrete space; None for other spaces.
        has_integers: True if policy actions are integers, (N,) or (N, K); False if they are floats (N, A).
    """

    def __init__(self, space: PolicyActionSpace) -> None:
        self.nvec: tuple[int, ...] | None = None
        self.has_integers = not isinstance(space, spaces.Box)
        if isinstance(space, spaces.Discrete):
            self.width = int(space.n)
        elif isinstance(space, spaces.MultiDiscrete):
            self.nvec = tuple(space.nvec.tolist())
            self.width = sum(self.nvec)
            self._offsets = np.cumsum((0, *self.nvec[:-1]))
        else:
            self.width = int(space.shape[0])

    def write(self, actions: np.ndarray, out: np.ndarray) -> None:
        """Write actions, (N,) or (N, K) integers or (N, A) floats, to zeros `out` (N, A) float32."""
        if not self.has_integers:
            out[:] = actions
        elif self.nvec is None:
            out[np.arange(len(out)), actions] = 1.0
        else:
            out[np.arange(len(out))[:, None], actions + self._offsets] = 1.0


def finite_box(space: spaces.Box) -> spaces.Box:
    """A Box with finite bounds: [-1, 1] for elements without bounds, a range of 2 for those with one bound.

    A policy's action in [-1, 1] is thus taken unchanged, or shifted to the one bound.
    """
    low, high = space.low, space.high
    low_is_free, high_is_free = ~np.isfinite(low), ~np.isfinite(high)
    new_low = np.where(low_is_free, np.where(high_is_free, -1.0, high - 2.0), low)
    new_high = np.where(high_is_free, np.where(low_is_free, 1.0, low + 2.0), high)
    return spaces.Box(new_low.astype(space.dtype), new_high.astype(space.dtype), dtype=space.dtype)
