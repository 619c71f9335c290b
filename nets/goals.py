"""Embeddings of goals and texts, for the encoders of this library and for your own."""

from __future__ import annotations

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .mlp import Linear, require_positive

_ROWS_WORTH_COMPARING = 64


@gin.configurable(denylist=["goal_length", "goal_dim"])
class FFGoalEmb(nn.Module):
    """Embed goals of numbers (B, L, goal_length, goal_dim) as (B, L, goal_emb_dim), by two linear layers.

    Args:
        goal_length: number of goals at once.
        goal_dim: number of entries that describe a goal.
        goal_emb_dim: width of the result.
    """

    def __init__(self, goal_length: int, goal_dim: int, goal_emb_dim: int = 32) -> None:
        super().__init__()
        require_positive("FFGoalEmb", goal_emb_dim=goal_emb_dim)
        self.goal_emb_dim = goal_emb_dim
        self.hidden = Linear(goal_length * goal_dim, 2 * goal_emb_dim)
        self.out = Linear(2 * goal_emb_dim, goal_emb_dim)
        self.norm = nn.LayerNorm(goal_emb_dim)

    def forward(self, goals: Tensor) -> Tensor:
        y: Tensor = self.norm(self.out(F.leaky_relu(self.hidden(goals.flatten(2).float()))))
        return y


@gin.configurable(denylist=["goal_length", "goal_dim", "min_token", "max_token"])
class TokenGoalEmb(nn.Module):
    """Embed tokens, integers that represent words, (B, L, ...) as (B, L, goal_emb_dim), by a GRU.

    The GRU reads from the last token to the first, so that the padding of short texts comes before the words.

    Args:
        goal_length: number of goals at once.
        goal_dim: number of tokens that describe a goal.
        min_token: lowest token; lower ones count as this one.
        max_token: highest token; higher ones count as this one.
        goal_emb_dim: width of the result.
        embedding_dim: width of a token's embedding.
        hidden_size: width of the GRU's state.
    """

    def __init__(
        self,
        goal_length: int,
        goal_dim: int,
        min_token: int = -128,
        max_token: int = 128,
        goal_emb_dim: int = 32,
        embedding_dim: int = 16,
        hidden_size: int = 64,
    ) -> None:
        super().__init__()
        sizes = {"goal_emb_dim": goal_emb_dim, "embedding_dim": embedding_dim, "hidden_size": hidden_size}
        require_positive("TokenGoalEmb", **sizes)
        self.min_token, self.max_token, self.goal_emb_dim = min_token, max_token, goal_emb_dim
        self.num_tokens = goal_length * goal_dim
        self.embedding = nn.Embedding(max_token - min_token + 1, embedding_dim)
        self.rnn = nn.GRU(embedding_dim, hidden_size, batch_first=True)
        self.out = Linear(hidden_size, goal_emb_dim)
        self.norm = nn.LayerNorm(goal_emb_dim)

    def forward(self, goals: Tensor) -> Tensor:
        ids = goals.reshape(-1, self.num_tokens).long().clamp(self.min_token, self.max_token) - self.min_token
        if len(ids) <= _ROWS_WORTH_COMPARING:
            return self._embedded(ids).view(*goals.shape[:2], -1)
        # Texts mostly stay the same for a whole episode, so each distinct text is read once.
        texts, place = torch.unique(ids, dim=0, return_inverse=True)
        return self._embedded(texts)[place].view(*goals.shape[:2], -1)

    def _embedded(self, ids: Tensor) -> Tensor:
        """(K, num_tokens) -> (K, goal_emb_dim)."""
        last = self.rnn(self.embedding(ids.flip(-1)))[1][0]
        y: Tensor = self.norm(self.out(last))
        return y
