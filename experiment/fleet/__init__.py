"""Many processes, one run: heartbeats, the learner's lock, and the pace between learner and actors."""

from .heartbeat import ENDED_STATES, STATES, Heartbeat
from .latest import WatchedFile
from .membership import Membership
from .reading import Beat, StatusReader, read_heartbeats

__all__ = [
    "ENDED_STATES",
    "STATES",
    "Beat",
    "Heartbeat",
    "Membership",
    "StatusReader",
    "WatchedFile",
    "read_heartbeats",
]
