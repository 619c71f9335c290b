"""The settings of a run: every field of Experiment, with its default, its meaning and its rules.

The defaults are those of AMAGO 3.3, so that a name means the same in both. The recommended values are in
`gin_configs/base_offpolicy.gin` and `gin_configs/ppo/ppo.gin`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np

from ..agents import BaseAgent, OnPolicyAgent
from ..data import RLDataset
from ..data.errors import check_choice, check_number
from ..data.sampling import PADDED_SAMPLING_MODES
from ..envs import EpsilonGreedy, ExplorationWrapper
from ..nets import TrajEncoder, TstepEncoder
from .artifacts.stores import is_run_name
from .callbacks import Callback
from .collect.build import MakeEnv
from .config.load import LoadedConfig
from .learn.average import WeightAverage
from .ppo import PPOLearner

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it since Python 3.11

logger = logging.getLogger("loxodon")
T = TypeVar("T")
AUTO_BATCH_TIMESTEPS = 512
"""Timesteps in a batch of full sequences with `Experiment.batch_size = 'auto'`, so that an update costs about
the same at any length."""
AUTO_BATCH_SIZES = (4, 24)
"""The smallest and the largest number of sequences of such a batch."""
FEW_STEPS = 8
"""Env steps per environment in a test run."""


class Rules(TypedDict, total=False):
    """Further properties of a field of Settings, for checks, test runs, the hash and messages.

    Attributes:
        choices: allowed texts.
        lowest: smallest allowed number.
        above: number that it must exceed.
        tiny: its value in a test run.
        tiny_most: its largest value in a test run.
        in_hash: False if runs that differ in it have the same `config_hash`.
        on_policy: what makes an on-policy agent read it: "files" if it stores its rollouts, "imitation" for
            Pretraining, "never". Fields without this rule are always read.
    """

    choices: Sequence[str]
    lowest: float
    above: float
    tiny: Any
    tiny_most: int
    in_hash: bool
    on_policy: Literal["files", "imitation", "never"]


def about(doc: str, **rules: Unpack[Rules]) -> dict[str, Any]:
    """The metadata of a field: its documentation and its rules."""
    return {"doc": doc, **rules}


def setting(default: T, doc: str, **rules: Unpack[Rules]) -> T:
    """A field with this default."""
    made: T = field(default=default, metadata=about(doc, **rules))
    return made


@dataclass(kw_only=True)
class Settings:
    """Settings of an Experiment, each with its default, its meaning and its rules.

    Fields without a default are required.
    """

    run_name: str = field(metadata=about("name of the run and of its folder", in_hash=False))
    ckpt_base_dir: str = field(
        metadata=about("the run folder is `<ckpt_base_dir>/<run_name>`", in_hash=False)
    )
    max_seq_len: int = field(metadata=about("longest training sequence, in transitions", lowest=1))
    dataset: RLDataset = field(metadata=about("where trajectories are kept; by default in the run folder"))
    tstep_encoder_type: Callable[..., TstepEncoder] | None = setting(
        None,
        "a type; its keywords are set in gin. None selects FFTstepEncoder for numbers, else DictTstepEncoder",
    )
    traj_encoder_type: Callable[..., TrajEncoder] = field(
        metadata=about("a type (required); its keywords are set in gin")
    )
    agent_type: Callable[..., BaseAgent] = field(
        metadata=about("a type (required); its keywords are set in gin")
    )
    val_timesteps_per_epoch: int = field(
        metadata=about(
            "env steps per environment in an evaluation. Every episode that begins within them counts and is "
            "played to its end, for at most ten times as many steps plus 1,000; 0 disables evaluation",
            lowest=0,
            tiny_most=FEW_STEPS,
        )
    )
    make_train_env: MakeEnv | Sequence[MakeEnv] = field(
        metadata=about("an EnvSpec, an id, a callable, or a list with one of these per environment")
    )
    make_val_env: MakeEnv | Sequence[MakeEnv] = field(
        metadata=about("an EnvSpec, an id, a callable, or a list with one of these per environment")
    )

    # ---- environments ----

    parallel_actors: int = setting(12, "number of environments", lowest=1)
    env_mode: str = setting("async", "how environments run", choices=("async", "sync", "already_vectorized"))
    async_env_mp_context: str | None = setting(
        None, "start method of the environments' processes", in_hash=False
    )
    exploration_wrapper_type: Callable[..., ExplorationWrapper] | None = setting(
        EpsilonGreedy, "noise on training actions; None disables it", on_policy="never"
    )
    sample_actions: bool = setting(True, "draw actions in training; otherwise the most likely one is taken")
    sample_actions_val: bool = setting(True, "draw actions in evaluation too")
    force_reset_train_envs_every: int | None = setting(
        None, "epochs between resets of all training environments", lowest=1, tiny=None
    )

    # ---- logs ----

    log_to_wandb: bool = setting(False, "log to Weights & Biases too", tiny=False, in_hash=False)
    wandb_project: str | None = field(
        default_factory=lambda: os.environ.get("WANDB_PROJECT"),
        metadata=about("W&B project; by default the environment variable WANDB_PROJECT", in_hash=False),
    )
    wandb_entity: str | None = field(
        default_factory=lambda: os.environ.get("WANDB_ENTITY"),
        metadata=about("W&B entity; by default the environment variable WANDB_ENTITY", in_hash=False),
    )
    wandb_group_name: str | None = setting(None, "W&B group; None for no group", in_hash=False)
    verbose: bool = setting(True, "show progress, and draw the learning curves at the end", in_hash=False)
    log_interval: int = setting(
        300,
        "batches between records of training metrics",
        lowest=1,
        tiny=1,
        in_hash=False,
        on_policy="imitation",
    )

    # ---- replay ----

    traj_save_len: float = setting(
        1e10, "transitions after which a trajectory continues in another file", above=0, on_policy="files"
    )
    has_dset_edit_rights: bool = setting(True, "this process may delete old files", on_policy="files")
    stagger_traj_file_lengths: bool = setting(
        True, "vary traj_save_len from file to file by up to max_seq_len", on_policy="files"
    )
    save_trajs_as: str = setting(
        "npz",
        "format of trajectory files",
        choices=("npz", "npz-compressed"),
        in_hash=False,
        on_policy="files",
    )
    padded_sampling: str = setting(
        "none",
        'ends of a trajectory over which windows may extend; "shifted": as "both", then moved inside',
        choices=PADDED_SAMPLING_MODES,
        on_policy="imitation",
    )
    time_limits_terminate: bool = setting(
        False,
        "store an episode of at most max_seq_len steps that a time limit ends as terminated: an agent that "
        "sees all of it can foresee its end",
        on_policy="files",
    )
    dloader_workers: int = setting(
        6,
        "sampling processes; 0 samples in this process",
        lowest=0,
        tiny_most=1,
        in_hash=False,
        on_policy="imitation",
    )

    # ---- schedule: one epoch collects, then learns ----

    epochs: int = setting(1000, "number of epochs", lowest=0, tiny=1)
    start_learning_at_epoch: int = setting(0, "first epoch that learns", lowest=0, tiny=0)
    start_collecting_at_epoch: int = setting(0, "first epoch that collects", lowest=0, tiny=0)
    train_timesteps_per_epoch: int = setting(
        1000, "env steps per environment; 0 collects nothing", lowest=0, tiny_most=FEW_STEPS
    )
    train_batches_per_epoch: int = setting(
        1000,
        "batches per epoch and process, for off-policy agents; 0 makes no updates. With a replay_ratio, "
        "other numbers apply only to epochs that collect nothing",
        lowest=0,
        on_policy="never",
    )
    val_interval: int | None = setting(20, "epochs between evaluations; None for never", lowest=1, tiny=1)
    ckpt_interval: int | None = setting(
        50,
        "epochs between checkpoints; None saves only those of CheckpointManager.every_minutes and the last "
        "one",
        lowest=1,
        tiny=1,
    )
    always_save_latest: bool = setting(True, "publish the policy after every epoch", in_hash=False)

    # ---- optimisation ----

    batch_size: int | Literal["auto"] = setting(
        24,
        'sequences per batch and process; "auto" takes 4 to 24, for about 500 timesteps if all are full',
        choices=("auto",),
        lowest=1,
        on_policy="imitation",
    )
    batches_per_update: int = setting(1, "batches whose gradients are added up for one update", lowest=1)
    learning_rate: float = setting(1e-4, "learning rate of AdamW", above=0)
    critic_loss_weight: float = setting(10.0, "weight of the critics' loss; that of the actor is 1", lowest=0)
    lr_warmup_steps: int = setting(500, "updates of linear warm-up", lowest=0)
    grad_clip: float = setting(
        1.0,
        "largest norm of the gradient; 0 or less: no clipping. Where it is often exceeded, values of rare "
        "rewards stay far below their targets (docs/notebook)",
    )
    l2_coeff: float = setting(1e-3, "weight decay of AdamW", lowest=0)
    mixed_precision: str = setting("no", "precision of the updates", choices=("no", "fp16", "bf16"))
    matmul_precision: str = setting(
        "highest",
        'float32 matrix products on a CUDA device: "high" uses TF32, which has as many digits as fp16; see '
        "torch.set_float32_matmul_precision",
        choices=("highest", "high", "medium"),
        in_hash=False,
    )

    # ---- extras ----

    mode: str = setting(
        "both",
        'work of this process; "learn" never collects, "collect" never learns',
        choices=("both", "learn", "collect"),
        tiny="both",
    )
    seed: int | None = setting(
        None, "seed of all randomness; None draws one and logs it", lowest=0, in_hash=False
    )
    deterministic: bool = setting(False, "forbid irreproducible torch operations", in_hash=False)
    evaluate_at_end: bool = setting(
        True, "evaluate once more, on new episodes, after the last epoch", tiny=False, in_hash=False
    )
    stop_at_val_return: float | None = setting(
        None, "end training once an evaluation has this mean return; None disables it", tiny=None
    )
    max_env_steps: int | None = setting(
        None,
        "end training after the epoch in which all collecting processes of the run together have taken "
        "this many env steps; None for no limit. Schedules still follow Experiment.epochs",
        lowest=1,
        tiny=None,
    )
    torch_threads: int | None = setting(
        None,
        "threads of torch in this process, never more than OMP_NUM_THREADS and its share of the cores; None "
        "for one, and as many as that on large models",
        lowest=1,
        in_hash=False,
    )
    compile_learning: bool = setting(
        False, "compile the losses of updates with torch.compile (slow to start, for GPUs)", in_hash=False
    )
    compile_acting: bool = setting(
        False, "compile the policy for acting with torch.compile (slow to start, for GPUs)", in_hash=False
    )
    restore_from: str | None = setting(
        None,
        "source that a new run begins from: an artifact (`latest`, `other-run:best`) or a path",
        tiny=None,
    )
    packed_batches: bool = setting(
        False,
        "put short windows one after another in one row instead of padding each; the losses are the same. "
        "This saves the cost of padding without sorting windows by length",
        on_policy="imitation",
    )
    replay_ratio: float | None = setting(
        None,
        "gradient updates per collected env step, all collecting processes together; None for no fixed "
        "ratio. Learner and actors wait for each other when they are further off than "
        'ReplayRatio.tolerance. In mode "both" it sets the number of updates of each epoch that collects, '
        "instead of train_batches_per_epoch. Counting begins when training may begin",
        above=0,
        tiny=None,
    )
    lr_schedule: Callable[[float], float] | None = setting(
        None,
        "factor of the learning rate by training progress in [0, 1], such as @LinearSchedule() or "
        "@TorchSchedule(); it multiplies the warm-up. None for 1",
    )
    weight_average: Callable[[BaseAgent], WeightAverage] | None = setting(
        None,
        "an average of the weights, such as @WeightAverage, that is evaluated and stored in policy files; "
        "None for the newest weights, which collect in either case",
        on_policy="never",
    )
    extra_loss_weights: Mapping[str, float] = field(
        default_factory=dict,
        metadata=about("weights of the auxiliary losses of an agent (`LossTerms.extra`), by name"),
    )
    on_policy_learner_type: Callable[..., PPOLearner] = setting(
        PPOLearner, "trainer of an on-policy agent; its keywords are set in gin"
    )
    callbacks: Sequence[Callable[[], Callback]] = setting(
        (),
        "classes or functions that create Callbacks: hooks of your own at the points of a run, or "
        "ParamFreezer, Pretraining, EpisodeLengthCurriculum. WallClockLimit, FinalTest and ProfileEpoch "
        "are always there",
    )
    test_run: bool = setting(False, "try every part once, in seconds, in the run folder `<run_name>-test`")

    @property
    def sequences_per_batch(self) -> int:
        """`batch_size`, or the number that "auto" stands for."""
        if self.batch_size != "auto":
            return self.batch_size
        fewest, most = AUTO_BATCH_SIZES
        return min(max(AUTO_BATCH_TIMESTEPS // self.max_seq_len, fewest), most)


def fields_with(rule: str) -> dict[str, Any]:
    """The fields that have this rule, with its value, by name."""
    return {one.name: one.metadata[rule] for one in fields(Settings) if rule in one.metadata}


# ---- checks before anything is built ----

_TAKEN = ("actor", "critic", "value")  # names of other losses in the logs
_OF_REPLAY_RATIO = ("ReplayRatio.tolerance", "ReplayRatio.warmup_env_steps")


def _checked(one: Field[Any], value: Any) -> Any:
    """The value of a field, a whole float as an integer. Raises: ValueError or TypeError if it is wrong."""
    name, rules = f"Experiment.{one.name}", one.metadata
    kind, choices = str(one.type), rules.get("choices", ())  # kind is a text such as "int | None"
    if kind.startswith(("int", "float")) and value not in choices:
        limits = {limit: rules[limit] for limit in ("lowest", "above") if limit in rules}
        is_whole = kind.startswith("int")
        check_number(name, value, whole=is_whole, optional="None" in kind, **limits)
        return int(value) if is_whole and value is not None else value
    if kind == "bool" and not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, but must be True or False. Fix: set one of these.")
    if choices:
        check_choice(name, value, choices)
    return value


def check_settings(settings: Settings) -> None:
    """Raise ValueError or TypeError for the first setting that cannot work; make whole floats integers."""
    for one in fields(Settings):
        value = getattr(settings, one.name)
        setattr(settings, one.name, _checked(one, value.item() if isinstance(value, np.number) else value))
    if not callable(settings.agent_type):
        raise TypeError(
            f"Experiment.agent_type is {settings.agent_type!r}, but must be a class. Fix: in Python, pass "
            "the class itself, such as PPOAgent; in gin, write @PPOAgent."
        )
    for term, weight in settings.extra_loss_weights.items():
        check_number(f"Experiment.extra_loss_weights[{term!r}]", weight, lowest=0)
        if term in _TAKEN:
            raise ValueError(
                f"Experiment.extra_loss_weights names {term!r}, but the logs have another {term}_loss. Fix: "
                "give the extra loss another name in LossTerms.extra."
            )
    if settings.traj_save_len < settings.max_seq_len:
        raise ValueError(
            f"Experiment.traj_save_len is {settings.traj_save_len:g}, shorter than max_seq_len = "
            f"{settings.max_seq_len}, so no training window could be full. Fix: set "
            f"Experiment.traj_save_len to {settings.max_seq_len} or more."
        )
    if not is_run_name(settings.run_name):
        raise ValueError(
            f"Experiment.run_name is {settings.run_name!r}, but it names a folder: 1 to 128 bytes "
            "without '/', ':' and control characters, that does not begin with '.' or '-'. Fix: set "
            "Experiment.run_name = 'my-run' (--run-name my-run)."
        )


def set_by_user(settings: Settings, config: LoadedConfig | None) -> Callable[[str], bool]:
    """A function that returns True for a setting, such as "Experiment.epochs", that the user has set.

    config: what gin was given. Settings that it lacks come from Python code, where a default does not count.
    """
    defaults = {f"Experiment.{one.name}": one.default for one in fields(Settings)}
    config = config if config is not None and config.is_in_gin() else None
    bound = set() if config is None else {binding.key for binding in config.bindings}

    def is_set(key: str) -> bool:
        if config is not None and (key in bound or key not in defaults):
            return config.is_set_by_user(key)
        return key in defaults and getattr(settings, key.partition(".")[2]) != defaults[key]

    return is_set


def without_effect(settings: Settings, is_set: Callable[[str], bool]) -> list[str]:
    """Sentences about what the user has set, see `set_by_user`, although another setting disables it."""
    found = []
    ratio, num_batches = settings.replay_ratio, settings.train_batches_per_epoch
    collects = settings.mode == "both" and settings.train_timesteps_per_epoch > 0
    is_replaced = ratio is not None and collects and settings.start_collecting_at_epoch == 0
    if is_replaced and num_batches > 0 and is_set("Experiment.train_batches_per_epoch"):
        found.append(
            f"Experiment.train_batches_per_epoch = {num_batches} has no effect, because "
            f"Experiment.replay_ratio = {ratio} decides how many updates an epoch makes. Fix: remove it, or "
            "set Experiment.replay_ratio = None."
        )
    if ratio is None and (names := [name for name in _OF_REPLAY_RATIO if is_set(name)]):
        found.append(
            f"{' and '.join(names)} cannot take effect, because Experiment.replay_ratio is None. Fix: set "
            "it, or remove this."
        )
    evaluates = settings.val_interval is not None and settings.val_timesteps_per_epoch > 0
    if settings.stop_at_val_return is not None and not evaluates and is_set("Experiment.stop_at_val_return"):
        name = "val_timesteps_per_epoch" if settings.val_interval is not None else "val_interval"
        found.append(
            f"Experiment.stop_at_val_return = {settings.stop_at_val_return:g} cannot end this run, because "
            f"Experiment.{name} is {getattr(settings, name)}, so there are no evaluations. Fix: set "
            f"Experiment.{name} to a positive number."
        )
    return found


def check_for_on_policy(
    settings: Settings, agent: str, is_set: Callable[[str], bool], *, stores: bool, imitates: bool
) -> None:
    """Raise ValueError for settings that an on-policy agent of this name cannot use.

    A warning names the settings that the agent does not read, although the user has set them.

    Args:
        settings: settings of the run.
        agent: name of the agent.
        is_set: see `set_by_user`.
        stores: True if the rollouts become trajectory files.
        imitates: True if the agent imitates stored trajectories first.
    """
    num_steps, first = settings.train_timesteps_per_epoch, settings.start_collecting_at_epoch
    needs = [
        (
            "mode",
            settings.mode == "both",
            "'both' (leave out --actors and --mode; docs/learners.md explains PPO in several processes)",
            "its data come from the newest policy only",
        ),
        ("sample_actions", settings.sample_actions, "True", "it learns from sampled actions"),
        ("replay_ratio", settings.replay_ratio is None, "None", "it replays nothing"),
        ("train_timesteps_per_epoch", num_steps > 0, "128", "it needs rollouts of some length"),
        ("start_collecting_at_epoch", first == 0, "0", "it trains on the rollout of each epoch"),
    ]
    for name, is_fine, value, reason in needs:
        if not is_fine:
            raise ValueError(
                f"Experiment.{name} is {getattr(settings, name)!r}, but the on-policy agent {agent} cannot "
                f"train with it: {reason}. Fix: set Experiment.{name} = {value}, or use an off-policy agent "
                "such as Agent."
            )
    read = {"files": stores, "imitation": imitates, "never": False}
    # An on-policy agent behaves as with None anyway. A test run has set most of these settings itself.
    unread = [
        name
        for name, rule in fields_with("on_policy").items()
        if not read[rule] and getattr(settings, name) is not None and is_set(f"Experiment.{name}")
    ]
    if unread and not settings.test_run:
        logger.warning(
            "These settings of Experiment have no effect for the on-policy agent %s, which trains on each "
            "rollout with the settings of PPOLearner: %s. Fix: remove them.",
            agent,
            ", ".join(sorted(unread)),
        )


# ---- a test run: one of everything in seconds, away from the real run's folder and data ----

_FEW_SEQUENCES = 4  # sequences per batch of a test run


def is_on_policy(agent_type: Any) -> bool:
    """True if the agent will learn from its newest rollout; False if that is unknown."""
    while isinstance(agent_type, functools.partial):
        agent_type = agent_type.func
    agent_type = inspect.unwrap(agent_type)
    return isinstance(agent_type, type) and issubclass(agent_type, OnPolicyAgent)


def shrink(settings: Settings) -> None:
    """Change the settings of a test run: `<run_name>-test`, one epoch, tiny numbers, nothing published."""
    settings.has_dset_edit_rights = separate_data(
        settings.dataset, settings.train_timesteps_per_epoch > 0, settings.ckpt_base_dir, settings.run_name
    )
    settings.run_name += "-test"
    for name, value in fields_with("tiny").items():
        setattr(settings, name, value)
    for name, most in fields_with("tiny_most").items():
        if name == "train_timesteps_per_epoch" and is_on_policy(settings.agent_type):
            continue  # sequences and minibatches are made for rollouts of this length
        setattr(settings, name, min(getattr(settings, name), most))
    settings.batch_size = min(settings.sequences_per_batch, _FEW_SEQUENCES)
    settings.train_batches_per_epoch = min(settings.train_batches_per_epoch, 2 * settings.batches_per_update)


def separate_data(dataset: Any, collects: bool, root: str, name: str) -> bool:
    """Let new trajectories go to the folder of the test run; data that are only read stay in place.

    Args:
        dataset: the dataset of the run, or a part of it.
        collects: False if the run collects nothing, so that all its data are only read.
        root: folder of datasets without their own, in the real run.
        name: name of datasets without their own, in the real run.

    Returns: True if the test run may move and delete every file that the dataset can change.
    """
    if hasattr(dataset, "takes_new_trajs"):
        dataset.takes_new_trajs &= collects
        if dataset.takes_new_trajs:
            dataset.dset_root = dataset.dset_name = None
        else:  # found there no matter where the folder of the test run is
            dataset.dset_root = root if dataset.dset_root is None else dataset.dset_root
            dataset.dset_name = name if dataset.dset_name is None else dataset.dset_name
    parts = [separate_data(part, collects, root, name) for part in getattr(dataset, "datasets", ())]
    return all(parts) if parts else hasattr(dataset, "takes_new_trajs")
