"""Agents: acting, losses, and the pure objective functions behind them."""

if __name__ == "agents":
    raise ImportError(
        "Import this as 'loxodon.agents', not 'agents': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .agent import Agent
from .base import BaseAgent, LossTerms
from .filters import binary_filter, exp_filter, leaky_relu_filter
from .objectives import masked_mean, n_step_targets

__all__ = [
    "Agent",
    "BaseAgent",
    "LossTerms",
    "binary_filter",
    "exp_filter",
    "leaky_relu_filter",
    "masked_mean",
    "n_step_targets",
]
