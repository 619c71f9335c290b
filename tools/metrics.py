"""The meaning of the metrics in a run's logs; docs/metrics.md is made from this module.

python -m loxodon.tools.metrics                    # the page
python -m loxodon.tools.metrics ppo/kl q           # these metrics, in all places
"""

from __future__ import annotations

import re
import sys
import textwrap

from ..gin_configs.presets import did_you_mean

_LOSSES = {
    "loss": "the minimised loss: `actor_loss` plus `Experiment.critic_loss_weight` times `critic_loss`, plus "
    "the extra losses times `Experiment.extra_loss_weights`",
    "actor_loss": "loss of the actor, mean over the transitions of the batch and all discounts, after "
    "`loss_weights`",
    "critic_loss": "loss of the critics, mean over the transitions of the batch, all discounts and all "
    "critics, after `loss_weights`",
}
_EXTRA = {
    "<name>_loss": "an auxiliary loss (`LossTerms.extra`) before its weight, mean over the transitions",
}
_GRADIENTS = {
    "grad_norm": "norm of the gradient of all trained parameters, before clipping",
    "grad_norm/<part>": "norm of the gradient of one part of the agent, before clipping; `<part>` is its "
    "attribute (`actor`, `critics`, ...)",
    "learning_rate": "learning rate of this update, including warm-up and schedules",
    "batch_timesteps": "transitions in the batch that count, over all processes",
    "batch_places": "size of the batch in timesteps, including padding, over all processes",
    "batch_padded_share": "share of the batch without loss: padding, and with PPO timesteps that are reread",
    "sequence_length": "length of a row of the batch, including padding",
}
_EPISODES = {
    "return": "mean undiscounted return of the episodes",
    "return_p20": "20th percentile of the returns of the episodes",
    "episode_length": "mean length of the episodes in steps",
    "episodes": "number of episodes",
    "env_steps": "total number of steps of the episodes",
    "<any>/<environment>": "the metric `<any>` for one environment (`<environment>` is its `env_name`, or "
    "its class or id)",
    "success": "share of episodes that succeeded, if the environment reports it",
    "attempts": "attempts of a trial (`KShotWrapper`)",
    "return_attempt_<i>": "mean return of attempt i of a trial, counted from 0 (`KShotWrapper`)",
    "success_attempt_<i>": "share of trials whose attempt i succeeded",
    "reward/<name>": "mean of the steps' term `<name>` of the reward, which environments report as "
    "`info['metric/reward/<name>']`",
    "<metric>": "mean of the values that environments report as `info['metric/<metric>']` when an episode "
    "ends",
    "metric/<metric>": "the same, if another metric of this list has the name `<metric>`: "
    "`info['metric/return']` is `metric/return`",
}

