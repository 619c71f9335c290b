"""The training rollout in a checkpoint, so that it goes on in the middle of its episodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .collector import Collector, RolloutState
from .overlap import OverlappedCollector

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")


def check_env_states(exp: Experiment) -> None:
    """With save_env_state: refuse training environments whose state cannot be stored.

    Raises: ValueError naming the environment and what it lacks.
    """
    if not exp.save_env_state or exp.collector is None:
        return
    for part in _parts(exp.collector):
        if (problem := part.envs.state_problem()) is not None:
            raise ValueError(
                f"{problem}, which Experiment.save_env_state needs. Fix: define both there or in a wrapper "
                "around it (loxodon.envs.ClassicControlState does so for gymnasium's classic control), or "
                "set Experiment.save_env_state = False."
            )


def capture_rollout(exp: Experiment) -> list[dict[str, Any]] | None:
    """Where the training rollout of this process stands, for `tensor_tree`; None if it is not stored.

    Comes after `Collector.flush`, which ends the running pieces of trajectories.
    """
    if not exp.save_env_state or exp.collector is None or exp.collector.state is None:
        return None
    return [_capture(part) for part in _parts(exp.collector)]


def go_on(exp: Experiment, saved: Sequence[dict[str, Any]]) -> None:
    """After saving: do to the rollout what a resumed run does to its own, so that both go on alike."""
    assert exp.collector is not None
    for part, state in zip(_parts(exp.collector), saved, strict=True):
        _continue(part, state)


def restore_rollout(exp: Experiment, saved: Sequence[dict[str, Any]], seed: int) -> None:
    """Put environments, memory and statistics back, in another process than the one that saved them.

    Comes after exploration and sink have their state, and before the random generators get theirs:
    environments are reset first, with `seed`.

    Raises: ValueError if the run now has another number of environments, or others.
    """
    assert exp.collector is not None
    parts = _parts(exp.collector)
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
        _continue(part, state)
        offset += part.num_envs


def _parts(collector: Collector | OverlappedCollector) -> list[Collector]:
    return collector.halves if isinstance(collector, OverlappedCollector) else [collector]


def _capture(part: Collector) -> dict[str, Any]:
    state = part.state
    assert state is not None
    return {
        "envs": part.envs.get_states(),
        "obs": {key: np.array(value) for key, value in state.obs.items()},
        "rl2s": state.rl2s.copy(),
        "time_idxs": state.time_idxs.copy(),
        "env_names": list(state.env_names),
        "memory": part.agent.export_hidden_state(part.hidden_state),
        "running": part.histories.returns.running(),
        "context": part.context(),
    }


def _continue(part: Collector, saved: dict[str, Any]) -> None:
    """Act on from a captured state; the sink begins new pieces there."""
    rows = {name: value.to(part.device) for name, value in saved["memory"].items()}
    part.go_on_from(
        RolloutState(
            obs={key: np.array(value) for key, value in saved["obs"].items()},
            rl2s=saved["rl2s"].copy(),
            time_idxs=saved["time_idxs"].copy(),
            env_names=list(saved["env_names"]),
            hidden_state=part.agent.import_hidden_state(rows),
        ),
        saved.get("context"),
    )
