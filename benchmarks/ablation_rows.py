"""Tasks and rows of `ablation.py`: budgets and targets of tasks, and the change that each row leaves out.

Tasks, budgets and targets were chosen only with the recommended agent and seed 0, before any other row was
run.
"""

from __future__ import annotations

from dataclasses import dataclass

from learning_tasks import Task

SEEDS = (0, 1, 2, 3, 4)
EPOCH = 600  # env steps

# Settings of all runs. They make runs affordable: epochs have half the usual length, and batches (per task)
# have about 300 timesteps instead of 1,500. When the ablation began, the preset had 16 epochs without
# training instead of a replay ratio that rises; all rows keep that but those that replace it.
_EVERYWHERE = (
    "Experiment.train_timesteps_per_epoch=50",  # for each of 12 actors
    "Experiment.val_interval=2",  # every 1,200 env steps
    "Experiment.start_learning_at_epoch=16",
    "ReplayRatio.warmup_env_steps=0",
    "Experiment.sample_actions_val=False",  # the first stored runs are greedy
)


@dataclass(frozen=True)
class AblationTask:
    """A task of the ablation.

    kind: ability that the task requires. metric: metric of the greedy evaluation. chance: its value before
    learning. target: the value that counts as learned. num_env_steps: budget of every run.
    """

    kind: str
    metric: str
    chance: float
    target: float
    num_env_steps: int
    own_settings: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        """Gin settings on top of the preset."""
        return (*_EVERYWHERE, f"Experiment.epochs={self.num_env_steps // EPOCH}", *self.own_settings)

    def as_learned(self) -> Task:
        """The task in the form of `learning.py`."""
        return Task(("base_offpolicy",), self.metric, self.target, overrides=self.settings)


@dataclass(frozen=True)
class Row:
    """The recommended agent without one change.

    leaves_out: the change. instead: what replaces it, if anything. settings: gin settings on top of the
    task's; None if the change cannot be switched off or no longer exists. configs: configurations on top of
    the preset. cannot_matter_on: tasks that are skipped because the agent would be the same.
    """

    leaves_out: str
    instead: str
    settings: tuple[str, ...] | None
    configs: tuple[str, ...] = ()
    cannot_matter_on: tuple[str, ...] = ()


def _task(
    make_env: str, max_seq_len: int, batch_size: int, val_timesteps: int, *settings: str
) -> tuple[str, ...]:
    return (
        f"Experiment.make_train_env={make_env}",
        f"Experiment.make_val_env={make_env}",
        f"Experiment.max_seq_len={max_seq_len}",
        f"Experiment.batch_size={batch_size}",
        f"Experiment.val_timesteps_per_epoch={val_timesteps}",
        *settings,
    )


_WALK = {"rollout_horizon": 12, "curve": 1e5, "eps_start_start": 0.01, "eps_start_end": 0.01}
_TURN = {"eps_end_start": 1.0, "eps_end_end": 0.05, "steps_anneal": 600, "randomize_eps": False}

