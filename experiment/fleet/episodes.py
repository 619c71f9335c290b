"""Results of training episodes on their way from the processes that collect to the agent that learns."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from ...agents.parts import ActByReturn, EpisodeResult
from ..contracts import RunContext
from ..process.distributed import from_main, gather
from .heartbeat import read_heartbeats


class EpisodeReports:
    """Brings the results of training episodes to the part of the agent that chooses a discount by them.

    A process adds its own at once; ranks that train together add those of all of them after each collection,
    so that they agree. An actor also reports its own in its heartbeat. Its learner adds what is new there
    before it publishes a policy, and its choice replaces that of the actors together with the weights.

    Args:
        ctx: context of the run.
        choice: the part of the agent.
    """

    def __init__(self, ctx: RunContext, choice: ActByReturn) -> None:
        self.ctx, self.choice = ctx, choice
        self._own: deque[EpisodeResult] = deque(maxlen=choice.recent)
        self._num_own = 0
        self._unshared: list[EpisodeResult] = []  # those that other ranks do not know yet
        self._num_read: dict[str, int] = {}  # episodes that each actor had reported, by its id
        self._has_other_ranks = ctx.role.does_both and ctx.accelerator.num_processes > 1

    def begin(self, *, is_new: bool) -> None:
        """`learn` begins. is_new: False if the agent was resumed, and knows earlier episodes already."""
        if self.ctx.role.only_learns and not is_new:
            self._new_of_actors()

    def add(self, ended: Sequence[EpisodeResult]) -> None:
        """Add episodes of this process."""
        if self.ctx.role.is_actor:
            self._own.extend(ended)
            self._num_own += len(ended)
            self.ctx.status.put(num_episodes=self._num_own, episodes=tuple(self._own))
        if self._has_other_ranks:
            self._unshared += ended
        else:
            self.choice.add(ended)

    def after_collection(self) -> None:
        """Add the episodes of all ranks, if there are several; all of them have to call this."""
        if self._has_other_ranks:
            unshared, self._unshared = self._unshared, []
            self.choice.add(list(itertools.chain(*gather(unshared, self.ctx.accelerator))))

    def before_publication(self) -> None:
        """Add new episodes of actors, in a process that only learns; all ranks have to call this."""
        if self.ctx.role.only_learns:
            self.choice.add(from_main(self._new_of_actors, self.ctx.accelerator))

    def _new_of_actors(self) -> list[EpisodeResult]:
        """The episodes that actors have reported since the last call; the newest ones of each come last."""
        new = []
        for beat in read_heartbeats(self.ctx.run_dir):
            num_new = beat.num_episodes - self._num_read.get(beat.id, 0)
            self._num_read[beat.id] = beat.num_episodes
            if num_new > 0:
                new.append(beat.episodes[-num_new:])
        turns = itertools.zip_longest(*[reversed(episodes) for episodes in new])
        newest_first = [episode for turn in turns for episode in turn if episode is not None]
        return newest_first[::-1]
