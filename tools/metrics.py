"""The meaning of the metrics in a run's logs; docs/metrics.md is made from this module.

python -m loxodon.tools.metrics                    # the page
python -m loxodon.tools.metrics ppo/kl q           # these metrics, in all places
"""

from __future__ import annotations

import re
import sys
import textwrap

_LOSSES = {
    "loss": "what is minimised: `actor_loss` plus `Experiment.critic_loss_weight` times `critic_loss`, plus "
    "the extra losses times `Experiment.extra_loss_weights`",
    "actor_loss": "mean over the transitions of the batch and all discounts",
    "critic_loss": "the same mean, taken over all critics too",
}
_EXTRA = {
    "<name>_loss": "an auxiliary loss (`LossTerms.extra`) before its weight, mean over the transitions",
}
_GRADIENTS = {
    "grad_norm": "of all trained parameters together, before clipping",
    "grad_norm/<part>": "of a part of the agent, before clipping; `<part>` is its attribute (`actor`, "
    "`critics`, ...)",
    "learning_rate": "of this update, warm-up and schedules included",
    "batch_timesteps": "transitions that count in the batch, of all processes",
    "batch_places": "places for transitions in the batch, of all processes",
    "batch_padded_share": "share of the places of the batch that hold no transition",
    "sequence_length": "places in a row of the batch",
}
_EPISODES = {
    "return": "mean undiscounted return of the episodes",
    "return_p20": "their 20th percentile",
    "episode_length": "mean number of steps",
    "episodes": "how many ended",
    "env_steps": "their steps, all together",
    "<figure>/<environment>": "the same of one environment (its `env_name`, or its class or id)",
    "success": "share of episodes that succeeded, where environments tell",
    "return_attempt_<i>": "mean return of the attempt i of a trial, from 0 (`KShotWrapper`)",
    "success_attempt_<i>": "share of trials whose attempt i succeeded",
    "<metric>": "mean of what environments report as `info['metric/<metric>']` when an episode ends",
    "metric/<metric>": "the same, where another figure of this list has the name `<metric>`: "
    "`info['metric/return']` is `metric/return`",
}

