"""The training rollout in a checkpoint, so that it goes on in the middle of its episodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .collector import Collector, RolloutState
from .overlap import OverlappedCollector

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_OFFER = (
    "define both there or in a wrapper around it (loxodon.envs.ClassicControlState does so for gymnasium's "
    "classic control)"
)


def check_env_states(exp: Experiment) -> None:
    """Where save_env_state is True: refuse training environments whose state cannot be stored.

    Raises: ValueError naming the environment and what it lacks.
    """
    if exp.save_env_state and (problem := _problem(exp)) is not None:
        raise ValueError(
            f"{problem}, which Experiment.save_env_state needs. Fix: {_OFFER}, or set "
            "Experiment.save_env_state = None to begin new episodes on resuming."
        )


def is_storable(exp: Experiment) -> bool:
    """Whether a checkpoint can hold where the training rollout of this process stands now."""
    if exp.collector is None or exp.save_env_state is False:
        return False
    # What broke off within a step, as after an error, is somewhere that nothing can go on from.
    stands = all(part.state is not None and part.state.actions is None for part in _parts(exp.collector))
    return stands and _problem(exp) is None


def capture_rollout(exp: Experiment) -> list[dict[str, Any]] | None:
    """Where the training rollout of this process stands, for a checkpoint; None if it cannot be stored."""
    if exp.collector is None or not is_storable(exp):
        return None
    return [_capture(part) for part in _parts(exp.collector)]


def restore_rollout(exp: Experiment, saved: Sequence[dict[str, Any]] | None, seed: int) -> bool:
    """Put environments, memory and statistics back, in another process than the one that saved them.

    Comes before exploration, sink and random generators get their states: environments are reset first, with
    `seed`, and the sink is told that pieces begin.

    Returns: False where nothing was stored or, unless save_env_state requires it, where it does not fit.

    Raises: ValueError if save_env_state is True and the run has another number of environments, or others.
    """
    if saved is None or exp.collector is None or exp.save_env_state is False:
        return False
    try:
        if exp.save_env_state is None and (problem := _problem(exp)) is not None:
            raise ValueError(f"{problem}. Fix: {_OFFER}.")
        _restore(_parts(exp.collector), saved, seed)
    except ValueError as error:
        if exp.save_env_state:
            raise
        logger.warning(
            "Training begins new episodes instead of going on in those of the checkpoint: %s", error
        )
        return False
    return True


def warn_of_cut_episodes(exp: Experiment) -> None:
    """With exact_resume: say so if no episode has ended since the last checkpoint, as all are cut now."""
    assert exp.collector is not None
    times = [part.state.time_idxs for part in _parts(exp.collector) if part.state is not None]
    num_steps = exp.train_timesteps_per_epoch * (exp.ckpt_interval or 0)
    if num_steps and times and min(int(part.min()) for part in times) >= num_steps:
        logger.warning(
            "No training episode has ended in the %d steps since the last checkpoint, and "
            "Experiment.exact_resume cuts them all at each checkpoint. Fix: raise Experiment.ckpt_interval, "
            "let the environment offer its state, or set Experiment.exact_resume = False.",
            num_steps,
        )


def _parts(collector: Collector | OverlappedCollector) -> list[Collector]:
    return collector.halves if isinstance(collector, OverlappedCollector) else [collector]


def _problem(exp: Experiment) -> str | None:
    """Why the training rollout cannot be stored; None if it can."""
    for part in () if exp.collector is None else _parts(exp.collector):
        if (problem := part.envs.state_problem()) is not None:
            return str(problem)
        try:
            part.agent.export_hidden_state(part.agent.init_hidden_state(1, part.device))
        except NotImplementedError:
            encoder = type(part.agent.traj_encoder).__name__
            return f"The memory of {encoder} cannot be stored: it has no export_hidden_state(hidden_state)"
    return None


def _capture(part: Collector) -> dict[str, Any]:
    state = part.state
    assert state is not None
    return {
        "envs": part.envs.get_states(),
        "obs": state.obs,
        "rl2s": state.rl2s,
        "time_idxs": state.time_idxs,
        "env_names": list(state.env_names),
        "memory": part.agent.export_hidden_state(part.hidden_state),
        "running": part.histories.returns.running(),
        "context": part.context(),
    }


def _restore(parts: Sequence[Collector], saved: Sequence[dict[str, Any]], seed: int) -> None:
    before, now = [len(state["time_idxs"]) for state in saved], [part.num_envs for part in parts]
    if before != now:
        raise ValueError(
            f"The checkpoint holds the states of {sum(before)} environments (in {len(before)} part(s)), this "
            f"run has {sum(now)} (in {len(now)}). Fix: resume with the Experiment.parallel_actors, "
            "overlap_sampling and env_mode of the earlier run, or set Experiment.save_env_state = False."
        )
    offset = 0
    for part, state in zip(parts, saved, strict=True):
        part.envs.reset(seed=seed + offset)
        part.envs.set_states(state["envs"])
        part.histories.returns.set_running(state["running"])
        rows = {name: value.to(part.device) for name, value in state["memory"].items()}
        part.go_on_from(
            RolloutState(
                obs=state["obs"],
                rl2s=state["rl2s"],
                time_idxs=state["time_idxs"],
                env_names=list(state["env_names"]),
                hidden_state=part.agent.import_hidden_state(rows),
            ),
            state["context"],
        )
        offset += part.num_envs
