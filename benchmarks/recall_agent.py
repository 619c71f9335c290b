"""How many updates does the agent itself need to recall, from play at random? Prints JSON.

    python benchmarks/recall_agent.py
    python benchmarks/recall_agent.py reverse by_key --symbols 100 --seeds 0 1 2 --limit 600
    python benchmarks/recall_agent.py --critic-gain 0.41   # as before He et al. 2015

The tasks of recall_probe.py, learned by `Agent` with its own losses and optimizer, as the general preset has
them, but without its choices: every action is drawn uniformly, and new episodes come in as one actor
process adds them at 0.04 updates per env step. What a figure here differs in from one of recall_probe.py is
the agent's doing. Figures are updates until the acting policy's likeliest answers are right in 95 % of new
episodes, or none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import recall_probe
import torch
from accelerate import Accelerator
from gymnasium import spaces
from provenance import provenance
from recall_probe import NO_ANSWER, SYMBOLS, episodes
from recommended import ACTOR, CRITICS, TRANSFORMER, parts
from torch import Tensor
from torch.nn import functional as F

from loxodon.agents import Agent
from loxodon.data import Batch
from loxodon.experiment import Learner
from loxodon.experiment.learn.learner import masked_losses
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.nets import Actor, CriticEnsemble, FFTstepEncoder, TransformerTrajEncoder

FIRST_EPISODES, EPISODES_PER_UPDATE, BATCH, ENOUGH, LOOK_EVERY = 96, 0.125, 7, 0.95, 35


class Play:
    """Episodes of play at random, and batches of them."""

    def __init__(self, task: str, rng: torch.Generator) -> None:
        self._task, self._rng = task, rng
        self.seen, self.answers, self.drawn = self._more(FIRST_EPISODES)

    def _more(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        seen, answers = episodes(self._task, number, self._rng)
        return seen, answers, torch.randint(SYMBOLS, answers.shape, generator=self._rng)

    def grow(self, number: int) -> None:
        """Play so many more episodes."""
        old = self.seen, self.answers, self.drawn
        new = self._more(number)
        self.seen, self.answers, self.drawn = (torch.cat(pair) for pair in zip(old, new, strict=True))

    def batch(self, rows: Tensor) -> Batch:
        """Whole episodes as an agent gets them: each right answer pays its share of 1."""
        number, length = len(rows), self.seen.shape[1]
        right = self.drawn[rows] == self.answers[rows]
        rewards = right[..., None].float() / (self.answers[0] != NO_ANSWER).sum()
        actions = F.one_hot(self.drawn[rows], SYMBOLS).float()
        dones = torch.zeros(number, length, 1, dtype=torch.bool)
        dones[:, -1] = True
        return Batch(
            obs={"observation": F.pad(self.seen[rows], (0, 0, 0, 1))},
            rl2s=F.pad(torch.cat([rewards, actions], -1), (0, 0, 1, 0)),
            time_idxs=torch.arange(length + 1).expand(number, -1)[..., None],
            actions=actions,
            rews=rewards,
            dones=dones,
            mask=torch.ones_like(dones),
        )


def updates_needed(
    task: str, seed: int, limit: int, discounts: Sequence[float], critic_gain: float
) -> int | None:
    """Train until it is learned; None if that takes more than `limit` updates."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 100)
    play = Play(task, rng)
    length, obs_dim = play.seen.shape[1:]
    obs_space = spaces.Dict({"observation": spaces.Box(0.0, 1.0, (obs_dim,), np.float32)})
    agent = Agent(
        obs_space,
        spaces.Discrete(SYMBOLS),
        FFTstepEncoder,
        partial(TransformerTrajEncoder, **TRANSFORMER),
        length,
        actor_type=partial(Actor, **ACTOR),
        critic_type=partial(CriticEnsemble, **CRITICS),
        **{**parts(Agent), "training_discounts": discounts[:-1], "gamma": discounts[-1]},
    )
    with torch.no_grad():
        for critics in (agent.critics, agent.target_critics):
            for layer in (critics.from_state, *critics.hidden):
                layer.weight.mul_(critic_gain)

    def losses(batch: Batch, log_step: bool) -> dict[str, Any]:
        return masked_losses(batch, agent(batch, log_step))

    parameters = agent.trainable_params()
    learner: Learner = Learner(
        agent,
        agent,
        make_optimizer(agent, parameters, learning_rate=1e-3, l2_coeff=1e-3, fused=True),
        Accelerator(cpu=True),
        compute_loss=losses,
        critic_loss_weight=10.0,
        lr_warmup_steps=100,
        grad_clip=1.0,
    )
    for update in range(1, limit + 1):
        if new := int(update * EPISODES_PER_UPDATE) - int((update - 1) * EPISODES_PER_UPDATE):
            play.grow(new)
        learner.update([play.batch(torch.randint(len(play.seen), (BATCH,), generator=rng))])
        if update % LOOK_EVERY == 0 and share_right(agent, task, rng) > ENOUGH:
            return update
    return None


@torch.no_grad()
def share_right(agent: Agent, task: str, rng: torch.Generator) -> float:
    """Share of right answers in new episodes, if the acting policy's likeliest is given."""
    agent.eval()
    play = Play(task, rng)
    found = agent.policy(agent.encode(play.batch(torch.arange(2 * BATCH)))[:, :-1]).act(False)
    agent.train()
    right = play.answers[: 2 * BATCH]
    return float((found == right)[right != NO_ANSWER].float().mean())


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["distance", "reverse", "by_key"])
    parser.add_argument("--symbols", type=int, default=100, help="in a list")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--discounts", type=float, nargs="+", default=[0.1, 0.5, 0.9, 0.99, 0.999])
    parser.add_argument("--critic-gain", type=float, default=1.0, help="times critics' first hidden weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recall_probe.LIST = recall_probe.KEYS = args.symbols
    results: list[dict[str, Any]] = []
    for task in args.tasks:
        begin_s = time.process_time()
        updates = [
            updates_needed(task, seed, args.limit, args.discounts, args.critic_gain) for seed in args.seeds
        ]
        one = {"task": task, "updates": updates, "cpu_s": round(time.process_time() - begin_s, 1)}
        print(json.dumps(one), file=sys.stderr, flush=True)
        results.append(one)
    print(json.dumps({"provenance": provenance(), **vars(args), "results": results}, indent=1))


if __name__ == "__main__":
    main()
