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
from .goals import FFGoalEmb, TokenGoalEmb
from .heads import (
    Actor,
    BinnedCriticEnsemble,
    CriticEnsemble,
    DiscountInputCriticEnsemble,
    DuelingCriticEnsemble,
    PolicyHead,
    ValueHead,
    dead_units,
)
from .hybrid import HybridTrajEncoder
from .images import DrQCNN, GridworldCNN, IMPALAishCNN, NatureishCNN
from .mixers.ffm import FFMTrajEncoder
from .mixers.gated_delta import GatedDeltaNetTrajEncoder
from .mixers.gla import GLATrajEncoder
from .mixers.lru import LRUTrajEncoder
from .mixers.mamba import Mamba2TrajEncoder, MambaTrajEncoder
from .mixers.min_rnn import MinGRUTrajEncoder, MinLSTMTrajEncoder
from .mixers.mlstm import MLSTMTrajEncoder
from .mixers.s5 import S5TrajEncoder
from .mlp import MLP, orthogonal_init
from .normalization import (
    RunningNorm,
    RunningStatistics,
    ValueNorm,
    debiased_rate,
    sum_over_processes,
    summed_over_processes,
)
from .recurrent import GRUTrajEncoder, LSTMTrajEncoder
from .traj_encoders import FFTrajEncoder, IdentityTrajEncoder, TrajEncoder
from .transformer import TransformerTrajEncoder
from .trunk import Mixer, MixerTrajEncoder
from .tstep_encoders import (
    CNNTstepEncoder,
    DictTstepEncoder,
    FFTstepEncoder,
    GridworldCNNTstepEncoder,
    TstepEncoder,
    default_tstep_encoder,
)
from .value_bins import ValueBins

__all__ = [
    "MLP",
    "Actor",
    "Bernoulli",
    "Beta",
    "BinnedCriticEnsemble",
    "CNNTstepEncoder",
    "Categorical",
    "CriticEnsemble",
    "DictTstepEncoder",
    "DiscountInputCriticEnsemble",
    "DistributionType",
    "DrQCNN",
    "DuelingCriticEnsemble",
    "FFGoalEmb",
    "FFMTrajEncoder",
    "FFTrajEncoder",
    "FFTstepEncoder",
    "GLATrajEncoder",
    "GRUTrajEncoder",
    "GatedDeltaNetTrajEncoder",
    "Gaussian",
    "GaussianMixture",
    "GridworldCNN",
    "GridworldCNNTstepEncoder",
    "HybridTrajEncoder",
    "IMPALAishCNN",
    "IdentityTrajEncoder",
    "LRUTrajEncoder",
    "LSTMTrajEncoder",
    "MLSTMTrajEncoder",
    "Mamba2TrajEncoder",
    "MambaTrajEncoder",
    "MinGRUTrajEncoder",
    "MinLSTMTrajEncoder",
    "Mixer",
    "MixerTrajEncoder",
    "MultiCategorical",
    "MultiCategoricalType",
    "NatureishCNN",
    "PolicyDistribution",
    "PolicyHead",
    "RunningNorm",
    "RunningStatistics",
    "S5TrajEncoder",
    "TanhGaussian",
    "TokenGoalEmb",
    "TrajEncoder",
    "TransformerTrajEncoder",
    "TstepEncoder",
    "ValueBins",
    "ValueHead",
    "ValueNorm",
    "dead_units",
    "debiased_rate",
    "default_tstep_encoder",
    "orthogonal_init",
    "sum_over_processes",
    "summed_over_processes",
]
