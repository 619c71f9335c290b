"""Kinds of attention heads, by the names that `TransformerTrajEncoder.heads` takes. Each kind is one object.

A head reads the timesteps s of its window by queries q_t, keys k_s and values v_s, each (E,):

    y_t = sum over s <= t of softmax_s(q_t k_s / sqrt(E)) v_s        with q_t = W_q x_t, k_s = W_k x_s

A `HeadKind` says how a kind differs from this. To switch a kind off, give its heads another kind; 'plain' for
all heads is the published Transformer. To add one, write an object and add it to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

COUNT_SCALE = 32.0
"""Timesteps up to which counts grow evenly; then by their logarithm. With 8, reversed recall took longer."""

COUNT_SHARE = 0.5
"""Heads count keys whose logit exceeds this share of the logit of an equal query and key at the start."""

PLAIN_MATCH = 1 / 3
"""Product of an equal query and key per feature at the start, unless `qk_norm` sets it to `qk_gain`."""


@dataclass(frozen=True)
class HeadKind:
    """How heads differ from the plain equation.

    Attributes:
        name: for settings.
        is_rotated: queries and keys are turned by their timestep, see `HeadPositions`.
        has_waves: learned mixtures of waves of their timestep are added to queries and keys.
        fades: logits fall with the distance t - s, with a slope for each head.
        sees_present: s = t is read. If not, a key and a value of zeros take its place.
        begins_alike: W_k = W_q at the start.
        weigh: weights (B, H, L, S) of logits, and of the logit that an equal query and key have at the start.
            A logit of -inf must get a weight of 0. None: softmax, for which there are fast kernels.
        finish: what follows on the sums of weighted values, (B, H, L, E) -> (B, H, L, E), or None.
    """

    name: str
    is_rotated: bool = False
    has_waves: bool = False
    fades: bool = False
    sees_present: bool = True
    begins_alike: bool = False
    weigh: Callable[[Tensor, float], Tensor] | None = None
    finish: Callable[[Tensor], Tensor] | None = None


FIXED = HeadKind("fixed", has_waves=True)
"""Attends by place in the episode. q_t = W_q x_t + U_q waves(t) and k_s = W_k x_s + U_k waves(s), with
learned U and sinusoidal waves; W_q and W_k begin small (`fixed_content_gain`). Ours. Reason: recall of a
given place, as of a list in reverse, without positions in what layers read and write.
"""

ROTARY = HeadKind("rotary", is_rotated=True)
"""Attends by distance. q_t = R^t W_q x_t and k_s = R^s W_k x_s, where R turns pairs of features, so that
q_t k_s depends on t - s. Su et al. 2021, arXiv:2104.09864, eq. 34. Reason: recall of a fixed number of
timesteps ago.
"""

PLAIN = HeadKind("plain")
"""The equation above. Only an encoder with `pos_emb` shows such heads positions. Vaswani et al. 2017,
arXiv:1706.03762, eq. 1.
"""

ALIBI = HeadKind("alibi", fades=True)
"""Attends by distance. The logits become q_t k_s / sqrt(E) - slope (t - s). Press et al. 2021,
arXiv:2108.12409. Reason: attention fades with distance.
"""

CONTENT = HeadKind("content", sees_present=False, begins_alike=True)
"""Attends to what is like the present: no positions, and only s < t. Ours; alike first weights of Trockman &
Kolter 2023, arXiv:2305.09828. Reason: recall by key from the first update on. The present is left out because
nothing is more like it than itself.
"""


def _fits(logits: Tensor, match: float) -> Tensor:
    return (logits - COUNT_SHARE * match).sigmoid()


def _damped(sums: Tensor) -> Tensor:
    return (sums / COUNT_SCALE).asinh()


COUNTING = HeadKind(
    "counting",
    sees_present=False,
    begins_alike=True,
    weigh=_fits,
    finish=_damped,
)
"""Counts what is like the present. Like CONTENT, with y_t = asinh(sum over s < t of sigmoid(q_t k_s / sqrt(E)
- threshold) v_s / COUNT_SCALE). Ours; weights of Ramapuram et al. 2024, arXiv:2409.04431 (sigmoid attention).
Reason: softmax returns a mean, which shows shares but not numbers.
"""

KINDS = {kind.name: kind for kind in (FIXED, ROTARY, PLAIN, ALIBI, CONTENT, COUNTING)}
"""All kinds, in the order in which a layer keeps its heads. Those with waves come first."""


class Heads:
    """The kinds of the heads of a layer.

    Attributes:
        kinds: the kind of each head.
        groups: neighbouring heads that attend in the same way, once queries and keys are there.
        weighings: neighbouring heads that make weights of logits in the same way, and one of their kinds.
        sees_present: (H, 1, 1) float, 1 for heads that read their own timestep, else 0.
        any_fades: some heads' logits fall with the distance.
        all_see_present: all heads read their own timestep.
        slopes: (H, 1, 1) float, by how much logits fall per timestep: a geometric series over fading heads.
    """

    def __init__(self, kinds: Sequence[HeadKind]) -> None:
        self.kinds = tuple(kinds)
        runs = self._runs(lambda kind: (kind.fades, kind.sees_present, kind.weigh, kind.finish))
        self.groups = [(part, self if len(runs) == 1 else Heads(self.kinds[part])) for part in runs]
        self.weighings = [
            (part, self.kinds[part.start]) for part in self._runs(lambda kind: (kind.weigh, kind.finish))
        ]
        self.any_fades, self.all_see_present = self.num("fades") > 0, self.num("sees_present") == len(self)
        self.sees_present = torch.tensor([float(kind.sees_present) for kind in kinds])[:, None, None]
        fades = torch.tensor([kind.fades for kind in kinds])
        slopes = 2.0 ** (-8.0 * fades.cumsum(0) / max(self.num("fades"), 1))
        self.slopes = torch.where(fades, slopes, 0.0)[:, None, None]

    @classmethod
    def named(cls, heads: str | Sequence[str], n_heads: int, *, setting: str) -> Heads:
        """One kind for all heads, or one per head in any order; sorted as `KINDS` are.

        Args:
            heads: names of `KINDS`.
            n_heads: how many heads there are.
            setting: name of the setting that holds `heads`, for errors.
        Raises: ValueError for an unknown name, or another number of names.
        """
        names = (heads,) * n_heads if isinstance(heads, str) else tuple(heads)
        example = "('fixed', 'rotary', 'rotary', 'content')"
        if unknown := sorted({*names} - {*KINDS}):
            raise ValueError(
                f"{setting} names {', '.join(map(repr, unknown))}, but the kinds of heads are "
                f"{', '.join(map(repr, KINDS))}. Fix: bind one of these for all heads, or one per head, e.g. "
                f"{example} for four (nets/head_kinds.py explains them)."
            )
        if len(names) != n_heads:
            raise ValueError(
                f"{setting} names the kinds of {len(names)} heads, but there are {n_heads}. Fix: bind one "
                f"kind for all heads, or one per head, e.g. {example} for four."
            )
        return cls([KINDS[name] for name in sorted(names, key=list(KINDS).index)])

    def __len__(self) -> int:
        return len(self.kinds)

    def num(self, trait: str) -> int:
        """How many heads have this attribute of `HeadKind`."""
        return sum(bool(getattr(kind, trait)) for kind in self.kinds)

    @property
    def need_positions(self) -> bool:
        """True if queries or keys of some heads depend on the timestep."""
        return self.num("is_rotated") + self.num("has_waves") > 0

    def _runs(self, way: Callable[[HeadKind], object]) -> list[slice]:
        runs, start = [], 0
        for _, run in groupby(self.kinds, way):
            runs.append(slice(start, start + len(list(run))))
            start = runs[-1].stop
        return runs


def equal_match(width: int, qk_gain: float | None) -> float:
    """The logit of an equal query and key of `width` at the start; qk_gain: None without normalisation."""
    match: float = width**0.5 * (PLAIN_MATCH if qk_gain is None else qk_gain)
    return match