METRICS: dict[str, tuple[str, dict[str, str]]] = {
    "collect": (
        "Episodes that ended in this epoch while collecting, with exploration; there are none until one "
        "has ended. Short episodes end first. They are over-represented until the longest have had time to "
        "end since the last reset of all environments (the start of a run, "
        "`Experiment.force_reset_train_envs_every`, `CheckpointManager.exact_resume`). Until then, means "
        "are too low if long episodes are the good ones. `val/` does not have this bias.",
        {
            **_EPISODES,
            "acting_discount": "discount whose policy has the best recent returns (`Agent.acting`)",
            "novelty": "mean of 1 / sqrt(count) over the observations (`NoveltyBonus`)",
        },
    ),
    "val": (
        "Episodes of an evaluation (`Experiment.val_interval`): all that began within "
        "`Experiment.val_timesteps_per_epoch` steps of their environment, each played to its end. "
        "`test/` has the same metrics of `FinalTest`.",
        {**_EPISODES, "after_env_steps": "env steps of the run before the evaluation; not in `test/`"},
    ),
    "train": (
        "Means over the updates of an epoch, for off-policy agents.",
        {
            **_LOSSES,
            "updates": "number of updates in this epoch",
            "skipped_updates": "updates skipped because their gradient was not finite (`Learner.on_nan = "
            "'skip'` or fp16)",
            "policy_lag": "mean number of policy versions since the sampled trajectories were collected",
            "replay_ratio": "updates per env step so far, of all processes (`Experiment.replay_ratio`)",
        },
    ),
    "train-update": (
        "A single update, every `Experiment.log_interval`. Some metrics exist for each discount: a name "
        "followed by a discount belongs to that discount, and the plain name belongs to `gamma`, with "
        "which the agent acts unless `acting` chooses another discount.",
        {
            **_LOSSES,
            **_EXTRA,
            **_GRADIENTS,
            "reward": "mean reward, environment units",
            "q": "mean value of the recorded actions, mean over the critics, environment units",
            "q_ensemble_std": "standard deviation over the critics. If it grows and the values do not, "
            "the data lack the actions of the policy",
            "td_target": "mean target of the critics. If it stays far above `q`, values are still rising",
            "td_target_min": "smallest target of the critics. If no return can be so low, values diverge",
            "td_target_max": "largest target of the critics. If no return can be so high, values diverge",
            "advantage": "mean advantage of the recorded actions. If it is positive, the data are better "
            "than the policy",
            "filter_approved": "share of recorded actions with a positive advantage, which a binary "
            "filter lets through. Close to 0, nothing is imitated; close to 1, the critics see no "
            "difference between actions",
            "filter_weight": "mean weight of the recorded actions in imitation",
            "action_log_prob": "mean log-probability of the recorded actions",
            "policy_entropy": "mean entropy, nats. If it falls to 0 early, no exploration is left",
            "dead_units/<part>": "share of hidden units of `actor` or `critics` that are hardly ever "
            "active: their mean size is below 1/40 of their layer's",
            "target_mu": "running mean of the targets, times `reward_multiplier`; 0 with `PlainValues`",
            "target_sigma": "running standard deviation of the targets, times `reward_multiplier`; losses of "
            "critics are in its units. 1 with `PlainValues`",
            "loss_weight": "factor of the losses of a discount (`WeighByAdvantage`)",
            "alpha": "entropy temperature (SACAgent)",
            "targets_at_ends": "share of the targets in the first or last value bin (MultiTaskAgent). Above "
            "a few per cent, the range of the bins is too small",
            "<any>/<discount>": "the metric `<any>` for one discount",
        },
    ),
    "ppo": (
        "A rollout and the updates that are made with it.",
        {
            **_LOSSES,
            "actor_loss": "policy loss, mean over the timesteps of all updates",
            "critic_loss": "value loss, mean over the timesteps of all updates",
            **_EXTRA,
            **_GRADIENTS,
            "value": "mean value of the timesteps of the rollout, in units of the normalised rewards",
            "return": "mean target of the values",
            "explained_variance": "share of the variance of the returns that the values before the "
            "updates explain: 1 is perfect, 0 is as good as a constant, below 0 is worse",
            "advantage_std": "standard deviation of advantages, before they are normalised",
            "entropy": "mean entropy, nats",
            "kl": "mean divergence from the policy that collected, estimated by r - 1 - log r",
            "kl_k1": "mean divergence from the policy that collected, estimated by -log r: noisier, and "
            "sometimes negative",
            "kl_exact": "mean divergence from the policy that collected, from the distributions if they "
            "have a closed form",
            "kl_last": "`kl` of the last pass over the rollout, which early stopping and adaptation use",
            "initial_kl": "`kl` of the first minibatch, before the policy changes: 0 except for rounding",
            "clip_fraction": "share of timesteps whose ratio lies beyond the clipping range",
            "ratio_min": "smallest ratio of probabilities, new to old",
            "ratio_max": "largest ratio of probabilities, new to old",
            "effective_sample_size": "effective sample size of the timesteps weighted by their ratios, as "
            "a share of their number",
            "initial_logratio_abs_max": "largest difference between the log-probabilities of acting and "
            "of training with the same weights, nats; should be rounding only",
            "initial_logratio_rounding_max": "what rounding may contribute to `initial_logratio_abs_max`; "
            "a larger difference gives a warning",
            "initial_value_diff_abs_max": "largest difference between the values of acting and of "
            "training with the same weights, in units of the normalised rewards",
            "updates": "number of updates",
            "updates_share": "share of the planned updates that were made; below 1 after early stopping",
            "skipped_updates": "updates skipped because their gradient was not finite",
            "normalized_reward": "mean reward after reward normalisation",
        },
    ),
    "pretrain": (
        "Imitation before training (`Pretraining`); `pretrain-update` is a single update of it.",
        {
            **_LOSSES,
            "loss": "the minimised loss: `actor_loss` plus `Pretraining.value_coef` times `critic_loss`",
            **_GRADIENTS,
            "first_loss": "loss of the first update",
            "log_prob": "mean log-probability of the demonstrated actions",
            "entropy": "mean entropy, nats",
            "value": "mean value, environment units",
            "return": "mean return of the demonstrations",
            "updates": "number of updates",
            "seconds": "duration in seconds",
        },
    ),
    "dataset": (
        "The trajectories to learn from.",
        {
            "fifo_files": "trajectory files that are deleted to make room for new ones",
            "protected_files": "files that are never deleted",
            "total_files": "all trajectory files",
            "deleted_files": "files that this process deleted to make room",
            "disk_gb": "size of all files in GB",
            "broken_files": "files that could not be read",
            "quarantined_files": "broken files that were moved to quarantine",
            "padded_share": "share of an epoch's batches that is padding",
            "newest_age_s": "seconds since the newest file was written",
            "<dataset>/weight": "probability of a dataset of a mixture in this epoch (`MixtureOfDatasets`)",
            "<dataset>/<any>": "one of the metrics above, of a dataset of a mixture",
        },
    ),
    "policy": (
        "The policy that an actor process acted with.",
        {
            "version": "version number of the policy",
            "age_s": "seconds since the policy was published",
            "versions_behind": "number of newer versions of the policy",
        },
    ),
    "time": (
        "Where the time goes, per process.",
        {
            "collect_s": "seconds of collecting in this epoch",
            "learn_s": "seconds of learning in this epoch",
            "val_s": "seconds of evaluating in this epoch",
            "env_steps_per_s": "env steps per second of collecting",
            "updates_per_s": "updates per second of learning",
            "env_ms_per_step": "milliseconds in the environments, per step of all of them",
            "policy_ms_per_step": "milliseconds in the policy, per step of all environments",
            "store_ms_per_step": "milliseconds for storing, per step of all environments",
            "update_ms": "milliseconds per update",
            "wait_for_learner_s": "seconds that actors waited for the learner (`Experiment.replay_ratio`)",
            "wait_for_actors_s": "seconds that the learner waited for actors (`Experiment.replay_ratio`)",
        },
    ),
}