METRICS: dict[str, tuple[str, dict[str, str]]] = {
    "collect": (
        "Episodes that ended in this epoch while collecting, with exploration; there are none until one has "
        "ended. Short episodes end first: until the longest have had time to end since all environments were "
        "last reset (the start of a run, `Experiment.force_reset_train_envs_every`, "
        "`CheckpointManager.exact_resume`), they are over-represented, and means are too low where long "
        "episodes are the good ones. `val/` does not have this bias.",
        _EPISODES,
    ),
    "val": (
        "Episodes of an evaluation (`Experiment.val_interval`): all that began within "
        "`Experiment.val_timesteps_per_epoch` steps of their environment, each played to its end.",
        _EPISODES,
    ),
    "train": (
        "Means over the updates of an epoch, off-policy.",
        {
            **_LOSSES,
            "updates": "of this epoch",
            "skipped_updates": "left out because their gradient was not finite (`Learner.on_nan = 'skip'` or "
            "fp16)",
            "policy_lag": "how many policies ago the sampled trajectories were collected, in the mean",
            "replay_ratio": "updates per env step so far, of all processes (`Experiment.replay_ratio`)",
        },
    ),
    "train-update": (
        "A single update, every `Experiment.log_interval`. Where discounts are told apart, the name with a "
        "discount behind it is of that one, and the plain name of `gamma`, which acts.",
        {
            **_LOSSES,
            **_EXTRA,
            **_GRADIENTS,
            "reward": "mean reward, environment units",
            "q": "mean value of the recorded actions, mean over the critics, environment units",
            "q_ensemble_std": "standard deviation over the critics. Growing without the values growing: the "
            "data do not hold what the policy would do",
            "td_target": "mean of what the critics are trained towards; far above `q` for long: values "
            "still rise",
            "td_target_min": "the least of them. Outside of what returns can be: values diverge",
            "td_target_max": "the largest",
            "advantage": "mean advantage of the recorded actions. Positive: the data are better than the "
            "policy",
            "filter_approved": "share of recorded actions with a positive advantage: what a binary filter "
            "lets through. Close to 0, nothing is imitated; close to 1, the critics see no difference "
            "between actions",
            "filter_weight": "mean weight of imitation",
            "action_log_prob": "mean log-probability of the recorded actions",
            "policy_entropy": "mean entropy, nats. Falling to 0 early: no exploration is left",
            "dead_units/<part>": "share of hidden units of `actor` or `critics` that are hardly ever "
            "active: mean size below 1/40 of their layer's",
            "target_mu": "running mean of the targets, times `reward_multiplier`; 0 with `PlainValues`",
            "target_sigma": "running standard deviation of the targets, times `reward_multiplier`; losses of "
            "critics are in its units. 1 with `PlainValues`",
            "alpha": "entropy temperature (SACAgent)",
            "targets_at_ends": "share of the targets in the first or last value bin (MultiTaskAgent). Above "
            "a few per cent, the range of the bins is too small",
            "<figure>/<discount>": "the figure of one discount",
        },
    ),
    "ppo": (
        "A rollout and the updates that learned from it.",
        {
            **_LOSSES,
            **_EXTRA,
            **_GRADIENTS,
            "value_loss": "the critics' part, before its weight",
            "value": "mean value of the timesteps of the rollout, environment units",
            "return": "mean target of the values",
            "explained_variance": "of the returns, by the values from before the updates: 1 is perfect, 0 "
            "as good as a constant, below 0 worse than that",
            "advantage_std": "standard deviation of advantages, before they are normalised",
            "entropy": "mean entropy, nats",
            "kl": "mean divergence from the policy that collected, estimated by r - 1 - log r",
            "kl_k1": "the same by -log r: noisier, and negative at times",
            "kl_exact": "the same from the distributions themselves, where these have a closed form",
            "kl_last": "`kl` of the last pass over the rollout, which early stopping and adaptation go by",
            "initial_kl": "`kl` of the first minibatch, where the policy is the one that collected: 0 but "
            "for rounding",
            "clip_fraction": "share of timesteps whose ratio lies beyond the clipping range",
            "ratio_min": "smallest ratio of probabilities, new to old",
            "ratio_max": "largest",
            "effective_sample_size": "of weighting timesteps by their ratios, as a share of their number",
            "initial_logratio_abs_max": "how far acting and training disagree about the same weights, nats; "
            "should be rounding",
            "initial_logratio_rounding_max": "what rounding may do to that; a larger difference is warned of",
            "initial_value_diff_abs_max": "likewise of values, environment units",
            "updates": "made",
            "updates_share": "of those that were planned; less where early stopping ended them",
            "skipped_updates": "left out because their gradient was not finite",
            "normalized_reward": "mean reward after reward normalisation",
            "scale": "of the learning rate (adaptation by KL divergence)",
        },
    ),
    "pretrain": (
        "Imitation before training (`Pretraining`); `pretrain-update` is a single update of it.",
        {
            **_LOSSES,
            **_GRADIENTS,
            "first_loss": "of the first update",
            "log_prob": "mean log-probability of the demonstrated actions",
            "entropy": "mean entropy, nats",
            "value": "mean value, environment units",
            "return": "mean return of the demonstrations",
            "updates": "made",
            "seconds": "taken",
        },
    ),
    "dataset": (
        "What there is to learn from.",
        {
            "fifo_files": "trajectory files that make room for new ones",
            "protected_files": "files that are never deleted",
            "total_files": "all of them",
            "deleted_files": "that made room, in this process",
            "disk_gb": "size of all files",
            "broken_files": "that could not be read",
            "quarantined_files": "of these, those that were put aside",
            "padded_fraction": "share of the places of an epoch's batches that hold no transition",
            "newest_age_s": "how long ago the newest file was written",
        },
    ),
    "policy": (
        "What an actor process acted with.",
        {
            "version": "number of the policy",
            "age_s": "since it was published",
            "versions_behind": "how many newer ones there are",
        },
    ),
    "time": (
        "Where the time goes, per process.",
        {
            "collect_s": "collecting, in this epoch",
            "learn_s": "learning",
            "val_s": "evaluating",
            "env_steps_per_s": "env steps per second of collecting",
            "updates_per_s": "updates per second of learning",
            "env_ms_per_step": "in the environments, per step of all of them",
            "policy_ms_per_step": "in the policy, likewise",
            "store_ms_per_step": "in keeping what happened, likewise",
            "update_ms": "per update",
            "wait_for_learner_s": "actors had to wait, by `Experiment.replay_ratio`",
            "wait_for_actors_s": "the learner had to wait, likewise",
        },
    ),
}


def describe(name: str) -> str | None:
    """The meaning of a logged metric, e.g. "train-update/q/0.9"; None for an unknown one."""
    group, _, figure = name.partition("/")
    group = "pretrain" if group == "pretrain-update" else group
    _, known = METRICS.get(group, ("", {}))
    # Names without placeholders first.
    for pattern in sorted(known, key=lambda one: ("<" in one, one.startswith("<"))):
        if re.fullmatch(re.sub(r"<[a-z]+>", "[^/]+", pattern), figure):
            return known[pattern]
    return None


def page() -> str:
    """Format all metrics as Markdown."""
    lines = [
        "# Figures in the logs",
        "",
        "`logs/metrics.jsonl` of a run has one record per epoch and kind of figure, with `epoch`, "
        "`env_steps` and",
        "`gradient_steps`; TensorBoard and W&B have the same names. This page is the output of",
        "`python -m loxodon.tools.metrics`, which also takes names.",
    ]
    for group, (about, known) in METRICS.items():
        wrapped = textwrap.fill(about, 120, break_long_words=False, break_on_hyphens=False)
        lines += ["", f"## {group}/", "", wrapped, "", "| figure | meaning |", "|---|---|"]
        lines += [f"| `{figure}` | {meaning} |" for figure, meaning in known.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, or the meaning of some metrics."""
    if not (names := sys.argv[1:]):
        sys.stdout.write(page())
    for name in names:
        places = [name] if "/" in name and describe(name) else [f"{group}/{name}" for group in METRICS]
        # An environment may report any name, so a match with that pattern means nothing.
        found = [(place, about) for place in places if (about := describe(place)) and "<metric>" not in about]
        lines = [f"{place}: {about}\n" for place, about in found] or [f"{name}: no figure of this name\n"]
        sys.stdout.writelines(lines)


if __name__ == "__main__":
    main()