TASKS = {
    "recall_reverse": AblationTask(
        "recall",
        "val/return",
        chance=0.25,
        target=0.95,
        num_env_steps=18_000,
        own_settings=_task(
            "@Recall", 60, 6, 60, "Recall.length=30", "Recall.num_symbols=4", "Recall.order='reverse'"
        ),
    ),
    "recall_by_key": AblationTask(
        "recall",
        "val/return",
        chance=0.25,
        target=0.95,
        num_env_steps=18_000,
        own_settings=_task(
            "@Recall", 40, 8, 80, "Recall.length=20", "Recall.num_symbols=4", "Recall.order='by_key'"
        ),
    ),
    "counting": AblationTask(
        "counting",
        "val/return",
        chance=0.05,
        target=0.3,
        num_env_steps=19_200,
        own_settings=_task("@Counting", 13, 24, 104, "Counting.length=10", "Counting.num_symbols=3"),
    ),
    "tmaze": AblationTask(
        "delayed reward",
        "val/success",
        chance=0.0,
        target=1.0,
        num_env_steps=21_600,
        own_settings=_task(
            "@TMazePassive",
            13,
            24,
            52,
            "TMazePassive.horizon=12",
            # Noise in the corridor would end most episodes before the fork.
            "Experiment.exploration_wrapper_type=@BilevelEpsilonGreedy",
            *(f"BilevelEpsilonGreedy.{key}={value!r}" for key, value in {**_WALK, **_TURN}.items()),
        ),
    ),
    "bandit": AblationTask(
        "meta-learning",
        "val/return",
        chance=20.0,
        target=23.0,
        num_env_steps=21_600,
        own_settings=_task("@Bandit", 40, 10, 240, "Bandit.num_arms=4", "Bandit.num_steps=40"),
    ),
    "dark_room": AblationTask(
        "meta-RL",
        "val/return",
        chance=5.0,
        target=10.0,
        num_env_steps=20_400,
        own_settings=_task(
            "@KShotWrapper",
            40,
            8,
            120,
            "KShotWrapper.env=@DarkRoom",
            "KShotWrapper.num_attempts=5",
            "DarkRoom.size=3",
            "DarkRoom.time_limit=8",
        ),
    ),
    "cartpole_no_velocity": AblationTask(
        "control, partly observed",
        "val/return",
        chance=20.0,
        target=150.0,
        num_env_steps=19_200,
        own_settings=_task(
            "@partial_env()", 32, 10, 200, "partial_env.env_id='CartPole-v1'", "partial_env.keep=(0, 2)"
        ),
    ),
    "double_integrator": AblationTask(
        "continuous control, partly observed",
        "val/return",
        chance=0.29,
        target=0.85,
        num_env_steps=16_800,
        own_settings=_task(
            "@gym_env()", 30, 10, 60, "gym_env.env_id='double_integrator:DoubleIntegrator-v0'"
        ),
    ),
}

_WHOLE_EPISODES = tuple(name for name in TASKS if name != "cartpole_no_velocity")
_EQUALLY_LONG = tuple(name for name in TASKS if name not in ("cartpole_no_velocity", "tmaze"))
_CONTINUOUS = ("double_integrator",)


def _heads(*others: str) -> tuple[str]:
    """Eight heads: four rotary ones and these."""
    kinds = ("rotary",) * 4 + others
    return (f"TransformerTrajEncoder.heads={kinds!r}",)


_PUBLISHED_TRANSFORMER = (
    "TransformerTrajEncoder.pos_emb='fixed'",
    "TransformerTrajEncoder.heads='plain'",
    "TransformerTrajEncoder.qk_norm=False",
    "TransformerTrajEncoder.sigma_reparam=True",
    "TransformerTrajEncoder.normformer_norms=True",
    "TransformerTrajEncoder.head_scaling=True",
)

_NO_DELAY = ("Experiment.start_learning_at_epoch=0",)