SAME_METRICS = {"pretrain-update": "pretrain", "test": "val"}
"""Groups without a table of their own, and the group whose metrics they have."""


def describe(name: str) -> str | None:
    """The meaning of a logged metric, e.g. "train-update/q/0.9"; None for an unknown one."""
    group, _, metric = name.partition("/")
    _, known = METRICS.get(SAME_METRICS.get(group, group), ("", {}))
    # Names without placeholders first.
    for pattern in sorted(known, key=lambda one: ("<" in one, one.startswith("<"))):
        # Some metrics have a `/` in their own name, such as reward/<name>.
        if re.fullmatch(re.sub(r"<[a-z]+>", "[^/]+", pattern.replace("<any>", ".+")), metric):
            return known[pattern]
    return None


def page() -> str:
    """Format all metrics as Markdown."""
    lines = [
        "# Metrics in the logs",
        "",
        "`logs/metrics.jsonl` of a run has one record per epoch and kind of metric, with `epoch`, "
        "`env_steps` and",
        "`gradient_steps`; TensorBoard and W&B have the same names. This page is the output of",
        "`python -m loxodon.tools.metrics`, which also accepts names of metrics.",
        "",
        "In pandas, each record is a row, and the columns of other kinds of metrics are empty. A run that",
        "stops at a target evaluates twice after its last env step:",
        "",
        "```python",
        'rows = pd.read_json("runs/tmaze/logs/metrics.jsonl", lines=True)',
        'curve = rows.dropna(subset=["val/return"]).drop_duplicates("env_steps", keep="last")',
        "```",
    ]
    for group, (about, known) in METRICS.items():
        wrapped = textwrap.fill(about, 120, break_long_words=False, break_on_hyphens=False)
        lines += ["", f"## {group}/", "", wrapped, "", "| metric | meaning |", "|---|---|"]
        lines += [f"| `{metric}` | {meaning} |" for metric, meaning in known.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the page, or the meaning of some metrics; returns the exit status, 1 if one is unknown."""
    if not (names := sys.argv[1:]):
        sys.stdout.write(page())
    known = [f"{group}/{metric}" for group, (_, metrics) in METRICS.items() for metric in metrics]
    known += [one.partition("/")[2] for one in known]
    status = 0
    for name in names:
        is_whole = name.partition("/")[0] in {*METRICS, *SAME_METRICS}
        places = [name] if is_whole else [f"{group}/{name}" for group in METRICS]
        # An environment may report any name, so a match with that pattern means nothing.
        found = [(place, about) for place in places if (about := describe(place)) and "<metric>" not in about]
        sys.stdout.writelines(f"{place}: {about}\n" for place, about in found)
        if not found:
            meant = did_you_mean(name, {one for one in known if ("/" in one) == ("/" in name)})
            sys.stderr.write(
                f"error: no metric has the name {name!r}.{meant} Fix: python -m loxodon.tools.metrics "
                "prints all names.\n"
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
