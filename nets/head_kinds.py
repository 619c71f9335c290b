"""Kinds of attention heads, by the names that `TransformerTrajEncoder.heads` takes. Each kind is one object.

A head reads the timesteps s of its window by queries q_t, keys k_s and values v_s, each (E,):

    y_t = sum over s <= t of softmax_s(q_t k_s / sqrt(E)) v_s        with q_t = W_q x_t, k_s = W_k x_s

A `HeadKind` defines how a kind differs from this. To switch a kind off, give its heads another kind; 'plain'
for all heads is the published Transformer. To add a kind, write an object and add it to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadKind:
    """Differences of a kind of heads from the plain equation.

    Attributes:
        name: name in settings.
        is_rotated: queries and keys are rotated by their timestep, see `HeadPositions`.
        has_waves: learned mixtures of waves of their timestep are added to queries and keys.
        fades: logits fall with the distance t - s, with a slope for each head.
        sees_present: s = t is read. Otherwise a key and a value of zeros replace it.
        begins_alike: W_k = W_q at the start.
    """

    name: str
    is_rotated: bool = False
    has_waves: bool = False
    fades: bool = False
    sees_present: bool = True
    begins_alike: bool = False


FIXED = HeadKind("fixed", has_waves=True)
"""Attends by place in the episode. q_t = W_q x_t + U_q waves(t) and k_s = W_k x_s + U_k waves(s), with
learned U and sinusoidal waves; W_q and W_k begin small (`fixed_content_gain`). Ours. Reason: recall of a
given place, such as a list in reverse, without positions in the inputs and outputs of layers. Effect: the
area under the learning curve of recall in reverse is 0.23 larger than with rotary heads (docs/algorithm.md).
"""

ROTARY = HeadKind("rotary", is_rotated=True)
"""Attends by distance. q_t = R^t W_q x_t and k_s = R^s W_k x_s, where R rotates pairs of features, so that
q_t k_s depends on t - s. Su et al. 2021, arXiv:2104.09864, eq. 34. Reason: recall from a fixed number of
timesteps ago.
"""

PLAIN = HeadKind("plain")
"""The equation above. Such heads see positions only if the encoder has a `pos_emb`. Vaswani et al. 2017,
arXiv:1706.03762, eq. 1.
"""

ALIBI = HeadKind("alibi", fades=True)
"""Attends by distance. The logits become q_t k_s / sqrt(E) - slope (t - s). Press et al. 2021,
arXiv:2108.12409. Reason: attention fades with distance.
"""

CONTENT = HeadKind("content", sees_present=False, begins_alike=True)
"""Attends to timesteps similar to the present, without positions, and only to s < t. Ours; equal first
weights by Trockman & Kolter 2023, arXiv:2305.09828. Reason: recall by key from the first update on. The
present is left out because nothing is more similar to it than itself. Effect: the area under the learning
curve of recall by key is 0.24 larger than with rotary heads (docs/algorithm.md; one of the two heads counted
such timesteps in that measurement).
"""

KINDS = {kind.name: kind for kind in (FIXED, ROTARY, PLAIN, ALIBI, CONTENT)}
"""All kinds, in the order of the heads of a layer. Kinds with waves come first."""


class Heads:
    """The kinds of the heads of a layer.

    Attributes:
        kinds: the kind of each head.
        groups: neighbouring heads that attend in the same way, given queries and keys.
        shifted: these heads after a shift of keys and values that lets all of them read their own timestep.
        sees_present: (H, 1, 1) float, 1 for heads that read their own timestep, else 0.
        any_fades: True if the logits of some heads fall with the distance.
        all_see_present: True if all heads read their own timestep.
        slopes: (H, 1, 1) float, decrease of logits per timestep: a geometric series over fading heads.
    """

    def __init__(self, kinds: Sequence[HeadKind]) -> None:
        self.kinds = tuple(kinds)
        runs = [list(run) for _, run in groupby(self.kinds, lambda kind: (kind.fades, kind.sees_present))]
        self.groups: list[Heads] = [self] if len(runs) == 1 else [Heads(run) for run in runs]
        self.any_fades, self.all_see_present = self.num("fades") > 0, self.num("sees_present") == len(self)
        self.sees_present = torch.tensor([float(kind.sees_present) for kind in kinds])[:, None, None]
        self.shifted = self
        if not self.all_see_present:
            self.shifted = Heads([replace(kind, sees_present=True) for kind in kinds])
        fades = torch.tensor([kind.fades for kind in kinds])
        slopes = 2.0 ** (-8.0 * fades.cumsum(0) / max(self.num("fades"), 1))
        self.slopes = torch.where(fades, slopes, 0.0)[:, None, None]

    @classmethod
    def named(cls, heads: str | Sequence[str], n_heads: int, *, setting: str) -> Heads:
        """Make heads from names: one kind for all heads, or one per head in any order; sorted like `KINDS`.

        Args:
            heads: names of `KINDS`.
            n_heads: number of heads.
            setting: name of the setting with `heads`, for errors.
        Raises: ValueError for an unknown name, or a wrong number of names.
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

    def split(self, x: Tensor, dim: int) -> Sequence[Tensor]:
        """Split a tensor with an axis of heads into those of each group."""
        return torch.split(x, [len(group) for group in self.groups], dim)

    def num(self, trait: str) -> int:
        """Number of heads with this attribute of `HeadKind`."""
        return sum(bool(getattr(kind, trait)) for kind in self.kinds)

    @property
    def need_positions(self) -> bool:
        """True if queries or keys of some heads depend on the timestep."""
        return self.num("is_rotated") + self.num("has_waves") > 0

    def on(self, device: torch.device) -> Heads:
        """These heads, whose tensors stay on `device` from now on."""
        if self.slopes.device != device:
            self.sees_present, self.slopes = self.sees_present.to(device), self.slopes.to(device)
        return self
