"""Goals and texts as vectors: for the encoders of this library, and for your own."""

from __future__ import annotations

import gin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .mlp import require_positive

_ROWS_WORTH_COMPARING = 64


@gin.configurable(denylist=["goal_length", "goal_dim"])
class FFGoalEmb(nn.Module):
    """Goals of numbers (B, L, goal_length, goal_dim) -> (B, L, goal_emb_dim), by two linear layers.

    Args:
        goal_length: how many goals there are at once.
        goal_dim: numbers that describe one.
        goal_emb_dim: width of the result.
    """

    def __init__(self, goal_length: int, goal_dim: int, goal_emb_dim: int = 32) -> None:
        super().__init__()
        require_positive("FFGoalEmb", goal_emb_dim=goal_emb_dim)
        self.goal_emb_dim = goal_emb_dim
        self.hidden = nn.Linear(goal_length * goal_dim, 2 * goal_emb_dim)
        self.out = nn.Linear(2 * goal_emb_dim, goal_emb_dim)
        self.norm = nn.LayerNorm(goal_emb_dim)

    def forward(self, goals: Tensor) -> Tensor:
        y: Tensor = self.norm(self.out(F.leaky_relu(self.hidden(goals.flatten(2).float()))))
        return y


@gin.configurable(denylist=["goal_length", "goal_dim", "min_token", "max_token"])
class TokenGoalEmb(nn.Module):
    """Whole numbers that stand for words (B, L, ...) -> (B, L, goal_emb_dim): embeddings through a GRU.

    It reads from the last to the first, so that the zeros that fill up short texts come before the words.

    Args:
        goal_length: how many goals there are at once.
        goal_dim: numbers that describe one.
        min_token: the lowest number; lower ones count as this one.
        max_token: the highest number; higher ones count as this one.
        goal_emb_dim: width of the result.
        embedding_dim: width of a number's embedding.
        hidden_size: of the GRU.
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
        self.out = nn.Linear(hidden_size, goal_emb_dim)
        self.norm = nn.LayerNorm(goal_emb_dim)

    def forward(self, goals: Tensor) -> Tensor:
        ids = goals.reshape(-1, self.num_tokens).long().clamp(self.min_token, self.max_token) - self.min_token
        if len(ids) <= _ROWS_WORTH_COMPARING:
            return self._embedded(ids).view(*goals.shape[:2], -1)
        # Texts mostly stay the same for a whole episode: read each once.
        texts, place = torch.unique(ids, dim=0, return_inverse=True)
        return self._embedded(texts)[place].view(*goals.shape[:2], -1)

    def _embedded(self, ids: Tensor) -> Tensor:
        """(K, num_tokens) -> (K, goal_emb_dim)."""
        last = self.rnn(self.embedding(ids.flip(-1)))[1][0]
        y: Tensor = self.norm(self.out(last))
        return y
