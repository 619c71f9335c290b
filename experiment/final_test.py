"""The test after training: `Experiment.test_timesteps` in environments of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import building

if TYPE_CHECKING:
    from .experiment import Experiment


def test_env_of(exp: Experiment) -> Any:
    """What makes the test environments."""
    return exp.make_val_env if exp.make_test_env is None else exp.make_test_env


def check_test_envs(exp: Experiment) -> None:
    """Build the test environments once, so that a mistake shows before training and not after it.

    Raises: ValueError if their observations or actions are not those the agent is made for.
    """
    if exp.test_timesteps == 0 or exp.make_test_env is None or exp.mode == "collect":
        return
    envs = building.make_envs(exp, exp.make_test_env)
    try:
        found = envs.single_observation_space, envs.single_action_space
        pairs = {name: (s.shape, s.dtype) for name, s in found[0].spaces.items()}
        needed = {name: (s.shape, s.dtype) for name, s in exp.obs_space.spaces.items()}
        if pairs != needed or found[1] != exp.action_space:
            raise ValueError(
                f"Experiment.make_test_env has observations {found[0]} and actions {found[1]}, but the agent "
                f"is made for {exp.obs_space} and {exp.action_space}. Fix: test in environments of the same "
                "spaces."
            )
    finally:
        envs.close()


def run_final_test(exp: Experiment) -> None:
    """Evaluate once in the test environments."""
    if exp.test_timesteps > 0:
        exp.fleet.state("evaluating")
        episodes = exp.parallel_actors if exp.test_run else None
        exp.evaluate_test(test_env_of(exp), exp.test_timesteps, episodes=episodes)
