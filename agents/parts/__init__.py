"""The parts of an off-policy agent. Each is one idea, which gin can exchange or leave out.

    y    = returns(r, d, V')              returns.py: NStep (published), LambdaReturns, Retrace
    V'   = critic_subset(Q')              critic_subset.py: RandomSubset
    Q    = values(outputs)                values.py: PopArt (published), PlainValues, FixedUnits, SummedValues
    loss = loss_weights (Q - y)^2 / s^2   loss_weights.py: WeighByAdvantage (published: none), s from values
    pi   = acting(pi_g)                   acting.py: ActByReturn (published: none, the last discount acts)

`docs/algorithm.md` has the equations side by side, the effect of each part and how to switch it off.
"""

from .acting import ActByReturn, EpisodeResult
from .critic_subset import RandomSubset
from .loss_weights import WeighByAdvantage
from .returns import (
    LambdaReturns,
    Lookahead,
    NStep,
    Retrace,
    Returns,
    Steps,
    UncorrectedReturns,
    lambda_returns,
    n_step_targets,
    retrace_targets,
)
from .values import FixedUnits, PlainValues, PopArt, SummedValues, ValueScale

__all__ = [
    "ActByReturn",
    "EpisodeResult",
    "FixedUnits",
    "LambdaReturns",
    "Lookahead",
    "NStep",
    "PlainValues",
    "PopArt",
    "RandomSubset",
    "Retrace",
    "Returns",
    "Steps",
    "SummedValues",
    "UncorrectedReturns",
    "ValueScale",
    "WeighByAdvantage",
    "lambda_returns",
    "n_step_targets",
    "retrace_targets",
]
