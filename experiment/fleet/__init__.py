"""Several processes for one run: heartbeats, the learner's lock, and the pace between learner and actors."""

from .episodes import EpisodeReports
from .heartbeat import ENDED_STATES, STATES, Heartbeat, Membership, read_heartbeats
from .pace import ReplayRatio

__all__ = [
    "ENDED_STATES",
    "STATES",
    "EpisodeReports",
    "Heartbeat",
    "Membership",
    "ReplayRatio",
    "read_heartbeats",
]
