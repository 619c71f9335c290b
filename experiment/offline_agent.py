"""An off-policy agent beside the run's own, while it is trained; and what is taken from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..agents import BaseAgent
from ..nets import Actor, PolicyHead
from .checkpoint.policy_file import load_what_fits
from .rng import isolated_rng

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_ENCODERS = ("tstep_encoder.", "traj_encoder.")


@contextlib.contextmanager
def offline_agent(
    exp: Experiment,
    agent_type: Callable[..., BaseAgent],
    seed: int,
    make_optimizer: Callable[[BaseAgent], Any],
) -> Iterator[tuple[BaseAgent, nn.Module, Any]]:
    """Agent, model and optimizer as Accelerate prepares them; it forgets them afterwards.

    seed: of the agent's weights.
    """
    accelerator = exp.accelerator
    held = accelerator._models, accelerator._optimizers
    known = [list(things) for things in held]
    with isolated_rng(seed):
        agent = agent_type(
            exp.obs_space, exp.action_space, exp.tstep_encoder_type, exp.traj_encoder_type, exp.max_seq_len
        )
    try:
        model, optimizer = accelerator.prepare(agent, make_optimizer(agent))
        yield agent, model, optimizer
    finally:
        for things, before in zip(held, known, strict=True):
            things[:] = before


def hand_over(source: BaseAgent, target: nn.Module) -> None:
    """Copy encoders, and the policy where both heads are built alike; says what was copied.

    Raises: ValueError if nothing fits.
    """
    weights = {name: value for name, value in source.state_dict().items() if name.startswith(_ENCODERS)}
    weights |= _policy_weights(getattr(source, "actor", None), getattr(target, "policy_head", None))
    found = load_what_fits(target, weights, f"the {type(source).__name__} of pre-training")
    logger.info("Pre-training hands over %s.", found)


def _policy_weights(actor: Any, head: Any) -> dict[str, Tensor]:
    """The acting part of the actor (last discount) as a policy head; {} where that computes another."""
    if not isinstance(actor, Actor) or not isinstance(head, PolicyHead):
        return {}
    weights = {f"policy_head.{name}": value for name, value in actor.state_dict().items()}
    for name in ("policy_head.mlp.out.weight", "policy_head.mlp.out.bias"):
        weights[name] = weights[name][-actor.num_params :]
    own = {f"policy_head.{name}": value.shape for name, value in head.state_dict().items()}
    is_alike = (
        actor.distribution is head.distribution or _factors(actor.distribution) == _factors(head.distribution)
    ) and actor.mlp.activation is head.mlp.activation
    return weights if is_alike and own == {name: value.shape for name, value in weights.items()} else {}


def _factors(distribution: Any) -> Any:
    """Tells MultiCategorical types apart, of which every agent has its own."""
    return getattr(distribution, "nvec", None) or distribution
