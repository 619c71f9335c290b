"""The experiment: collector, learner, evaluator, checkpoints and logs.

Importing this package imports every other layer, so that all gin-configurable names are registered.
"""

if __name__ == "experiment":
    raise ImportError(
        "Import this as 'loxodon.experiment', not 'experiment': a second copy would break isinstance and "
        "gin. "
        "Fix: run pip install -e . and import loxodon.experiment."
    )

from .. import agents, data, envs, nets
from ..envs import Histories
from .callbacks import Callback, EvaluateAfterLoad
from .checkpoint.load_policy import LoadedPolicy, load_policy
from .checkpoint.store import CheckpointManager
from .collect import Collector
from .evaluation import Evaluator
from .experiment import Experiment
from .learn.average import WeightAverage
from .learn.learner import Learner
from .optional.curriculum import EpisodeLengthCurriculum
from .optional.freezing import ParamFreezer
from .optional.novelty import NoveltyBonus
from .optional.pretraining import Pretraining
from .optional.reward_shaping import ScaleRewards
from .output.logs import MetricLogger
from .process.versions import version_of

# Here, since `loxodon` itself is not a package; None if it is not installed
__version__ = version_of("loxodon")

__all__ = [
    "Callback",
    "CheckpointManager",
    "Collector",
    "EpisodeLengthCurriculum",
    "EvaluateAfterLoad",
    "Evaluator",
    "Experiment",
    "Histories",
    "Learner",
    "LoadedPolicy",
    "MetricLogger",
    "NoveltyBonus",
    "ParamFreezer",
    "Pretraining",
    "ScaleRewards",
    "WeightAverage",
    "agents",
    "data",
    "envs",
    "load_policy",
    "nets",
]
