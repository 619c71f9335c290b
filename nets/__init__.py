"""Networks: timestep encoders, trajectory encoders, heads, distributions and running statistics."""

if __name__ == "nets":
    raise ImportError(
        "Import this as 'loxodon.nets', not 'nets': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .distributions import Categorical, PolicyDistribution, TanhGaussian
from .heads import Actor, CriticEnsemble
from .mlp import MLP
from .normalization import PopArt, RunningNorm, RunningStatistics, sum_over_processes
from .recurrent import GRUTrajEncoder, LSTMTrajEncoder
from .traj_encoders import FFTrajEncoder, IdentityTrajEncoder, TrajEncoder
from .transformer import TransformerTrajEncoder
from .tstep_encoders import FFTstepEncoder, TstepEncoder

__all__ = [
    "MLP",
    "Actor",
    "Categorical",
    "CriticEnsemble",
    "FFTrajEncoder",
    "FFTstepEncoder",
    "GRUTrajEncoder",
    "IdentityTrajEncoder",
    "LSTMTrajEncoder",
    "PolicyDistribution",
    "PopArt",
    "RunningNorm",
    "RunningStatistics",
    "TanhGaussian",
    "TrajEncoder",
    "TransformerTrajEncoder",
    "TstepEncoder",
    "sum_over_processes",
]