# The order is the order of the queue. Names never change, because stored runs refer to them.
ROWS = {
    "recommended": Row("nothing", "", ()),
    # Whole agents
    "published_agent": Row("every change", "the published agent", _NO_DELAY, ("amago",)),
    "published_agent_our_transformer": Row(
        "every change but the sequence model", "", _NO_DELAY, ("amago", "encoders/transformer")
    ),
    # Targets and values
    "n_step": Row(
        "Retrace and lambda-returns",
        "one-step targets",
        ("Agent.returns=@NStep()",),
    ),
    "no_loss_weights": Row(
        "`WeighByAdvantage` with h_g alone",
        "equal weights",
        ("Agent.loss_weights=None",),
    ),
    "published_popart": Row(
        "SummedValues and FixedUnits", "PopArt as published", ("Agent.values=@PopArt()",)
    ),
    "no_summed_values": Row(
        "sums over discounts",
        "a value per discount, in fixed units",
        ("Agent.values=@FixedUnits()",),
    ),
    "no_start_at_reward": Row("StartAtReward", "values begin at the first targets", None),
    "no_weight_average": Row("WeightAverage", "the newest weights act", None),
    "published_subset": Row(
        "one subset of different critics per update",
        "a subset per element, with replacement",
        ("RandomSubset.per='element'", "RandomSubset.replace=True"),
    ),
    "discount_input": Row(
        "critics with an output per discount",
        "the discount is an input",
        ("Agent.critic_type=@DiscountInputCriticEnsemble",),
        cannot_matter_on=tuple(name for name in TASKS if name not in _CONTINUOUS),
    ),
    "published_tau": Row("our Polyak rate of 0.03", "0.003", ("TAU=0.003",)),
    "published_discounts": Row(
        "our discounts",
        "0.1, 0.9, 0.95, 0.97, 0.99, 0.995 and 0.999",
        ("DISCOUNTS=(0.1, 0.9, 0.95, 0.97, 0.99, 0.995)",),
    ),
    # Sequence model
    "published_transformer": Row("our Transformer", "the published one", _PUBLISHED_TRANSFORMER),
    "all_rotary": Row("heads of all other kinds", "rotary ones", ("TransformerTrajEncoder.heads='rotary'",)),
    "no_fixed_heads": Row(
        "heads for places", "rotary ones", _heads("rotary", "rotary", "content", "content")
    ),
    "no_content_heads": Row(
        "heads for contents and counts", "rotary ones", _heads("fixed", "fixed", "rotary", "rotary")
    ),
    "no_counting_heads": Row("the head that counts", "one more for contents", None),
    "no_qk_gain": Row("large initial queries", "a gain of 1", ("TransformerTrajEncoder.qk_gain=1.0",)),
    # Initial weights
    "published_first_weights": Row("all initial weights", "the published ones", None),
    "published_critic_weights": Row("smaller initial weights of critics", "the published ones", None),
    "published_actor_weights": Row("small initial weights of the actor's last layer", "the usual ones", None),
    "published_rl2_weights": Row(
        "small initial weights of the previous reward and action",
        "a gain of 1",
        ("FFTstepEncoder.rl2_gain=1.0",),
    ),
    # Exploration, data, optimiser
    "plain_noise": Row(
        "repeated random actions",
        "single random actions",
        ("EpsilonGreedy.mean_repeat=1",),
        cannot_matter_on=("tmaze",),  # has its own exploration
    ),
    "files_alike": Row(
        "timesteps drawn uniformly",
        "files drawn uniformly",
        ("Sampler.sample_by='trajectory'",),
        cannot_matter_on=_EQUALLY_LONG,
    ),
    "plain_windows": Row(
        "shifted windows",
        "windows that may extend beyond the end of an episode",
        ("Experiment.padded_sampling='none'",),
        cannot_matter_on=_WHOLE_EPISODES,
    ),
    "published_optimiser": Row(
        "our optimiser",
        "published learning rate, warm-up and clipping",
        ("Experiment.learning_rate=1e-4", "Experiment.lr_warmup_steps=500", "Experiment.grad_clip=1"),
    ),
    "no_delayed_start": Row(
        "no updates in the first 16 epochs",
        "updates from the start",
        _NO_DELAY,
    ),
    "replay_warmup": Row(
        "no updates in the first 16 epochs",
        "a replay ratio that rises over 32 epochs (in the preset, over 33 longer ones)",
        (*_NO_DELAY, f"ReplayRatio.warmup_env_steps={32 * EPOCH}"),
    ),
    "short_replay_warmup": Row(
        "no updates in the first 16 epochs",
        "a replay ratio that rises over 16 epochs",
        (*_NO_DELAY, f"ReplayRatio.warmup_env_steps={16 * EPOCH}"),
    ),
    "grad_clip_1": Row("our gradient clipping at 40", "at 1", ("Experiment.grad_clip=1",)),
    "published_beta2": Row("our decay of the second moment of 0.98", "0.999", ("AdamW.beta2=0.999",)),
    "published_learning_rate": Row("our learning rate of 1e-3", "1e-4", ("Experiment.learning_rate=1e-4",)),
    "published_lr_warmup": Row("our warm-up of 100 updates", "500", ("Experiment.lr_warmup_steps=500",)),
    # Parts that are off by default, or were
    "action_memory": Row("nothing; adds a memory of actions", "", None),
    "act_by_return": Row(
        "the last discount acts", "the one with the best returns", ("Agent.acting=@ActByReturn()",)
    ),
}
