"""Kinds of attention heads, by the names that `TransformerTrajEncoder.heads` takes.

A head reads the timesteps s of its window by queries q_t, keys k_s and values v_s, each (E,):

    y_t = sum over s <= t of softmax_s(q_t k_s / sqrt(E)) v_s        with q_t = W_q x_t, k_s = W_k x_s

Kinds differ from this in their queries, keys or weights:

- "plain": no change. Only an encoder with `pos_emb` shows such heads positions. Vaswani et al. 2017,
  arXiv:1706.03762, eq. 1.
- "rotary" attends by distance. q_t = R^t W_q x_t and k_s = R^s W_k x_s, where R turns pairs of features, so
  that q_t k_s depends on t - s. Su et al. 2021, arXiv:2104.09864, eq. 34. Reason: recall of a fixed number
  of timesteps ago.
- "alibi" attends by distance. The logits become q_t k_s / sqrt(E) - slope (t - s), with a slope for each
  head. Press et al. 2021, arXiv:2108.12409. Reason: attention fades with distance.
- "fixed" attends by place in the episode. q_t = W_q x_t + U_q waves(t) and k_s = W_k x_s + U_k waves(s),
  with learned U and sinusoidal waves; W_q and W_k begin small (`fixed_content_gain`). Ours. Reason: recall
  of a given place, as of a list in reverse, without positions in what layers read and write.
- "content" attends to what is like the present. W_k = W_q at the start, no positions, and only s < t, with
  a key and a value of zeros. Ours; alike first weights of Trockman & Kolter 2023, arXiv:2305.09828. Reason:
  recall by key from the first update on. The present is left out because nothing is more like it than
  itself.
- "counting" counts what is like the present. Like "content", with y_t = asinh(sum over s < t of sigmoid(q_t
  k_s / sqrt(E) - threshold) v_s / COUNT_SCALE). Ours; weights of Ramapuram et al. 2024, arXiv:2409.04431.
  Reason: softmax returns a mean, which shows shares but not numbers.

To switch a kind off, give its heads another kind; 'plain' for all heads is the published Transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ORDER = ("fixed", "rotary", "plain", "alibi", "content", "counting")
"""All kinds, in the order in which a layer keeps its heads."""

COUNT_SCALE = 32.0
"""Timesteps up to which counts grow evenly; then by their logarithm. With 8, reversed recall took longer."""

COUNT_SHARE = 0.5
"""Heads count keys whose logit exceeds this share of the logit of an equal query and key at the start."""

PLAIN_MATCH = 1 / 3
"""Product of an equal query and key per feature at the start, unless `qk_norm` sets it to `qk_gain`."""


def counting_threshold(width: int, qk_gain: float | None) -> float:
    """The logit above which heads of `width` count; qk_gain: None if queries and keys are not normalised."""
    threshold: float = COUNT_SHARE * width**0.5 * (PLAIN_MATCH if qk_gain is None else qk_gain)
    return threshold


@dataclass(frozen=True)
class HeadKinds:
    """The kind of each head of a layer, sorted by `ORDER`."""

    kinds: tuple[str, ...]

    @classmethod
    def named(cls, heads: str | Sequence[str], n_heads: int, *, setting: str) -> HeadKinds:
        """One kind for all heads, or one per head in any order.

        Args:
            heads: names of `ORDER`.
            n_heads: how many heads there are.
            setting: name of the setting that holds `heads`, for errors.
        Raises: ValueError for an unknown name, or another number of names.
        """
        kinds = (heads,) * n_heads if isinstance(heads, str) else tuple(heads)
        example = "('fixed', 'rotary', 'rotary', 'content')"
        if unknown := sorted({*kinds} - {*ORDER}):
            raise ValueError(
                f"{setting} names {', '.join(map(repr, unknown))}, but the kinds of heads are "
                f"{', '.join(map(repr, ORDER))}. Fix: bind one of these for all heads, or one per head, e.g. "
                f"{example} for four (nets/head_kinds.py explains them)."
            )
        if len(kinds) != n_heads:
            raise ValueError(
                f"{setting} names the kinds of {len(kinds)} heads, but there are {n_heads}. Fix: bind one "
                f"kind for all heads, or one per head, e.g. {example} for four."
            )
        return cls(tuple(sorted(kinds, key=ORDER.index)))

    def __len__(self) -> int:
        return len(self.kinds)

    def num(self, *kinds: str) -> int:
        """How many heads are of one of these kinds."""
        return sum(kind in kinds for kind in self.kinds)

    def slopes(self) -> list[float]:
        """How much the logits of each head fall per timestep: a geometric series for "alibi", else 0."""
        num, first = self.num("alibi"), [*self.kinds, "alibi"].index("alibi")
        return [
            2.0 ** (-8.0 * (head - first + 1) / num) if kind == "alibi" else 0.0
            for head, kind in enumerate(self.kinds)
        ]

    @property
    def need_positions(self) -> bool:
        """True if queries or keys of some heads depend on the timestep."""
        return self.num("fixed", "rotary") > 0
