"""Networks: timestep encoders, trajectory encoders, heads, distributions and running statistics."""

if __name__ == "nets":
    raise ImportError(
        "Import this as 'loxodon.nets', not 'nets': a second copy would break isinstance and gin. "
        "Fix: pip install -e ."
    )

from .distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DistributionType,
    Gaussian,
    GaussianMixture,
    MultiCategorical,
    MultiCategoricalType,
    PolicyDistribution,
    TanhGaussian,
)
from .heads import (
    Actor,
    BinnedCriticEnsemble,
    CriticEnsemble,
    DuelingCriticEnsemble,
    PolicyHead,
    ValueHead,
    dead_units,
)
from .mlp import MLP, orthogonal_init
from .normalization import (
    PopArt,
    RunningNorm,
    RunningStatistics,
    ValueNorm,
    sum_over_processes,
    summed_over_processes,
)
from .recurrent import GRUTrajEncoder, LSTMTrajEncoder
from .traj_encoders import FFTrajEncoder, IdentityTrajEncoder, TrajEncoder
from .transformer import TransformerTrajEncoder
from .tstep_encoders import FFTstepEncoder, TstepEncoder
from .value_bins import ValueBins

__all__ = [
    "MLP",
    "Actor",
    "Bernoulli",
    "Beta",
    "BinnedCriticEnsemble",
    "Categorical",
    "CriticEnsemble",
    "DistributionType",
    "DuelingCriticEnsemble",
    "FFTrajEncoder",
    "FFTstepEncoder",
    "GRUTrajEncoder",
    "Gaussian",
    "GaussianMixture",
    "IdentityTrajEncoder",
    "LSTMTrajEncoder",
    "MultiCategorical",
    "MultiCategoricalType",
    "PolicyDistribution",
    "PolicyHead",
    "PopArt",
    "RunningNorm",
    "RunningStatistics",
    "TanhGaussian",
    "TrajEncoder",
    "TransformerTrajEncoder",
    "TstepEncoder",
    "ValueBins",
    "ValueHead",
    "ValueNorm",
    "dead_units",
    "orthogonal_init",
    "sum_over_processes",
    "summed_over_processes",
]
